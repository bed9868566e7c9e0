"""Jars by Maven coordinate, downloaded once and cached.

PySpark's wheel contains Apache Ivy, which Spark itself uses for ``spark.jars.packages``. It is run
here as a separate program, because a jar that is named in ``spark.jars`` needs no network at later
starts, and because the embedded broker needs jars without Spark.

A coordinate becomes one directory. It is created by one rename, so an existing one is complete.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from xml.sax.saxutils import quoteattr

from oncely.errors import Unavailable, WrongInput
from oncely.wording import plural

KAFKA_BROKER = "org.apache.kafka:kafka_2.13:4.1.0"
POSTGRES_JDBC = "org.postgresql:postgresql:42.7.7"


@dataclass(frozen=True)
class SparkJars:
    """Coordinates of jars that are loaded beside those of a Spark release.

    Attributes:
        kafka: the connector of Spark's own Kafka source and sink, which ``write_stream`` and peers
            use.
        delta: Delta Lake; None: no version of it runs on this release.
    """

    kafka: str
    delta: str | None


_SPARK: Mapping[str, SparkJars] = {
    release: SparkJars(f"org.apache.spark:spark-sql-kafka-0-10_{kafka}", delta)
    for release, kafka, delta in (
        ("3.5", "2.12:3.5.7", "io.delta:delta-spark_2.12:3.3.2"),
        ("4.0", "2.13:4.0.0", "io.delta:delta-spark_2.13:4.0.1"),
        ("4.1", "2.13:4.1.1", "io.delta:delta-spark_2.13:4.1.0"),
        ("4.2", "2.13:4.2.0", "io.delta:delta-spark_2.13:4.2.0"),
        ("4.3", "2.13:4.2.0", None),
    )
}
"""The releases of Spark that are supported. Not every patch release of the connector can be
fetched."""

_MANIFEST = "jars.json"
_OLDEST_JAVA = 17
_TRIES = 3
_TELL = 5.0  # seconds
_MEGABYTE = 1_000_000


def resolve(coordinate: str) -> list[Path]:
    """Return the jars of a coordinate and of its dependencies; downloads them at first use.

    A Spark connector (group ``org.apache.spark``) is loaded beside PySpark's own jars, so modules
    that PySpark contains are left out: the result can be given to ``spark.jars`` as it is. Any
    other coordinate is complete and can be used as a class path.

    Args:
        coordinate: ``group:artifact:version``.

    Returns:
        Absolute paths, sorted by name; never empty.

    Raises:
        WrongInput: the coordinate is malformed, or Java 17 or later is missing.
        Unavailable: the download failed.
    """
    group, artifact, version = _parts(coordinate)
    home = cache_directory() / "jars"
    place = home / _key(group, artifact, version)
    found = _complete(place)
    if found:
        return found
    home.mkdir(parents=True, exist_ok=True)
    # Of two processes, the second waits here, then uses the complete directory. The lock belongs to
    # the open file, so it is released when its holder is killed.
    with _locked(home / f".{place.name}.lock", coordinate):
        found = _complete(place)
        if found:
            return found
        for left in home.glob(f".{place.name}.*/"):  # left by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=home))
        try:
            _fetch(group, artifact, version, work)
            shutil.rmtree(place, ignore_errors=True)  # incomplete: a jar was removed
            (work / "lib").rename(place)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return _complete(place)


def cache_directory() -> Path:
    """Return ``$XDG_CACHE_HOME/oncely``, or ``~/.cache/oncely``."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "oncely"


@cache
def java() -> str:
    """Return the path of a Java launcher of version 17 or later: ``$JAVA_HOME`` first, then PATH.

    Raises:
        WrongInput: there is no Java, or it is older.
    """
    way_out = f"install Java {_OLDEST_JAVA} or later and put it on PATH, or set JAVA_HOME to it"
    home = os.environ.get("JAVA_HOME")
    path = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    where = f"JAVA_HOME={home}" if home else "PATH"
    if path is None or not os.access(path, os.X_OK):
        raise WrongInput(f"Java {_OLDEST_JAVA}+ is needed; none by {where}", way_out=way_out)
    answer = subprocess.run([path, "-version"], capture_output=True, text=True, check=False)
    said = re.search(r'version "((?:1\.)?(\d+)[^"]*)', answer.stderr + answer.stdout)
    if answer.returncode or not said:
        raise WrongInput(f"Java {_OLDEST_JAVA}+ is needed; {path} does not run", way_out=way_out)
    if int(said[2]) < _OLDEST_JAVA:
        raise WrongInput(
            f"Java {_OLDEST_JAVA}+ is needed, found {said[1]} at {path}", way_out=way_out
        )
    return path


def spark_jars() -> SparkJars:
    """The jars for the installed PySpark.

    Raises:
        WrongInput: PySpark is not installed, or of a release that is not supported.
    """
    spark_home()
    from pyspark.version import __version__ as version  # an archive of Spark has no metadata

    found = _SPARK.get(".".join(version.split(".")[:2]))
    if found is None:
        oldest, *_, newest = _SPARK
        raise WrongInput(
            f"PySpark {version} is installed; {oldest} to {newest} are supported",
            way_out=f"pip install 'pyspark=={newest}.*'",
        )
    return found


def spark_home() -> Path:
    """Return the directory of the installed PySpark, without importing it.

    Raises:
        WrongInput: PySpark is not installed.
    """
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise WrongInput("PySpark is not installed", way_out="pip install 'oncely[spark]'")
    return Path(spec.origin).parent


def _parts(coordinate: str) -> tuple[str, str, str]:
    parts = coordinate.split(":")
    if len(parts) != 3 or not all(re.fullmatch(r"[\w.\-]+", part) for part in parts):
        raise WrongInput(
            f"{coordinate!r} is no Maven coordinate", way_out="write group:artifact:version"
        )
    return parts[0], parts[1], parts[2]


def _key(group: str, artifact: str, version: str) -> str:
    name = f"{group}-{artifact}-{version}"
    # The excluded modules depend on the installed PySpark.
    return f"{name}-pyspark-{importlib.metadata.version('pyspark')}" if _beside(group) else name


def _beside(group: str) -> bool:
    return group == "org.apache.spark"


def _complete(place: Path) -> list[Path]:
    """Return the jars if all of the manifest exist with their full size, else an empty list."""
    try:
        sizes: dict[str, int] = json.loads((place / _MANIFEST).read_text())
        whole = all((place / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return []
    return [place / name for name in sorted(sizes)] if whole else []


@contextmanager
def _locked(path: Path, coordinate: str) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{coordinate}: another process is fetching it, waiting", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(group: str, artifact: str, version: str, work: Path) -> None:
    """Let Ivy fill ``work/lib``, and write the manifest into it."""
    ivy_file = work / "ivy.xml"
    ivy_file.write_text(_ivy_file(group, artifact, version))
    log = work / "ivy.log"
    command = [java(), "-jar", str(_ivy_jar()), "-ivy", str(ivy_file), "-confs", "default"]
    # A separate Ivy cache: Ivy's default cache is not safe for two processes, and an interrupted
    # download must not outlive this call. Within it, a second try downloads only missing files.
    command += ["-cache", str(work / "cache")]
    command += ["-retrieve", f"{work}/lib/[artifact]-[revision](-[classifier]).[ext]"]
    settings = os.environ.get("ONCELY_IVY_SETTINGS")
    if settings:
        command += ["-settings", settings]
    with _progress(f"{group}:{artifact}:{version}") as show:
        for left in reversed(range(_TRIES)):
            code = _watched(command, log, work / "cache", show)
            if code == 0:
                break
            if not left:
                raise _download_failed(f"{group}:{artifact}:{version}", log)
        show(*_arrived(work / "cache"))
    jars = {jar.name: jar.stat().st_size for jar in (work / "lib").glob("*.jar")}
    if not jars:
        raise _download_failed(f"{group}:{artifact}:{version}", log)
    _compare(f"{artifact}-{version}.jar", work / "lib", beside=_beside(group))
    (work / "lib" / _MANIFEST).write_text(json.dumps(jars, indent=1, sort_keys=True))


def _compare(named: str, folder: Path, *, beside: bool) -> None:
    """Compare the jars of a coordinate with ``jars.sha256`` (sha256sum), if its own jar is there.

    Which dependencies a connector of Spark brings varies with the release: those that are not in
    the list are not compared.

    Raises:
        Unavailable: a jar is another one.
    """
    lines = Path(__file__).with_name("jars.sha256").read_text().splitlines()
    pinned = {name: digest for digest, name in map(str.split, lines)}
    for jar in folder.glob("*.jar") if named in pinned else ():
        with jar.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != pinned.get(jar.name, found if beside else ""):
            raise Unavailable(
                f"{jar.name} is not the jar that this release was tested with: SHA-256 {found}",
                way_out="nothing of it was kept; check the proxy, or ONCELY_IVY_SETTINGS' mirror",
            )


def _ivy_jar() -> Path:
    found = sorted((spark_home() / "jars").glob("ivy-*.jar"))
    if not found:
        raise WrongInput(f"no ivy-*.jar in {spark_home() / 'jars'}", way_out="reinstall pyspark")
    return found[-1]


def _ivy_file(group: str, artifact: str, version: str) -> str:
    """Return an Ivy module that depends on the coordinate's default (runtime) configuration."""
    brought = _brought_by_spark() if _beside(group) else []
    excludes = "".join(f"<exclude module={quoteattr(name)}/>" for name in brought)
    return (
        '<ivy-module version="2.0"><info organisation="oncely" module="jars"/>'
        '<configurations><conf name="default"/></configurations><dependencies>'
        f"<dependency org={quoteattr(group)} name={quoteattr(artifact)}"
        f' rev={quoteattr(version)} conf="default->default"/>{excludes}'
        "</dependencies></ivy-module>"
    )


def _brought_by_spark() -> list[str]:
    """Return the module names of PySpark's jars."""
    return sorted({_module(jar.name) for jar in (spark_home() / "jars").glob("*.jar")})


def _module(jar: str) -> str:
    """Return ``log4j-1.2-api`` for ``log4j-1.2-api-2.24.3.jar``: a number alone does not end a
    name.

    A Scala module's name ends with the Scala version, any other one before the first number that
    only numbers or qualifiers follow ("33.4.0-jre", "2.0.70.Final-linux-x86_64").
    """
    scala = re.match(r".*_\d\.\d+(?=-)", jar)
    other = re.match(r"(.*?)(?:-\d[\w.]*)+(?:-[A-Za-z][\w.]*)*\.jar$", jar)
    return scala[0] if scala else other[1] if other else jar.removesuffix(".jar")


def _watched(command: list[str], log: Path, cache: Path, show: Callable[[int, int], None]) -> int:
    """Run Ivy to its end, and report the number of jars and bytes so far to ``show``."""
    with log.open("ab") as out:
        ivy = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            while True:
                try:
                    return ivy.wait(0.2)
                except subprocess.TimeoutExpired:
                    show(*_arrived(cache))
        finally:
            if ivy.poll() is None:
                ivy.kill()
                ivy.wait()


def _arrived(cache: Path) -> tuple[int, int]:
    jars = size = 0
    for path in cache.rglob("*.jar*"):  # Ivy writes x.jar.part first
        try:
            size += path.stat().st_size
        except FileNotFoundError:  # renamed in the meantime
            continue
        jars += path.suffix == ".jar"
    return jars, size


@contextmanager
def _progress(coordinate: str) -> Iterator[Callable[[int, int], None]]:
    """Show the download on stderr: a live line on a terminal, else a line every few seconds."""

    def said(jars: int, size: int) -> str:
        much = f"{plural(jars, 'jar')}, {size / _MEGABYTE:.1f} MB"
        return f"{coordinate}: {much if size else 'looking up what it needs'}"

    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(f"fetching {said(0, 0)}")

            def show(jars: int, size: int) -> None:
                bar.update(task, description=f"fetching {said(jars, size)}")

            yield show
        return
    print(f"{coordinate}: fetching its jars into {cache_directory()}", file=sys.stderr)
    began, told, last = time.monotonic(), 0.0, (0, 0)

    def keep(jars: int, size: int) -> None:
        nonlocal last, told
        last, took = (jars, size), time.monotonic() - began
        if took > told + _TELL:
            told = took
            print(said(*last), file=sys.stderr)

    yield keep
    print(f"{said(*last)}, {time.monotonic() - began:.0f} s", file=sys.stderr)


def _download_failed(coordinate: str, log: Path) -> Unavailable:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    telling = [line.strip() for line in lines if re.search(r"ERROR|FAILED|not found|rror:", line)]
    telling = list(dict.fromkeys(telling))  # repeated for each attempt
    return Unavailable(
        f"the download of {coordinate} failed: " + "; ".join(telling[:5] or lines[-5:]),
        way_out="check the network and try again; behind a proxy set JAVA_TOOL_OPTIONS to Java's"
        " proxy properties, for a mirror set ONCELY_IVY_SETTINGS to an Ivy settings file",
    )


def main(wanted: Sequence[str]) -> None:
    """Download the jars of the embedded broker, and PostgreSQL's driver for audits by id on Spark;
    or only some: ``python -m oncely.artifacts [broker] [postgresql]``."""
    known = {"broker": KAFKA_BROKER, "postgresql": POSTGRES_JDBC}
    for name in wanted or known:
        resolve(known.get(name, name))  # other names are coordinates


if __name__ == "__main__":
    main(sys.argv[1:])
