"""The ends of a topic while its partitions change their leaders."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from oncely.testing import readers


class Admin:
    """Gives the answers of a list in turn: offsets by partition, or codes of errors.

    An error's code stands for the whole topic, or for one partition.
    """

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def list_topics(self, topic: str, timeout: float) -> Any:
        answer = self.answers[0]
        known = SimpleNamespace(error=None, partitions=answer)
        if isinstance(answer, int):
            self.answers.pop(0)
            known = SimpleNamespace(error=KafkaError(answer), partitions={})
        return SimpleNamespace(topics={topic: known})

    def list_offsets(self, wanted: dict[Any, Any], isolation_level: object) -> Any:
        if not wanted:
            return {}
        answer = self.answers.pop(0)
        return {tp: self._of(answer[tp.partition]) for tp in wanted}

    def _of(self, offset: Any) -> Future[Any]:
        done: Future[Any] = Future()
        if isinstance(offset, KafkaError):
            done.set_exception(KafkaException(offset))
        else:
            done.set_result(SimpleNamespace(offset=offset))
        return done


def ends(monkeypatch: pytest.MonkeyPatch, *answers: Any) -> dict[int, int]:
    monkeypatch.setattr(readers, "_admin", lambda _: Admin(*answers))
    return readers.ends("nowhere:1", "t")


@pytest.mark.parametrize(
    "code",
    [
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.LEADER_NOT_AVAILABLE,
    ],
)
def test_a_partition_without_its_leader_is_asked_again(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ends(monkeypatch, {0: 1, 1: KafkaError(code)}, {0: 1, 1: 2}) == {0: 1, 1: 2}


def test_a_topic_without_leaders_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ends(monkeypatch, KafkaError.LEADER_NOT_AVAILABLE, {0: 7}) == {0: 7}


def test_a_topic_that_does_not_exist_has_no_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ends(monkeypatch, KafkaError.UNKNOWN_TOPIC_OR_PART) == {}


def test_other_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KafkaException, match="authorization"):
        ends(monkeypatch, {0: KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)}, {0: 1})
    with pytest.raises(KafkaException, match="authorization"):
        ends(monkeypatch, KafkaError.TOPIC_AUTHORIZATION_FAILED, {0: 1})
    monkeypatch.setattr(readers, "_ASK", -1.0)
    with pytest.raises(KafkaException):
        ends(monkeypatch, {0: KafkaError(KafkaError.NOT_LEADER_FOR_PARTITION)}, {0: 1})
