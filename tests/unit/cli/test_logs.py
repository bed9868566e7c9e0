"""What reaches stderr: entries of ours and warnings of others, each error once."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from oncely.cli import screen
from oncely.secrets import Secrets


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("oncely")
    handlers, level, our_level = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    ours.setLevel(our_level)
    screen.named("")
    screen.hide(Secrets())


@pytest.mark.parametrize("debug", [False, True])
def test_what_psycopg_says_of_a_copy_whose_session_has_ended_is_for_who_debugs(
    capsys: pytest.CaptureFixture[str], debug: bool
) -> None:
    """The error of the COPY itself is raised, and told in words."""
    screen.configure(debug=debug)
    logging.getLogger("psycopg").warning("error ignored terminating %r: %s", "<Copy>", "it is lost")
    logging.getLogger("psycopg").error("another one")
    said = capsys.readouterr().err
    assert ("error ignored terminating" in said) == debug
    assert "another one" in said


@pytest.mark.parametrize(
    ("level", "debug", "said"),
    [
        (None, False, "info warning error other"),
        (None, True, "debug info warning error other"),
        ("debug", False, "debug info warning error other"),
        ("warning", True, "warning error other"),
        ("error", False, "error"),
    ],
)
def test_the_level(
    capsys: pytest.CaptureFixture[str], level: str | None, debug: bool, said: str
) -> None:
    screen.configure(debug=debug, log_level=level)
    for name in ("debug", "info", "warning", "error"):
        getattr(logging.getLogger("oncely.x"), name)(name)
    logging.getLogger("somebody").info("never")
    logging.getLogger("somebody").warning("other")
    assert [line.split()[-1] for line in capsys.readouterr().err.splitlines()] == said.split()


def entry(path: str, name: str = "root") -> logging.LogRecord:
    return logging.LogRecord(name, logging.ERROR, path, 1, "said at %s", (path,), None)


@pytest.mark.parametrize("debug", [False, True])
def test_what_py4j_says_through_the_root_logger_is_for_who_debugs(
    capsys: pytest.CaptureFixture[str], debug: bool
) -> None:
    """It raises the same error, and that one is told in words."""
    screen.configure(debug=debug)
    logging.getLogger().handle(entry("/lib/py4j/java_gateway.py"))
    logging.getLogger().handle(entry("/lib/other/py4j_like.py"))
    logging.getLogger("py4j2").handle(entry("/lib/py4j/x.py", "py4j2"))
    said = capsys.readouterr().err
    assert ("java_gateway" in said) == debug
    assert "py4j_like" in said
    assert "said at /lib/py4j/x.py" in said


def test_a_line_of_json_names_the_pipeline_and_hides_secrets(
    capsys: pytest.CaptureFixture[str],
) -> None:
    screen.configure(debug=False, log_format="json")
    screen.hide(Secrets.of(["s3cret!"]))
    screen.named("orders")
    mine = logging.getLogger("oncely.run")
    mine.info("logged in by %s\n", "s3cret! " + "x" * 300, extra={screen.FIELDS: {"epoch": 3}})
    try:
        raise ValueError("s3cret!")
    except ValueError:
        mine.exception("failed")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    time = first.pop("time")
    assert time.endswith("Z")
    assert first == {
        "level": "INFO", "logger": "oncely.run", "pipeline": "orders", "epoch": 3,
        "message": "logged in by *** " + "x" * 300 + "\n",
    }  # fmt: skip
    assert "ValueError: ***" in second["error"]


def test_every_line_of_text_names_the_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    screen.named("of an earlier command")
    screen.configure(debug=False)
    logging.getLogger("oncely.run").info("before")
    screen.named("orders")
    logging.getLogger("oncely.run").info("checking")
    before, named = capsys.readouterr().err.splitlines()
    assert before.endswith("INFO oncely.run: before")
    assert named.endswith("INFO oncely.run [orders]: checking")
