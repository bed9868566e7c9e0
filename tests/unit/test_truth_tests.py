"""Values that have a length and may be absent are compared with None, not tested for truth.

A ``Message`` of the Kafka client is false if its record has no value, and an Arrow table or array
if it is empty: ``message and ...`` takes these for "there is none". The types of both packages are
not known to mypy, so the rule is checked by name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import oncely

_SRC = Path(oncely.__file__).parent
_MAY_BE_ABSENT = re.compile(r"(Any|(\w+\.)?Message|(pa|pq)\.\w+) \| None")
_GIVES_MESSAGES = {"poll"}


def bound(tree: ast.Module) -> Iterator[str]:
    """The names of variables, parameters, fields and functions whose value may be None or empty."""
    for node in ast.walk(tree):
        match node:
            case ast.arg(arg=name, annotation=ast.expr() as of):
                given = [(name, of)]
            case ast.AnnAssign(target=target, annotation=of):
                given = [(ast.unparse(target).rpartition(".")[2], of)]
            case ast.FunctionDef(name=name, returns=ast.expr() as of):
                given = [(name, of)]
            case (
                ast.Assign(targets=[ast.Name(name)], value=value)
                | ast.NamedExpr(target=ast.Name(name), value=value)
            ):
                yield from [name] if _is_poll(value) else []
                continue
            case _:
                continue
        yield from (name for name, of in given if _MAY_BE_ABSENT.fullmatch(ast.unparse(of)))


def _is_poll(value: ast.expr) -> bool:
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and value.func.attr in _GIVES_MESSAGES
    )


def truth_tests(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        match node:
            case ast.If(test=one) | ast.While(test=one) | ast.Assert(test=one):
                tested = [one]
            case ast.IfExp(test=one) | ast.UnaryOp(op=ast.Not(), operand=one):
                tested = [one]
            case ast.comprehension(ifs=tests):
                tested = tests
            case ast.BoolOp(values=[*tests, _]):
                tested = tests
            case _:
                continue
        yield from (operand for one in tested for operand in operands(one))


def operands(tested: ast.expr) -> Iterator[ast.expr]:
    """The values on whose truth that of an expression depends."""
    for one in tested.values if isinstance(tested, ast.BoolOp) else [tested]:
        yield from [one] if one is tested else operands(one)


def name_of(tested: ast.expr) -> str:
    match tested:
        case ast.NamedExpr(target=ast.Name(name)) | ast.Name(name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=called):
            return "poll()" if _is_poll(tested) else name_of(called)
    return ""


def wrong(tree: ast.Module) -> list[str]:
    names = {*bound(tree), "poll()"}
    return [f"{o.lineno}: {ast.unparse(o)}" for o in truth_tests(tree) if name_of(o) in names]


@pytest.mark.parametrize(
    "code",
    [
        "message = consumer.poll(1)\ntp = message and message.topic()",
        "while message := consumer.poll(1): pass",
        "if not consumer.poll(1): pass",
        "def f(rows: pa.Table | None): return rows or 1",
        "class A:\n rows: Any | None = None\n def f(self): return 1 if self.rows else 2",
        "def f(rows: pa.Array | None): return [1 for a in b if a and (c or rows)]",
        "def kind() -> pa.DataType | None: ...\nkind() or pa.int64()",
    ],
)
def test_a_truth_test_is_found(code: str) -> None:
    assert wrong(ast.parse(code))


@pytest.mark.parametrize(
    "code",
    [
        "message = consumer.poll(1)\nif message is not None: pass",
        "def f(rows: pa.Table): return 1 if rows.num_rows else 2",
        "def f(rows: pa.Array | None): return x or rows",
        "def f(name: str | None): return name or 'none'",
    ],
)
def test_others_are_not(code: str) -> None:
    assert not wrong(ast.parse(code))


def test_values_with_a_length_are_compared_with_none() -> None:
    found = {
        f"{file.relative_to(_SRC)}:{one}"
        for file in sorted(_SRC.rglob("*.py"))
        for one in wrong(ast.parse(file.read_text("utf-8")))
    }
    assert not found
