"""What reaches stderr: entries of ours and warnings of others, each error once."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from oncely.cli import logs


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def entry(path: str, name: str = "root") -> logging.LogRecord:
    return logging.LogRecord(name, logging.ERROR, path, 1, "said at %s", (path,), None)


@pytest.mark.parametrize("debug", [False, True])
def test_what_py4j_says_through_the_root_logger_is_for_who_debugs(
    capsys: pytest.CaptureFixture[str], debug: bool
) -> None:
    """It raises the same error, and that one is told in words."""
    logs.configure(debug=debug)
    logging.getLogger().handle(entry("/lib/py4j/java_gateway.py"))
    logging.getLogger().handle(entry("/lib/other/py4j_like.py"))
    logging.getLogger("py4j2").handle(entry("/lib/py4j/x.py", "py4j2"))
    said = capsys.readouterr().err
    assert ("java_gateway" in said) == debug
    assert "py4j_like" in said
    assert "said at /lib/py4j/x.py" in said
