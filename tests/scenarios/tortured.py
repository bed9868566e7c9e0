"""A handler that tests torture: it writes by a connection of its own."""

from __future__ import annotations

import os

import psycopg

from oncely import Batch, Worker

app = Worker(
    "bad",
    brokers="nowhere:9092",
    url="postgresql://nowhere/db",
    decode={"format": "json", "schema": "id BIGINT, name STRING"},
)


@app.handle(os.environ.get("TORTURED_TOPIC", "orders"))
def bill_elsewhere(batch: Batch, tx: psycopg.Connection) -> None:
    """The rows are committed by themselves, and only the sum with the offsets."""
    with psycopg.connect(tx.info.dsn, password=tx.info.password, autocommit=True) as other:
        for record in batch:
            other.execute("INSERT INTO bills (of) VALUES (%s)", (record["name"],))
    tx.execute("UPDATE total SET bills = bills + %s", (len(batch),))
