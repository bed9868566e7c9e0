"""The overview in a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from rich.console import Console

from oncely.cli import screen, status, web
from oncely.cli.verbs import Status, Top
from oncely.cli.web import rendered, top
from oncely.errors import Unavailable
from oncely.pipeline.status import unreadable
from oncely.secrets import Secrets
from oncely.web.model import Overview, Problem, overview
from tests.webtools import PASSWORD, Topics, filled, pipeline_file, subject


def shown(read: object, width: int) -> list[str]:
    console = Console(width=width, record=True, file=None)
    with console.capture() as told:
        console.print(rendered(read))  # type: ignore[arg-type]
    return told.get().splitlines()


def test_a_line_for_each_pipeline(tmp_path: Path) -> None:
    shop, clicks = subject(filled(tmp_path)), subject(pipeline_file(tmp_path, "clicks"))
    down = Overview(unreadable("no answer"), problem=Problem("no", "start it"))
    read = [(clicks, None), (shop, overview(shop)), (subject(shop.file), down)]
    for width in (80, 140):
        lines = shown(read, width)
        assert max(map(len, lines)) <= width
        text = " ".join(" ".join(lines).split())
        assert "? clicks - - - - - reading" in text
        assert "! shop 30 " in text
        assert "✕ shop" in text
    assert "Can't be read: no answer (way out: start it)" in text


def test_no_text_is_cut_in_80_columns(tmp_path: Path) -> None:
    shop = subject(filled(tmp_path, "billing-of-the-whole-company-2026"))
    read = overview(shop)
    lines = shown([(shop, read)], 80)
    assert max(map(len, lines)) <= 80
    for word in read.verdict.sentence.split():
        assert any(word in line for line in lines), word


def test_it_scrolls_and_q_ends_it(tmp_path: Path) -> None:
    for number in range(20):
        pipeline_file(tmp_path, f"p{number:02}", f"sqlite:///{tmp_path}/{number}.db")
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 14, 100, 0, 0))
    command = [sys.executable, "-m", "oncely.cli", "top", str(tmp_path)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "14"}
    with subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=environment) as process:
        os.close(its)
        seen = ""

        def until(text: str) -> None:
            nonlocal seen
            while text not in seen:
                seen += os.read(ours, 65_536).decode()

        try:
            until("lines 1 to 10 of 20")
            assert "p00" in seen
            assert "p15" not in seen
            os.write(ours, b"\x1b[6~")
            until("lines 11 to 20 of 20; ")
            assert "p15" in seen
            os.write(ours, b"\x1b[A")
            until("lines 10 to 19 of 20")
            os.write(ours, b"q")
            assert process.wait(60) == 0
        finally:
            process.kill()
            os.close(ours)


def test_an_error_of_several_lines_is_on_one(tmp_path: Path) -> None:
    (tmp_path / "wrong.toml").write_text(
        'name = "p"\n[source]\nbrokers = 3\n[decode]\nformat = "x"\n[sink]\nkind = "sql"\n'
    )
    with screen.out.capture() as told:
        assert top(Top(paths=[tmp_path], once=True)) == 3
    said = " ".join(told.get().split())
    assert re.search(r"\d problems source.brokers: found 3; allowed: a text source\.topics", said)
    (read,) = web.opened_subjects([tmp_path])
    assert "\n" not in overview(read).verdict.sentence


def test_into_a_pipe_it_is_printed_once(tmp_path: Path) -> None:
    file = pipeline_file(tmp_path, "down", "postgresql://app@127.0.0.1:2/db")
    command = [sys.executable, "-m", "oncely.cli", "top", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.count("down")) == (3, 1)


def test_once_ends_with_the_code_of_the_worst(tmp_path: Path) -> None:
    url = f"postgresql://app:{PASSWORD}@127.0.0.1:2/db"
    with screen.out.capture() as told:
        try:
            assert top(Top(paths=[pipeline_file(tmp_path, "billing", url)], once=True)) == 3
        finally:
            screen.hide(Secrets())
    assert "billing" in told.get()
    assert PASSWORD not in told.get()


@pytest.mark.parametrize(
    ("names", "code"),
    [(["idle"], 1), (["shop"], 1), (["shop", "idle"], 1), (["shop", "down"], 3), (["down"], 3)],
)
def test_the_codes_of_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], code: int
) -> None:
    made = {
        "shop": subject(filled(tmp_path)),
        "idle": subject(pipeline_file(tmp_path, "idle")),
        "down": subject(pipeline_file(tmp_path, "down"), Topics(down=True)),
    }
    files = [made[name].file for name in names]
    monkeypatch.setattr(web, "opened_subjects", lambda paths: [made[one.stem] for one in paths])
    monkeypatch.setattr(status, "opened", lambda file: made[file.stem].pipeline)

    def ended(*, as_json: bool, check: bool) -> int:
        return status.show_status(Status(paths=files, as_json=as_json, check=check))

    with screen.out.capture() as told:
        assert ended(as_json=False, check=True) == code
    for name in set(names) - {"down"}:
        assert name in told.get()
    if names == ["down"]:
        with pytest.raises(Unavailable):
            ended(as_json=False, check=False)
    else:
        assert ended(as_json=True, check=False) == 0


def test_status_of_several_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shop = subject(filled(tmp_path))
    down = subject(pipeline_file(tmp_path, "down"), Topics(down=True))
    monkeypatch.setattr(web, "opened_subjects", lambda _paths: [shop, down])
    assert status.show_status(Status(paths=[tmp_path], as_json=True, check=True)) == 3
    first, second = json.loads(capsys.readouterr().out)
    assert (first["name"], first["verdict"], first["rejects"]) == ("shop", "behind", 3)
    assert second == {
        "name": "down", "file": str(down.file), "state": "WARN", "verdict": "unreadable",
        "reason": "the broker does not answer",
    }  # fmt: skip
