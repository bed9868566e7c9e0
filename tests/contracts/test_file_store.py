"""What a store promises, on a folder and on a real S3 server."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path

import pytest
from filetools import Shelf

from oncely.errors import ConfigError, InvariantViolation, OncelyError, Stopped, Unavailable
from oncely.stores.objects.store import NoSuchFile, S3Options, Store
from tests.s3tools import HOST, SECRET, S3Proxy, S3Server

LARGE = os.urandom(12_000_000)  # more than one part of an upload


@pytest.fixture(params=["folder", "s3", "whole bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return Store(f"file://{tmp_path}/a%20folder/deep/")
    server: S3Server = request.getfixturevalue("s3_server")
    prefix = "" if request.param == "whole bucket" else "/some/prefix"
    return Store(f"s3://{server.bucket()}{prefix}", server.options())


def names(store: Store) -> set[str]:
    return {stored.path for stored in store.list()}


def test_files_come_and_go(store: Store) -> None:
    store.check()
    assert names(store) == set()
    store = pickle.loads(pickle.dumps(store))
    hostile = "user=%2E%2E%2Fetc~0/date=__HIVE_DEFAULT_PARTITION__/f-1.avro"
    store.write(hostile, b"one")
    store.write("large", memoryview(LARGE))
    store.durable()
    assert store.read(hostile) == b"one"
    assert store.read("large") == LARGE
    with store.open("large") as file:
        file.seek(5_000_000)
        assert file.read(10) == LARGE[5_000_000:5_000_010]
    assert {(s.path, s.bytes) for s in store.list()} == {(hostile, 3), ("large", len(LARGE))}
    store.delete([hostile, "large", "was/never/there"])
    assert names(store) == set()
    with pytest.raises(NoSuchFile):
        store.read("large")
    with pytest.raises(NoSuchFile):
        store.open(hostile)


def test_times_are_the_stores_own(store: Store) -> None:
    before = store.now()
    store.write("f", b"")
    after = store.now()
    (stored,) = store.list()
    assert before <= stored.modified <= after
    assert abs(after - datetime.now(UTC)) < timedelta(seconds=30)  # one machine


def test_listings_have_pages(store: Store) -> None:
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda n: store.write(f"d={n % 7}/f{n}", b"x"), range(1200)))
    store.durable()
    assert names(store) == {f"d={n % 7}/f{n}" for n in range(1200)}
    store.delete([f"d=0/f{n}" for n in range(0, 70, 7)])
    assert len(names(store)) == 1190


@pytest.mark.parametrize(
    "path",
    ["", "/etc/passwd", "../x", "a/../../x", "a//b", "a/.", "a\\b", "a\0b", "a\nb", "\ud800",
     "x" * 256, "/".join(["y" * 200] * 5)],
)  # fmt: skip
def test_nothing_is_outside_the_root(path: str) -> None:
    shelf = Shelf()
    store = shelf.store()
    for call in (lambda: store.write(path, b""), lambda: store.read(path),
                 lambda: store.open(path), lambda: store.delete([path])):  # fmt: skip
        with pytest.raises(InvariantViolation):
            call()
    assert shelf.calls == []


@pytest.mark.parametrize(
    ("url", "s3"),
    [
        ("/folder", None), ("file://host/x", None), ("file:///", None), ("file:///a/../b", None),
        ("file:///a?b", None), ("ftp://x/y", None), ("s3:///x", None), ("s3://b/x?e=y", None),
        ("s3://key:password@b/x", None), ("s3://b/a//b", None), (f"s3://b/{'x' * 200}", None),
        ("file:///x", S3Options()), ("gs://b\x00c/%00", None),
    ],
)  # fmt: skip
def test_a_url_that_is_no_root_is_refused(url: str, s3: S3Options | None) -> None:
    with pytest.raises(ConfigError, match=r"sink\.(url|s3)") as refused:
        Store(url, s3)
    assert "password@" not in str(refused.value)


@pytest.mark.parametrize(
    "wrong",
    [{"endpoint": "localhost:9000"}, {"endpoint": "http://a:b@h"}, {"endpoint": "http://h/path"},
     {"endpoint": "http://h:port"}, {"access_key": "a"}, {"secret_key": "s"},
     {"session_token": "t"}],
)  # fmt: skip
def test_wrong_options_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"sink\.s3\."):
        S3Options(**wrong)  # type: ignore[arg-type]


def test_secrets_are_not_shown(s3_server: S3Server) -> None:
    store = Store("s3://b/x", s3_server.options(session_token="the-session-token"))
    for shown in (repr(store), repr(store.s3), str(store), str(vars(store)["url"])):
        assert SECRET not in shown
        assert "the-session-token" not in shown


# -- what can't work -----------------------------------------------------------------------


def refusal(store: Store) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        store.check()
    assert SECRET not in str(refused.value)
    return refused.value


def test_a_missing_bucket(s3_server: S3Server) -> None:
    error = refusal(Store("s3://there-is-none/x", s3_server.options()))
    assert (error.key, "no such bucket" in str(error)) == ("sink.url", True)


@pytest.mark.parametrize("wrong", [{"secret_key": "another"}, {"access_key": "nobody"}])
def test_wrong_keys(s3_server: S3Server, wrong: dict[str, str]) -> None:
    store = Store(f"s3://{s3_server.bucket()}/x", s3_server.options(**wrong))
    assert refusal(store).key == "sink.s3.access_key"


@pytest.mark.parametrize("endpoint", [f"http://{HOST}:1", "http://no-such-host.invalid:9"])
def test_nobody_at_the_endpoint(s3_server: S3Server, endpoint: str) -> None:
    error = refusal(Store("s3://b/x", s3_server.options(endpoint=endpoint)))
    assert error.key == "sink.s3.endpoint"
    with pytest.raises(Unavailable):  # at work it is a passing trouble
        Store("s3://b/x", s3_server.options(endpoint=endpoint, retries=0)).read("f")


def test_a_folder_that_can_not_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert refusal(Store(f"file://{tmp_path}/file")).key == "sink.url"
    assert refusal(Store(f"file://{tmp_path}/file/below")).key == "sink.url"
    if Path("/proc/self").exists():
        assert refusal(Store("file:///proc/oncely")).key == "sink.url"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_no_permission(number: int) -> None:
    shelf = Shelf(fail={"write": [OSError(number, os.strerror(number))]})
    assert refusal(shelf.store()).key == "sink.url"


# -- trouble that passes, and that does not -------------------------------------------------


def test_a_full_disk_stops() -> None:
    shelf = Shelf(fail={"write": [OSError(errno.ENOSPC, "No space left on device")]})
    with pytest.raises(Stopped, match="is full"):
        shelf.store("s3://b/x", S3Options()).write("f", b"data")
    assert shelf.calls == ["write"]


_LIMITED = """
import sys, resource
from oncely.stores.objects.store import Store
store = Store(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
store.write("small", b"x" * 1000)
try:
    store.write("large", b"x" * 1_000_000)
except Exception as error:
    print(type(error).__name__)
"""


def test_a_file_that_finds_no_room_leaves_nothing(tmp_path: Path) -> None:
    """The kernel's own refusal in the middle of a file: a limit on the size of files."""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, f"file://{tmp_path}"],
        capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.stdout.strip() == "Stopped"
    assert names(Store(f"file://{tmp_path}")) == {"small"}


def test_a_full_disk_leaves_nothing_half(tmp_path: Path) -> None:
    """A real one, where we may mount a small one."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=False,
        capture_output=True,
    )  # fmt: skip
    if mounted.returncode:
        pytest.skip("a small disk can't be mounted by this user; see the test with a limit")
    try:
        store = Store(f"file://{tmp_path}")
        store.write("a/small", b"x" * 1000)
        with pytest.raises(Stopped, match="is full"):
            store.write("a/large", LARGE)
        assert names(store) == {"a/small"}
        store.write("a/fits", b"x" * 500_000)
        store.durable()
    finally:
        # Lazily: the store still holds a handle of its root.
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def through(proxy: S3Proxy, server: S3Server, **changed: object) -> Store:
    options = {"endpoint": proxy.endpoint, "request_timeout": 1.0, **changed}
    return Store(f"s3://{server.bucket()}/x", server.options(**options))


@pytest.mark.parametrize(("method", "times"), [("PUT", 1), ("PUT", 5), ("GET", 3), ("HEAD", 4)])
def test_a_busy_server_is_asked_again(s3_server: S3Server, method: str, times: int) -> None:
    with S3Proxy(s3_server) as proxy:
        store = through(proxy, s3_server)
        with proxy.fault("refuse", method=method, times=times) as fault:
            store.write("f", b"data")
            assert store.read("f") == b"data"
            assert names(store) == {"f"}
            assert fault.met.is_set()
            assert not fault.times


def test_a_server_that_stays_busy(s3_server: S3Server) -> None:
    with S3Proxy(s3_server) as proxy:
        store = through(proxy, s3_server, retries=1)
        with proxy.fault("refuse", times=1000), pytest.raises(Unavailable):
            store.write("f", b"data")
        with proxy.fault("refuse", times=1000), pytest.raises(Unavailable):
            store.check()
        assert names(store) == set()
        store.write("f", b"data")


@pytest.mark.parametrize("kind", ["cut request", "lose response", "hold"])
def test_a_small_file_arrives_in_spite_of_the_line(s3_server: S3Server, kind: str) -> None:
    with S3Proxy(s3_server) as proxy:
        store = through(proxy, s3_server)
        with proxy.fault(kind, part="/f") as fault:  # type: ignore[arg-type]
            store.write("f", b"data")
        assert fault.met.is_set()
        assert store.read("f") == b"data"


@pytest.mark.parametrize(
    ("kind", "method", "part", "times"),
    [
        *product(("cut request", "lose response", "refuse"), ["PUT"], ["partNumber=2"], [1]),
        *product(("cut request", "lose response", "refuse"), ["PUT"], ["partNumber=1"], [4]),
        *product(("cut request", "lose response", "refuse"), ["POST"], ["uploadId="], [4]),
        ("hold", "PUT", "partNumber=2", 1),
    ],
)
def test_a_large_file_arrives_whole(
    s3_server: S3Server, kind: str, method: str, part: str, times: int
) -> None:
    """In the middle of a multipart upload, once or until pyarrow gives up and we begin anew."""
    with S3Proxy(s3_server) as proxy:
        store = through(proxy, s3_server)
        fault = {"method": method, "part": part, "times": times}
        with proxy.fault(kind, **fault) as met:  # type: ignore[arg-type]
            store.write("f", LARGE)
        assert met.met.is_set()
        assert store.read("f") == LARGE
        assert names(store) == {"f"}


def test_an_upload_that_is_not_completed_is_no_file(s3_server: S3Server) -> None:
    """Its parts stay on the server, until a lifecycle rule of the bucket removes them."""
    with S3Proxy(s3_server) as proxy:
        store = through(proxy, s3_server, retries=0)
        bucket = store.url.split("/")[2]
        with (
            proxy.fault("refuse", method="POST", part="uploadId=", times=1000) as complete,
            proxy.fault("refuse", method="DELETE", times=1000),
            pytest.raises(Unavailable),
        ):
            store.write("f", LARGE)
        assert complete.met.is_set()
        assert sum(one.stat().st_size for one in s3_server.parts(bucket)) >= len(LARGE)
        assert names(store) == set()
        assert not store.exists("f")
        for read in (store.read, store.open):
            with pytest.raises(NoSuchFile):
                read("f")
        store.write("f", b"another")
        assert store.read("f") == b"another"
        assert s3_server.parts(bucket)


def test_a_store_that_vanishes_is_unavailable(s3_server: S3Server) -> None:
    with S3Proxy(s3_server) as proxy:
        store = through(proxy, s3_server, retries=0)
        store.write("f", b"data")
    for call in (lambda: store.read("f"), lambda: list(store.list()), store.now,
                 lambda: store.delete(["f"]), lambda: store.write("g", b"")):  # fmt: skip
        with pytest.raises(OncelyError) as failed:
            call()
        assert type(failed.value) is Unavailable
