"""A compaction and a reset of a schema, killed at calls to their producers: whole or not at all."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from oncely.kinds.files.compact import compact
from oncely.testing.servers.kafka import Broker
from tests.contracts.test_files_compact import as_published, five_batches, named
from tests.contracts.test_files_schema_reset import ANEW, ANN, polluted, published, write
from tests.filestools import make_place, open_sink
from tests.laketools import lake
from tests.scenarios import files_jobs as jobs
from tests.scenarios.zygote import Zygote


def killed(*calls: str, after: Sequence[str]) -> pytest.MarkDecorator:
    """Before each call, which is after the one before it if nothing is sent in between."""
    every = [*((call, "before") for call in calls), *((call, "after") for call in after)]
    return pytest.mark.parametrize(("call", "when"), every)


@killed(
    *("init_transactions", "begin_transaction", "flush", "commit_transaction"),
    after=["commit_transaction"],
)
def test_a_killed_compaction_has_replaced_all_or_nothing(
    zygote: Zygote, broker: Broker, tmp_path: Path, call: str, when: str
) -> None:
    small = five_batches(lake(broker, tmp_path))
    before = len(named(small).files)
    ended = zygote.run(jobs.compact_and_die, small.table, 1, when, call)
    assert ended.signal == signal.SIGKILL, ended.error
    # The next one ends a transaction that was left open, and finds three files when there was none.
    again = compact(small.table)
    done = (call, when) == ("commit_transaction", "after")
    assert again.outputs == (0 if done else 2)
    assert len(named(small).files) == 3 < before
    as_published(small)


@killed(
    *("init_transactions", "begin_transaction", "produce", "commit_transaction"),
    after=["produce", "commit_transaction"],
)
def test_a_killed_reset_of_a_schema_has_taken_effect_or_not(
    zygote: Zygote, broker: Broker, tmp_path: Path, call: str, when: str
) -> None:
    place = make_place(broker, tmp_path)
    polluted(place).close()
    ended = zygote.run(jobs.replace_schema_and_die, place, ANN, ANEW, when, call)
    assert ended.signal == signal.SIGKILL, ended.error
    run = place.sink(None)
    fence = open_sink(run).fence  # which ends what was left open
    done = (call, when) == ("commit_transaction", "after")
    assert ("amount" in (published(place) or {})) is not done
    assert write(run, fence, 1, {"id": 2, "amount": 5}) == ([] if done else [0])
    run.close()
