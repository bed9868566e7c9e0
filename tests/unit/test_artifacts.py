"""Jars by coordinate: complete or absent, fetched once, clear when they can't be had."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from zipfile import ZipFile

import pytest

from oncely import artifacts
from oncely.errors import Unavailable, WrongInput
from oncely.runtimes.spark import session
from oncely.testing.processes import await_that
from tests.class_archives import QUICK

_RESOLVE = (
    "import sys; from oncely import artifacts\n"
    "for jar in artifacts.resolve(sys.argv[1]): print(jar.stat().st_size, jar)"
)


_MODULES = {
    "org/example/driver/42.7.7": """
        <dependency><groupId>org.checkerframework</groupId><artifactId>checker-qual</artifactId>
        <version>3.49.3</version><scope>runtime</scope></dependency>""",
    "org/checkerframework/checker-qual/3.49.3": "",
}
DRIVER = "org.example:driver:42.7.7"
_FILES = "[organisation]/[module]/[revision]/[module]-[revision]"


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Maven modules in a folder, in place of a registry in the network."""
    folder = tmp_path_factory.mktemp("registry")
    for place, dependencies in _MODULES.items():
        group, name, version = place.rsplit("/", 2)
        base = folder / place / f"{name}-{version}"
        base.parent.mkdir(parents=True)
        base.with_name(f"{base.name}.pom").write_text(
            "<project><modelVersion>4.0.0</modelVersion>"
            f"<groupId>{group.replace('/', '.')}</groupId><artifactId>{name}</artifactId>"
            f"<version>{version}</version><dependencies>{dependencies}</dependencies></project>"
        )
        with ZipFile(base.with_name(f"{base.name}.jar"), "w") as jar:
            jar.writestr("content", os.urandom(10_000))
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", QUICK)
    pattern = f"{registry}/{_FILES}"
    resolver = (
        f'<filesystem name="here" m2compatible="true"><ivy pattern="{pattern}.pom"/>'
        f'<artifact pattern="{pattern}(-[classifier]).[ext]"/></filesystem>'
    )
    monkeypatch.setenv("ONCELY_IVY_SETTINGS", _settings(tmp_path / "here.xml", resolver))
    return tmp_path / "oncely" / "jars"


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[str]:
    """Settings of Ivy for a registry that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        resolver = f'<ibiblio name="here" m2compatible="true" root="{url}"/>'
        yield _settings(tmp_path / "silent.xml", resolver)


def _settings(file: Path, resolver: str) -> str:
    """A settings file of Ivy with a resolver that is named ``here``."""
    file.write_text(
        '<ivysettings><settings defaultResolver="here"/>'
        f"<resolvers>{resolver}</resolvers></ivysettings>"
    )
    return str(file)


@pytest.fixture
def fresh_java() -> Iterator[None]:
    artifacts.java.cache_clear()
    yield
    artifacts.java.cache_clear()


def _in_background(coordinate: str, settings: str | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _RESOLVE, coordinate],
        env={**os.environ, **({"ONCELY_IVY_SETTINGS": settings} if settings else {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("coordinate", ["postgresql", "a:b", "a:b:c:d", "a:../b:1", "a::1", ""])
def test_a_malformed_coordinate_is_refused(coordinate: str) -> None:
    with pytest.raises(WrongInput, match="is no Maven coordinate") as refused:
        artifacts.resolve(coordinate)
    assert "group:artifact:version" in refused.value.way_out


def test_two_processes_at_once_fetch_once_and_get_the_same(cache: Path) -> None:
    both = [_in_background(DRIVER) for _ in range(2)]
    answers = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], answers
    assert answers[0][0] == answers[1][0] != ""
    fetched = [error for _, error in answers if "fetching its jars" in error]
    assert len(fetched) == 1
    assert re.search(r"7\.7: 2 jars, 0\.0 MB, \d+ s\n", fetched[0])
    assert _leftovers(cache) == []


def test_a_killed_download_leaves_nothing_that_looks_complete(cache: Path, silent: str) -> None:
    killed = _in_background(DRIVER, silent)
    await_that(lambda: list(cache.glob(".*/ivy.log")), "the begin of Ivy")
    assert killed.poll() is None
    os.killpg(killed.pid, signal.SIGKILL)  # with its Ivy, which would go on for a while
    killed.communicate()
    assert not [place for place in cache.iterdir() if not place.name.startswith(".")]
    assert artifacts.resolve(DRIVER)  # the lock was free
    assert _leftovers(cache) == []


def test_a_jar_that_somebody_removed_or_cut_is_fetched_again(cache: Path) -> None:
    jars = artifacts.resolve(DRIVER)
    driver = next(jar for jar in jars if jar.name.startswith("driver-"))
    whole = driver.stat().st_size
    os.truncate(driver, whole // 2)
    assert artifacts.resolve(DRIVER) == jars
    assert driver.stat().st_size == whole
    driver.unlink()
    assert artifacts.resolve(DRIVER) == jars
    assert driver.exists()


def test_the_second_time_needs_neither_java_nor_network(
    cache: Path, monkeypatch: pytest.MonkeyPatch, fresh_java: None
) -> None:
    jars = artifacts.resolve(DRIVER)
    artifacts.java.cache_clear()
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    assert artifacts.resolve(DRIVER) == jars


def test_a_spark_connector_brings_no_module_that_pyspark_brings() -> None:
    names = [jar.name for jar in artifacts.resolve(artifacts.spark_jars().kafka)]
    assert [re.sub(r"-[\d.]+\.jar$", "", name) for name in names] == [
        "commons-pool2",
        "kafka-clients",
        "spark-sql-kafka-0-10_2.13",
        "spark-token-provider-kafka-0-10_2.13",
    ]


@pytest.mark.parametrize(
    ("jar", "module"),
    [
        ("scala-library-2.13.16.jar", "scala-library"),
        ("spark-core_2.13-4.0.5.jar", "spark-core_2.13"),
        ("spark-sql-kafka-0-10_2.13-4.0.0.jar", "spark-sql-kafka-0-10_2.13"),
        ("log4j-1.2-api-2.24.3.jar", "log4j-1.2-api"),
        ("guava-33.4.0-jre.jar", "guava"),
        ("netty-tcnative-2.0.70.Final-linux-x86_64.jar", "netty-tcnative"),
        ("stax-api-1.0-2.jar", "stax-api"),
        ("arpack_combined_all-0.1.jar", "arpack_combined_all"),
        ("odd.jar", "odd"),
    ],
)
def test_a_module_is_known_by_its_jars_name(jar: str, module: str) -> None:
    assert artifacts._module(jar) == module


def test_an_unknown_coordinate_says_that_the_download_failed(cache: Path) -> None:
    with pytest.raises(Unavailable, match=r"download of org\.postgresql:postgresql:0\.0\.0 failed"):
        artifacts.resolve("org.postgresql:postgresql:0.0.0")
    assert _leftovers(cache) == []


def test_no_java_names_the_version_that_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_java: None
) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(WrongInput, match=r"Java 17\+ is needed; none by PATH"):
        artifacts.java()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(WrongInput, match=r"none by JAVA_HOME"):
        artifacts.java()


@pytest.mark.parametrize("said", ["11.0.2", "1.8.0_292"])
def test_an_old_java_is_refused(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_java: None
) -> None:
    _fake_java(tmp_path, f"echo 'openjdk version \"{said}\"' >&2")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(WrongInput, match=rf"17\+ is needed, found {said} at {tmp_path}"):
        artifacts.java()


def test_java_home_comes_before_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_java: None
) -> None:
    _fake_java(tmp_path, "echo 'openjdk version \"21\" 2023-09-19' >&2")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert artifacts.java() == str(tmp_path / "bin" / "java")


def test_a_launcher_that_does_not_run_is_no_java(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_java: None
) -> None:
    _fake_java(tmp_path, "exit 1")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(WrongInput, match="does not run"):
        artifacts.java()


def test_an_interrupted_download_takes_ivy_along(cache: Path, silent: str) -> None:
    """Ctrl-C reaches the whole process group of a terminal; here only we get it."""
    stopped = _in_background(artifacts.spark_jars().kafka, silent)
    await_that(lambda: list(cache.glob(".*/ivy.log")), "the begin of Ivy")
    stopped.send_signal(signal.SIGINT)
    stopped.communicate(timeout=30)
    assert stopped.returncode != 0
    assert _leftovers(cache) == []


def _leftovers(cache: Path) -> list[Path]:
    return [p for p in cache.iterdir() if p.name.startswith(".") and p.suffix != ".lock"]


def _fake_java(home: Path, body: str) -> None:
    (home / "bin").mkdir()
    program = home / "bin" / "java"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)


@pytest.mark.parametrize("version", ["3.4.4", "4.99.0", "5.0.0"])
def test_a_release_of_spark_that_is_not_supported(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyspark.version.__version__", version)
    with pytest.raises(WrongInput, match=rf"PySpark {version} is installed; 3.5 to 4.3") as refused:
        session.existing()
    assert "pip install 'pyspark==" in str(refused.value.way_out)


@pytest.mark.parametrize(("version", "scala"), [("3.5.9", "2.12"), ("4.0.5", "2.13")])
def test_the_connector_is_that_of_the_installed_spark(
    version: str, scala: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyspark.version.__version__", version)
    assert f"_{scala}:{version[:3]}." in artifacts.spark_jars().kafka


def test_a_jar_with_another_content_than_the_pinned_one_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of the coordinate itself, and of what it brings; unless the coordinate is not pinned."""
    jars = artifacts.resolve(DRIVER)
    sums = {one.name: hashlib.sha256(one.read_bytes()).hexdigest() for one in jars}
    monkeypatch.setattr(artifacts, "__file__", str(tmp_path / "artifacts.py"))
    for pinned, refused in (
        (sums, ""),
        ({**sums, "driver-42.7.7.jar": "0" * 64}, "driver"),
        ({**sums, "checker-qual-3.49.3.jar": "0" * 64}, "checker-qual"),
        ({"driver-42.7.7.jar": sums["driver-42.7.7.jar"]}, "checker-qual"),
        ({"other-1.jar": "0" * 64}, ""),
    ):
        shutil.rmtree(jars[0].parent)
        (tmp_path / "jars.sha256").write_text("".join(f"{b}  {a}\n" for a, b in pinned.items()))
        with pytest.raises(Unavailable, match=f"{refused}.*tested") if refused else nullcontext():
            artifacts.resolve(DRIVER)
        assert jars[0].parent.exists() == (not refused)
        jars[0].parent.mkdir(exist_ok=True)


@pytest.mark.parametrize("coordinate", [artifacts.KAFKA_BROKER, artifacts.POSTGRES_JDBC])
def test_what_make_setup_downloads_is_pinned(coordinate: str) -> None:
    _, artifact, version = coordinate.split(":")
    text = Path(artifacts.__file__).with_name("jars.sha256").read_text()
    assert f"  {artifact}-{version}.jar\n" in text
