"""``python -m simulate [--seeds N] [--first S] | [--seed S [--of batches] [--mistake NAME]]``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from multiprocessing import get_context

from rich.console import Console

from simulate import search

_PIECE = 100  # seeds at a time
_BATCHES = (
    8  # a seed of runs in batches, with so many of workers: it takes about five times as long
)
console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    """Run the seeds and the mistakes; exit code 1 when a seed breaks or a mistake is not found."""
    given = _options().parse_args()
    logging.disable(logging.CRITICAL)
    if given.seed is not None:
        return _one(given.seed, given.of, given.mistake)
    began = time.monotonic()
    work = [*_pieces("worker", given.first, given.seeds),
            *_pieces("batches", given.first, -(-given.seeds // _BATCHES))]  # fmt: skip
    with get_context("spawn").Pool(os.cpu_count(), initializer=search.prepare) as pool:
        mistakes = pool.imap(search.first_found, search.ALL)  # first: some take long
        broken = [one for found in pool.imap_unordered(search.broken_of, work) for one in found]
        for of, seed, why in broken[:20]:
            console.print(f"{of}, seed {seed}: {why}", markup=False)
        missed = list(_missed(mistakes))
    console.print(
        f"{sum(last - first for _, first, last in work):,} seeds tried, {len(broken)} broken;"
        f" {len(search.ALL) - len(missed)} of {len(search.ALL)} mistakes found;"
        f" {time.monotonic() - began:.0f} s"
    )
    return 1 if broken or missed else 0


def _pieces(of: search.Of, first: int, seeds: int) -> Iterator[tuple[search.Of, int, int]]:
    last = first + seeds
    for at in range(first, last, _PIECE):
        yield of, at, min(at + _PIECE, last)


def _missed(results: Iterable[tuple[str, int | None, str]]) -> Iterator[str]:
    for mistake, seed, why in results:
        if seed is None:
            console.print(f"NOT FOUND in {search.MOST:,} seeds: {mistake}")
            yield mistake
        else:
            console.print(f"{mistake}: found by seed {seed}: {why}", markup=False)


def _one(seed: int, of: search.Of, mistake: str | None) -> int:
    """Run one seed, and show what happens."""
    known = None if mistake is None else search.ALL[mistake]
    with nullcontext() if known is None else known[1]():
        search.RUNS[of if known is None else known[0]](
            seed, tell=lambda line: console.print(line, markup=False)
        )
    return 0


def _options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="simulate", description=__doc__)
    options.add_argument("--seeds", type=int, default=12_000, help="of workers")
    options.add_argument("--first", type=int, default=0, help="the first seed")
    options.add_argument("--seed", type=int, help="run this one, and show what happens")
    options.add_argument("--of", choices=search.RUNS, default="worker", help="with --seed: of what")
    options.add_argument("--mistake", choices=search.ALL, help="with --seed: put it in")
    return options


if __name__ == "__main__":
    sys.exit(main())
