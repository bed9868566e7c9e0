"""Each kind that a pipeline file may name is behind an entry point, and says what plan prints."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoints, distribution

import pytest

from oncely.config.pipeline import tables
from oncely.errors import WrongInput
from oncely.extras import KINDS, plugins
from oncely.kinds.kind import kind_of, kinds

NAMED = tables()["sink"].sections


def test_the_entry_points_are_what_a_file_may_name() -> None:
    found = distribution("oncely").entry_points.select(group="oncely.kinds")
    assert {one.name for one in found} == set(NAMED)
    assert len(NAMED) == len(found)
    assert {one.name: one.settings for one in kinds()} == NAMED


def test_a_package_without_its_metadata_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: EntryPoints())
    with pytest.raises(WrongInput, match=r"oncely-\*\.dist-info"):
        plugins.__wrapped__(KINDS)


@pytest.mark.parametrize("name", sorted(NAMED))
def test_a_kind_says_what_plan_prints(name: str) -> None:
    kind = kind_of(name)
    assert kind.name == name
    assert kind.texts.ends
    assert bool(kind.texts.by_task) == (kind.commits == "chunks")
    assert bool(kind.texts.why_driver) == (kind.commits == "ranges")
    assert kind.works or kind.commits == "ranges", "a worker commits chunks"


@pytest.mark.parametrize("name", sorted(NAMED))
def test_a_task_that_imports_a_sink_does_not_import_the_settings(name: str) -> None:
    code = f"import oncely.kinds.{name}.sink, sys; print('pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
