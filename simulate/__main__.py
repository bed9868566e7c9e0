"""``python -m simulate [--seeds N] [--first S] | [--seed S [--mistake NAME]]``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator
from multiprocessing import get_context

from rich.console import Console

from simulate import search
from simulate.mistakes import MISTAKES
from simulate.world import run

_PIECE = 100  # seeds at a time
console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    """Run the seeds and the mistakes; exit code 1 when a seed breaks or a mistake is not found."""
    given = _options().parse_args()
    logging.disable(logging.CRITICAL)
    if given.seed is not None:
        return _one(given.seed, given.mistake)
    began = time.monotonic()
    with get_context("spawn").Pool(os.cpu_count(), initializer=search.quiet) as pool:
        pieces = range(given.first, given.first + given.seeds, _PIECE)
        last = given.first + given.seeds
        work = [(at, min(at + _PIECE, last)) for at in pieces]
        broken = [one for found in pool.imap_unordered(search.broken_of, work) for one in found]
        for seed, why in broken[:20]:
            console.print(f"seed {seed}: {why}", markup=False)
        missed = list(_missed(pool.imap(search.first_found, MISTAKES)))
    console.print(
        f"{given.seeds:,} seeds tried, {len(broken)} broken; {len(MISTAKES) - len(missed)} of"
        f" {len(MISTAKES)} mistakes found; {time.monotonic() - began:.0f} s"
    )
    return 1 if broken or missed else 0


def _missed(results: Iterable[tuple[str, int | None, str]]) -> Iterator[str]:
    for mistake, seed, why in results:
        if seed is None:
            console.print(f"NOT FOUND in {search.MOST:,} seeds: {mistake}")
            yield mistake
        else:
            console.print(f"{mistake}: found by seed {seed}: {why}", markup=False)


def _one(seed: int, mistake: str | None) -> int:
    """Run one seed, and show what happens."""
    if mistake is None:
        run(seed, tell=lambda line: console.print(line, markup=False))
        return 0
    with MISTAKES[mistake]():
        run(seed, tell=lambda line: console.print(line, markup=False))
    return 0


def _options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="simulate", description=__doc__)
    options.add_argument("--seeds", type=int, default=20_000)
    options.add_argument("--first", type=int, default=0, help="the first seed")
    options.add_argument("--seed", type=int, help="run this one, and show what happens")
    options.add_argument("--mistake", choices=MISTAKES, help="with --seed: put it in")
    return options


if __name__ == "__main__":
    sys.exit(main())
