"""Settings of a Spark session that Oncely has not made: which break the guarantee."""

from __future__ import annotations

import pytest

from oncely.errors import ConfigError
from oncely.runtimes.spark.session import STREAMING as OF_STREAMS
from oncely.runtimes.spark.session import check_settings

LOCAL = {"spark.master": "local[*,4]", "spark.app.name": "mine"}
CLUSTER = {"spark.master": "spark://host:7077", "spark.stage.maxConsecutiveAttempts": "1"}
STREAMING = "spark.sql.streaming."


@pytest.mark.parametrize("conf", [LOCAL, CLUSTER])
def test_an_ordinary_session_is_taken(conf: dict[str, str]) -> None:
    check_settings(conf)
    harmless = {
        f"{STREAMING}checkpointLocation": "/checkpoints",
        f"{STREAMING}minBatchesToRetain": "100",
        "spark.redaction.regex": "(?i)secret|password|token|credential|access[.]?key|keystore[.]key"
        "|jaas",
    }
    check_settings(conf | harmless, OF_STREAMS)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("spark.stage.maxConsecutiveAttempts", "4"),
        (f"{STREAMING}minBatchesToRetain", "1"),
        (f"{STREAMING}disabledV2MicroBatchReaders", "org.apache.spark.sql.kafka010.KafkaSource"),
        (f"{STREAMING}kafka.useDeprecatedOffsetFetching", "true"),
    ],
)
def test_a_setting_that_breaks_the_guarantee_is_refused(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: is '{value}' in the Spark session") as refused:
        check_settings(LOCAL | {key: value}, OF_STREAMS)
    assert refused.value.way_out


def test_a_run_has_no_requirements_of_structured_streaming() -> None:
    check_settings(LOCAL | {f"{STREAMING}minBatchesToRetain": "1"})


def test_on_a_cluster_attempts_of_a_stage_must_be_set() -> None:
    with pytest.raises(ConfigError, match=r"maxConsecutiveAttempts: is not set in the Spark"):
        check_settings({"spark.master": "yarn"})
