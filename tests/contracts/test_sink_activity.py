"""The time of the last commit and the rate, read from the ledger of each database."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from oncely.kinds.sql_ledger import look
from oncely.stores.sql.tables import Activity
from tests.sinktools import T0, Place, at_t0, commit_all, numbered, ready, sink_to


def test_the_last_commit_and_the_rate(place: Place) -> None:
    assert look(sink_to(place).ledger).activity is None
    sink, fence = ready(sink_to(place), {T0: 0})
    assert look(sink.ledger).activity == Activity(None, None, 0.0)
    commit_all(sink, at_t0(0, numbered(0, 300)), fence)
    commit_all(sink, at_t0(300, numbered(300, 600)), fence)
    now = look(sink.ledger).activity
    assert now is not None
    assert now.last_commit is not None
    assert now.seconds is not None
    assert abs(now.last_commit.timestamp() - datetime.now(UTC).timestamp()) < 3_600
    assert 0 <= now.seconds < 3_600
    assert now.partitions == {T0: pytest.approx(now.seconds, abs=1)}
    assert now.rate == pytest.approx(600 / 300) or now.seconds > 250
