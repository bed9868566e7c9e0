"""The overview in a terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from oncely.cli import screen
from oncely.cli.top import rendered, top
from oncely.secrets import Secrets
from oncely.web.model import Overview, Problem, Verdict, overview
from tests.webtools import PASSWORD, filled, pipeline_file, subject


def shown(read: object, width: int) -> list[str]:
    console = Console(width=width, record=True, file=None)
    with console.capture() as told:
        console.print(rendered(read))  # type: ignore[arg-type]
    return told.get().splitlines()


def test_a_line_for_each_pipeline(tmp_path: Path) -> None:
    shop, clicks = subject(filled(tmp_path)), subject(pipeline_file(tmp_path, "clicks"))
    down = Overview(Verdict("bad", "Can't be read: no answer"), problem=Problem("no", "start it"))
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


def test_once_ends_with_1_if_there_is_a_problem(tmp_path: Path) -> None:
    url = f"postgresql://app:{PASSWORD}@127.0.0.1:2/db"
    with screen.out.capture() as told:
        try:
            assert top([pipeline_file(tmp_path, "billing", url)], 1.0, once=True) == 1
        finally:
            screen.hide(Secrets())
    assert "billing" in told.get()
    assert PASSWORD not in told.get()
