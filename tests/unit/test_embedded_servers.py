"""When `make proof` leaves the tests of the embedded servers out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import embedded_servers
from tests.conftest import repository

SOURCE = "src/oncely/testing/servers/kafka.py"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / SOURCE).parent.mkdir(parents=True)
    (tmp_path / SOURCE).write_text("port = 1")
    return tmp_path


def test_they_are_left_out_until_a_source_changes_or_is_added(root: Path) -> None:
    recorded = root / "recorded.json"

    def left_out(*arguments: str) -> str:
        return embedded_servers.main([*arguments], root, recorded)

    assert left_out() == ""
    assert left_out("--record") == ""
    assert left_out() == "and not embedded"
    (root / SOURCE).write_text("port = 2")
    assert left_out() == ""
    left_out("--record")
    (root / SOURCE).with_name("other.py").touch()
    assert left_out() == ""
    left_out("--record")
    (root / SOURCE).unlink()
    assert left_out() == ""


def test_the_servers_and_all_marked_tests_are_sources() -> None:
    top, mark = repository(), "mark." + "embedded"
    sources = set(embedded_servers.hashes())
    servers = (top / "src/oncely/testing/servers").glob("*.py")
    marked = [one for one in (top / "tests").rglob("test_*.py") if mark in one.read_text()]
    assert marked
    assert sources >= {one.relative_to(top).as_posix() for one in (*servers, *marked)}
