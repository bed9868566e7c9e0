"""Traces that tests walk, as files: one for each recipe, with a line for each step.

    # 1
    Init db=[epoch|->0,positions|->[p1|->[at|->0],p2|->[at|->0]]] ...
    TakeEpoch db.epoch=1 proc.r1.epoch=1 .pc=given
    TakePositions proc.r1.pc=idle

``#`` begins a trace and tells its name. A line has the action and the values that it changes: of
``db.epoch``, ``proc.r1.epoch``, and, in the same record as the value before it, ``proc.r1.pc``. The
first line of a trace tells what differs from the first state of the file. The first line of a file
has the recipe's hash.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from models.traces import Function, Recipe, Step, printed, traces, traces_to, value

FOLDER = Path(__file__).parent / "walks"
_CHANGE = re.compile(r' ([\w.]+)=((?:"(?:\\.|[^"\\])*"|[^" ])+)')
_WORD = re.compile(r"\w+")

Walks = Mapping[str, Sequence[Step]]
"""Traces by name: of the goal, or a number."""


def walks(recipe: Recipe, folder: Path = FOLDER) -> Walks:
    """The recipe's traces.

    Raises:
        ValueError: the file is not of the present model and recipe.
    """
    text = _text(recipe, folder)
    if not text.startswith(_head(recipe)):
        raise ValueError(f"{recipe.name}.txt is not of the present model: run make models")
    return parsed(text)


def renew(recipe: Recipe, folder: Path = FOLDER, *, anew: bool) -> bool:
    """Write a file that is stale; with ``anew`` find out whether another one is as TLC says.

    Returns:
        False: the file is of the present model and recipe, and had other traces; or TLC fails.
    """
    before = _text(recipe, folder)
    is_stale = not before.startswith(_head(recipe))
    if not is_stale and not anew:
        return True
    try:
        text = written(recipe, found(recipe))
    except RuntimeError as error:
        print(f"WRONG {recipe.model.module:<12} traces {recipe.name}: {error}")
        return False
    (folder / f"{recipe.name}.txt").write_text(text)
    verdict = "new: commit the file" if is_stale else "as recorded"
    if right := is_stale or text == before:
        print(f"ok    {recipe.model.module:<12} traces {recipe.name}: {verdict}")
    else:
        print(f"WRONG {recipe.model.module:<12} traces {recipe.name}: the file had others")
    return right


def found(recipe: Recipe) -> Walks:
    """The traces that TLC finds: all, or the shortest one to each goal."""
    if recipe.goals:
        return {name: min(some, key=len) for name, some in traces_to(recipe).items()}
    return {str(number): trace for number, trace in enumerate(traces(recipe), 1)}


def written(recipe: Recipe, some: Walks) -> str:
    """The text of a file."""
    lines = [_head(recipe)]
    initial = next(iter(some.values()))[0].state
    before: Any = dict.fromkeys(initial)
    for name, trace in some.items():
        lines.append(f"# {name}\n")
        for step in trace:
            lines += [step.action, *_changes(before, step.state), "\n"]
            before = step.state
        before = initial
    return "".join(lines)


def parsed(text: str) -> Walks:
    """The traces in a file."""
    read: dict[str, list[Step]] = {}
    initial: dict[str, Any] = {}
    for line in text.splitlines()[1:]:
        if line.startswith("# "):
            trace = read[line[2:]] = []
            state = initial
            continue
        record: list[str] = []
        for path, new in _CHANGE.findall(line):
            *named, key = path.split(".")
            record = record if named == [""] else named
            state = _with(state, [*record, key], value(new))
        initial = initial or state
        trace.append(Step(line.partition(" ")[0], state))
    return read


def _head(recipe: Recipe) -> str:
    return f"{recipe.model.module} {recipe.digest()}, written by make models\n"


def _text(recipe: Recipe, folder: Path) -> str:
    file = folder / f"{recipe.name}.txt"
    return file.read_text() if file.exists() else ""


def _changes(before: Any, after: Any) -> Iterator[str]:
    last = None
    for (*record, key), new in _differences((), before, after):
        path = ["", key] if record and record == last else [*record, key]
        yield f" {'.'.join(path)}={printed(new)}"
        last = record


def _differences(
    path: tuple[str, ...], before: Any, after: Any
) -> Iterator[tuple[tuple[str, ...], Any]]:
    if before == after:
        return
    both = isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys()
    if both and all(_WORD.fullmatch(str(key)) for key in after):
        for key, new in after.items():
            yield from _differences((*path, str(key)), before[key], new)
    else:
        yield path, after


def _with(old: Mapping[Any, Any], path: Sequence[str], new: Any) -> Function:
    word, *rest = path
    key = int(word) if word.isdecimal() else word
    return Function({**old, key: _with(old[key], rest, new) if rest else new})
