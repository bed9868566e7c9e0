"""The Spark session of a run, with the settings that the guarantee requires."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from oncely.artifacts import SPARK_KAFKA, java, resolve
from oncely.errors import Unavailable
from oncely.extras import require
from oncely.runtimes.spark.options import REDACTION_REGEX

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

_ROWS_AN_ARROW_BATCH = 20_000

_DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    # Each of several pipelines has a pool of its own; within a pool jobs are scheduled FIFO.
    "spark.scheduler.mode": "FAIR",
    "spark.sql.shuffle.partitions": "8",
    "spark.sql.session.timeZone": "UTC",
    # A lost shuffle output fails the job, and the whole batch is repeated. Spark would repeat only
    # the lost tasks, and order-dependent operations (limit, row_number with ties) would then mix
    # two results.
    "spark.stage.maxConsecutiveAttempts": "1",
    "spark.sql.streaming.minBatchesToRetain": "4",
    "spark.sql.execution.arrow.maxRecordsPerBatch": str(_ROWS_AN_ARROW_BATCH),
    "spark.sql.execution.pandas.udf.buffer.size": str(256 << 10),  # between the JVM and Python
    # Renames by plain files: the default's checksums are a third of a small batch's cost.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.FileSystemBasedCheckpointFileManager"
    ),
    # Passwords are never put into Spark's configuration; this hides those that a user puts there.
    "spark.redaction.regex": REDACTION_REGEX,
}


def start(
    name: str, master: str, conf: Mapping[str, str], log: IO[bytes] | None = None
) -> SparkSession:
    """Start Spark (or use the existing session), with the Kafka connector on its class path.

    Args:
        name: the name of the pipeline, for Spark's application name.
        master: Spark's master URL.
        conf: the user's own settings.
        log: the file of the JVM's output; None for stderr.

    Raises:
        WrongInput: there is no Java, or an older one.
        Unavailable: Spark's Java process did not start.
    """
    from pyspark.sql import SparkSession

    found = existing()
    if found is not None:
        return found
    java()  # PySpark looks in the same places, and does not check the version
    settings = {**_DEFAULTS, "spark.master": master, "spark.app.name": f"oncely {name}", **conf}
    if not master.startswith("local"):
        settings.pop("spark.driver.host") if "spark.driver.host" not in conf else None
    jars = [str(jar) for jar in resolve(SPARK_KAFKA)]
    settings["spark.jars"] = ",".join([*filter(None, [settings.get("spark.jars")]), *jars])
    # PySpark itself reads only the variable, and uses `python3` of PATH if it is not set.
    python = conf.get("spark.pyspark.python") or os.environ.get("PYSPARK_PYTHON") or sys.executable
    settings["spark.pyspark.python"] = os.environ["PYSPARK_PYTHON"] = python
    with _submitted(settings):
        _launch(log)
        try:
            session = SparkSession.builder.getOrCreate()
        except (
            BaseException
        ):  # also on a signal: a JVM that is creating its SparkContext may not end
            _end(patience=0.0)
            raise
    _ours.context = session.sparkContext
    session.sparkContext.setLogLevel(os.environ.get("ONCELY_SPARK_LOG", "ERROR"))
    return session


@dataclass
class _Ours:
    """The SparkContext that :func:`start` has created, if any."""

    context: SparkContext | None = None


_ours = _Ours()


def existing() -> SparkSession | None:
    """The Spark session of this process, from any creator, if there is one.

    Below ``spark-submit`` there always is one: the JVM has begun before this process, with settings
    that can't be changed any more.

    Raises:
        ConfigError: PySpark is not installed.
    """
    require("spark", "spark", "a run on Spark")
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    if SparkContext._active_spark_context is None and "PYSPARK_GATEWAY_PORT" not in os.environ:
        return None
    return SparkSession.builder.getOrCreate()


def enter(
    session: SparkSession, name: str, conf: Mapping[str, str], *, alone: bool
) -> SparkSession:
    """The session of a pipeline that runs in this thread, beside others of its Spark application.

    Jobs that the thread submits, and queries that it starts, belong to a scheduler pool.

    Args:
        session: the session of the application.
        name: the name of the pipeline, and of its pool.
        conf: settings of its own; none if it is alone.
        alone: it is the only pipeline, and uses the session itself.
    """
    from pyspark.sql import SparkSession

    own = session if alone else session.newSession()
    for key, value in conf.items():
        own.conf.set(key, value)
    own.sparkContext.setLocalProperty("spark.scheduler.pool", name)
    # In the JVM each thread has an active session of its own, for SparkSession.getActiveSession.
    SparkSession._get_j_spark_session_class(own._jvm).setActiveSession(own._jsparkSession)
    return own


def is_ours(session: SparkSession) -> bool:
    """True for a session that :func:`start` has created."""
    return _ours.context is not None and session.sparkContext is _ours.context


def _launch(log: IO[bytes] | None) -> None:
    """Start the JVM in a session of its own.

    A signal to our process group (Ctrl-C, ``timeout``, a supervisor) then reaches only this
    process, which stops the JVM. The JVM ends with this process in any case: its standard input is
    a pipe from it.

    A thread launches it, where no signal can interrupt it: PySpark would remove the folder in which
    the JVM writes its port, and the JVM would fail there and continue without reading its standard
    input, forever.

    Raises:
        Unavailable: it ended before it responded.
    """
    from pyspark import SparkContext
    from pyspark.errors import PySparkRuntimeError
    from pyspark.java_gateway import launch_gateway

    if SparkContext._gateway is not None:
        _end(patience=20.0)  # of a stopped session: it cannot use other settings
    output = {} if log is None else {"stdout": log, "stderr": log}
    with ThreadPoolExecutor(1, "oncely-spark") as thread:
        launched = thread.submit(launch_gateway, popen_kwargs={"start_new_session": True, **output})
        try:
            gateway = launched.result()
            SparkContext._ensure_initialized(gateway=gateway)
        except PySparkRuntimeError as error:
            raise Unavailable(
                f"Spark's Java process did not start: {error}", way_out="see its log"
            ) from None
        except BaseException:  # a signal
            with suppress(PySparkRuntimeError):
                launched.result().proc.kill()
                launched.result().proc.wait()
            raise


def java_process() -> subprocess.Popen[bytes] | None:
    """Spark's Java process, if this process has started one."""
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    return None if gateway is None else getattr(gateway, "proc", None)


def stop(session: SparkSession, patience: float = 20.0) -> None:
    """Stop Spark and wait for its Java process, so that no part of it outlives this process.

    A session that :func:`start` has not created is not stopped.
    """
    if not is_ours(session):
        return
    with suppress(Exception):  # the JVM may be gone
        session.stop()
    _ours.context = None
    _end(patience)


def _end(patience: float) -> None:
    """End the JVM and wait until it is gone."""
    from pyspark import SparkContext

    process = java_process()
    if process is None or process.stdin is None:
        return
    process.stdin.close()  # the signal for the JVM to end
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    SparkContext._gateway = SparkContext._jvm = None


@contextmanager
def _submitted(settings: Mapping[str, str]) -> Iterator[None]:
    """Pass settings in a file that only this user can read: arguments would be visible in
    ``ps``."""
    folder = Path(tempfile.mkdtemp(prefix="oncely-spark-"))
    properties = folder / "spark.properties"
    properties.touch(mode=0o600)
    properties.write_text("".join(f"{k} {_escaped(v)}\n" for k, v in settings.items()))
    before = os.environ.get("PYSPARK_SUBMIT_ARGS")
    os.environ["PYSPARK_SUBMIT_ARGS"] = (
        f"--properties-file {properties} --load-spark-defaults pyspark-shell"
    )
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYSPARK_SUBMIT_ARGS"]
        else:
            os.environ["PYSPARK_SUBMIT_ARGS"] = before
        shutil.rmtree(folder, ignore_errors=True)


def _escaped(value: str) -> str:
    """A value in the syntax of java.util.Properties."""
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
