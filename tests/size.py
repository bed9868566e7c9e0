"""The size of the code, compared with the numbers that the repository records.

``python -m tests.size`` is part of ``make check``: it ends with 1 when a number is larger than its
record in ``tests/size.json``. ``make format`` (``--record``) lowers the records to what there is.
Only an edit of the file raises one, with the reason beside it.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LANES = ("tests", "demo", "bench", "truth", "storm", "simulate", "models")
KINDS = ("sql", "kafka", "files", "delta", "handlers", "iceberg")

_NAMES = "|".join(KINDS)
_CLASSES = "|".join(kind.capitalize() for kind in KINDS)
_ASKS_FOR_A_KIND = re.compile(
    rf"""\b(kind|sink)\s*(==|!=|in|not\ in)\s*[("'{{\[]+\s*["']?({_NAMES})\b
    |isinstance\([^)]*\b({_CLASSES})(Sink|SinkSettings|Destination|Tables?)\b
    |^\s*case\s+["']?({_NAMES}|({_CLASSES})\w*Sink)\b""",
    re.MULTILINE | re.VERBOSE,
)
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}

Imports = Mapping[str, set[str]]
"""The modules of the package that each of its modules imports."""


def measure(root: Path = ROOT) -> dict[str, int]:
    """The numbers by the name that their record has."""
    source = root / "src"
    texts = {path: path.read_text() for path in sorted(source.rglob("*.py"))}
    tests = [path.read_text() for path in (root / "tests").rglob("*.py")]
    lanes = [path.read_text() for lane in LANES for path in (root / lane).rglob("*.py")]
    modules = {_module(path.relative_to(source)): ast.parse(text) for path, text in texts.items()}
    return {
        "code lines of src": sum(code_lines(text) for text in texts.values()),
        "files of src": len(texts),
        "places that ask for a kind outside its folder": sum(
            len(_ASKS_FOR_A_KIND.findall(text))
            for path, text in texts.items()
            if "kinds" not in path.parts
        ),
        "modules in import circles": len(in_circles(imports(modules))),
        "lines of tests and lanes": sum(text.count("\n") for text in lanes),
        "lines of tests outside test functions": sum(
            text.count("\n") - in_test_functions(text) for text in tests
        ),
    }


def code_lines(text: str) -> int:
    """Lines of a module without blank lines, comments and docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    module = ast.parse(text)
    for node in (module, *statements(module)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body:
                case [ast.Expr(value=ast.Constant(value=str())) as docstring, *_]:
                    lines -= {*range(docstring.lineno, (docstring.end_lineno or 0) + 1)}
    return len(lines)


def in_test_functions(text: str) -> int:
    """Lines of functions called ``test_...``, with their decorators."""
    return sum(
        (node.end_lineno or 0) + 1 - min(one.lineno for one in (node, *node.decorator_list))
        for node in statements(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    )


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """The statements in a node, at any depth. ``ast.walk`` takes ten times as long."""
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        inner = getattr(node, part, ())
        for one in inner if isinstance(inner, list) else ():
            if isinstance(one, ast.stmt):
                yield one
            yield from statements(one)


def imports(modules: Mapping[str, ast.Module]) -> Imports:
    """What modules import, for annotations and inside functions, too."""
    found: dict[str, set[str]] = {name: set() for name in modules}
    for name, tree in modules.items():
        for node in statements(tree):
            asked: Iterable[str] = ()
            if isinstance(node, ast.Import):
                asked = (one.name for one in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                members = {f"{node.module}.{one.name}" for one in node.names}
                asked = {one if one in modules else node.module for one in members}
            found[name] |= {one for one in asked if one in modules and one != name}
    return found


def in_circles(imported: Imports) -> set[str]:
    """The modules that import themselves, by way of others."""
    return {name for name in imported if name in _reached(name, imported)}


def _reached(start: str, imported: Imports) -> set[str]:
    found: set[str] = set()
    left = [*imported[start]]
    while left:
        if (name := left.pop()) not in found:
            found.add(name)
            left += imported[name]
    return found


def _module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def main(arguments: list[str]) -> int:
    """Print the numbers beside their records; 1 when one is larger."""
    path = ROOT / "tests/size.json"
    recorded = json.loads(path.read_text())
    larger = 0
    for name, number in measure().items():
        most = recorded[name]["at most"]
        larger += number > most
        told = "  LARGER" if number > most else "  smaller: make format records it"
        print(f"{number:>7,} {name}, {most:,} recorded" + (told if number != most else ""))
        if "--record" in arguments:
            recorded[name]["at most"] = min(number, most)
    if "--record" in arguments:
        path.write_text(json.dumps(recorded, indent=2) + "\n")
    if larger:
        print("Larger than tests/size.json allows: delete something, or raise the number there")
        print("and write the reason beside it.")
    return 1 if larger else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
