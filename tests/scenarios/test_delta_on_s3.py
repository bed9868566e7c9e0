"""A Delta table on a real S3 server, which has conditional writes, and on one that has none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from oncely.errors import ConfigError, Fenced
from oncely.stores.objects.root import require_conditional_writes
from oncely.stores.objects.store import Connect, S3Options, Store
from oncely.stores.objects.store import connect as connect_files
from tests import s3tools
from tests.deltatools import Committing, DeltaPlace
from tests.s3tools import S3Proxy, S3Server
from tests.sinktools import at_t0, commit_all, numbered, ready


@dataclass(frozen=True)
class BucketPlace(DeltaPlace):
    """A table in a bucket, and a reader that goes to the server itself."""

    bucket: str = ""
    options: Any = None
    server: str = ""

    def store(self, files: Connect = connect_files) -> Store:
        return Store(f"s3://{self.bucket}/table", self.options, files)

    @property
    def table(self) -> Any:
        from deltalake import DeltaTable

        keys = {"AWS_ACCESS_KEY_ID": s3tools.ACCESS, "AWS_SECRET_ACCESS_KEY": s3tools.SECRET}
        where = {"AWS_ENDPOINT_URL": self.server, "AWS_REGION": "us-east-1"}
        own = {**keys, **where, "AWS_ALLOW_HTTP": "true"}
        return DeltaTable(f"s3://{self.bucket}/table", storage_options=own)


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[S3Proxy]:
    with S3Proxy(s3_server) as running:
        yield running


@pytest.fixture
def place(s3_server: S3Server, proxy: S3Proxy, tmp_path: Any) -> BucketPlace:
    options: S3Options = s3_server.options(endpoint=proxy.endpoint)
    return BucketPlace(tmp_path, "p", s3_server.bucket(), options, s3_server.endpoint)


@pytest.mark.parametrize("keys", [(), ("id",)])
def test_runs_that_fence_each_other(place: BucketPlace, keys: tuple[str, ...]) -> None:
    old, fence = ready(Committing(place.sink(keys=keys)))
    commit_all(old, at_t0(0, numbered(0, 5)), fence)
    new, newer = ready(Committing(place.sink(keys=keys)))
    with pytest.raises(Fenced):
        commit_all(old, at_t0(5, numbered(5, 9)), fence)
    commit_all(new, at_t0(5, numbered(5, 9)), newer)
    new.ledger.tidy(newer)
    assert place.ids() == [*range(9)]


@pytest.mark.parametrize("what", ["_delta_log", "_oncely", "/t-0"])
def test_an_answer_that_is_lost(place: BucketPlace, proxy: S3Proxy, what: str) -> None:
    """The client writes the log again, and is refused by the object that it wrote itself."""
    sink, fence = ready(Committing(place.sink()))
    with proxy.fault("lose response", part=what) as lost:
        commit_all(sink, at_t0(0, numbered(0, 5)), fence)
        assert lost.met.is_set()
    commit_all(sink, at_t0(5, numbered(5, 9)), fence)
    assert place.ids() == [*range(9)]


def test_a_server_that_refuses_for_a_while(place: BucketPlace, proxy: S3Proxy) -> None:
    sink, fence = ready(Committing(place.sink()))
    with proxy.fault("refuse", part="table", times=3), proxy.fault("refuse", method="GET", times=2):
        commit_all(sink, at_t0(0, numbered(0, 5)), fence)
    assert place.ids() == [*range(5)]


def test_a_server_without_conditional_writes_is_refused(
    place: BucketPlace, proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the environment says that a rename may be unsafe."""
    monkeypatch.setenv("AWS_S3_ALLOW_UNSAFE_RENAME", "true")
    with (
        proxy.fault("no condition", times=100),
        pytest.raises(ConfigError, match="no conditional writes") as caught,
    ):
        ready(Committing(place.sink()))
    assert caught.value.key == "sink.s3.endpoint"
    assert "use a server that has them" in caught.value.way_out
    proxy.requests.clear()
    ready(Committing(place.sink()))
    commits = [to for method, to in proxy.requests if method == "PUT" and "_delta_log" in to]
    assert commits
    assert set(commits) <= set(proxy.conditional), "the log is written on this condition alone"


@pytest.mark.parametrize("kind", ["refuse", "cut request", "lose response"])
def test_the_check_survives_a_passing_failure(
    place: BucketPlace, proxy: S3Proxy, kind: s3tools.Kind
) -> None:
    with proxy.fault(kind, method="PUT", part="oncely-probe", times=1, skip=1) as fault:
        place.sink().check()  # the first probe is that of the store
    assert fault.met.is_set()
    assert not any("probe" in one.path for one in place.store().list())


def test_keys_of_a_profile(
    place: BucketPlace, proxy: S3Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, url = tmp_path / "credentials", place.store().url
    file.write_text(
        f"[ours]\naws_access_key_id={s3tools.ACCESS}\naws_secret_access_key={s3tools.SECRET}\n"
    )
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "ours")
    options = S3Options(endpoint=proxy.endpoint)
    require_conditional_writes(url, options)
    with (
        proxy.fault("no condition", times=100),
        pytest.raises(ConfigError, match="no conditional writes"),
    ):
        require_conditional_writes(url, options)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    with pytest.raises(ConfigError, match=r"sink\.s3\.access_key") as caught:
        require_conditional_writes(url, options)
    assert "not-the-secret" not in str(caught.value)


def test_the_secret_is_in_no_error(place: BucketPlace) -> None:
    wrong = S3Options(endpoint=place.server, access_key=s3tools.ACCESS, secret_key="not-the-secret")
    sink = BucketPlace(place.root, "p", place.bucket, wrong, place.server).sink()
    with pytest.raises(ConfigError) as caught:
        ready(sink)
    assert "not-the-secret" not in str(caught.value)
    with pytest.raises(Exception, match="load") as loading:
        sink.tables.load()
    assert "not-the-secret" not in str(loading.value)
