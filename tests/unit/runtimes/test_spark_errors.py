"""The sentence that a user reads of Spark's page-long message."""

from __future__ import annotations

import pytest

from oncely.errors import OncelyError, Unavailable, WrongInput
from oncely.runtimes.spark.jobs import spark_error

_LOST = """An error occurred while calling o2529.getResult.
: org.apache.spark.SparkException: Exception thrown in awaitResult:
\tat org.apache.spark.util.ThreadUtils$.awaitResult(ThreadUtils.scala:56)
Caused by: org.apache.spark.SparkException: Checkpoint block rdd_13_0 not found!
\tat org.apache.spark.errors.SparkCoreErrors$.checkpointRDDBlockIdNotFoundError(SparkCore.scala:1)
"""
_PYTHON = """An error occurred while calling o99.collectToPython.
: org.apache.spark.SparkException: Job aborted due to stage failure
org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "daemon.py", line 1, in <module>
ValueError: told

\tat org.apache.spark.api.python.BasePythonRunner.handlePythonException(PythonRunner.scala:581)
"""


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        (_LOST, Unavailable, "org.apache.spark.SparkException: Checkpoint block rdd_13_0 not fou"),
        (_PYTHON, Unavailable, "Spark: ValueError: told"),
        ("ModuleNotFoundError: No module named 'x'", WrongInput, "No module named 'x'"),
        ("Caused by: java.lang.OutOfMemoryError: heap", Unavailable, "ran out of memory"),
        ("Answer from Java side is empty", Unavailable, "Spark: Answer from Java side is empty"),
        ("", Unavailable, "Spark: no message"),
    ],
)
def test_the_innermost_cause_is_told(text: str, kind: type[OncelyError], said: str) -> None:
    found = spark_error(text)
    assert type(found) is kind
    assert said in found.message
