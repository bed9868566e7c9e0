"""Discarded dead letters: without content, neither pending nor replayed, and still counted."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from oncely.commit.change import replay
from oncely.core.batch import Reject
from oncely.core.claim import Takeover
from oncely.errors import Unavailable, WrongInput
from oncely.kinds.sql.change import SqlReplay
from oncely.kinds.sql.sink import SqlSink
from oncely.kinds.sql_ledger import discard_letters
from oncely.pipeline.rejects import Discarded
from oncely.pipeline.rejects import discard as discard_by
from oncely.stores.sql.connection import brief_session
from oncely.stores.sql.dead_letters import FIRST
from tests.contracts.looking import ids, wait_for_a_lock
from tests.replaytools import judging, pipeline_of
from tests.sinktools import (
    SOURCE,
    T0,
    Place,
    Rec,
    at_t0,
    commit_all,
    impatient,
    losing_first_commit,
    numbered,
    ready,
    sink_to,
    with_faults,
)

_WAIT = 60.0
EMAIL = b"ann@shop.example"


@pytest.fixture
def sink(place: Place) -> SqlSink:
    """A row, and rejects at offsets 1 to 4; the last one has another reason."""
    sink, fence = ready(sink_to(place))
    bad = [
        Rec(n, bad=f"email: '{EMAIL.decode()}' at byte {n}", key=EMAIL, value=b'{"v": 1}',
            headers=[("from", EMAIL)]) for n in range(1, 4)
    ]  # fmt: skip
    commit_all(sink, at_t0(0, [*numbered(0, 1), *bad, Rec(4, bad="no JSON")]), fence)
    return sink


def by_email(one: Reject) -> bool:
    return "email" in one.reason


def discard(sink: SqlSink, which: Callable[[Reject], bool] = by_email) -> Counter[str]:
    return discard_letters(sink.ledger, which, True)


def states(sink: SqlSink) -> tuple[list[int], list[int]]:
    """The offsets of pending and of discarded dead letters, and the counts are theirs."""
    letters = sink.ledger.dead_letters
    with brief_session(sink.dialect, "test", sink.connect) as session:
        found = [letters.read(session, FIRST, 100, discarded=gone) for gone in (False, True)]
        counts = [letters.count(session, discarded=gone) for gone in (False, True)]
    assert counts == [len(one) for one in found]
    pending, discarded = ([one.offset for one in letters] for letters in found)
    return pending, discarded


def test_what_remains(place: Place, sink: SqlSink) -> None:
    before = place.sql('SELECT * FROM oncely_rejects WHERE "offset" = 4')
    assert discard(sink) == {"email: … at byte …": 3}
    assert states(sink) == ([4], [1, 2, 3])
    kept = place.sql(
        'SELECT "offset", "key", "value", headers, stage, reason, timestamp_ms FROM oncely_rejects'
        ' WHERE "offset" < 4 ORDER BY "offset"'
    )
    reason = "email: … at byte …"
    assert kept == [
        (n, None, None, "[]", "discarded", reason, 1_700_000_000_000) for n in (1, 2, 3)
    ]
    assert place.sql('SELECT * FROM oncely_rejects WHERE "offset" = 4') == before
    assert discard(sink) == {}


def test_a_dry_run_counts_and_writes_nothing(place: Place, sink: SqlSink) -> None:
    before = place.sql("SELECT * FROM oncely_rejects")
    with place.session() as other:
        other.execute("BEGIN")
        other.execute('UPDATE oncely_rejects SET stage = stage WHERE "offset" = 1')
        found = discard_letters(sink.ledger, by_email, False)  # waits for no lock
        other.execute("ROLLBACK")
    assert found == {"email: … at byte …": 3}
    assert place.sql("SELECT * FROM oncely_rejects") == before


def test_more_than_are_read_at_once(
    sink: SqlSink, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oncely.kinds.sql_ledger._AT_ONCE", 1)
    assert discard(sink, lambda one: one.offset % 2 == 0).total() == 2
    assert states(sink) == ([1, 3], [2, 4])


def test_it_is_not_replayed(place: Place, sink: SqlSink) -> None:
    discard(sink)
    assert replay(SqlReplay(sink), judging(), impatient()) == (1, 0)
    assert ids(place) == [0, 4]
    assert states(sink) == ([], [1, 2, 3])


def test_a_record_that_is_read_again_is_pending_again(place: Place, sink: SqlSink) -> None:
    discard(sink, lambda _: True)
    back = Takeover(SOURCE, lambda: {T0: 0}, {T0: 0}, reset=lambda _: {T0: 3})
    fence = sink.open(back).fence
    assert states(sink) == ([], [1, 2])
    commit_all(sink.bind(), at_t0(3, [Rec(3, bad="no JSON"), *numbered(4, 5)]), fence)
    assert states(sink) == ([3], [1, 2])
    assert ids(place) == [0, 4]


def test_a_lost_answer_is_settled(place: Place, sink: SqlSink) -> None:
    lost: list[str] = []
    with pytest.raises(Unavailable):
        discard(with_faults(sink, losing_first_commit(lost)))
    assert states(sink) == ([4], [1, 2, 3])
    assert discard(sink) == {}


@pytest.mark.parametrize("at", ["begin", "query", "execute_many", "commit"])
def test_all_or_nothing(sink: SqlSink, at: str) -> None:
    def cut(name: str, call: Callable[[], Any]) -> Any:
        if name == at:
            raise Unavailable("cut")
        return call()

    with pytest.raises(Unavailable):
        discard(with_faults(sink, cut), lambda _: True)
    assert states(sink) == ([1, 2, 3, 4], [])


def test_others_than_were_shown_stay(sink: SqlSink) -> None:
    """One that is rejected while the discard goes on is of the same transaction, or of none."""
    assert discard_of(sink) == discard_of(sink)
    was = discard_of(sink).shown
    assert discard_of(sink, lambda one: one.offset < 4).shown != was
    discard(sink, lambda one: one.offset == 1)
    with pytest.raises(WrongInput, match="are not those that the dry run has shown"):
        discard_of(sink, shown=was)
    assert states(sink) == ([2, 3, 4], [1])
    assert discard_of(sink, shown=discard_of(sink).shown).total == 3
    assert states(sink) == ([], [1, 2, 3, 4])


def discard_of(sink: SqlSink, which: Any = lambda _: True, shown: str | None = None) -> Discarded:
    """As the pipeline does; a dry run unless it was shown."""
    pipeline = pipeline_of(partial(discard_letters, sink.ledger))
    return discard_by(pipeline, which, execute=shown is not None, shown=shown)


# -- beside a replay -----------------------------------------------------------------------


class Beside:
    """Work in a thread, which waits for locks of this one."""

    def __init__(self, place: Place, work: Callable[[], Any]) -> None:
        self._place, self._done = place, list[Any]()
        self._thread = threading.Thread(target=lambda: self._done.append(work()))

    def start(self) -> None:
        self._thread.start()
        if self._place.is_postgres:
            wait_for_a_lock(self._place)

    def finish(self) -> Any:
        self._thread.join(_WAIT)
        return self._done[0]


def test_a_discard_beside_a_replay(place: Place, sink: SqlSink) -> None:
    """The replay has locked three dead letters; one of them is kept, with a newer reason."""
    judge = judging(lambda one: one.offset != 2)
    beside = Beside(place, lambda: discard(sink, lambda _: True))
    with SqlReplay(sink).portion(3) as portion:
        assert portion is not None
        beside.start()
        portion.commit(judge(portion.rejects))
    assert beside.finish() == {"still bad": 1, "no JSON": 1}
    assert ids(place) == [0, 1, 3]
    assert states(sink) == ([], [2, 4])


def test_a_replay_beside_a_discard(place: Place, sink: SqlSink) -> None:
    """The discard has locked the dead letters; the replay skips those that it discards."""
    beside = Beside(place, lambda: replay(SqlReplay(sink), judging(), impatient(), 2))

    def by_email_when_it_waits(one: Reject) -> bool:
        if one.offset == 1:
            beside.start()
        return by_email(one)

    assert discard(sink, by_email_when_it_waits).total() == 3
    assert beside.finish() == (1, 0)
    assert ids(place) == [0, 4]
    assert states(sink) == ([], [1, 2, 3])
