"""Damage on purpose: the table is audited, damaged by plain SQL, audited, repaired, audited."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psycopg

from demo.job import ROOT

AUDITS = {
    "clean": "before the damage",
    "damaged": "after the damage",
    "repaired": "after oncely repair",
}
"""The audits in their order, in words."""
PAGE = "audit.html"
REPORT = "audit.json"
_COMMAND = 120.0
_DAMAGED = 1  # exit code of an audit
_TABLE = "public.flights"
_ROWS = f"FROM {_TABLE} WHERE id = ANY(%s)"


class Step(NamedTuple):
    """One kind of damage.

    Attributes:
        finding: what the audit must call it.
        words: for people.
        statement: the SQL.
        ids: of the flights.
    """

    finding: str
    words: str
    statement: str
    ids: Sequence[int]

    @property
    def shown(self) -> str:
        """The statement with its values."""
        return self.statement.replace("ANY(%s)", f"ANY('{{{','.join(map(str, self.ids))}}}')")


STEPS = (
    Step("lost", "rows removed", f"DELETE {_ROWS}", (1_000, 90_001, 250_000)),
    Step(
        "duplicated",
        "rows doubled",
        f"INSERT INTO {_TABLE} SELECT * {_ROWS}",
        (40_000, 180_000, 336_000),
    ),
    Step(
        "altered",
        "rows altered",
        f"UPDATE {_TABLE} SET distance = distance + 1 WHERE id = ANY(%s)",
        (2_000, 123_456, 300_000),
    ),
)


def run(
    pipeline: str,
    environment: Mapping[str, str],
    url: str,
    directory: Path,
    step: Callable[[str], None],
) -> dict[str, Any]:
    """Audit, damage, audit, repair; the repair audits at its end.

    Args:
        pipeline: the pipeline file.
        environment: added to ours.
        url: the database.
        directory: for the report of the damage and its page.
        step: told what comes next.
    """
    began = time.monotonic()
    found, page = directory / REPORT, directory / PAGE
    step("Audit of the table")
    clean, _ = _oncely(environment, "audit", pipeline)
    places = damage(url)
    step("Audit of the damaged table")
    damaged, code = _oncely(environment, "audit", pipeline, "--html", str(page))
    found.write_text(json.dumps(damaged, indent=1) + "\n", "utf-8")
    step("Repair")
    arguments = ("--report", str(found), "--execute")
    repaired, _ = _oncely(environment, "repair", pipeline, *arguments)
    return {
        "clean": _told(clean),
        "damaged": _told(damaged) | {"exit_code": code},
        "repaired": _told(repaired["audit"]),
        "done": places,
        "page": str(page),
        "seconds": round(time.monotonic() - began, 1),
    }


def damage(url: str) -> list[list[Any]]:
    """Do all of it; the kinds, partitions and offsets of the damaged records."""
    with psycopg.connect(url) as database:
        places = [
            [one.finding, *place]
            for one in STEPS
            for place in database.execute(
                f"SELECT kafka_partition, kafka_offset {_ROWS}".encode(), (list(one.ids),)
            )
        ]
        for one in STEPS:
            database.execute(one.statement.encode(), (list(one.ids),))
    return sorted(places, key=str)


def judge(audit: Mapping[str, Any], records: int) -> list[str]:
    """Return what did not come out as it must, in sentences.

    Args:
        audit: the answer of :func:`run`.
        records: the number of records that the independent reader has counted.
    """
    damaged, done = audit["damaged"], audit["done"]
    checks = [
        (len(done) == sum(len(one.ids) for one in STEPS),
         "the damage did not hit the rows that it was for"),
        (damaged["verdict"] == "damaged" and damaged["exit_code"] == _DAMAGED,
         f"the damaged table was called {damaged['verdict']}"),
        (damaged["findings"] == done,
         f"the damage was {done}, the audit named {damaged['findings']}"),
        (sum(damaged["found"].values()) == len(damaged["findings"]),
         "findings were counted that are not listed"),
    ]  # fmt: skip
    for name in ("clean", "repaired"):
        when, one = AUDITS[name], audit[name]
        whole = one["records"] == one["accounted"] == records
        checks += [
            (one["verdict"] == "clean", f"{when}, the table was called {one['verdict']}"),
            (whole, f"{when}, {one['accounted']:,} of {records:,} records were accounted for"),
        ]
    return [f"audit: {text}" for good, text in checks if not good]


def _told(report: Mapping[str, Any]) -> dict[str, Any]:
    """What the demo's report keeps of an audit."""
    numbers = ("verdict", "records", "accounted", "holes", "found", "seconds")
    findings = [
        [kind, one["partition"], one["offset"]] for kind in report["found"] for one in report[kind]
    ]
    return {**{name: report[name] for name in numbers}, "findings": sorted(findings, key=str)}


def _oncely(environment: Mapping[str, str], *arguments: str) -> tuple[dict[str, Any], int]:
    """``oncely ARGUMENTS --json``: what it printed, and its exit code."""
    done = subprocess.run(
        [sys.executable, "-m", "oncely.cli", *arguments, "--json"],
        cwd=ROOT,
        env={**os.environ, **environment},
        text=True,
        start_new_session=True,  # a Ctrl-C is for us; run() ends it
        stdout=subprocess.PIPE,
        timeout=_COMMAND,
        check=False,
    )
    if not done.stdout:
        raise RuntimeError(f"`oncely {arguments[0]}` ended with code {done.returncode}")
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed, done.returncode
