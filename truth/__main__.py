"""``python -m truth [--damages N] [--clean N] [--seed S] [--only KIND]``: ``make audit-truth``."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from rich.console import Console

from oncely.runtimes.spark import session
from oncely.testing.servers.kafka import Broker
from oncely.testing.servers.postgres import Postgres
from truth.damage import Damage, Tally, Throw, World
from truth.delta import DeltaWorld
from truth.files import FilesWorld
from truth.kafka import KafkaWorld
from truth.live import clean_audits
from truth.sql import SqlWorld

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OUT = Path("build/audit/truth.json")
_AT_ONCE = 1000  # damages before one audit
_SHARE = {"sql": 36, "delta": 24, "kafka": 28, "kafka-values": 8, "files": 4}
"""Of the damages; one of a file is one of many records."""

_OFTEN = 'flush_interval = "1 second"'
console = Console()

Make = Callable[["SparkSession", Random], World]


def main() -> int:
    """Throw damage at every kind of destination; exit code 1 when the audit was wrong."""
    given = _options().parse_args()
    seed = given.seed if given.seed is not None else secrets.randbelow(1 << 32)
    console.print(f"seed {seed}")
    tally, clean, began = Tally(), (0, 0), time.monotonic()
    with _made(given) as (worlds, spark, broker, postgres):
        whole = sum(_SHARE[name] for name in worlds)
        for name, make in worlds.items():
            random = Random(f"{seed} {name}")
            number = -(-given.damages * _SHARE[name] // whole)
            _throw_all(make(spark, random), random, number, tally)
        clean = _clean_audits(given.clean, broker, postgres)
    result = {
        "seed": seed,
        "damages": tally.thrown.total(),
        "found": tally.found.total(),
        "invented": len(tally.invented),
        "kinds": {
            kind: {"thrown": number, "found": tally.found[kind]}
            for kind, number in sorted(tally.thrown.items())
        },
        "harmless": dict(sorted(tally.harmless.items())),
        "clean_audits": clean[0],
        "false_alarms": clean[1],
        "seconds": round(time.monotonic() - began),
    }
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(result, indent=2) + "\n")
    _show(tally, result)
    return 0 if tally.is_right and not clean[1] else 1


@contextmanager
def _made(
    given: argparse.Namespace,
) -> Iterator[tuple[dict[str, Make], SparkSession, Broker, Postgres]]:
    with ExitStack() as left:
        broker = left.enter_context(Broker())
        postgres = left.enter_context(Postgres())
        spark = session.start("truth", "local[2,4]", {})
        left.callback(spark.stop)

        def to_sql(spark: SparkSession, random: Random) -> World:
            url = postgres.create_database("truth")
            return SqlWorld(broker, url, spark, given.records, random)

        def to_delta(spark: SparkSession, random: Random) -> World:
            root = Path(left.enter_context(tempfile.TemporaryDirectory(prefix="oncely-truth-")))
            return DeltaWorld(broker, root / "orders", spark, given.records, random)

        def to_files(spark: SparkSession, random: Random) -> World:
            root = Path(left.enter_context(tempfile.TemporaryDirectory(prefix="oncely-truth-")))
            return FilesWorld(broker, root, spark, given.records // 4, random)

        def to_kafka(spark: SparkSession, random: Random, *, keep_source: bool) -> World:
            return KafkaWorld(broker, spark, given.records, random, keep_source=keep_source)

        worlds: dict[str, Make] = {
            "sql": to_sql,
            "delta": to_delta,
            "kafka": partial(to_kafka, keep_source=True),
            "kafka-values": partial(to_kafka, keep_source=False),
            "files": to_files,
        }
        chosen = {name: one for name, one in worlds.items() if given.only in (None, name)}
        yield chosen, spark, broker, postgres


def _clean_audits(number: int, broker: Broker, postgres: Postgres) -> tuple[int, int]:
    """Audits of running pipelines, and how many of them were false alarms."""
    done = alarms = 0
    with tempfile.TemporaryDirectory(prefix="oncely-truth-") as folder:
        url, root = postgres.create_database("live"), Path(folder).as_uri()
        files = f'kind = "files"\nurl = "{root}/files"'
        sinks = {
            "live-sql": f'kind = "sql"\nurl = "{url}"\ntable = "orders"',
            "live-kafka": 'kind = "kafka"\ntopic = "live-out"\nkeep_source = true',
            "live-delta": f'kind = "delta"\nurl = "{root}/delta"\n{_OFTEN}',
            "live-files": f'{files}\n{_OFTEN}\nmanifest_topic = "live"',
        }
        for at, (name, sink) in enumerate(sinks.items()):
            share = (number - done) // (len(sinks) - at)
            if share:
                wrong = clean_audits(broker, name, sink, share, console)[1]
                done, alarms = done + share, alarms + wrong
    return done, alarms


def _throw_all(world: World, random: Random, number: int, tally: Tally) -> None:
    """One audit without damage, large damages alone, then the others together."""
    began, name = time.monotonic(), world.name

    def say(left: int) -> None:
        took = time.monotonic() - began
        console.print(f"{name}: {took:.0f} s, {left:,} damages to do, {len(tally.missed)} missed")

    tally.compare(name, [], world.audit())
    for throw in world.large(random):
        _throw(throw, world, tally)
    last = list(world.last(random))
    left = number - tally.thrown_at(name) - len(last)
    say(left)
    while left > 0:
        damages = _throw(partial(world.throw, random, min(left, _AT_ONCE)), world, tally)
        left -= len(damages)
        say(left)
    for throw in last:
        _throw(throw, world, tally)


def _throw(throw: Throw, world: World, tally: Tally) -> Sequence[Damage]:
    with throw() as damages:
        try:
            report = world.audit()
        except Exception as error:  # the damage must not end an audit
            tally.failed(world.name, damages, error)
        else:
            tally.compare(world.name, damages, report)
    return damages


def _show(tally: Tally, result: dict[str, object]) -> None:
    for kind, number in sorted(tally.thrown.items()):
        console.print(f"{kind:45} {tally.found[kind]:>6,} of {number:>6,}")
    for kind, number in sorted(tally.harmless.items()):
        console.print(f"{kind:45} no damage, {number:,} audits")
    for damage in tally.missed[:20]:
        console.print(f"missed: {damage.kind}: {sorted(damage.places)[:3]}")
    for reason in sorted(tally.reasons)[:20]:
        console.print(f"not proved: {reason}")
    for named in tally.invented[:20]:
        console.print(f"invented: {named}")
    console.print(
        f"{result['found']:,} of {result['damages']:,} damages found, {result['invented']:,}"
        f" invented; {result['false_alarms']} false alarms in {result['clean_audits']} audits of a"
        f" running pipeline; written: {OUT}"
    )


def _options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="truth", description=__doc__)
    options.add_argument("--damages", type=int, default=10_000)
    options.add_argument("--records", type=int, default=20_000, help="of each destination")
    options.add_argument("--clean", type=int, default=50, help="audits of a running pipeline")
    options.add_argument("--seed", type=int)
    options.add_argument("--only", choices=(*_SHARE, "live"))
    return options


if __name__ == "__main__":
    sys.exit(main())
