"""Handlers that tests run: `oncely work tests.scenarios.billing:app`, settings in environment."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psycopg

from oncely import Batch, Worker
from oncely.context import Record
from tests.scenarios.world import SCHEMA

app = Worker(
    os.environ["BILLING_NAME"],
    brokers=os.environ["BILLING_BROKERS"],
    url="${BILLING_URL}",
    decode={"format": "json", "schema": SCHEMA},
    sink={"max_rejects": 10, "retries": 0},
    worker={"session_timeout": "6 seconds"},
)


def unwanted(record: Record) -> bool:
    """Records whose key ends in some digits."""
    ending = os.environ.get("BILLING_DROP")
    return ending is not None and record.key.decode().endswith(ending)


@app.handle(
    os.environ["BILLING_TOPIC"],
    drop=unwanted,
    threads=int(os.environ.get("BILLING_THREADS", "1")),
)
def bill(batch: Batch, tx: psycopg.Connection) -> None:
    """A row for each record; 13 raises an error, 14 is rejected."""
    ids = [str(one["id"]) for one in batch]
    if "BILLING_CALLS" in os.environ:
        with Path(os.environ["BILLING_CALLS"]).open("a") as calls:
            calls.write(" ".join([*ids, ""]))
    rows = [
        (one["id"], one["grp"], one["pad"], batch.topic, batch.partition, one.offset)
        for one in batch
    ]
    with tx.cursor() as cursor:
        cursor.executemany("INSERT INTO rows VALUES (%s, %s, %s, %s, %s, %s)", rows)
    for one in batch:
        if one["id"] == 13:
            raise ValueError("unlucky")
        if one["id"] == 14:
            batch.reject(one, "not billable")
    if "BILLING_SQL" in os.environ:
        tx.execute(os.environ["BILLING_SQL"].encode())
    for one in os.environ.get("BILLING_HELD", ids[0]).split():
        if one in ids:
            _hold(Path(os.environ.get("BILLING_HOLD", "/nowhere/hold")), f".inside{one}")


def _hold(file: Path, suffix: str) -> None:
    """Wait inside the transaction while a file exists."""
    while file.exists():
        file.with_suffix(suffix).touch()
        time.sleep(0.01)
