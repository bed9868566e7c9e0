"""The Spark session of a run, and the settings that the guarantee rests on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from oncely.artifacts import SPARK_KAFKA, java, resolve
from oncely.errors import Unavailable
from oncely.sources.spark_options import REDACTION_REGEX

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ROWS_AN_ARROW_BATCH = 20_000

_DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "8",
    "spark.sql.session.timeZone": "UTC",
    # A lost shuffle output fails the job, and the batch is done again whole. Spark would run only
    # the lost tasks again, and what depends on the order of arrival (limit, row_number with
    # ties) would then mix two outcomes.
    "spark.stage.maxConsecutiveAttempts": "1",
    "spark.sql.streaming.minBatchesToRetain": "4",
    "spark.sql.execution.arrow.maxRecordsPerBatch": str(_ROWS_AN_ARROW_BATCH),
    "spark.sql.execution.pandas.udf.buffer.size": str(256 << 10),  # between the JVM and Python
    # Renames by plain files: a third of a small batch's cost less than the default's checksums.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.FileSystemBasedCheckpointFileManager"
    ),
    # Passwords are never put into Spark's configuration; this hides what a user puts there.
    "spark.redaction.regex": REDACTION_REGEX,
}


def start(
    name: str, master: str, conf: Mapping[str, str], log: IO[bytes] | None = None
) -> SparkSession:
    """Start Spark (or use the one that runs), with the Kafka connector on its class path.

    Args:
        name: the pipeline, for Spark's application name.
        master: where Spark runs.
        conf: the user's own settings.
        log: where the JVM's output goes; to our stderr when it is None.

    Raises:
        WrongInput: there is no Java, or an older one.
        Unavailable: Spark's Java process did not start.
    """
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    java()  # PySpark looks for it in the same places, and does not say what it has found
    settings = {**_DEFAULTS, "spark.master": master, "spark.app.name": f"oncely {name}", **conf}
    if not master.startswith("local"):
        settings.pop("spark.driver.host") if "spark.driver.host" not in conf else None
    jars = [str(jar) for jar in resolve(SPARK_KAFKA)]
    settings["spark.jars"] = ",".join([*filter(None, [settings.get("spark.jars")]), *jars])
    # PySpark itself reads the variable alone, and takes `python3` from PATH where it is not set.
    python = conf.get("spark.pyspark.python") or os.environ.get("PYSPARK_PYTHON") or sys.executable
    settings["spark.pyspark.python"] = os.environ["PYSPARK_PYTHON"] = python
    with _submitted(settings):
        _launch(log)
        session = SparkSession.builder.getOrCreate()
    session.sparkContext.setLogLevel(os.environ.get("ONCELY_SPARK_LOG", "ERROR"))
    return session


def _launch(log: IO[bytes] | None) -> None:
    """Start the JVM in a session of its own.

    A signal to our process group (Ctrl-C, ``timeout``, a supervisor) then reaches us alone, and
    we end the JVM in order. It ends with us in any case: its standard input is a pipe to us.

    Raises:
        Unavailable: it ended before it answered.
    """
    from pyspark import SparkContext
    from pyspark.errors import PySparkRuntimeError
    from pyspark.java_gateway import launch_gateway

    if SparkContext._gateway is not None:
        return
    output = {} if log is None else {"stdout": log, "stderr": log}
    try:
        gateway = launch_gateway(popen_kwargs={"start_new_session": True, **output})
    except PySparkRuntimeError as error:
        raise Unavailable(
            f"Spark's Java process did not start: {error}", way_out="its log says why"
        ) from None
    SparkContext._ensure_initialized(gateway=gateway)


def java_process() -> subprocess.Popen[bytes] | None:
    """Spark's Java process, when this process has started one."""
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    return None if gateway is None else getattr(gateway, "proc", None)


def stop(session: SparkSession, patience: float = 20.0) -> None:
    """Stop Spark and wait for its Java process, so that nothing of it outlives us."""
    from pyspark import SparkContext

    process = java_process()
    with suppress(Exception):  # the JVM may be gone
        session.stop()
    if process is None or process.stdin is None:
        return
    process.stdin.close()  # the JVM's sign to end
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    SparkContext._gateway = SparkContext._jvm = None


@contextmanager
def _submitted(settings: Mapping[str, str]) -> Iterator[None]:
    """Hand settings over in a file only we can read: as arguments they would stand in ``ps``."""
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
    """A value as java.util.Properties reads it back."""
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")


_CHECKPOINTS = "oncely-checkpoints"


def throwaway_checkpoint() -> Path:
    """A new checkpoint directory, named by this process so that a later run can sweep it."""
    root = Path(tempfile.gettempdir()) / f"{_CHECKPOINTS}-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=root))


def sweep_checkpoints() -> int:
    """Remove what runs that were killed have left; a checkpoint holds nothing we rely on."""
    root = Path(tempfile.gettempdir()) / f"{_CHECKPOINTS}-{os.getuid()}"
    swept = 0
    for left in root.glob("*-*"):
        if not _alive(int(left.name.split("-")[0])):
            shutil.rmtree(left, ignore_errors=True)
            swept += 1
    return swept


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
