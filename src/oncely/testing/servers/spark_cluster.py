"""A real standalone Spark cluster on 127.0.0.1: a master and workers as processes of their own."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Self

import psutil

from oncely import artifacts
from oncely.errors import WrongInput
from oncely.testing.servers.process import HOST, Process, free_port, wait_until

_START = 60.0
_DAEMON_HEAP = "256m"
_EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"


class SparkCluster:
    """A standalone master with workers, run from PySpark's own jars.

    Args:
        workers: number of worker processes.
        cores: cores of each worker.
        memory: memory of each worker, for executors, in Spark's syntax ("1g").
        directory: for logs and the workers' files; a temporary directory by default.
    """

    def __init__(
        self,
        workers: int = 2,
        cores: int = 1,
        memory: str = "1g",
        directory: Path | None = None,
    ) -> None:
        self._temporary = directory is None
        self.directory = (directory or Path(tempfile.mkdtemp(prefix="oncely-spark-"))).absolute()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._count, self._cores, self._memory = workers, cores, memory
        self._port = free_port()
        self._master: Process | None = None
        self._workers: list[Process] = []

    @property
    def master_url(self) -> str:
        """``spark://host:port``, for ``spark.master``."""
        return f"spark://{HOST}:{self._port}"

    @property
    def workers(self) -> list[int]:
        """The pids of the workers that are running."""
        return [worker.pid for worker in self._workers if worker.running]

    def executors(self) -> list[int]:
        """Return the pids of the executors' JVMs, in any order."""
        return [p.pid for pid in self.workers for p in _below(pid) if _runs(p, _EXECUTOR)]

    def python_workers(self) -> list[int]:
        """Return the pids of the executors' Python processes, daemons included."""
        return [p.pid for pid in self.executors() for p in _below(pid)]

    def start(self) -> Self:
        """Start the cluster; return when every worker has registered with the master.

        Raises:
            Unavailable: a part did not start; with the end of its log.
            WrongInput: Java is missing.
        """
        if self._master is not None and self._master.running:
            raise WrongInput("the Spark cluster is running", way_out="close() it first")
        try:
            self._start_master()
            self._workers = [self._start_worker(number) for number in range(self._count)]
            for worker in self._workers:
                _await_line(worker, "Successfully registered with master")
        except BaseException:
            self.stop()
            raise
        return self

    def kill_worker(self, number: int) -> None:
        """SIGKILL a worker and its executors together, as if their machine was lost."""
        self._workers[number].kill()

    def stop(self) -> None:
        """End the workers, then the master."""
        for worker in self._workers:
            worker.send(15)
        for process in (*self._workers, self._master):
            if process is not None:
                process.stop(timeout=10)

    def close(self) -> None:
        """Stop, and delete the directory if it was a temporary one."""
        self.stop()
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_master(self) -> None:
        listen = ["--host", HOST, "--port", str(self._port), "--webui-port", "0"]
        master = self._master = self._run("master", "org.apache.spark.deploy.master.Master", listen)
        _await_line(master, "I have been elected leader")

    def _start_worker(self, number: int) -> Process:
        name = f"worker-{number}"
        arguments = ["--host", HOST, "--webui-port", "0", "--work-dir", str(self.directory / name)]
        arguments += ["--cores", str(self._cores), "--memory", self._memory, self.master_url]
        return self._run(name, "org.apache.spark.deploy.worker.Worker", arguments)

    def _run(self, name: str, main: str, arguments: list[str]) -> Process:
        home = artifacts.spark_home()
        log = self.directory / f"{name}.log"
        log.unlink(missing_ok=True)  # lines of an earlier start would match
        return Process(
            f"Spark's {name}",
            [str(home / "bin" / "spark-class"), main, *arguments],  # it ends in exec: one pid
            directory=self.directory,
            log=log,
            environment={
                **os.environ,
                "SPARK_HOME": str(home),
                "JAVA_HOME": str(Path(artifacts.java()).resolve().parent.parent),
                "SPARK_LOCAL_IP": HOST,  # also for the web pages
                "SPARK_LOCAL_DIRS": str(self.directory),
                "SPARK_DAEMON_MEMORY": _DAEMON_HEAP,
                # Otherwise Spark uses the python3 of PATH.
                "PYSPARK_PYTHON": sys.executable,
                "PYSPARK_DRIVER_PYTHON": sys.executable,
            },
            remove=self.directory if self._temporary else None,
        )


def _below(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _runs(process: psutil.Process, word: str) -> bool:
    try:
        return word in process.cmdline()
    except psutil.Error:  # it has just ended
        return False


def _await_line(process: Process, line: str) -> None:
    wait_until(
        lambda: process.log.exists() and line in process.log.read_text(errors="replace"),
        process=process,
        timeout=_START,
        what=f"its log said {line!r}",
    )
