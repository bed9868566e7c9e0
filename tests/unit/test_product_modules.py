"""No module of the product is there for the tests alone, and every function fits a screen.

The walk begins at what users start or import. It follows imports, also those inside functions and
for type checkers, modules that are run by ``-m``, files that are run by their name, and functions
that are named as ``module:function``.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

from tests.conftest import repository

SOURCE = repository() / "src"
ENTRY_POINTS = {
    "oncely": "`import oncely`",
    "oncely.files": "`from oncely import files`",
    "oncely.jobs": "`from oncely import jobs`",
    "oncely.testing": "`from oncely.testing import Broker`, in tests of users",
    "oncely.cli.__main__": "`python -m oncely.cli`",
    "oncely.artifacts": "`python -m oncely.artifacts`, in the Makefile",
    "oncely.runtimes.spark.daemon": "`spark.python.daemon.module`, in the sessions of Spark",
}
"""Beside the scripts and kinds that pyproject.toml names."""


def modules(top: Path) -> dict[str, Path]:
    """The modules below a folder, by name."""
    found = {}
    for file in sorted(top.rglob("*.py")):
        parts = file.relative_to(top).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def named_in(module: str, file: Path) -> Iterator[str]:
    """What a module imports or runs: modules, or names in them."""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Import(names):
                yield from (one.name for one in names)
            case ast.ImportFrom(of, names, level):
                above = package.split(".")[: len(package.split(".")) - level + 1] if level else []
                origin = ".".join([*above, *([of] if of else [])])
                yield from (f"{origin}.{one.name}" for one in names)
            case ast.List(items) | ast.Tuple(items):
                texts = [one.value if isinstance(one, ast.Constant) else None for one in items]
                yield from (b for a, b in pairwise(texts) if a == "-m" and b)
            case ast.Constant(str(text)) if re.fullmatch(r"oncely[.\w]+:\w+", text):
                yield text.replace(":", ".")
            case ast.Constant(str(text)) if text.endswith(".py"):
                yield f"{package}.{text.removesuffix('.py')}"


def reached(known: Mapping[str, Path], entry_points: set[str]) -> set[str]:
    """The modules that can be run or imported from some of them."""
    found: set[str] = set()
    left = set(entry_points)
    while left:
        module = left.pop()
        while module and module not in known:  # a name of a module, which is behind the last dot
            module = module.rpartition(".")[0]
        if not module or module in found:
            continue
        found.add(module)
        left.add(module.rpartition(".")[0])  # its package is imported, too
        left.update(one for one in named_in(module, known[module]) if one.startswith("oncely"))
    return found


def scripts() -> set[str]:
    project = tomllib.loads((repository() / "pyproject.toml").read_text())["project"]
    targets = [*project["scripts"].values(), *project["entry-points"]["oncely.kinds"].values()]
    return {target.partition(":")[0] for target in targets}


def test_every_module_is_reached_from_what_users_start() -> None:
    known = modules(SOURCE)
    assert known.keys() >= ENTRY_POINTS.keys()
    assert not known.keys() - reached(known, {*ENTRY_POINTS, *scripts()})


def test_a_module_that_nothing_imports_is_noticed(tmp_path: Path) -> None:
    files = {
        "oncely/__init__.py": "",
        "oncely/a.py": "from oncely import b\nimport os\nF = 'f.py'",
        "oncely/b.py": "def f():\n    from .c.d import name\n",
        "oncely/c/__init__.py": "",
        "oncely/c/d.py": "RUN = ['-m', 'oncely.e']; WORK = 'oncely.c.g:work'",
        "oncely/c/g.py": "",
        "oncely/e.py": "",
        "oncely/f.py": "",
        "oncely/c/alone.py": "'''About oncely.a.'''\nimport oncely.a",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    known = modules(tmp_path)
    assert known.keys() - reached(known, {"oncely.a"}) == {"oncely.c.alone"}


LONGEST = 50


def long_functions(text: str) -> Iterator[str]:
    """The functions above this number of lines; decorators do not count, docstrings do."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > LONGEST:
                yield f"{node.name}: {lines} lines"


def test_every_function_fits_a_screen() -> None:
    found = {name: list(long_functions(file.read_text())) for name, file in modules(SOURCE).items()}
    assert not {name: some for name, some in found.items() if some}


def test_a_function_of_more_lines_is_noticed() -> None:
    body = "    pass\n" * (LONGEST - 1)
    text = f"@a\ndef fits():\n{body}\nasync def long():\n    1\n{body}"
    assert list(long_functions(text)) == [f"long: {LONGEST + 1} lines"]


def test_offsets_of_a_group_are_asked_of_a_consumer() -> None:
    """An admin client of librdkafka 2.16 crashes when the group's coordinator has moved."""
    asking = [
        f.name for f in SOURCE.rglob("*.py") if "list_consumer_group_offsets" in f.read_text()
    ]
    assert asking == []
