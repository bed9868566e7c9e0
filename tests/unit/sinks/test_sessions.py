"""Sessions: kept from commit to commit, thrown away after a failure, never mixed up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from oncely.errors import Unavailable
from oncely.stores.sql.connection import (
    BadData,
    application_name,
    application_prefix,
    brief_session,
    close_all,
    session,
    transaction,
)
from oncely.stores.sql.dialects import dialect_for

DIALECT = dialect_for("postgresql://nowhere.invalid/x")


class Fake:
    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[str] = []
        self.raises: dict[str, Exception] = {}
        self.ended = False

    def is_ended(self) -> bool:
        return self.ended

    def __getattr__(self, name: str) -> Any:
        def call() -> None:
            self.calls.append(name)
            if name in self.raises:
                raise self.raises[name]

        return call


@pytest.fixture
def made() -> Iterator[list[Fake]]:
    close_all()
    yield (made := [])
    made.clear()
    close_all()


def connecting(made: list[Fake]) -> Any:
    def connect(_: object, application: str) -> Fake:
        made.append(Fake(application))
        return made[-1]

    return connect


def test_a_session_is_kept(made: list[Fake]) -> None:
    for _ in range(3):
        with session(DIALECT, "p", 1, connecting(made)):
            pass
    assert len(made) == 1
    assert made[0].calls == []


def test_one_that_was_ended_is_replaced(made: list[Fake]) -> None:
    with (
        session(DIALECT, "p", 1, connecting(made), several=True),
        session(DIALECT, "p", 1, connecting(made), several=True),
    ):
        pass
    for one in made:
        one.ended = True
    with session(DIALECT, "p", 1, connecting(made), several=True):
        pass
    assert [one.calls for one in made] == [["close"], ["close"], []]


def test_after_a_failure_it_is_thrown_away(made: list[Fake]) -> None:
    with pytest.raises(Unavailable), session(DIALECT, "p", 1, connecting(made)):
        raise Unavailable("gone")
    with session(DIALECT, "p", 1, connecting(made)):
        pass
    assert made[0].calls == ["close"]
    assert len(made) == 2


def test_a_new_epoch_has_a_session_of_its_own_name(made: list[Fake]) -> None:
    for epoch in (1, 2):
        with session(DIALECT, "p", epoch, connecting(made)):
            pass
    assert [one.name for one in made] == [application_name("p", 1), application_name("p", 2)]
    assert made[0].calls == ["close"]


def test_a_process_with_several_epochs_keeps_the_sessions_that_it_used_last(
    made: list[Fake],
) -> None:
    for epoch in (1, 2, 1, 2, 3, 1, 4, 5):
        with session(DIALECT, "p", epoch, connecting(made), several=True):
            pass
    assert [one.name for one in made] == [application_name("p", epoch) for epoch in range(1, 6)]
    closed = [one.name for one in made if one.calls]
    assert closed == [application_name("p", 2)]  # of those that are kept, not used for longest


def test_pipelines_and_databases_do_not_share(made: list[Fake]) -> None:
    for dialect, pipeline in ((DIALECT, "p"), (DIALECT, "q"), (dialect_for("sqlite:////x"), "p")):
        with session(dialect, pipeline, 1, connecting(made)):
            pass
    assert len(made) == 3


def test_two_at_once_leave_one_and_close_the_other(made: list[Fake]) -> None:
    with session(DIALECT, "p", 1, connecting(made)), session(DIALECT, "p", 1, connecting(made)):
        pass
    assert sorted(one.calls for one in made) == [[], ["close"]]


def test_threads_that_commit_at_the_same_time_keep_a_session_each(made: list[Fake]) -> None:
    for _ in range(2):
        with (
            session(DIALECT, "p", 1, connecting(made), several=True),
            session(DIALECT, "p", 1, connecting(made), several=True),
        ):
            pass
    assert [one.calls for one in made] == [[], []]
    for epoch in range(2, 6):  # those of an epoch are closed together
        with session(DIALECT, "p", epoch, connecting(made), several=True):
            pass
    assert [one.calls for one in made][:2] == [["close"], ["close"]]


def test_a_brief_session_is_closed_and_bears_no_pipeline_s_name(made: list[Fake]) -> None:
    with brief_session(DIALECT, "open", connecting(made)):
        pass
    assert made[0].calls == ["close"]
    assert not made[0].name.startswith(application_prefix("open"))
    assert not made[0].name.startswith("oncely/")


def test_a_transaction(made: list[Fake]) -> None:
    fake = Fake("x")
    with transaction(fake):  # type: ignore[arg-type]
        fake.query()
    assert fake.calls == ["begin", "query", "commit"]


def test_a_transaction_that_raises_is_undone_and_says_why(made: list[Fake]) -> None:
    fake = Fake("x")
    fake.raises["rollback"] = Unavailable("and that too")
    with pytest.raises(KeyboardInterrupt), transaction(fake):  # type: ignore[arg-type]
        raise KeyboardInterrupt
    assert fake.calls == ["begin", "rollback"]


def test_after_a_commit_without_answer_nothing_is_undone(made: list[Fake]) -> None:
    fake = Fake("x")
    fake.raises["commit"] = Unavailable("no answer")
    with pytest.raises(Unavailable), transaction(fake):  # type: ignore[arg-type]
        pass
    assert fake.calls == ["begin", "commit"]


def test_a_commit_that_was_refused_is_undone(made: list[Fake]) -> None:
    fake = Fake("x")
    fake.raises["commit"] = BadData("deferred")
    with pytest.raises(BadData), transaction(fake):  # type: ignore[arg-type]
        pass
    assert fake.calls == ["begin", "commit", "rollback"]


def test_names_are_short_plain_and_of_one_pipeline() -> None:
    names = [application_name(p, 123_456) for p in ("flights", "x" * 300, "für 😀\n" * 9, "")]
    assert all(len(name.encode()) <= 63 and name.isascii() for name in names)
    assert all("\n" not in name for name in names)
    assert len({application_prefix(p) for p in ("a", "a/1", "b", "x" * 40, "x" * 41)}) == 5
    assert not application_name("a", 12).startswith(application_name("a", 1) + "/")
