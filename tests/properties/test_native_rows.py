"""Digests and JSON of rows: oncely-native computes the same as the Python that it replaces."""

from __future__ import annotations

import datetime as dt
import math
import random
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pytest

from oncely.core import digest
from oncely.core.digest import Kind, Recipe
from oncely.extras import SWITCH, native
from oncely.kinds.kafka import format as record_format
from oncely.kinds.rows import row_digests
from tests.conftest import examples
from tests.nativetools import need_native
from tests.properties.test_digest import COLUMNS, REALS, TEXTS, recipe_of, table_of

BYTES = [b"", b"\x00\xff", *(bytes([at]) * at for at in range(80)), b"k" * 241, b"long " * 5_000]
CONTROLS = "".join(map(chr, range(32)))
HOSTILE = [*TEXTS, CONTROLS, "\x7f", '"', "\\", "/", "\u2028", '\U0001f600"']


@pytest.fixture(autouse=True)
def with_native(monkeypatch: pytest.MonkeyPatch) -> None:
    need_native(monkeypatch)


def layouts(rows: pa.Table) -> Iterator[pa.Table]:
    """The rows in one piece, in several, and as a part of others."""
    yield rows
    yield pa.concat_tables([rows.slice(0, 3), rows.slice(3, 0), rows.slice(3)])
    yield pa.concat_tables([rows.slice(0, 5), rows]).slice(5)
    yield rows.slice(2, max(0, rows.num_rows - 3))
    yield rows.slice(0, 0)


def same_digests(rows: pa.Table, recipe: Recipe) -> None:
    for one in layouts(rows):
        offsets = np.arange(one.num_rows) * (2**31 - 1) - 5
        given = offsets if recipe.offset else None
        expected = digest.row_digests(one, given, recipe)
        assert row_digests(one, given, recipe).tolist() == expected.tolist()


@pytest.mark.parametrize("offset", [True, False])
@pytest.mark.parametrize("name", COLUMNS)
def test_hostile_values_have_the_same_digest(name: str, offset: bool) -> None:
    rows = table_of({name: [None, *COLUMNS[name][2], None, COLUMNS[name][2][0]]})
    same_digests(rows, recipe_of(rows, offset=offset))


def test_records_have_the_same_digest() -> None:
    columns = {"key": [None, *BYTES], "value": [*BYTES, None]}
    rows = pa.table({name: pa.array(some, pa.large_binary()) for name, some in columns.items()})
    same_digests(rows, Recipe.of({"key": Kind("raw"), "value": Kind("raw")}, offset=False))
    same_digests(rows, Recipe.of({}, offset=True))


def test_whole_rows_have_the_same_digest() -> None:
    dice = random.Random(5)
    for _ in range(examples(50)):
        names = dice.sample(sorted(COLUMNS), dice.randint(1, 8))
        count = dice.randint(1, 40)
        rows = table_of({name: [dice.choice([None, *COLUMNS[name][2]]) for _ in range(count)]
                         for name in names})  # fmt: skip
        same_digests(rows, recipe_of(rows, offset=dice.random() < 0.5))


def test_what_is_not_computed_here_is_left_to_the_reference() -> None:
    """Long decimals: the module tells that it has left them out."""
    rows = table_of({"long": [None, *COLUMNS["long"][2]], "flag": [True] * 7})
    recipe = recipe_of(rows, offset=False)
    module, batch = native(), digest.covered_columns(rows, recipe).to_batches()[0]
    assert module is not None
    kinds = [kind.name for _, kind in recipe.columns]
    assert module.row_contents(batch, kinds, [1, 2])[1] == [kinds.index("numeric")]


# -- JSON ------------------------------------------------------------------------------------


def a_float(dice: random.Random) -> float:
    return math.ldexp(dice.random() - 0.5, dice.randint(-1074, 1020))


def a_text(dice: random.Random) -> str:
    return "".join(
        dice.choices('ab"\\/\x00\x1f\x7f\n\u00e9\u2028\U0001f600', k=dice.randint(0, 12))
    )


Draw = Callable[[random.Random], object]
MOMENTS: dict[str, tuple[pa.DataType, Draw]] = {
    "instant": (pa.timestamp("us", "Asia/Kolkata"), lambda d: d.randint(-(2**45), 2**47)),
    "at": (pa.timestamp("ms"), lambda d: d.randint(-(2**40), 2**42)),
    "day": (pa.date32(), lambda d: d.randint(-700_000, 2_900_000)),
    "clock": (pa.time64("us"), lambda d: d.randint(0, 86_399_999_999)),
}


def integers(bits: int, least: int, most: int, kind: str) -> tuple[pa.DataType, Draw]:
    return getattr(pa, f"{kind}{bits}")(), lambda dice: dice.choice(
        [least, most, dice.randint(least, most)]
    )


SIZES = (8, 16, 32, 64)
ANY: dict[str, tuple[pa.DataType, Draw]] = {
    **{f"i{n}": integers(n, -(2 ** (n - 1)), 2 ** (n - 1) - 1, "int") for n in SIZES},
    **{f"u{n}": integers(n, 0, 2**n - 1, "uint") for n in SIZES},
    "flag": (pa.bool_(), lambda dice: dice.random() < 0.5),
    "double": (pa.float64(), a_float),
    "real": (pa.float32(), lambda d: d.choice([*REALS, -math.inf, float(np.float32(a_float(d)))])),
    "cents": (pa.float64(), lambda dice: dice.randint(-(10**9), 10**9) / 100),
    "whole": (pa.float64(), lambda dice: float(dice.randint(-(10**17), 10**17))),
    'te"xt': (pa.string(), a_text),
    "\u00e9\n": (pa.large_string(), lambda dice: dice.choice(HOSTILE)),
    **MOMENTS,
}


def a_column(dice: random.Random, name: str) -> pa.Array:
    type_, draw = ANY[name]
    return pa.array([None if dice.random() < 0.1 else draw(dice) for _ in range(100)], type_)


def in_python(rows: pa.Table, monkeypatch: pytest.MonkeyPatch) -> pa.LargeBinaryArray:
    with monkeypatch.context() as patched:
        patched.setenv(SWITCH, "off")
        return record_format.encoded(rows)


def test_any_rows_have_the_same_json(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(7)
    for _ in range(examples(40)):
        names = dice.sample(sorted(ANY), dice.randint(1, len(ANY)))
        rows = pa.table([a_column(dice, name) for name in names], names=names)
        for one in layouts(rows):
            assert record_format._native(one) is not None
            assert record_format.encoded(one).equals(in_python(one, monkeypatch))


def test_borders_of_the_forms_of_numbers_have_the_same_json(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digits = (1, 1.5, 9.999999999999999)
    powers = [digit * 10.0**power for digit in digits for power in range(-30, 31)]
    numbers = [*powers, *(-one for one in powers)]
    numbers += [0.0, -0.0, 5e-324, 1.7976931348623157e308, math.nan, math.inf, -math.inf]
    rows = pa.table({"v": numbers})
    assert record_format.encoded(rows).equals(in_python(rows, monkeypatch))


def test_nested_rows_are_left_to_the_reference() -> None:
    rows = pa.table({"v": [[1, 2]], "at": [dt.datetime(2024, 1, 1)]})
    assert record_format._native(rows) is None
    assert record_format.encoded(rows).to_pylist() == [
        b'{"v":[1,2],"at":"2024-01-01T00:00:00.000000"}'
    ]
