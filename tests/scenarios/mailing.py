"""Jobs that tests run: `oncely work tests.scenarios.mailing:app`, settings in environment."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psycopg

from oncely import Worker, context, jobs

app = Worker(
    os.environ["MAILING_NAME"],
    brokers=os.environ["MAILING_BROKERS"],
    url="${MAILING_URL}",
    sink={"max_rejects": 10, "retries": 0, "context": ["user"]},
    worker={"session_timeout": "6 seconds", "max_records": 10},
)


@jobs.job(app, os.environ["MAILING_TOPIC"])
def mail(tx: psycopg.Connection, number: int, *, text: str = "") -> None:
    """A row for each; 13 raises an error. Waits inside the transaction while a file exists."""
    row = (number, text, context.current().get("user"))
    tx.execute("INSERT INTO mails VALUES (%s, %s, %s)", row)
    if number == 13:
        raise ValueError("unlucky")
    hold = Path(os.environ.get("MAILING_HOLD", "/nowhere/hold"))
    while hold.exists() and number >= 10:
        hold.with_suffix(".inside").touch()
        time.sleep(0.01)
