"""A directory of a known name in a shared one is used only if nobody else has access to it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from oncely.cli.progress import SparkLog, is_private, make_private
from oncely.errors import ConfigError, RejectSummary, TooManyRejects

Plant = Callable[[Path], None]


def opened_to(mode: int) -> Plant:
    def plant(folder: Path) -> None:
        folder.mkdir()
        folder.chmod(mode)

    return plant


def link(folder: Path) -> None:
    elsewhere = folder.with_name("elsewhere")
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)


TRAPS = pytest.mark.parametrize(
    "plant",
    [opened_to(0o777), opened_to(0o755), opened_to(0o710), link,
     lambda folder: folder.symlink_to("nowhere"), lambda folder: folder.write_text("a file")],
    ids=["open", "readable", "group", "link", "broken link", "file"],
)  # fmt: skip


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_directory_is_made_private_and_taken_again(tmp_path: Path) -> None:
    tmp_path.chmod(0o2777)  # what is made in it inherits the set-group-ID bit
    folder = tmp_path / "own"
    for _ in range(2):
        make_private(folder, "a.key", "")
        assert is_private(folder)


def test_a_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "own"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with pytest.raises(ConfigError, match=rf"{folder} .* belong to user id 4711") as caught:
        make_private(folder, "a.key", "take another one")
    assert caught.value.key == "a.key"
    assert "take another one" in caught.value.way_out


def test_one_that_cant_be_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        make_private(tmp_path / "missing" / "own", "a.key", "")


@TRAPS
def test_logs_go_to_no_place_of_others(shared: Path, plant: Plant) -> None:
    plant(shared / f"oncely-logs-{os.getuid()}")
    before = sorted(shared.rglob("*"))
    with pytest.raises(ConfigError, match=r"^--spark-log: .*oncely-logs-") as caught, \
            SparkLog("p", None):  # fmt: skip
        raise AssertionError
    assert "TMPDIR" in caught.value.way_out
    assert sorted(shared.rglob("*")) == before


def test_the_error_that_ends_a_run_is_not_replaced(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link(shared / f"oncely-logs-{os.getuid()}")
    refused = RejectSummary.of(["no JSON"], lambda _: [])
    with pytest.raises(TooManyRejects, match="9 records"), SparkLog("p", Path("-")):
        raise TooManyRejects("9 records", refused=refused)
    assert "is not kept" in " ".join(capsys.readouterr().err.split())
