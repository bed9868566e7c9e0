"""The Spark session of a run, with the settings that the guarantee requires, and checks of sessions
and executors.

A session that Oncely has not created is checked before its use. Of executors a small job imports
the modules that a task will import, and another one asks Kafka."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING

from oncely.artifacts import java, spark_home, spark_jars
from oncely.errors import ConfigError, OncelyError, Unavailable
from oncely.extras import MODULES, PACKAGES, is_installed, require
from oncely.kafka.source import KafkaSource
from oncely.secrets import carried, redact

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

_ROWS_AN_ARROW_BATCH = 20_000
_DYING = 1.0  # seconds

_DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Each of several pipelines has a pool of its own; within a pool jobs are scheduled FIFO.
    "spark.scheduler.mode": "FAIR",
    "spark.sql.shuffle.partitions": "8",
    "spark.sql.session.timeZone": "UTC",
    # A lost shuffle output fails the job, and the whole batch is repeated. Spark would repeat only
    # the lost tasks, and order-dependent operations (limit, row_number with ties) would then mix
    # two results.
    "spark.stage.maxConsecutiveAttempts": "1",
    "spark.sql.execution.arrow.maxRecordsPerBatch": str(_ROWS_AN_ARROW_BATCH),
    "spark.sql.execution.pandas.udf.buffer.size": str(256 << 10),  # between the JVM and Python
    # The stages of a transform are those of its plan: no task of it is repeated by another one.
    "spark.sql.adaptive.enabled": "false",
    # Passwords are never put into Spark's configuration; this hides those that a user puts there.
    # Spark's own pattern does not match a private key in PEM.
    "spark.redaction.regex": (
        r"(?i)secret|password|token|credential|access[.]?key|keystore[.]key|jaas"
    ),
}


def start(
    name: str, master: str, conf: Mapping[str, str], log: IO[bytes] | None = None
) -> SparkSession:
    """Start Spark, or use the existing session.

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
    # PySpark itself reads only the variable, and uses `python3` of PATH if it is not set.
    python = conf.get("spark.pyspark.python") or os.environ.get("PYSPARK_PYTHON") or sys.executable
    defaults = _DEFAULTS | (_local(python) if master.startswith("local") else {})
    settings = {**defaults, "spark.master": master, "spark.app.name": f"oncely {name}", **conf}
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


def _local(python: str) -> dict[str, str]:
    """The defaults of a local session. Another Python than ours may lack our daemon."""
    found = {"spark.driver.host": "127.0.0.1"}
    if python == sys.executable:
        # Workers begin by `python -m`, which would put the working directory before Python's
        # modules. They import what the driver can, and find their own modules first.
        found["spark.executorEnv.PYTHONSAFEPATH"] = "1"
        ours = dict.fromkeys(str(Path(one).absolute()) for one in sys.path)
        found[f"spark.executorEnv.{MODULES}"] = os.pathsep.join(ours)
        found["spark.python.daemon.module"] = "oncely.runtimes.spark.daemon"
    return found


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
        WrongInput: it is of a release that is not supported.
    """
    require("spark", "spark", "a run on Spark")
    spark_jars()
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
    own = session if alone else session.newSession()
    for key, value in conf.items():
        own.conf.set(key, value)
    own.sparkContext.setLocalProperty("spark.scheduler.pool", name)
    activate(own)
    return own


def activate(session: SparkSession) -> None:
    """Make a session the active one of this thread: in the JVM each thread has its own, for
    ``SparkSession.getActiveSession``."""
    session._jvm.org.apache.spark.sql.SparkSession.setActiveSession(session._jsparkSession)


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


def exit_code() -> int | None:
    """The exit code of Spark's Java process, if it has ended, or ends within a second: a call to it
    may fail shortly before its end."""
    process = java_process()
    try:
        return None if process is None else process.wait(_DYING)
    except subprocess.TimeoutExpired:
        return None


def death(error: Exception) -> int | None:
    """The exit code of Spark's Java process, if its end may be the cause of ``error``."""
    if not type(error).__module__.startswith(("py4j", "pyspark", "builtins")):
        return None
    return exit_code()


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
    ours = "".join(f"{k} {_escaped(v)}\n" for k, v in settings.items())
    properties.write_text(f"{_spark_defaults()}\n\n{ours}")
    before = os.environ.get("PYSPARK_SUBMIT_ARGS")
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"--properties-file {properties} pyspark-shell"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYSPARK_SUBMIT_ARGS"]
        else:
            os.environ["PYSPARK_SUBMIT_ARGS"] = before
        shutil.rmtree(folder, ignore_errors=True)


def _spark_defaults() -> str:
    """The text of the installation's ``spark-defaults.conf``: Spark reads it only if no other file
    is given. In a file of properties the last value of a key counts."""
    home = Path(os.environ.get("SPARK_HOME") or spark_home())
    folder = Path(os.environ.get("SPARK_CONF_DIR") or home / "conf")
    try:
        return (folder / "spark-defaults.conf").read_text()
    except FileNotFoundError:
        return ""


def _escaped(value: str) -> str:
    """A value in the syntax of java.util.Properties."""
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")


# -- sessions that Oncely has not created ----------------------------------------------------


_ATTEMPTS = "spark.stage.maxConsecutiveAttempts"
Allowed = Mapping[str, tuple[Callable[[str], bool], str]]
"""Settings that break the guarantee: their allowed values, and the reason."""
STREAMING: Allowed = {
    "spark.sql.streaming.minBatchesToRetain": (
        lambda value: value.isdecimal() and int(value) > 1,
        "with fewer batches kept in the checkpoint, the start of a batch is not known",
    ),
    "spark.sql.streaming.disabledV2MicroBatchReaders": (
        lambda value: "kafka" not in value.lower(),
        "the older Kafka reader plans its ranges in another way",
    ),
    "spark.sql.streaming.kafka.useDeprecatedOffsetFetching": (
        lambda value: value != "true",
        "the older way of fetching offsets joins a consumer group and can wait forever",
    ),
}
"""Those of Structured Streaming, which ``write_stream`` uses."""


@contextmanager
def started(
    start: Callable[[], SparkSession], given: SparkSession | None
) -> Iterator[SparkSession]:
    """The session that is given; otherwise a new one, which is stopped at the end."""
    if given is not None:
        yield given
        return
    own = start()
    try:
        yield own
    finally:
        stop(own)


def check_session(spark: SparkSession, more: Allowed = MappingProxyType({})) -> None:
    """Refuse a session that Oncely has not created and that does not fulfil its requirements.

    Args:
        spark: the session.
        more: requirements beside those of every run, such as :data:`STREAMING`.

    Raises:
        ConfigError: names the setting.
    """
    if not is_ours(spark):
        asked = {key: spark.conf.get(key, None) for key in (_ATTEMPTS, *more)}
        given = {key: value for key, value in asked.items() if value is not None}
        check_settings({**dict(spark.sparkContext.getConf().getAll()), **given}, more)


def check_settings(conf: Mapping[str, str], more: Allowed = MappingProxyType({})) -> None:
    """Refuse the settings of a session that break the guarantee.

    Raises:
        ConfigError: names the setting.
    """
    from oncely.config.runtimes import REFUSED, is_local

    allowed: Allowed = {_ATTEMPTS: (lambda value: value == "1", REFUSED[_ATTEMPTS][0]), **more}
    wrong = [key for key, (allows, _) in allowed.items() if key in conf and not allows(conf[key])]
    # In one process no shuffle output is lost, and Spark's default is harmless.
    if _ATTEMPTS not in conf and not is_local(conf.get("spark.master", "")):
        wrong.append(_ATTEMPTS)
    for key in wrong:
        found = f"is {conf[key]!r}" if key in conf else "is not set"
        way_out = f'begin the session with .config("{key}", "1")' if key == _ATTEMPTS else ""
        raise ConfigError(
            key,
            f"{found} in the Spark session that exists: {allowed[key][1]}",
            way_out=way_out or "begin the session without it",
        )


# -- executors -----------------------------------------------------------------------------


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
