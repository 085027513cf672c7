"""How fast the sampler is, beside Lhotse's and NeMo's, in one run on the same cuts.

    python benchmarks/sampler.py [--quick] [--only TEXT]

Prints a Markdown table. Each figure is a median of five (one with ``--quick``), peers alternate with us, and only
ratios are worth comparing between machines. NeMo's 2D constraint takes part if ``nemo`` can be imported.
"""

from __future__ import annotations

import argparse
import logging
import platform
import random
import statistics
import sys
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import cycle
from typing import Any

import numpy as np
import torch
from lhotse import SupervisionSegment
from lhotse.cut import MonoCut
from lhotse.dataset.sampling.dynamic_bucketing import DynamicBucketingSampler, FixedBucketBatchSizeConstraint
from lhotse.testing.dummies import dummy_recording

from lhotse_oomfit import CalibratedBucketingSampler
from lhotse_oomfit.bins import Bins

NUM_CUTS = 100_000
BUFFER = 20_000
EDGES = np.linspace(1.0, 30.0, 31)[1:].tolist()
RECORDING = dummy_recording(0, duration=100.0)
Make = Callable[..., Any]


def make_cut(number: int, rng: random.Random) -> MonoCut:
    """Log-normal lengths from 1 to 30 s, about 3 tokens a second."""
    duration = min(30.0, max(1.0, rng.lognormvariate(2.0, 0.6)))
    supervision = SupervisionSegment(f"s{number}", RECORDING.id, 0.0, duration)
    supervision.tokens = range(int(duration * rng.uniform(2.0, 4.0)))
    return MonoCut(
        id=str(number), start=0.0, duration=duration, channel=0, supervisions=[supervision], recording=RECORDING
    )


def make_cuts(seed: int = 0, num: int = NUM_CUTS) -> list[MonoCut]:
    rng = random.Random(seed)
    return [make_cut(number, rng) for number in range(num)]


class Source:
    """Hands out cuts, again and again if asked, after working for a while on each as a decoder would."""

    is_lazy = True

    def __init__(self, cuts: Sequence[Any], *, busy_s: float = 0.0, repeat: bool = False) -> None:
        self.cuts = cuts
        self.busy_s = busy_s
        self.repeat = repeat

    def __iter__(self) -> Iterator[Any]:
        cuts = cycle(self.cuts) if self.repeat else self.cuts
        if not self.busy_s:
            yield from cuts
            return
        for cut in cuts:
            until = time.perf_counter() + self.busy_s
            while time.perf_counter() < until:
                pass
            yield cut


def ours(cuts: Any, sizes: Sequence[int], bins: Sequence[Any] = EDGES, **options: Any) -> Any:
    return CalibratedBucketingSampler(
        cuts,
        bucket_batch_size=sizes,
        duration_bins=bins,
        shuffle=True,
        max_buffer_size=100_000_000,
        **({"buffer_size": BUFFER, "rank": 0, "world_size": 1} | options),
    )


def lhotses(cuts: Any, sizes: Sequence[int], bins: Sequence[Any] = EDGES, **options: Any) -> Any:
    return DynamicBucketingSampler(
        cuts,
        constraint=FixedBucketBatchSizeConstraint(list(bins), list(sizes)),
        duration_bins=list(bins),
        shuffle=True,
        **({"buffer_size": BUFFER, "rank": 0, "world_size": 1} | options),
    )


def nemos() -> Make | None:
    try:
        from nemo.collections.common.data.lhotse.sampling import FixedBucketBatchSizeConstraint2D
    except ImportError:
        return None

    def make(cuts: Any, sizes: Sequence[int], bins: Sequence[Any], **options: Any) -> Any:
        constraint = FixedBucketBatchSizeConstraint2D(
            max_seq_len_buckets=[list(edge) for edge in bins], batch_sizes=list(sizes)
        )
        return DynamicBucketingSampler(
            cuts,
            constraint=constraint,
            duration_bins=[list(edge) for edge in bins],
            shuffle=True,
            **({"buffer_size": BUFFER, "rank": 0, "world_size": 1} | options),
        )

    return make


def bins_2d() -> list[tuple[float, int]]:
    """Five token edges below each length; the last holds every cut of that length."""
    shares = (2.4, 2.8, 3.2, 3.6, 4.0)
    return [(edge, int(edge * share) + n) for edge in EDGES for n, share in enumerate(shares, start=1)]


# Measuring


def seconds_per_step(sampler: Any, num_steps: int) -> float:
    """Processor time, so that a busy machine doesn't count: nothing here waits or runs in a thread."""
    iterator = iter(sampler)
    next(iterator)
    start = time.process_time()
    for _ in range(num_steps):
        next(iterator)
    return (time.process_time() - start) / num_steps


def stop(sampler: Any) -> None:
    """End the filling thread; Lhotse's would keep the process alive."""
    if type(sampler) is DynamicBucketingSampler and sampler.concurrent:
        sampler.cuts_iter.close()


def seconds_to_first(sampler: Any) -> float:
    start = time.perf_counter()
    next(iter(sampler))
    elapsed = time.perf_counter() - start
    stop(sampler)
    return elapsed


def seconds_of_tiny_operations() -> float:
    """Seconds for 1,000 of them, over twenty thousand, since threads take turns of 5 ms."""
    x = torch.ones(4)
    start = time.perf_counter()
    for _ in range(20_000):
        x = x + 1.0
    return (time.perf_counter() - start) / 20


def seconds_while_filling(sampler: Any) -> float:
    next(iter(sampler))
    elapsed = seconds_of_tiny_operations()
    stop(sampler)
    return elapsed


class Table:
    def __init__(self, repeats: int, only: str) -> None:
        self.repeats = repeats
        self.only = only
        self.rows: list[tuple[str, str, str, str]] = []

    def wants(self, figure: str) -> bool:
        return self.only in figure

    def compare(self, figure: str, measures: dict[str, Callable[[], float]], *, unit: str, per: float = 1.0) -> None:
        """The first of ``measures`` is ours; the ratio says how many times longer the other takes."""
        if not self.wants(figure):
            return
        found: dict[str, list[float]] = {name: [] for name in measures}
        for _ in range(self.repeats):
            for name, measure in measures.items():
                found[name].append(measure() * per)
        medians = {name: statistics.median(values) for name, values in found.items()}
        (_, mine), *others = medians.items()
        for name, theirs in others:
            self.add(figure, f"{mine:.3g} {unit}", f"{theirs:.3g} {unit} ({name})", f"{theirs / mine:.1f}x")
        if not others:
            self.add(figure, f"{mine:.3g} {unit}", "", "")

    def add(self, figure: str, mine: str, theirs: str, ratio: str) -> None:
        self.rows.append((figure, mine, theirs, ratio))
        print(f"  {figure}: {mine} {theirs} {ratio}", file=sys.stderr, flush=True)

    def render(self) -> str:
        lines = ["| figure | lhotse-oomfit | peer | peer over ours |", "|---|---|---|---|"]
        lines += [f"| {' | '.join(row)} |" for row in self.rows]
        return "\n".join(lines)


def throughput(table: Table, cuts: list[MonoCut]) -> None:
    source = Source(cuts, repeat=True)
    nemo = nemos()
    for world_size in (8, 1):
        for size in (32, 64):
            steps = 40 if world_size == 8 else 200
            figure = f"ms a step, sizes {size}, {world_size} rank{'s' if world_size > 1 else ''}"
            options = {"world_size": world_size}
            table.compare(
                f"{figure}, 1D",
                {
                    "ours": lambda s=size, o=options, n=steps: seconds_per_step(ours(source, [s] * 30, **o), n),
                    "Lhotse": lambda s=size, o=options, n=steps: seconds_per_step(
                        lhotses(source, [s] * 30, **o), n // 4
                    ),
                },
                unit="ms",
                per=1e3,
            )
            measures = {
                "ours": lambda s=size, o=options, n=steps: seconds_per_step(ours(source, [s] * 150, bins_2d(), **o), n)
            }
            if nemo is not None:
                measures["NeMo"] = lambda s=size, o=options, n=steps: seconds_per_step(
                    nemo(source, [s] * 150, bins_2d(), **o), n // 8
                )
            table.compare(f"{figure}, 2D (30x5)", measures, unit="ms", per=1e3)


def flatness(table: Table, cuts: list[MonoCut]) -> None:
    source = Source(cuts, repeat=True)

    def step(num_bins: int, buffer_size: int) -> float:
        bins = np.linspace(1.0, 30.0, num_bins + 1)[1:].tolist()
        return seconds_per_step(ours(source, [32] * num_bins, bins, buffer_size=buffer_size), 1500)

    for figure, low, high in (
        ("cost of a batch of 32, 300 bins over 30 bins, buffer 20k", (30, BUFFER), (300, BUFFER)),
        ("cost of a batch of 32, buffer 100k over 10k, 30 bins", (30, 10_000), (30, 100_000)),
    ):
        if table.wants(figure):
            pairs = [(step(*low), step(*high)) for _ in range(table.repeats)]
            small, large = (statistics.median(values) for values in zip(*pairs, strict=True))
            table.add(
                figure, f"{small * 1e3:.3g} -> {large * 1e3:.3g} ms", "", f"{large / small:.2f}x (ours over ours)"
            )


def first_batch(table: Table, cuts: list[MonoCut]) -> None:
    sizes = [32] * 30
    table.compare(
        "time to the first batch, in line",
        {
            "ours": lambda: seconds_to_first(ours(Source(cuts), sizes)),
            "Lhotse": lambda: seconds_to_first(lhotses(Source(cuts), sizes)),
        },
        unit="ms",
        per=1e3,
    )
    for busy_us in (0, 10, 50):
        source = Source(cuts, busy_s=busy_us * 1e-6)
        table.compare(
            f"time to the first batch, concurrent, {busy_us} us a cut",
            {
                "ours": lambda s=source: seconds_to_first(ours(s, sizes, concurrent=True)),
                "Lhotse": lambda s=source: seconds_to_first(lhotses(s, sizes, concurrent=True)),
            },
            unit="ms",
            per=1e3,
        )


def interpreter_lock(table: Table, cuts: list[MonoCut]) -> None:
    """The buffer is large enough that the threads are filling all the while."""
    figure = "1,000 tiny torch operations while filling, 100 us a cut, over alone"
    if not table.wants(figure):
        return
    source = Source(cuts, busy_s=100e-6, repeat=True)
    found: dict[str, list[float]] = {"ours": [], "Lhotse": []}
    for _ in range(table.repeats):
        alone = statistics.median(seconds_of_tiny_operations() for _ in range(5))
        for name, make in (("ours", ours), ("Lhotse", lhotses)):
            sampler = make(source, [32] * 30, concurrent=True, buffer_size=60_000)
            found[name].append(seconds_while_filling(sampler) / alone)
    mine, theirs = (statistics.median(values) for values in found.values())
    table.add(figure, f"{mine:.1f}x", f"{theirs:.0f}x (Lhotse)", f"{theirs / mine:.0f}x")


def many_ranks(table: Table, cuts: list[MonoCut]) -> None:
    source = Source(cuts, repeat=True)
    for world_size in (8, 64, 512):
        figure = f"map-style, sizes 32, {world_size} ranks"
        if not table.wants(figure):
            continue
        sampler = ours(source, [32] * 30, world_size=world_size)
        iterator = iter(sampler)
        start = time.perf_counter()
        next(iterator)
        first = time.perf_counter() - start
        times = []
        for _ in range(table.repeats):
            start = time.perf_counter()
            next(iterator)
            times.append(time.perf_counter() - start)
        held = max(BUFFER, 32 * 30 * world_size)
        table.add(
            figure,
            f"{statistics.median(times) * 1e3:.3g} ms a step, {first:.2g} s to the first, {held:,} cuts held, "
            f"{held * bytes_per_cut() / 2**20:,.0f} MiB on each rank",
            "",
            "",
        )


def bytes_per_cut() -> float:
    """Host memory of a cut with one supervision."""
    tracemalloc.start()
    kept = make_cuts(seed=1, num=5_000)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held / len(kept)


def in_step(table: Table, quick: bool) -> None:
    bins = Bins.from_edges(EDGES)
    sizes = [max(1, int(640 / edge)) for edge in EDGES]
    figure = f"steps in which all 8 ranks drew the same bucket, 1D, sum of sizes {sum(sizes)}, buffer {BUFFER}"
    if not table.wants(figure):
        return
    num = 40_000 if quick else NUM_CUTS

    def bucket(batch: Any) -> int:
        found = bins.select(batch[0].duration)
        return -1 if isinstance(found, str) else found

    for make, name, share_of_cuts in ((ours, "ours", 1.0), (lhotses, "Lhotse", 0.4)):
        corpora = [make_cuts(seed, int(num * share_of_cuts)) for seed in range(8)]
        streams = [[bucket(batch) for batch in make(Source(corpus), sizes)] for corpus in corpora]
        alone = statistics.mean(len(set(step)) == 1 for step in zip(*streams, strict=False))
        shared = [
            [bucket(batch) for batch in make(Source(corpora[0]), sizes, rank=rank, world_size=8)] for rank in range(8)
        ]
        together = statistics.mean(len(set(step)) == 1 for step in zip(*shared, strict=True))
        for kind, value in (("each rank its own stream", alone), ("map-style", together)):
            if name == "ours":
                table.add(f"{figure}, {kind}", f"{value:.0%}", "", "")
            else:
                row = next(i for i, r in enumerate(table.rows) if r[0] == f"{figure}, {kind}")
                table.rows[row] = (*table.rows[row][:2], f"{value:.0%} ({name}, {share_of_cuts:.0%} of the cuts)", "")


def versions() -> str:
    def of(package: str) -> str:
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            return f"no {package}"

    packages = ", ".join(of(package) for package in ("lhotse", "torch", "numpy", "nemo-toolkit"))
    return f"Python {platform.python_version()}, {packages}; {platform.machine()}, {torch.get_num_threads()} thread"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="measure once instead of five times")
    parser.add_argument("--only", default="", help="only figures whose name contains this text")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    table = Table(1 if options.quick else 5, options.only)
    cuts = make_cuts()
    throughput(table, cuts)
    flatness(table, cuts)
    first_batch(table, cuts)
    interpreter_lock(table, cuts)
    many_ranks(table, cuts)
    in_step(table, options.quick)
    print(table.render())
    print(f"\n{versions()}")


if __name__ == "__main__":
    main()
