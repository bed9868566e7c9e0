"""Errors on the screen: message, way out, exit code, and never a secret."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from oncely.cli import plan, screen
from oncely.cli.progress import SparkLog
from oncely.cli.screen import LEFT, REST, RIGHT, duration, show
from oncely.errors import ConfigError, Fenced, InvariantViolation, Stopped, Unavailable
from oncely.secrets import Secrets

CANARY = "canary-4711-secret"


@pytest.fixture(autouse=True)
def pipeline_with_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "_secrets", (Secrets.of([CANARY]),))


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    written = io.StringIO()
    console = screen.Escaping(
        file=written, width=100, markup=False, highlight=False, soft_wrap=True
    )
    monkeypatch.setattr(screen, "err", console)
    monkeypatch.setattr(screen, "out", console)
    return written


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("sink.url", "wrong", way_out="correct it"), 2),
        (Fenced("p", 1, 2), 3),
        (Stopped("a person must decide"), 1),
        (Unavailable("gone"), 1),
        (InvariantViolation("can't be"), 1),
        (ValueError("unexpected"), 1),
    ],
)
def test_exit_codes(error: Exception, code: int, said: io.StringIO) -> None:
    assert screen.show_error(error, debug=False) == code
    assert said.getvalue().startswith("error: ")
    assert "Traceback" not in said.getvalue()


def test_message_and_way_out(said: io.StringIO) -> None:
    screen.show_error(ConfigError("sink.url", "wrong", way_out="correct it"), debug=False)
    assert said.getvalue() == "error: sink.url: wrong\nway out: correct it\n"


@pytest.mark.parametrize("debug", [False, True])
def test_no_secret_leaves_by_an_error(debug: bool, said: io.StringIO) -> None:
    def fails(password: str) -> None:
        raise ValueError(f"could not translate host name {password}")

    try:
        fails(CANARY)
    except ValueError as error:
        screen.show_error(error, debug=debug)
    assert CANARY not in said.getvalue()
    assert "***" in said.getvalue()
    assert ("Traceback" in said.getvalue()) is debug


def test_an_error_without_a_text_is_still_told(said: io.StringIO) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise AssertionError

    assert screen.show_error(Mute(), debug=False) == 1
    assert "Mute" in said.getvalue()


def test_json_is_redacted_and_stays_json(capsys: pytest.CaptureFixture[str]) -> None:
    screen.show_json({"a": f"x{CANARY}y", "ü": None})
    assert json.loads(capsys.readouterr().out) == {"a": "x***y", "ü": None}


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_terminal_without_unicode_gets_escapes(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding) for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    screen.escape_other_characters()
    screen.show_json({"name": "Ω\udc80"})
    print("✗ Ω")
    print("✗ Ω", file=err)
    out.flush()
    err.flush()
    line, text = out.buffer.getvalue().decode(encoding).splitlines()
    assert json.loads(line)["name"].startswith("Ω")
    assert text == ("✗ Ω" if encoding == "utf-8" else "\\u2717 \\u03a9")
    assert err.buffer.getvalue().decode(encoding).strip() == text


def test_log_lines_are_redacted(
    monkeypatch: pytest.MonkeyPatch, said: io.StringIO, caplog: pytest.LogCaptureFixture
) -> None:
    del caplog  # its handler is put back after the test
    root = logging.getLogger()
    before = root.handlers[:], root.level
    monkeypatch.setattr("threading.excepthook", sys.excepthook)
    monkeypatch.setattr("socketserver.BaseServer.handle_error", None)
    try:
        screen.configure(debug=False)
        logging.getLogger("oncely.x").info("secret %s", CANARY)
        logging.getLogger("somebody").info("not shown")
        try:
            raise ValueError(CANARY)
        except ValueError:
            logging.getLogger("oncely.x").exception("failed")
    finally:
        root.handlers[:], root.level = before
    assert CANARY not in said.getvalue()
    assert "secret ***" in said.getvalue()
    assert "not shown" not in said.getvalue()


HOSTILE = "a\x1b[2J\x9b31m\u202e\r\u2028\x85\n\nFORGED\x07\nFORGED"


def by_a_log(as_json: bool) -> None:
    before = logging.getLogger().handlers[:]
    try:
        screen.configure(debug=False, log_format="json" if as_json else "text")
        raise ValueError(HOSTILE)
    except ValueError as error:
        logging.getLogger("oncely.x").error("%s", error, exc_info=True)
    finally:
        logging.getLogger().handlers[:] = before


def test_lines_of_a_text_are_one_line_of_a_table(said: io.StringIO) -> None:
    show([("what", LEFT)], [("connection lost:\n\tis the server up? \x07",)])
    assert "connection lost: is the server up? \\x07" in said.getvalue()


@pytest.mark.parametrize(
    "tell",
    [
        lambda: screen.out.print(f"{HOSTILE} of a topic"),
        lambda: screen.out.print(Text.assemble(("said: ", "red"), HOSTILE)),
        lambda: screen.note(HOSTILE),
        lambda: screen.head("Rows", HOSTILE),
        lambda: screen.show_error(Unavailable(HOSTILE, way_out=HOSTILE), debug=True),
        lambda: screen.show_error(ValueError(HOSTILE), debug=False),
        lambda: show([("topic", LEFT), ("reason", REST)], [(HOSTILE, HOSTILE)]),
        lambda: plan._labelled([("note", HOSTILE)]),
        lambda: screen.show_json({HOSTILE: [HOSTILE]}),
        lambda: by_a_log(as_json=False),
        lambda: by_a_log(as_json=True),
    ],
)
def test_nothing_in_a_text_reaches_a_terminal_as_more_than_text(
    tell: Callable[[], object], said: io.StringIO, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("threading.excepthook", sys.excepthook)
    monkeypatch.setattr("socketserver.BaseServer.handle_error", None)
    tell()
    lines = (said.getvalue() + capsys.readouterr().out).split("\n")
    assert any("202e" in line for line in lines), "it was told"
    assert [line for line in lines if not line.isprintable() or line.startswith("FORGED")] == []


def test_colours_are_control_sequences_of_oncely_only() -> None:
    written = io.StringIO()
    console = screen.Escaping(file=written, force_terminal=True, color_system="standard")
    console.print(Text.assemble(("red", "red"), " \x1b[31mno"))
    assert written.getvalue() == "\x1b[31mred\x1b[0m \\x1b[31mno\n"


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_tables_keep_numbers_whole_and_cut_the_rest(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.StringIO()
    monkeypatch.setattr(screen, "out", Console(file=written, width=width))
    show(
        [("topic", LEFT), ("offset", RIGHT), ("reason", REST), ("value", REST)],
        [("a-topic-with-a-name", 123_456_789, "r" * 300, "v" * 300)],
    )
    lines = written.getvalue().splitlines()
    assert len(lines) == 3
    assert "a-topic-with-a-name" in lines[2]
    assert "123,456,789" in lines[2]
    assert all(len(line) <= width for line in lines)


def test_long_names_are_folded_and_nothing_of_them_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = io.StringIO()
    monkeypatch.setattr(screen, "out", Console(file=written, width=80))
    name = "warehouse.production.orders.changes.with.a.long.name"
    columns = [("topic", LEFT), ("offset", RIGHT), ("end", RIGHT), ("stage", LEFT), ("why", REST)]
    show(columns, [(name, 20_000_000_000, 20_000_000_001, "decode", "r" * 300)])
    lines = written.getvalue().splitlines()
    assert "".join(line.split(" ")[0] for line in lines[2:]) == name
    for one in ("20,000,000,000", "20,000,000,001", "decode"):
        assert one in lines[2]
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "?"), (0, "0 s"), (1.25, "1.2 s"), (119, "119.0 s"), (120, "2.0 min"),
     (7200, "2.0 h"), (86_400 * 3, "3.0 d")],
)  # fmt: skip
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds).plain == text


class TestSparkLog:
    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def write(self, error: Exception | None, path: Path | None = None) -> Path | None:
        with contextlib.suppress(ValueError), SparkLog("p", path) as log:
            if log.file is None:
                return None
            log.file.write(b"words of Spark's")
            found = Path(log.file.name) if path else log._path
            if error:
                raise error
        return found

    def test_it_goes_when_all_is_well_and_is_named_when_not(self, said: io.StringIO) -> None:
        gone = self.write(None)
        assert gone is not None
        assert not gone.exists()
        assert said.getvalue() == ""
        kept = self.write(ValueError())
        assert kept is not None
        assert kept.read_bytes() == b"words of Spark's"
        assert kept.stat().st_mode & 0o077 == 0
        assert str(kept) in said.getvalue()

    def test_a_given_file_stays(self, tmp_path: Path, said: io.StringIO) -> None:
        given = tmp_path / "own.log"
        self.write(None, given)
        self.write(None, given)
        assert given.read_bytes() == b"words of Spark's" * 2
        assert self.write(None, Path("-")) is None
        with pytest.raises(ConfigError, match=r"^--spark-log: "):
            self.write(None, tmp_path / "nowhere" / "x.log")

    def test_old_logs_do_not_pile_up(self, tmp_path: Path, said: io.StringIO) -> None:
        for _ in range(15):
            self.write(ValueError())
        assert len(list(tmp_path.glob("oncely-logs-*/p/*.log"))) == 11
