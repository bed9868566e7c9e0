"""A bucket of a local S3 server as the target; its folder is looked at afterwards.

Spark writes through Hadoop's S3A with the rename-based committer in its faster second version,
which is what a session without further jars has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.files.match import Target
from oncely.artifacts import resolve
from tests.s3tools import ACCESS, SECRET, S3Server

HADOOP_AWS = "org.apache.hadoop:hadoop-aws:3.4.1"


@dataclass(frozen=True)
class Bucket:
    """A bucket.

    Attributes:
        endpoint: of the server.
        name: of the bucket.
        folder: where the server keeps its objects.
    """

    endpoint: str
    name: str
    folder: Path

    def target(self, root: Path) -> Target:
        """A prefix with the name of a folder."""
        return Target(
            self.folder / root.name,
            f"s3://{self.name}/{root.name}",
            f"s3a://{self.name}/{root.name}",
            {"endpoint": self.endpoint, "access_key": ACCESS, "secret_key": SECRET},
        )

    def spark_settings(self) -> Mapping[str, str]:
        """For the session."""
        s3a = "spark.hadoop.fs.s3a"
        return {
            f"{s3a}.endpoint": self.endpoint,
            f"{s3a}.endpoint.region": "us-east-1",
            f"{s3a}.access.key": ACCESS,
            f"{s3a}.secret.key": SECRET,
            f"{s3a}.path.style.access": "true",
            f"{s3a}.connection.ssl.enabled": "false",
            "spark.hadoop.mapreduce.fileoutputcommitter.algorithm.version": "2",
        }


@contextmanager
def serving() -> Iterator[tuple[Bucket, list[Path]]]:
    """A server with an empty bucket, and the jars by which Spark reaches it (600 MB, once)."""
    jars = resolve(HADOOP_AWS)
    with S3Server() as server:
        name = server.bucket()
        yield Bucket(server.endpoint, name, server.data / name), jars
