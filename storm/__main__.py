"""``python -m storm [--seconds N] [--members N] [--seed S] [--protocol P] [--sink S]
[--on-rebalance R]``."""

from __future__ import annotations

import argparse
import itertools
import json
import secrets
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from rich.console import Console

from oncely.testing.processes import await_that
from oncely.testing.servers.kafka import Broker
from oncely.testing.servers.postgres import Postgres
from storm.destinations import Destination, Table, Topic
from storm.fleet import Fleet
from storm.load import SCHEMA, Load
from storm.tally import Tally, compare, lost

OUT = Path("build/storm/report.json")
_PARTITIONS = 12
_PROTOCOLS = ("eager", "cooperative", "consumer")
_SINKS = ("sql", "kafka")
_PROGRESS = 60.0  # seconds from the last fault to the next commit
_ALL = 300.0  # seconds until everything is committed
_SESSION = 'session_timeout = "6 seconds"'
_BROKER = {
    "group.min.session.timeout.ms": "1000",
    "group.initial.rebalance.delay.ms": "0",
    "group.consumer.session.timeout.ms": "6000",
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.heartbeat.interval.ms": "1000",
    "group.consumer.min.heartbeat.interval.ms": "1000",
}
_FILE = """
name = "{name}"

[source]
brokers = "{brokers}"
topics = ["{topic}"]

[decode]
format = "json"
schema = "{schema}"

[sink]
{sink}

[worker]
protocol = "{protocol}"
on_rebalance = "{on_rebalance}"
{session}
"""
console = Console()


@dataclass(frozen=True)
class Round:
    """One destination and one protocol."""

    sink: str
    protocol: str
    on_rebalance: str
    seconds: float
    members: int
    seed: str

    @property
    def name(self) -> str:
        """The name of the pipeline and of its topic."""
        return f"storm-{self.sink}-{self.protocol}"


@dataclass
class Result:
    """The result of a round."""

    tally: Tally
    started: int
    kills: int
    pauses: int
    progress: float
    verified: bool


def main() -> int:
    """Run every round; exit code 1 when anything was lost, doubled, read too early or late."""
    given = _options().parse_args()
    seed = given.seed if given.seed is not None else secrets.randbelow(1 << 32)
    console.print(f"seed {seed}")
    pairs = [
        (sink, protocol)
        for sink, protocol in itertools.product(_SINKS, _PROTOCOLS)
        if given.sink in (None, sink) and given.protocol in (None, protocol)
    ]
    results = []
    with Broker(properties=_BROKER) as broker, Postgres() as postgres:
        for sink, protocol in pairs:
            share = given.seconds / len(pairs)
            name = f"{seed} {sink} {protocol}"
            one = Round(sink, protocol, given.on_rebalance, share, given.members, name)
            results.append(_run(one, broker, postgres))
    tally = sum((one.tally for one in results), Tally())
    report = {
        "seconds": given.seconds,
        "members_started": sum(one.started for one in results),
        "kills": sum(one.kills for one in results),
        "pauses": sum(one.pauses for one in results),
        **asdict(tally),
        "progress_seconds": round(max(one.progress for one in results), 1),
        "verified": all(one.verified for one in results),
        "seed": seed,
    }
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(report, indent=2) + "\n")
    console.print_json(data=report)
    fine = tally.is_clean and report["verified"] and report["progress_seconds"] <= _PROGRESS
    return 0 if fine else 1


def _run(one: Round, broker: Broker, postgres: Postgres) -> Result:
    """A storm, calm after it, and the counting."""
    random = Random(one.seed)
    broker.create_topic(one.name, _PARTITIONS)
    destination: Destination
    if one.sink == "sql":
        destination = Table(postgres.create_database(one.name.replace("-", "_")), "arrived")
    else:
        destination = Topic(broker, f"{one.name}-out")
    file = _pipeline_file(one, broker, destination, _folder(one))
    load = Load(broker.bootstrap, one.name, _PARTITIONS, Random(f"{one.seed} load"))
    fleet = Fleet(file, one.members, random)
    load.start()
    try:
        fleet.storm(one.seconds)
        fleet.calm()
        progress = _until_progress(destination)
        load.finish()
        expected = load.expected()
        _until_all(destination, sum(map(len, expected.values())))
        fleet.close()
    finally:
        fleet.kill()
    tally = compare(expected, destination.found())
    if tally.lost:
        console.print(
            f"lost (partition, number): {sorted(lost(expected, destination.found()))[:20]}"
        )
    verified = _verified(file, fleet.logs)
    console.print(
        f"{one.name}: {fleet.started} workers, {fleet.kills} killed, {fleet.pauses} paused;"
        f" {tally}; next commit after {progress:.1f} s; verified: {verified}"
    )
    return Result(tally, fleet.started, fleet.kills, fleet.pauses, progress, verified)


def _folder(one: Round) -> Path:
    """An empty folder for the logs of the workers, which stays."""
    folder = OUT.parent / one.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder.absolute()


def _pipeline_file(one: Round, broker: Broker, destination: Destination, folder: Path) -> Path:
    file = folder / f"{one.name}.toml"
    file.touch(mode=0o600)  # it contains a URL with a password
    file.write_text(
        _FILE.format(
            name=one.name,
            brokers=broker.bootstrap,
            topic=one.name,
            # With the consumer protocol the broker decides.
            session="" if one.protocol == "consumer" else _SESSION,
            schema=SCHEMA,
            sink=destination.sink,
            protocol=one.protocol,
            on_rebalance=one.on_rebalance,
        )
    )
    return file


def _until_progress(destination: Destination) -> float:
    """Seconds until the next commit after the last fault."""
    began, before = time.monotonic(), destination.count()
    await_that(lambda: destination.count() > before, "a commit after the storm", _ALL)
    return time.monotonic() - began


def _until_all(destination: Destination, number: int) -> None:
    """Wait until so many records are there, or the time is over: then the tally shows it."""
    end = time.monotonic() + _ALL
    while len(destination.found()) < number and time.monotonic() < end:
        time.sleep(1.0)


def _verified(file: Path, logs: list[Path]) -> bool:
    """``oncely verify`` with the event logs of all workers."""
    events = [word for log in logs if log.exists() for word in ("--events", str(log))]
    command = [sys.executable, "-m", "oncely.cli", "verify", str(file), *events]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (file.parent / "verify.txt").write_text(done.stdout + done.stderr)
    if done.returncode:
        console.print(done.stdout + done.stderr, markup=False)
    return done.returncode == 0


def _options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="storm", description=__doc__)
    options.add_argument("--seconds", type=float, default=300.0, help="of all rounds together")
    options.add_argument("--members", type=int, default=8)
    options.add_argument("--protocol", choices=_PROTOCOLS)
    options.add_argument("--sink", choices=_SINKS)
    options.add_argument("--on-rebalance", choices=("keep", "restart"), default="keep")
    options.add_argument("--seed", type=int)
    return options


if __name__ == "__main__":
    sys.exit(main())
