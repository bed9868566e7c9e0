"""pyarrow imports pandas for functions of users alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("pandas")

_SCRIPT = """
import sys, pyarrow as pa
from oncely.users_function import with_pandas, without_pandas
{before}
without_pandas()
pa.array([1, 2]).to_numpy()
print("pandas" in sys.modules)
{after}
import numpy, pandas
print(pa.array(pandas.Series([1.0, numpy.nan])).null_count)
print(pa.table({{"a": [1]}}).to_pandas()["a"].sum())
"""


def told(before: str = "", after: str = "") -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(before=before, after=after)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.split()


def test_a_process_of_ours_imports_none() -> None:
    assert told(after="with_pandas()") == ["False", "1", "1"]


def test_the_users_import_stays() -> None:
    assert told(before="import pandas") == ["True", "1", "1"]
