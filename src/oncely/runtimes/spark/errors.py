"""Short texts of Spark's failures.

Spark matches the text of a batch's failure by regular expressions that overflow its stack on a
page-long one, such as the stack trace of a Java exception.
"""

from __future__ import annotations

import re
from itertools import takewhile

from oncely.errors import ConfigError, OncelyError, SchemaChanged, Unavailable, WrongInput

_LONGEST = 1_500
_HEAD = 300


def is_java(error: BaseException) -> bool:
    """True for an error that was raised by Spark or by the connection to its JVM."""
    return type(error).__module__.startswith(("py4j", "pyspark"))


def without_stack(error: BaseException) -> str:
    """Type and message of a Java exception, as Spark itself reads them, without its stack trace.

    Spark still recognises an interruption: a query that was stopped within a batch ends without an
    error.
    """
    kind = type(error)
    lines = takewhile(lambda line: not line.startswith("\tat "), str(error).splitlines())
    text = f"{kind.__module__}.{kind.__name__}: " + "\n".join(lines)
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_HEAD]}\n[...]\n{text[_HEAD - _LONGEST :]}"


def spark_error(text: str) -> OncelyError:
    """The relevant sentence of Spark's page-long message."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    missing = [line for line in lines if line.startswith("ModuleNotFoundError")]
    if missing:
        return WrongInput(
            f"an executor can't import a module of the pipeline: {missing[0]}",
            way_out="install it where the executors' Python finds it; `oncely plan` checks",
        )
    if ended := [line for line in lines if line.startswith("SystemExit")]:
        return ConfigError(
            "transform.spark",
            f"a function of it called sys.exit in an executor ({ended[-1]})",
            way_out="raise an exception instead",
        )
    if changed := [line for line in lines if line.startswith("oncely.errors.SchemaChanged: ")]:
        return SchemaChanged(changed[0].partition(": ")[2], way_out="start again")
    if re.search(r"OutOfMemoryError|exited with code 52\b|code 137\b", text):
        return Unavailable(
            "Spark: an executor ran out of memory",
            way_out='give it more, such as "spark.executor.memory" = "4g" in [spark.conf]; with a'
            ' local master it is "spark.driver.memory"',
        )
    telling = [line for line in lines if re.match(r"([\w.]+\.)?\w+(Error|Exception)\b", line)]
    causes = [line.removeprefix("Caused by").removeprefix(": ") for line in lines
              if line.startswith(("Caused by: ", ": "))]  # fmt: skip
    chosen = (telling or causes or lines[:1] or ["no message"])[-1]
    return Unavailable(f"Spark: {chosen[:500]}")
