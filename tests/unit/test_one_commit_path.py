"""One loop reads a ledger, decides, acts and settles a lost answer: ``commit/path.py``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import oncely

_SRC = Path(oncely.__file__).parent
_SESSIONS = ("connection", "postgres", "sqlite")
CLIENTS = (
    "kafka/",
    "stores/objects/",
    "stores/delta",
    *(f"stores/sql/{one}" for one in _SESSIONS),
)
_PATH = "commit/path.py"
_IN_THE_TABLE = {"kinds/delta/ledger.py", "kinds/delta/sink.py"}
"""A takeover, and new columns, beside other writers of the Delta table: no position moves."""

_GOES_ON_WITHOUT = "commit/run.py"  # housekeeping: the next work is done, not the same again


def modules() -> Iterator[tuple[str, ast.Module]]:
    for file in sorted(_SRC.rglob("*.py")):
        name = file.relative_to(_SRC).as_posix()
        if not name.startswith((*CLIENTS, "testing/")):
            yield name, ast.parse(file.read_text("utf-8"))


def handlers(tree: ast.AST, *, looped: bool = False) -> Iterator[tuple[ast.ExceptHandler, bool]]:
    """Every handler, and whether a loop of its own function repeats it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ExceptHandler):
            yield node, looped
        of_loop = isinstance(node, ast.For | ast.While)
        anew = isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef)
        yield from handlers(node, looped=of_loop or (looped and not anew))


def catches(handler: ast.ExceptHandler, name: str) -> bool:
    caught = ast.walk(handler.type) if handler.type is not None else ()
    return any(isinstance(one, ast.Name) and one.id == name for one in caught)


def leaves(handler: ast.ExceptHandler) -> bool:
    """It ends the loop whatever it is told."""
    return isinstance(handler.body[-1], ast.Raise | ast.Return | ast.Break)


def test_nobody_else_catches_a_moved_position() -> None:
    found = {
        name
        for name, tree in modules()
        for one, _ in handlers(tree)
        if catches(one, "PositionMoved")
    }
    assert found - _IN_THE_TABLE == {_PATH}


def test_nobody_else_repeats_what_had_no_answer() -> None:
    found = {
        name
        for name, tree in modules()
        for one, looped in handlers(tree)
        if looped and catches(one, "Unavailable") and not leaves(one)
    }
    assert found == {_GOES_ON_WITHOUT}


def test_a_loop_is_recognised() -> None:
    tree = ast.parse(
        "def f():\n for n in range(5):\n  try:\n   g()\n  except (A, Unavailable):\n   pass\n"
        "def g():\n try:\n  f()\n except Unavailable:\n  pass\n"
    )
    assert [looped for one, looped in handlers(tree) if catches(one, "Unavailable")] == [
        True,
        False,
    ]
