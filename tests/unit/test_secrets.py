"""Secrets belong to what brought them, and are looked for where they can stand."""

from __future__ import annotations

import pickle
import threading

import pytest

from oncely.errors import Fenced, Unavailable
from oncely.secrets import Secrets, carried, redact, scope


@pytest.mark.parametrize(
    ("value", "text", "expected"),
    [
        ("s3cr3t!", "x s3cr3t! y", "x *** y"),
        ("s3cr3t!", "xs3cr3t!y", "x***y"),
        ("another", "another process holds it", "another process holds it"),
        ("another", "anotherone", "anotherone"),
        ("another", "another", "***"),
        ("another", "no host \"another\" or 'another'", "no host \"***\" or '***'"),
        ("another", "password=another", "password=***"),
        ("another", "postgresql://u:another@h/d", "postgresql://u:***@h/d"),
        ("another", "failed to resolve another@h", "failed to resolve ***@h"),
        ("4711", "at offset 4711", "at offset 4711"),
        ("4711", "redis://:4711@h", "redis://:***@h"),
        ("averylongwordwithoutasign", "xaverylongwordwithoutasigny", "x***y"),
        ("pw", "upward, password=pw, u:pw@h", "upward, password=***, u:***@h"),
        ("p@ss", "p%40ss or p@ss", "*** or ***"),
        ("", "nothing", "nothing"),
    ],
)
def test_a_value_is_replaced_where_it_can_stand(value: str, text: str, expected: str) -> None:
    assert Secrets.of([value]).redact(text) == expected


def test_the_longest_first() -> None:
    assert Secrets.of(["one-two", "one-two-three"]).redact("one-two-three") == "***"


def test_what_is_shown_as_a_name_is_hidden_in_logins_only() -> None:
    secrets = Secrets.of(["oncely-1"], public=["oncely-1"])
    assert secrets.redact("user oncely-1 at x://oncely-1:oncely-1@h password='oncely-1'") == (
        "user oncely-1 at x://oncely-1:***@h password='***'"
    )


def test_nothing_of_a_secret_is_in_its_repr_and_it_travels() -> None:
    secrets = Secrets.of(["canary-1"])
    assert "canary" not in repr(secrets)
    assert pickle.loads(pickle.dumps(secrets)) == secrets


def test_an_error_is_redacted_by_the_scope_in_which_it_is_made() -> None:
    with scope(Secrets.of(["canary-1"])):
        inside = Unavailable("says canary-1", way_out="not canary-1")
        copy = pickle.loads(pickle.dumps(Fenced("canary-1", 1, 2)))
    assert (inside.message, inside.way_out, str(copy)[:14]) == (
        "says ***",
        "not ***",
        "pipeline '***'",
    )
    assert str(Unavailable("says canary-1")) == "says canary-1"


def test_an_error_from_elsewhere_is_redacted_when_it_arrives() -> None:
    error = Unavailable("says canary-1", way_out="not canary-1")
    error.hide(Secrets.of(["canary-1"]))
    assert (error.message, error.way_out, *error.args) == ("says ***", "not ***", "says ***")


def test_a_scope_is_its_threads_own() -> None:
    seen: list[str] = []
    with scope(Secrets.of(["canary-1"])):
        thread = threading.Thread(target=lambda: seen.append(redact("canary-1")))
        thread.start()
        thread.join()
        with scope(Secrets.of(["canary-2"])):
            assert redact("canary-1 canary-2") == "canary-1 ***"
        assert redact("canary-1 canary-2") == "*** canary-2"
    assert seen == ["canary-1"]


def test_a_task_takes_the_scope_with_it() -> None:
    with scope(Secrets.of(["canary-1"])):
        task = carried(_redacted)
    assert list(pickle.loads(pickle.dumps(task))(iter(["canary-1", "x"]))) == ["***", "x"]
    assert redact("canary-1") == "canary-1"


def _redacted(texts):  # type: ignore[no-untyped-def]
    for text in texts:
        yield redact(text)
