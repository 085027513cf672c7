"""Where the speech comes from: a NeMo manifest or Lhotse cuts, brought to one sampling rate and one spelling."""

from __future__ import annotations

import json
import unicodedata
import zlib
from pathlib import Path

from lhotse import CutSet, Recording, SupervisionSegment
from lhotse.cut import Cut, MonoCut

SAMPLING_RATE = 16000


def normalise_text(text: str) -> str:
    """Lower case, letters, digits and apostrophes of any script, single spaces: what the model learns to spell.

    >>> normalise_text("  Don't -- PANIC!")
    "don't panic"
    """
    kept = (c if c == "'" or unicodedata.category(c)[0] in "LMN" else " " for c in unicodedata.normalize("NFKC", text))
    return " ".join("".join(kept).lower().split())


def load_manifest(path: str | Path, *, sampling_rate: int = SAMPLING_RATE) -> CutSet:
    """Cuts of a NeMo JSONL manifest, resampled (when loaded) to ``sampling_rate`` and with normalised texts.

    Each line needs ``audio_filepath`` (relative paths start at the manifest's folder) and ``text``; ``offset`` and
    ``duration``, in seconds, select a part of the file. Recordings may have different sampling rates.

    :raises ValueError: naming file and line, when a line can't be used.
    """
    path = Path(path)
    cuts = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                cuts.append(_manifest_cut(json.loads(line), folder=path.parent, cut_id=f"{path.stem}-{number}"))
            except (KeyError, TypeError, ValueError, OSError) as error:
                reason = f"no field {error}" if isinstance(error, KeyError) else error
                raise ValueError(
                    f"{path}, line {number}, must name a readable recording and its text: {reason}"
                ) from error
    return _prepare(CutSet.from_cuts(cuts), path=path, sampling_rate=sampling_rate)


def _manifest_cut(entry: dict[str, object], *, folder: Path, cut_id: str) -> MonoCut:
    text = entry["text"]
    if not isinstance(text, str):
        raise TypeError(f"text must be a string, got {text!r}")
    audio = folder / str(entry["audio_filepath"])  # an absolute path stays as it is
    if not audio.is_file():
        raise FileNotFoundError(f"no file {audio}")
    recording = Recording.from_file(audio, recording_id=cut_id)
    offset_s = float(str(entry.get("offset") or 0.0))
    rest_s = recording.duration - offset_s
    # Manifests round durations, so one that's about the rest of the file means the rest of the file.
    duration_s = float(str(entry.get("duration") or rest_s))
    if duration_s > rest_s - 0.01:
        duration_s = rest_s
    if not (offset_s >= 0 and duration_s > 0):
        raise ValueError(f"offset {offset_s} s and duration {duration_s} s lie outside of {recording.duration} s")
    cut = recording.to_cut()
    if duration_s < recording.duration:
        cut = cut.truncate(offset=offset_s, duration=duration_s)
    supervision = SupervisionSegment(
        id=cut_id, recording_id=recording.id, start=0.0, duration=cut.duration, channel=cut.channel, text=text
    )
    cut.id = cut_id
    cut.supervisions = [supervision]
    return cut


def load_cuts(path: str | Path, *, sampling_rate: int = SAMPLING_RATE) -> CutSet:
    """Cuts of a Lhotse manifest (``cuts.jsonl.gz`` and the like), resampled and with normalised texts.

    :raises ValueError: when a cut has no recording or no text.
    """
    return _prepare(CutSet.from_file(path), path=Path(path), sampling_rate=sampling_rate)


def _prepare(cuts: CutSet, *, path: Path, sampling_rate: int) -> CutSet:
    prepared = [_prepare_cut(cut, path=path, sampling_rate=sampling_rate) for cut in cuts]
    if not prepared:
        raise ValueError(f"{path} must hold at least one utterance, it's empty")
    return CutSet.from_cuts(prepared)


def _prepare_cut(cut: Cut, *, path: Path, sampling_rate: int) -> Cut:
    if not cut.has_recording:
        raise ValueError(f"{path}: cut {cut.id} must have a recording, the features are computed by the model")
    if not any(supervision.text for supervision in cut.supervisions):
        raise ValueError(f"{path}: cut {cut.id} must have a supervision with a text")
    if cut.sampling_rate != sampling_rate:
        cut = cut.resample(sampling_rate)
    return cut.map_supervisions(lambda s: s.transform_text(normalise_text) if s.text else s)


def transcript(cut: Cut) -> str:
    """The texts of a cut's supervisions, in the order of their starts."""
    return " ".join(s.text for s in sorted(cut.supervisions, key=lambda s: s.start) if s.text)


def hold_out(cuts: CutSet, *, share: float = 0.1, most: int = 200) -> tuple[CutSet, CutSet]:
    """Splits cuts into training and held-out ones, by a hash of their ids: the same split in every run.

    :param share: of the cuts, held out; at least one and at most ``most`` cuts, and never all.
    :raises ValueError: for fewer than two cuts.
    """
    ordered = sorted(cuts, key=lambda cut: zlib.crc32(cut.id.encode()))
    if len(ordered) < 2:
        raise ValueError(f"one utterance to train on and one to hold out are the least, got {len(ordered)}")
    num = max(1, min(most, round(share * len(ordered))))
    held_out = {cut.id for cut in ordered[:num]}
    return (
        CutSet.from_cuts(cut for cut in cuts if cut.id not in held_out),
        CutSet.from_cuts(cut for cut in cuts if cut.id in held_out),
    )
