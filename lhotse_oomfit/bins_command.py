"""``oomfit bins``: length buckets from a corpus's manifests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from lhotse_oomfit.errors import InvalidArgumentError, MissingTokensError
from lhotse_oomfit.terminal import EPILOG, echo, echo_json, json_option, settings_line, width

if TYPE_CHECKING:
    from lhotse_oomfit.bins import Bins
    from lhotse_oomfit.corpus import Example
    from lhotse_oomfit.coverage import Coverage

__all__ = ["bins_command"]

_BAR = 24


@click.command("bins", epilog=EPILOG)
@click.argument("inputs", nargs=-1, required=True, metavar="MANIFEST|CUTS|INPUT_CFG.yaml...")
@click.option("-b", "--buckets", type=click.IntRange(min=1), default=30, show_default=True, help="Length buckets.")
@click.option("-s", "--sub-buckets", type=click.IntRange(min=1), help="Token buckets in each: makes the bins 2D.")
@click.option(
    "-t",
    "--tokenizer",
    help="What counts tokens, where the manifests have none: chars, bytes, words, a SentencePiece .model, a "
    "tokenizer.json, or module:function.",
)
@click.option("--max-tps", help="Leave out what has more tokens a second; 'suggest': mean plus 4 standard deviations.")
@click.option("--min-tps", type=float, help="Leave out what has fewer tokens a second.")
@click.option("-l", "--min-duration", type=float, help="Leave out what is shorter.")
@click.option("-u", "--max-duration", type=float, help="Leave out what is longer.")
@click.option("-n", "--num-examples", type=click.IntRange(min=1), help="Read so many examples of each source.")
@click.option("--text-field", default="text", show_default=True, help="The key of the text in NeMo manifests.")
@click.option("--lenient", is_flag=True, help="2D: examples may go to a longer bucket that has room for their tokens.")
@click.option(
    "--format",
    "style",
    type=click.Choice(["nemo", "hydra", "lhotse", "json"]),
    default="nemo",
    show_default=True,
    help="Of the line to paste, as with export.",
)
@click.option("--prefix", help="Where the settings live [default: model.train_ds; hydra: train_ds].")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but the line to paste.")
@json_option
def bins_command(
    inputs: tuple[str, ...],
    buckets: int,
    sub_buckets: int | None,
    tokenizer: str | None,
    max_tps: str | None,
    min_tps: float | None,
    min_duration: float | None,
    max_duration: float | None,
    num_examples: int | None,
    text_field: str,
    lenient: bool,
    style: str,
    prefix: str | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Estimate length buckets that hold about equal shares of the audio.

    From NeMo manifests, Lhotse cuts (.jsonl, .jsonl.gz, Shar directories), NeMo's input_cfg files with weights, or a
    list like [[a.json,2.0],[b.json,1.0]]. The last edge is the longest example, so that none is lost.
    """
    from lhotse_oomfit.bins import estimate_bins
    from lhotse_oomfit.corpus import find_sources, load_tokenizer, read_source
    from lhotse_oomfit.coverage import cover, rounded_up

    if lenient and sub_buckets is None:
        raise click.UsageError("--lenient is for 2D bins; pass --sub-buckets too, or leave it out")
    if prefix is not None and style in {"lhotse", "json"}:
        raise click.UsageError(f"--prefix has no meaning with --format {style}; leave it out")
    needs_tokens = sub_buckets is not None or max_tps is not None or min_tps is not None
    if tokenizer is not None and not needs_tokens:
        raise click.UsageError("--tokenizer has no say in 1D bins; pass --sub-buckets, --max-tps or --min-tps too")
    sources = find_sources(inputs)
    count = load_tokenizer(tokenizer) if tokenizer is not None else None
    dropped = {"too short": 0, "too long": 0, "no text": 0}

    def measured(examples: Iterable[Example]) -> list[tuple[float, int | None]]:
        kept = []
        for example in islice(examples, num_examples):
            if min_duration is not None and example.duration < min_duration:
                dropped["too short"] += 1
            elif max_duration is not None and example.duration > max_duration:
                dropped["too long"] += 1
            else:
                tokens = _tokens(example, count) if needs_tokens else None
                if needs_tokens and tokens is None:
                    dropped["no text"] += 1
                else:
                    kept.append((example.duration, tokens))
        return kept

    read = [measured(read_source(source, text_field=text_field)) for source in sources]
    weights = None if sources[0].weight is None else [source.weight or 0.0 for source in sources]
    if weights is None:
        read = [[pair for source in read for pair in source]]
    limit = _max_tps(max_tps)
    found = estimate_bins(
        read if weights is not None else read[0],
        buckets,
        num_subbuckets=sub_buckets,
        measure_length=lambda pair: rounded_up(pair[0], 3),  # edges that can be read, and lose nothing
        measure_tokens=lambda pair: pair[1],
        min_tps=min_tps,
        max_tps=limit,  # type: ignore[arg-type]
        strict_2d=not lenient,
        weights=weights,
    )
    if limit == "suggest" and found.max_tps is not None:
        found = replace(found, max_tps=tuple(rounded_up(value, 2) for value in found.max_tps))
    coverage = cover(found, read, weights)
    left_out = {reason: num for reason, num in dropped.items() if num}
    for reason, num in coverage.left_out.items():
        left_out[reason] = left_out.get(reason, 0) + num
    settings = _settings(found)
    line = settings_line(settings, style, prefix)
    if as_json:
        echo_json({**settings, **coverage.as_dict(), "left_out": left_out, "num_sources": len(sources)})
    elif quiet:
        click.echo(line)
    else:
        _print(found, coverage, left_out, len(sources) if weights is not None else None)
        click.echo(line)


def _tokens(example: Example, count: Any) -> int | None:
    from lhotse_oomfit.bins import has_text, output_length

    tokens = output_length(example, count)
    if tokens is None and has_text(example):
        raise MissingTokensError(
            f"example {example.id!r} must have tokens, since they decide its bucket, and it has only text; pass "
            f"--tokenizer (chars, a SentencePiece .model, module:function, ...)"
        )
    return tokens


def _max_tps(text: str | None) -> float | str | None:
    if text is None or text == "suggest":
        return text
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 < value < float("inf"):
        raise InvalidArgumentError(f"--max-tps must be tokens a second above 0, or 'suggest', it is {text!r}")
    return value


def _settings(bins: Bins) -> dict[str, Any]:
    settings: dict[str, Any] = {"bucket_duration_bins": bins.as_lists()}
    if bins.is_2d:
        settings["bucketing_2d_strict_mode"] = bins.strict_2d
    for name in ("min_tps", "max_tps"):
        values = getattr(bins, name)
        if values is not None:
            settings[name] = values[0]
    return settings


def _print(bins: Bins, coverage: Coverage, left_out: dict[str, int], num_weighted: int | None) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for head in ("up to", "examples", "of input", "padding", *(("of tokens",) if bins.is_2d else ())):
        table.add_column(head, justify="right", no_wrap=True)
    bars = width() >= 50 + _BAR
    if bars:
        table.add_column("", no_wrap=True)
    widest = max(bucket.length_share for bucket in coverage.buckets) or 1.0
    for edge, bucket in zip(bins.edges, coverage.buckets, strict=True):
        row = [
            f"{edge[0]:g} x {edge[1]}" if isinstance(edge, tuple) else f"{edge:g}",
            f"{bucket.num_examples:,}",
            f"{bucket.length_share:.1%}",
            f"{bucket.padding:.1%}",
        ]
        row += [f"{bucket.token_padding:.1%}"] if bucket.token_padding is not None else []
        row += ["█" * round(_BAR * bucket.length_share / widest)] if bars else []
        table.add_row(*row)
    echo(table)
    weighted = f" in {num_weighted} weighted sources" if num_weighted is not None else ""
    click.echo(f"{coverage.num_examples:,} examples{weighted}, {coverage.total_length / 3600:,.1f} h")
    tokens = "" if coverage.token_padding is None else f", {coverage.token_padding:.1%} of the tokens"
    click.echo(f"padding of full batches: at most {coverage.padding:.1%} of the input{tokens}")
    if left_out:
        click.echo("left out: " + ", ".join(f"{num:,} {reason}" for reason, num in left_out.items()))
    click.echo("")
