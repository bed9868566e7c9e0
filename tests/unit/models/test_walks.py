"""Files of traces: what is written is read, and a file of another model or recipe is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models import check as checker
from models import walks as files
from models.catalogue import SQL_LEDGER
from models.recipes import RECIPES
from models.traces import Function, Recipe, Step
from models.walks import FOLDER, parsed, renew, walks, written

RECIPE = Recipe("some", SQL_LEDGER, {}, number=1, depth=5, seed=1)


def state(epoch: int, pc: str, effects: Sequence[int], letters: frozenset[Any]) -> dict[str, Any]:
    done = Function({p: Function(enumerate(effects)) for p in ("p1", "p2")})
    proc = Function(r1=Function(pc=pc, run=(epoch, 0), held=0))
    owners = Function({("p1", 0): pc})
    return {
        "db": Function(epoch=epoch, effects=done),
        "proc": proc,
        "letters": letters,
        "owners": owners,
    }


FIRST = state(0, "down", [0, 0], frozenset())
SECOND = state(1, 'settle "read" \\ = .x', [0, 1], frozenset({("p1", 1), ("p2", 0)}))
THIRD = state(1, "TRUE", [1, 1], frozenset())
SOME = {
    "a name, of a race": [Step("Init", FIRST), Step("Take", SECOND), Step("Lose", FIRST)],
    "another": [Step("Init", SECOND), Step("Commit", THIRD), Step("Stutter", THIRD)],
    "third": [Step("Init", SECOND), Step("Commit", THIRD)],
}


def test_what_is_written_is_read() -> None:
    text = written(RECIPE, SOME)
    assert parsed(text) == SOME
    assert repr(parsed(text)["third"][1].state["proc"]) == repr(THIRD["proc"])
    assert written(RECIPE, parsed(text)) == text
    assert text.count("\n") == 1 + sum(1 + len(trace) for trace in SOME.values())
    assert "\nStutter\n" in text
    assert "Take db.epoch=1 db.effects.p1.1=1 db.effects.p2.1=1 proc.r1.pc=" in text


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda one: one.name)
def test_the_files_are_of_the_present_models(recipe: Recipe) -> None:
    found = walks(recipe)
    assert len(found) == (len(recipe.goals) or recipe.number)
    assert found.keys() == recipe.goals.keys() or not recipe.goals
    assert all(len(trace) > 1 for trace in found.values())


def test_each_file_has_a_recipe() -> None:
    assert sorted(one.stem for one in FOLDER.iterdir()) == sorted(one.name for one in RECIPES)


@pytest.mark.parametrize(
    "changed",
    [
        replace(RECIPE, constants={"MaxEpoch": "4"}),
        replace(RECIPE, number=2),
        replace(RECIPE, depth=6),
        replace(RECIPE, seed=2),
        replace(RECIPE, goals={"never": "FALSE"}),
    ],
    ids=["constants", "number", "depth", "seed", "goals"],
)
def test_traces_of_another_recipe_are_refused(tmp_path: Path, changed: Recipe) -> None:
    (tmp_path / "some.txt").write_text(written(RECIPE, SOME))
    assert walks(RECIPE, tmp_path) == SOME
    with pytest.raises(ValueError, match="run make models"):
        walks(changed, tmp_path)


def test_traces_of_another_module_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = written(RECIPE, SOME)
    (tmp_path / "some.txt").write_text(text)
    real = checker._files

    def append(more: str) -> None:
        files = lambda *given: {name: text + more for name, text in real(*given).items()}  # noqa: E731
        monkeypatch.setattr(checker, "_files", files)

    append("\\* a comment\n\n(* another *)\n")
    assert walks(RECIPE, tmp_path)
    append("More == 1\n")
    with pytest.raises(ValueError, match="run make models"):
        walks(RECIPE, tmp_path)


def test_no_traces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run make models"):
        walks(RECIPE, tmp_path)


def test_a_file_is_written_when_it_is_stale_and_compared_when_all_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [SOME]
    monkeypatch.setattr(files, "found", lambda _: answers.pop())
    assert renew(RECIPE, tmp_path, anew=False)
    assert "new: commit the file" in capsys.readouterr().out
    assert walks(RECIPE, tmp_path) == SOME
    assert renew(RECIPE, tmp_path, anew=False), "TLC was not asked"
    answers = [SOME]
    assert renew(RECIPE, tmp_path, anew=True)
    edited = (tmp_path / "some.txt").read_text().replace("db.epoch=1", "db.epoch=2")
    (tmp_path / "some.txt").write_text(edited)
    answers = [SOME]
    assert not renew(RECIPE, tmp_path, anew=True)
    assert "WRONG" in capsys.readouterr().out
    assert walks(RECIPE, tmp_path) == SOME


def test_traces_that_are_not_found_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def found(_: Recipe) -> files.Walks:
        raise RuntimeError("{'never': 0}, and 1 of each are wanted")

    monkeypatch.setattr(files, "found", found)
    assert not renew(RECIPE, tmp_path, anew=False)
    assert "WRONG SqlLedger    traces some: {'never': 0}" in capsys.readouterr().out
    assert not (tmp_path / "some.txt").exists()
