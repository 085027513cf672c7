"""The example recipes: their corpus, their model, and both of them from end to end."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from asr import recipe
from asr.corpus import LETTERS, ChordCorpus
from asr.dataset import SpeechDataset
from asr.features import LogMel, SpecAugment
from asr.model import ConformerConfig, ConformerCTC, greedy_tokens
from asr.scoring import character_error_rate, edit_distance
from asr.sources import hold_out, load_cuts, load_manifest, normalise_text, transcript
from asr.tokenizer import CharTokenizer
from lhotse import CutSet

EXAMPLES = Path(__file__).parent.parent / "examples"


def tone(seconds: float, sampling_rate: int) -> np.ndarray:
    return 0.1 * np.sin(2 * np.pi * 440.0 * np.arange(round(seconds * sampling_rate)) / sampling_rate)


def write_manifest(folder: Path, lines: list[dict[str, object]]) -> Path:
    path = folder / "manifest.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


# ---- corpus


def test_a_corpus_is_the_same_bytes_for_the_same_seed(tmp_path: Path) -> None:
    first, second = (ChordCorpus(num_utterances=3, seed=7).write(tmp_path / name) for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
    for wav in first.parent.glob("*.wav"):
        assert wav.read_bytes() == (second.parent / wav.name).read_bytes()


def test_another_seed_gives_another_corpus_in_the_same_folder(tmp_path: Path) -> None:
    before = ChordCorpus(num_utterances=3, seed=1).write(tmp_path / "corpus").read_bytes()
    assert ChordCorpus(num_utterances=3, seed=2).write(tmp_path / "corpus").read_bytes() != before


def test_a_corpus_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    manifest = ChordCorpus(num_utterances=2).write(tmp_path / "corpus")
    written = manifest.stat().st_mtime_ns
    assert ChordCorpus(num_utterances=2).write(tmp_path / "corpus").stat().st_mtime_ns == written


def test_a_folder_of_something_else_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("irreplaceable")
    with pytest.raises(FileExistsError, match="must be empty or hold a chord corpus; name another folder"):
        ChordCorpus(num_utterances=2).write(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "irreplaceable"


def test_utterances_are_spread_over_the_lengths_asked_for() -> None:
    corpus = ChordCorpus(num_utterances=60)
    utterances = [corpus.utterance(index) for index in range(60)]
    lengths_s = [len(audio) / corpus.sampling_rate for _, audio in utterances]
    assert max(lengths_s) <= corpus.max_s
    assert min(lengths_s) < 1.0
    assert sum(length > 4.0 for length in lengths_s) > 5
    assert all(set(text) <= set(LETTERS + " ") and text == text.strip() and text for text, _ in utterances)


def test_every_letter_has_a_chord_of_its_own() -> None:
    assert len(LETTERS) == len(set(LETTERS)) == 26


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_utterances": 1}, "num_utterances must be at least 2"),
        ({"min_s": 9.0}, "min_s and max_s must be ordered"),
        ({"min_s": 0.1}, "hold at least four letters"),
    ],
)
def test_a_corpus_that_cannot_be_is_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChordCorpus(**settings)


# ---- manifests and cuts


def test_a_manifest_of_mixed_sampling_rates_is_read_at_one(tmp_path: Path) -> None:
    for name, rate in (("a.wav", 8000), ("b.flac", 16000), ("c.wav", 22050)):
        soundfile.write(tmp_path / name, tone(1.0, rate), rate)
    manifest = write_manifest(
        tmp_path,
        [
            {"audio_filepath": "a.wav", "duration": 1.0, "text": "HELLO,  World!"},
            {"audio_filepath": "b.flac", "duration": 1.0001, "text": "don't"},
            {"audio_filepath": str(tmp_path / "c.wav"), "text": "no duration"},
        ],
    )
    cuts = load_manifest(manifest)
    assert {cut.sampling_rate for cut in cuts} == {16000}
    assert [cut.load_audio().shape for cut in cuts] == [(1, 16000)] * 3
    assert [transcript(cut) for cut in cuts] == ["hello world", "don't", "no duration"]
    middle = slice(4000, 12000)
    for cut in cuts:  # the same tone, whatever the file's rate
        assert np.abs(cut.load_audio()[0, middle] - tone(1.0, 16000)[middle]).max() < 2e-3


def test_offset_and_duration_select_a_part_of_a_file(tmp_path: Path) -> None:
    rate = 22050
    soundfile.write(tmp_path / "long.wav", np.concatenate([np.zeros(rate), tone(1.0, rate), np.zeros(rate)]), rate)
    manifest = write_manifest(
        tmp_path, [{"audio_filepath": "long.wav", "offset": 1.0, "duration": 1.0, "text": "the middle"}]
    )
    (cut,) = load_manifest(manifest)
    audio = cut.load_audio()[0]
    assert audio.shape == (16000,)
    assert np.abs(audio[4000:12000]).max() > 0.09
    assert cut.supervisions[0].duration == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"text": "where?"}, r"line 2, must name a readable recording and its text: no field 'audio_filepath'"),
        ({"audio_filepath": "a.wav"}, r"line 2, .*no field 'text'"),
        ({"audio_filepath": "a.wav", "text": 3}, r"line 2, .*text must be a string, got 3"),
        ({"audio_filepath": "gone.wav", "text": "x"}, r"line 2, .*no file .*gone.wav"),
        ({"audio_filepath": "a.wav", "text": "x", "offset": 5.0, "duration": 1}, r"line 2, .*lie outside of 1.0 s"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, line: dict[str, object], message: str) -> None:
    soundfile.write(tmp_path / "a.wav", tone(1.0, 16000), 16000)
    manifest = write_manifest(tmp_path, [{"audio_filepath": "a.wav", "text": "fine"}, line])
    with pytest.raises(ValueError, match=message):
        load_manifest(manifest)


def test_an_empty_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must hold at least one utterance"):
        load_manifest(write_manifest(tmp_path, []))


def test_cuts_of_another_rate_are_resampled(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", tone(1.0, 8000), 8000)
    manifest = write_manifest(tmp_path, [{"audio_filepath": "a.wav", "text": "Hi"}])
    load_manifest(manifest, sampling_rate=8000).to_file(tmp_path / "cuts.jsonl.gz")
    (cut,) = load_cuts(tmp_path / "cuts.jsonl.gz")
    assert cut.load_audio().shape == (1, 16000)
    assert transcript(cut) == "hi"


def test_cuts_without_a_text_are_refused(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", tone(1.0, 16000), 16000)
    (cut,) = load_manifest(write_manifest(tmp_path, [{"audio_filepath": "a.wav", "text": "hi"}]))
    CutSet.from_cuts([cut.drop_supervisions()]).to_file(tmp_path / "cuts.jsonl.gz")
    with pytest.raises(ValueError, match="must have a supervision with a text"):
        load_cuts(tmp_path / "cuts.jsonl.gz")


def test_texts_are_normalised_in_any_script() -> None:
    assert normalise_text("  Don't -- PANIC! ") == "don't panic"
    assert normalise_text("Größe №5; ДА") == "größe no5 да"


def test_the_same_utterances_are_held_out_whatever_their_order(tmp_path: Path) -> None:
    cuts = load_manifest(ChordCorpus(num_utterances=20).write(tmp_path / "corpus"))
    train, held_out = hold_out(cuts)
    again = hold_out(CutSet.from_cuts(reversed(list(cuts))))[1]
    assert len(held_out) == 2
    assert {cut.id for cut in held_out} == {cut.id for cut in again}
    assert not {cut.id for cut in held_out} & {cut.id for cut in train}
    assert len(train) == 18


# ---- tokens and scores


def test_decoding_undoes_encoding() -> None:
    tokenizer = CharTokenizer.from_texts(["abc", "b d"])
    assert tokenizer.vocab_size == 6
    assert tokenizer.decode(tokenizer("bad cab")) == "bad cab"
    assert tokenizer("bz") == tokenizer("b")


@pytest.mark.parametrize(
    ("reference", "hypothesis", "edits"),
    [("", "", 0), ("abc", "", 3), ("", "ab", 2), ("kitten", "sitting", 3), ("flaw", "lawn", 2), ("same", "same", 0)],
)
def test_edit_distance_counts_the_fewest_edits(reference: str, hypothesis: str, edits: int) -> None:
    assert edit_distance(reference, hypothesis) == edit_distance(hypothesis, reference) == edits


def test_error_rate_is_weighted_by_length() -> None:
    assert character_error_rate(["aaaaaaaaa", "b"], ["aaaaaaaaa", "c"]) == pytest.approx(0.1)


def test_an_error_rate_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one reference character"):
        character_error_rate([""], ["a"])


# ---- dataset and model


@pytest.fixture
def batch(tmp_path: Path) -> dict[str, object]:
    cuts = load_manifest(ChordCorpus(num_utterances=4, max_s=2.0).write(tmp_path / "corpus"))
    return SpeechDataset(CharTokenizer(" " + LETTERS))[cuts]


def test_a_batch_is_padded_to_its_longest_example(batch: dict[str, object]) -> None:
    assert batch["audio"].shape == (4, batch["audio_lens"].max())
    assert batch["tokens"].shape == (4, batch["token_lens"].max())
    assert [len(text) for text in batch["texts"]] == batch["token_lens"].tolist()
    for audio, length in zip(batch["audio"], batch["audio_lens"], strict=True):
        assert not audio[length:].any()


def test_the_model_gives_a_frame_every_40_ms_and_a_gradient_everywhere(batch: dict[str, object]) -> None:
    torch.manual_seed(0)
    model = ConformerCTC(ConformerConfig(vocab_size=28, dim=16, num_layers=1, subsampling_channels=4))
    log_probs, lens = model(batch["audio"], batch["audio_lens"])
    assert log_probs.shape == (4, lens.max(), 28)
    assert lens.tolist() == [(int(n) // 160 + 4) // 4 for n in batch["audio_lens"]]
    assert torch.allclose(log_probs.exp().sum(dim=-1), torch.ones(log_probs.shape[:2]))
    loss = model.loss(batch)
    loss.backward()
    assert loss.shape == ()
    # The bias before a batch norm changes nothing, so it alone may be zero.
    assert all(p.grad.abs().sum() > 0 for name, p in model.named_parameters() if "depthwise.bias" not in name)


def test_padding_changes_nothing_in_evaluation(batch: dict[str, object]) -> None:
    torch.manual_seed(0)
    model = ConformerCTC(ConformerConfig(vocab_size=28, dim=16, num_layers=1, subsampling_channels=4)).eval()
    shortest = int(batch["audio_lens"].argmin())
    length = batch["audio_lens"][shortest]
    alone, lens = model(batch["audio"][shortest : shortest + 1, :length], length[None])
    together, _ = model(batch["audio"], batch["audio_lens"])
    inner = int(lens) - 2  # the subsampling's last frames see past the end
    assert torch.allclose(alone[0, :inner], together[shortest, :inner], atol=1e-3)


def test_features_are_normalised_over_the_utterance() -> None:
    audio = torch.randn(2, 16000, generator=torch.Generator().manual_seed(0))
    features, lens = LogMel(40)(audio, torch.tensor([16000, 8000]))
    assert features.shape == (2, 101, 40)
    assert lens.tolist() == [101, 51]
    assert features[1, 51:].abs().max() == 0
    assert features[1, :51].mean(dim=0).abs().max() < 1e-4
    assert (features[1, :51].var(dim=0, unbiased=False) - 1).abs().max() < 0.02


def test_spec_augment_masks_in_training_only() -> None:
    torch.manual_seed(0)
    ones, lens = torch.ones(8, 100, 40), torch.full((8,), 100)
    augment = SpecAugment()
    masked = augment.train()(ones, lens)
    assert 0 < (masked == 0).sum() < ones.numel() / 2
    assert torch.equal(augment.eval()(ones, lens), ones)


def test_greedy_decoding_merges_repeats_and_drops_blanks() -> None:
    frames = torch.nn.functional.one_hot(torch.tensor([[0, 1, 1, 0, 1, 2, 2, 2], [3, 0, 0, 1, 1, 1, 1, 1]]), 4).float()
    assert greedy_tokens(frames, torch.tensor([8, 3])) == [[1, 1, 2], [3]]


# ---- the recipes from end to end

SMALL = {
    "--utterances": "40",
    "--max-utterance-s": "1.5",
    "--num-buckets": "3",
    "--memory-limit": "64MiB",
    "--buffer-size": "200",
    "--device": "cpu",
}


def start_example(output: Path, script: str, *arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Starts a recipe on a corpus of 40 short utterances."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(EXAMPLES.parent), *sys.path]),
    }
    environment.pop("OOMFIT_RECALIBRATE", None)
    command = [
        *(sys.executable, *launcher, str(EXAMPLES / script), *itertools.chain(*SMALL.items())),
        *("--output", str(output), "--cache", str(output / "profiles"), *arguments),
    ]
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that a hanging run goes with all its ranks and workers
    )


def end_of(process: subprocess.Popen[str]) -> str:
    """What a recipe printed, or a failure that shows it."""
    try:
        printed, _ = process.communicate(timeout=150)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate()
        pytest.fail(f"{process.args!r} hung:\n{printed}")
    assert process.returncode == 0, printed
    return printed


def run_example(output: Path, script: str, *arguments: str, launcher: tuple[str, ...] = ()) -> str:
    """Runs a recipe; what it printed."""
    return end_of(start_example(output, script, *arguments, launcher=launcher))


def test_the_lightning_recipe_calibrates_then_loads_its_profile_and_resumes(tmp_path: Path) -> None:
    first = run_example(tmp_path, "train_asr.py", "--max-steps", "2")
    (profile,) = (tmp_path / "profiles").glob("*.yaml")
    assert "calibrated 3 buckets" in first
    assert f"profile kept at {profile}" in first
    assert "CER on 4 held-out utterances after 2 steps" in first

    resumed = run_example(tmp_path, "train_asr.py", "--max-steps", "3", "--resume")
    assert "batch sizes of 3 buckets loaded from" in resumed
    assert "0 trial steps" in resumed
    assert "calibrated" not in resumed
    assert "CER on 4 held-out utterances after 3 steps" in resumed


def test_the_lightning_recipe_takes_2d_bins_and_an_iterable_loader_with_workers(tmp_path: Path) -> None:
    printed = run_example(
        tmp_path, "train_asr.py", *["--bins", "2d", "--loader", "iterable", "--num-workers", "1", "--max-steps", "2"]
    )
    assert "calibrated 6 buckets" in printed
    assert "CER on 4 held-out utterances after 2 steps" in printed


def test_the_plain_recipe_trains_on_two_ranks_and_resumes(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    first = run_example(tmp_path, "plain_pytorch.py", "--max-steps", "2", launcher=torchrun)
    assert first.count("calibrated 3 buckets") == 1
    assert "step 2: CER on 4 held-out utterances" in first

    resumed = run_example(tmp_path, "plain_pytorch.py", "--max-steps", "3", "--resume", launcher=torchrun)
    assert "0 trial steps" in resumed
    assert "step 3: CER on 4 held-out utterances" in resumed
    assert "step 2:" not in resumed


def test_the_plain_recipe_trains_on_two_nodes_that_share_no_disk(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    torchrun = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--local-addr", "127.0.0.1")
    torchrun += ("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "two")
    disks = [tmp_path / "first", tmp_path / "second"]
    nodes = [start_example(disk, "plain_pytorch.py", "--max-steps", "2", launcher=torchrun) for disk in disks]
    try:
        printed = [end_of(node) for node in nodes]
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
    assert "".join(printed).count("calibrated 3 buckets") == 1
    assert "".join(printed).count("step 2: CER on 4 held-out utterances") == 1
    # The first rank alone touches the cache.
    assert sorted(len(list(disk.glob("profiles/*.yaml"))) for disk in disks) == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--manifest", "a", "--cuts", "b"], "--manifest and --cuts must not be given both"),
        (["--valid-cuts", "b"], "need --manifest or --cuts to train on"),
        (["--max-steps", "0"], "--max-steps must be at least 1, it is 0"),
        (["--resume", "--output", "nowhere"], "--resume needs a checkpoint, there is no nowhere/last.pt; leave it out"),
    ],
)
def test_arguments_that_contradict_each_other_end_the_program(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = recipe.parser("")
    with pytest.raises(SystemExit):
        recipe.check_arguments(parser, parser.parse_args(arguments), checkpoint="last.pt")
    assert message in capsys.readouterr().err


def test_the_learning_rate_warms_up_and_falls_to_nothing() -> None:
    factors = [recipe.lr_factor(step, max_steps=60) for step in range(61)]
    assert factors[:10] == [pytest.approx((step + 1) / 10) for step in range(10)]
    assert factors[9] == max(factors) == 1.0
    assert factors[-1] == pytest.approx(0.0)


@pytest.mark.parametrize(("loader", "num_workers"), [("map", 0), ("map", 2), ("iterable", 0), ("iterable", 2)])
def test_a_resumed_loader_gives_the_batches_that_were_still_to_come(
    tmp_path: Path, loader: str, num_workers: int
) -> None:
    args = recipe.parser("").parse_args(["--output", str(tmp_path), "--loader", loader, "--max-utterance-s", "1"])
    args.utterances, args.num_buckets, args.buffer_size, args.num_workers = 30, 2, 60, num_workers
    speech = recipe.load_speech(args)

    def draw(num_batches: int, position: dict[str, object] | None = None) -> list[list[str]]:
        sampler = recipe.training_sampler(args, speech)
        if position is not None:
            sampler.load_state_dict(position)
        sampler.apply([3, 2])
        samplers.append(sampler)
        batches = recipe.training_loader(args, sampler, SpeechDataset(speech.tokenizer), rank=0, world_size=1)
        return [batch["ids"] for batch, _ in zip(batches, range(num_batches), strict=False)]

    samplers: list[recipe.CalibratedBucketingSampler] = []
    expected = draw(6)
    draw(4)
    position = samplers[-1].state_dict_at(4, num_workers=num_workers if loader == "iterable" else 0)
    assert draw(2, position) == expected[4:]
