"""Checks of the executors: a small job imports the modules that a task will import, and another one
asks Kafka."""

from __future__ import annotations

import re
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from oncely.errors import OncelyError
from oncely.extras import PACKAGES, is_installed
from oncely.kafka.source import KafkaSource
from oncely.secrets import carried, redact

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NEEDED = ("oncely", "pyarrow", "confluent_kafka", "duckdb", "msgspec")
_OPTIONAL = PACKAGES["sql"]
_HOLD_SECONDS = 0.2  # long enough that one executor does not run all tasks
_TASKS_A_SLOT = 2


@dataclass(frozen=True)
class ExecutorFacts:
    """The result of one Python worker.

    Attributes:
        host: its host.
        python: its interpreter and version.
        oncely: the version of Oncely that it imports; empty if it cannot.
        missing: one sentence for each module that cannot be imported.
    """

    host: str
    python: str
    oncely: str
    missing: tuple[str, ...]


@dataclass(frozen=True)
class Slots:
    """The number of parallel tasks, and the results of the executors."""

    slots: int
    executors: tuple[ExecutorFacts, ...]
    problem: str = ""


def probe(session: SparkSession, functions: Sequence[str]) -> Slots:
    """Run the job; missing modules are returned, not raised.

    Args:
        session: Spark.
        functions: ``package.module:function`` of the user, which are imported, too.
    """
    from pyspark import cloudpickle

    # By value: an executor without Oncely must return a result, and not fail to unpickle the
    # function.
    this = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(this)
    slots = int(session.sparkContext.defaultParallelism)
    here = filter(is_installed, _OPTIONAL)
    modules = [*NEEDED, *here, *(path.partition(":")[0] for path in functions)]
    ask = _asking(modules, _HOLD_SECONDS if slots > 1 else 0.0)
    count = max(1, slots * _TASKS_A_SLOT)
    try:
        answers = session.sparkContext.parallelize(range(count), count).map(ask).collect()
    except Exception as error:
        return Slots(slots, (), _telling(str(error)))
    finally:
        cloudpickle.unregister_pickle_by_value(this)
    found = {ExecutorFacts(*one) for one in answers}
    return Slots(slots, tuple(sorted(found, key=lambda one: (one.host, one.python))))


def refusals(session: SparkSession, source: KafkaSource) -> list[tuple[str, str]]:
    """Ask the leaders of all partitions from the executors, which can import Oncely.

    Returns:
        The hosts that get no answer, each with the error: an address that only the driver can
        reach, or a file of ``[source.kafka]`` that only the driver has.
    """
    count = max(1, int(session.sparkContext.defaultParallelism)) * _TASKS_A_SLOT
    tasks = session.sparkContext.parallelize(range(count), count)
    return sorted(set(tasks.mapPartitions(carried(partial(_refused, source))).collect()))


def _refused(source: KafkaSource, _: Iterable[object]) -> Iterator[tuple[str, str]]:
    time.sleep(_HOLD_SECONDS)
    try:
        with source:
            source.look()
    except OncelyError as error:
        yield socket.gethostname(), redact(error.message)


def _asking(modules: Sequence[str], hold: float):  # type: ignore[no-untyped-def]
    """The function of the job, which needs only the standard library."""

    def ask(_: int) -> tuple[str, str, str, tuple[str, ...]]:
        import importlib
        import platform
        import socket
        import sys
        import time

        time.sleep(hold)
        missing, version = [], ""
        for name in modules:
            try:
                importlib.import_module(name)
            except (Exception, SystemExit) as error:
                missing.append(f"{name}: {type(error).__name__}: {error}")
        if not any(one.startswith("oncely:") for one in missing):
            import importlib.metadata

            version = importlib.metadata.version("oncely")
        python = f"{sys.executable} {platform.python_version()}"
        return socket.gethostname(), python, version, tuple(missing)

    return ask


def _telling(text: str) -> str:
    """The line of a Spark failure with the reason."""
    match = re.search(r"PYTHON_VERSION_MISMATCH\][^\n]*|No module named '[^']*'|Cannot run program"
                      r"[^\n]*|[A-Za-z.]+(?:Error|Exception): [^\n]*", text)  # fmt: skip
    return (match[0] if match else text.strip().splitlines()[0])[:500]
