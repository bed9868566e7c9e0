"""A handler: orders become bills and debts, each exactly once.

    oncely work billing:worker                    # in as many processes as there is work for
    oncely torture billing:worker --setup billing.sql --table bills --table debts

The second command needs no servers: it starts its own, and kills the handler at each step.
"""

from __future__ import annotations

import psycopg

from oncely import Batch, Worker

worker = Worker(
    "billing",
    brokers="127.0.0.1:9092",
    url="postgresql://billing:${BILLING_PASSWORD}@127.0.0.1/shop",
    decode={"format": "json", "schema": "id BIGINT, customer STRING, total DECIMAL(12, 2)"},
)


@worker.handle("orders")
def bill(batch: Batch, tx: psycopg.Connection) -> None:
    """A bill for each order, and the sum of each customer: `+` would show each repetition."""
    for order in batch:
        row = (order["id"], order["customer"], order["total"])
        tx.execute("INSERT INTO bills VALUES (%s, %s, %s)", row)
        tx.execute(
            "INSERT INTO debts VALUES (%s, %s) ON CONFLICT (customer)"
            " DO UPDATE SET total = debts.total + excluded.total",
            row[1:],
        )
