"""Topic to files on a real S3 server that refuses, is slow and cuts; and a killed driver."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyarrow.fs import FileSelector, FileType

from oncely import files
from oncely.config import parse
from oncely.kinds.files.verify import verify
from oncely.pipeline import Pipeline
from oncely.stores.objects.store import s3_filesystem
from oncely.testing.halting import ask_to_halt, halted, running_halting
from oncely.testing.processes import kill_tree
from tests import s3tools
from tests.s3tools import S3Proxy, S3Server
from tests.scenarios.files_world import FilesWorld, assert_exactly_once

MANY = 2_000


@dataclass
class BucketWorld(FilesWorld):
    """A bucket behind a proxy; the readers go to the server itself."""

    server: Any = None
    bucket: str = ""
    endpoint: str = ""

    @property
    def url(self) -> str:  # type: ignore[override]
        """The root, as the pipeline file says."""
        return f"s3://{self.bucket}/events"

    @url.setter
    def url(self, _: str) -> None:
        """As for folders."""

    def settings(self, **sections: Any) -> dict[str, Any]:
        raw = super().settings(**sections)
        raw["sink"]["s3"] = {
            "endpoint": self.endpoint,
            "access_key": s3tools.ACCESS,
            "secret_key": s3tools.SECRET,
            "request_timeout": "5 seconds",
        }
        return raw

    def stored(self) -> set[str]:
        root = f"{self.bucket}/events"
        found = self._direct.get_file_info(FileSelector(root, recursive=True))
        paths = {one.path[len(root) + 1 :] for one in found if one.type == FileType.File}
        return {path for path in paths if not path.startswith(("_oncely/", "_READ_THE_"))}

    def content(self, path: str) -> bytes:
        with self._direct.open_input_file(f"{self.bucket}/events/{path}") as stream:
            data: bytes = stream.read()
            return data

    @property
    def _direct(self) -> Any:
        return s3_filesystem(self.server.options())


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[S3Proxy]:
    with S3Proxy(s3_server) as running:
        yield running


@pytest.fixture
def world(
    broker: Any, make_topic: Any, tmp_path: Path, s3_server: S3Server, proxy: S3Proxy
) -> BucketWorld:
    made = BucketWorld(
        broker.bootstrap, "", make_topic(partitions=2), tmp_path, infer=True,
        server=s3_server, bucket=s3_server.bucket(), endpoint=proxy.endpoint,
    )  # fmt: skip
    made.overrides["sink"] = {"max_rejects": "100%", "target_file_size": "8 MiB"}
    return made


@pytest.mark.timeout(300)
def test_a_store_that_refuses_delays_and_cuts(
    world: BucketWorld, proxy: S3Proxy, spark: Any
) -> None:
    """One user's events are far more than one part of an upload."""
    world.publish(MANY, partitions=2, bad_every=501)
    big = [{"id": 100_000 + i, "user": "big", "ts": "2026-03-01T00:00:00Z", "pad": _noise(i)}
           for i in range(900)]  # fmt: skip
    world.publish_values(big)
    pipeline = Pipeline(parse(world.settings()))
    with (
        proxy.fault("refuse", part="date", times=3) as refused,
        proxy.fault("lose response", part="date", skip=5) as lost,
        proxy.fault("cut request", part="partNumber") as cut,
    ):
        pipeline.run("latest", spark=spark)
        assert refused.met.is_set()
        assert lost.met.is_set()
        assert cut.met.is_set()
    assert assert_exactly_once(world) == MANY + 900 - 4
    assert verify(files.table_of(pipeline)).problems == ()
    seen = files.read(spark, pipeline, where={"user": "big"}, columns=["id"]).count()
    assert seen == 900


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_driver_is_killed_while_files_go_up(world: BucketWorld, runtime: Any) -> None:
    file = world.file()
    for word in ("write", "commit"):
        ask_to_halt(file, word)
        with running_halting(file) as driver:
            world.publish(MANY, partitions=2, first=0 if word == "write" else MANY)
            halted(driver.pid)
            kill_tree(driver.pid, signal.SIGKILL)
    Pipeline(parse(world.settings())).run("latest", spark=runtime)
    assert assert_exactly_once(world) == 2 * MANY
    orphans = world.stored() - set(world.entries())
    assert orphans


def _noise(i: int) -> str:
    """Ten kilobytes that no codec makes smaller."""
    import random

    return random.Random(i).randbytes(7_500).hex()
