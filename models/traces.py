"""Behaviours of a model, found by TLC's simulation, for tests that drive the code through them.

    for trace in traces(Recipe("many", SQL_LEDGER, {}, number=100, depth=40, seed=1)):
        for step in trace:
            print(step.action, step.state["db"]["epoch"])

A trace is random, and the same for the same model, sizes and seed. It ends after ``depth`` states,
or where no action is possible. Its first step is the initial state, named :data:`INITIAL`.

Races are rare in random traces. :func:`traces_to` keeps those that end with a given step:

    goals = {"fenced": 'proc[r1].pc = "idle" /\\ proc\'[r1].pc = "fenced"'}
    recipe = Recipe("few", SQL_LEDGER, {}, number=5, depth=40, seed=1, goals=goals)
    shortest = min(traces_to(recipe)["fenced"], key=len)

TLC names a step after the innermost operator that it reaches from ``Next`` through disjunctions and
through ``\\E`` over sets of constants: a set that depends on the state hides what is below it. It
does not tell arguments, which follow from the two states.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from models.check import TLC, Check, Constants, Model, command, digest, write_check
from oncely import artifacts

INITIAL = "Init"
"""The action of a trace's first step."""

_ENDS = "TraceEnds"
_REACHED = re.compile(r"^Error: Action property Goal(\d+) is violated\.", re.MULTILINE)
_STATE = re.compile(
    r"^State \d+: <(\w+)(?: predicate)?[^\n]*>\n(.*?)\n\n", re.MULTILINE | re.DOTALL
)
_BARE = re.compile(r"[A-Za-z_]\w*")
_TOKEN = re.compile(r'\s*("(?:\\.|[^"\\])*"|<<|>>|\|->|:>|@@|\.\.|-?\d+|\w+|[][{}(),])')


@dataclass(frozen=True)
class Step:
    """A state, and the action that led to it.

    Attributes:
        action: the operator's name in the module.
        state: the variables, as :func:`value` reads them.
    """

    action: str
    state: dict[str, Any]


class Function(dict[Any, Any]):
    """A function or record of TLA+. It may stand in a set, so it has a hash: never change it."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


@dataclass(frozen=True)
class Recipe:
    """What TLC is told.

    Attributes:
        name: of the file for the traces.
        model: of the catalogue; its properties are not checked. With goals its module has a
            definition ``vars``.
        constants: sizes that differ from the model's.
        number: of traces; of each goal, if there are goals.
        depth: of a trace, in states.
        seed: of TLC's random numbers.
        goals: actions in TLA+, each by a name of the caller's. A trace ends with the first step
            that is one of them.
        tries: after so many walks without each goal TLC gives up.
    """

    name: str
    model: Model
    constants: Constants
    number: int
    depth: int
    seed: int
    goals: Mapping[str, str] = field(default_factory=dict)
    tries: int = 1_000_000

    def check(self) -> Check:
        """The model at these sizes, with the properties whose violations end the traces."""
        properties = [f"Goal{at}" for at in range(1, len(self.goals) + 1)]
        model = replace(self.model, invariants=(_ENDS,), properties=properties)
        return Check(model, {**model.constants, **self.constants})

    def definitions(self) -> list[str]:
        """Those of the properties."""
        if not self.goals:
            # TLC names the actions of a trace that violates a property, and goes on after it.
            return [f'{_ENDS} == TLCGet("level") < {self.depth} /\\ ENABLED Next']
        every = f"\\A i \\in 1 .. {len(self.goals)}"
        return [
            f"ASSUME {every} : TLCSet(i, 0)",
            f"Again(i) == TLCGet(i) < {self.number} /\\ TLCSet(i, TLCGet(i) + 1)",
            *(
                f"Goal{at} == [][~(({goal}) /\\ Again({at}))]_vars"
                for at, goal in enumerate(self.goals.values(), 1)
            ),
            f"All == {every} : TLCGet(i) >= {self.number}",
            f'{_ENDS} == All => TLCSet("exit", TRUE)',
        ]

    def options(self) -> list[str]:
        """TLC's."""
        tries = self.tries if self.goals else self.number
        return [
            *("-workers", "1", "-simulate", f"num={tries}", "-depth", str(self.depth)),
            *("-seed", str(self.seed), "-continue"),
        ]

    def digest(self) -> str:
        """Of everything that TLC is told."""
        return digest(self.check(), *self.definitions(), options=self.options())


def traces(recipe: Recipe) -> list[list[Step]]:
    """Let TLC walk through the model at random.

    Raises:
        Unavailable, WrongInput: TLC can't be fetched, or there is no Java.
        RuntimeError: TLC found no traces; its output.
    """
    output = _simulated(recipe)
    found = list(parsed(output))
    if len(found) < recipe.number:
        raise RuntimeError(f"{len(found)} traces of {recipe.number}: {output[-3_000:]}")
    return found[: recipe.number]


def traces_to(recipe: Recipe) -> dict[str, list[list[Step]]]:
    """Let TLC walk through the model at random until it has done each of the recipe's goals.

    Raises:
        Unavailable, WrongInput: as for :func:`traces`.
        RuntimeError: TLC has not reached each goal so often; its output.
    """
    output = _simulated(recipe)
    found: dict[str, list[list[Step]]] = {name: [] for name in recipe.goals}
    names = list(recipe.goals)
    reached = _REACHED.split(output)[1:]
    for at, behaviour in zip(reached[::2], reached[1::2], strict=True):
        found[names[int(at) - 1]].append(next(parsed(behaviour)))
    if any(len(one) < recipe.number for one in found.values()):
        counts = {name: len(one) for name, one in found.items()}
        wanted = f"{counts}, and {recipe.number} of each are wanted"
        raise RuntimeError(f"{wanted}: {output[-3_000:]}")
    return found


def _simulated(recipe: Recipe) -> str:
    """What TLC prints."""
    jar, java = artifacts.resolve(TLC)[0], artifacts.java()
    with tempfile.TemporaryDirectory(prefix="oncely-models-") as name:
        folder = Path(name)
        write_check(recipe.check(), folder, *recipe.definitions())
        answer = subprocess.run(
            [*command(java, jar, folder), *recipe.options(), "Checked"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    return answer.stdout + answer.stderr


def parsed(output: str) -> Iterator[list[Step]]:
    """The behaviours in what TLC has printed."""
    trace: list[Step] = []
    for action, text in _STATE.findall(output):
        begins = action == "Initial"
        if begins and trace:
            yield trace
        step = Step(INITIAL if begins else action, _variables(text))
        trace = [step] if begins else [*trace, step]
    if trace:
        yield trace


def _variables(text: str) -> dict[str, Any]:
    conjuncts = re.split(r"^/\\ (\w+) = ", text, flags=re.MULTILINE)[1:]
    if not conjuncts:  # a module of one variable
        conjuncts = re.split(r"^(\w+) = ", text, flags=re.MULTILINE)[1:]
    return {name: value(of) for name, of in zip(conjuncts[::2], conjuncts[1::2], strict=True)}


def value(text: str) -> Any:
    """A value of TLA+ as TLC prints it.

    Strings and model values become ``str``, sets ``frozenset``, tuples ``tuple``, records and
    functions :class:`Function`. A function whose domain is ``1 .. n`` is a tuple to TLC.

    Raises:
        ValueError: the text is no value.
    """
    reader = _Reader(text)
    found = reader.value()
    if reader.tokens:
        raise ValueError(f"{text!r}: {reader.tokens[-1]!r} is left")
    return found


def printed(of: Any) -> str:
    """A value as :func:`value` reads it, short: words without quotes, and no spaces."""
    match of:
        case bool():
            return str(of).upper()
        case str():
            bare = _BARE.fullmatch(of) and of not in ("TRUE", "FALSE")
            return of if bare else '"' + of.replace("\\", "\\\\").replace('"', '\\"') + '"'
        case tuple():
            return "<<" + ",".join(map(printed, of)) + ">>"
        case frozenset():
            return "{" + ",".join(sorted(map(printed, of))) + "}"
        case dict() if all(isinstance(key, str) for key in of):
            return "[" + ",".join(f"{key}|->{printed(one)}" for key, one in of.items()) + "]"
        case dict():
            return "(" + "@@".join(f"{printed(key)}:>{printed(of[key])}" for key in of) + ")"
    return str(of)


class _Reader:
    """Reads a value from tokens, which stand in reverse."""

    def __init__(self, text: str) -> None:
        if _TOKEN.sub("", text).strip():
            raise ValueError(f"{text!r} is no value of TLA+")
        self.tokens = _TOKEN.findall(text)[::-1]

    def value(self) -> Any:
        found = self._next()
        match found:
            case "{":
                return frozenset(self._list("}"))
            case "<<":
                return tuple(self._list(">>"))
            case "[":
                return Function(self._list("]", "|->"))
            case "(":
                return Function(self._pairs())
            case "TRUE" | "FALSE":
                return found == "TRUE"
        if found.startswith('"'):
            return found[1:-1].replace('\\"', '"').replace("\\\\", "\\")
        if found.lstrip("-").isdecimal():
            return self._interval(int(found))
        return found

    def _list(self, end: str, between: str = "") -> Iterator[Any]:
        if self._is_next(end):
            self._next()
            return
        while True:
            yield self._pair(between) if between else self.value()
            after = self._next()
            if after == end:
                return
            if after != ",":
                raise ValueError(f"{after!r} stands where {end} or a comma should")

    def _pairs(self) -> Iterator[tuple[Any, Any]]:
        yield self._pair(":>")
        while (after := self._next()) == "@@":
            yield self._pair(":>")
        if after != ")":
            raise ValueError(f"{after!r} stands where ) or @@ should")

    def _pair(self, between: str) -> tuple[Any, Any]:
        key = self.value()
        if self._next() != between:
            raise ValueError(f"no {between} follows {key!r}")
        return key, self.value()

    def _interval(self, first: int) -> Any:
        if not self._is_next(".."):
            return first
        self._next()
        return frozenset(range(first, int(self._next()) + 1))

    def _is_next(self, token: str) -> bool:
        return bool(self.tokens) and self.tokens[-1] == token

    def _next(self) -> str:
        if not self.tokens:
            raise ValueError("the value ends too early")
        return str(self.tokens.pop())
