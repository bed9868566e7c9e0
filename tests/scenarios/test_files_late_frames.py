"""A zombie driver whose EndTxn arrives late: held in a proxy that reads the API key of each frame.

What the plain producer does under such a fault is shown by the control in
``test_kafka_lost_frames``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oncely.core.claim import Fence
from oncely.errors import Fenced
from oncely.testing.readers import messages
from oncely.testing.servers.kafka import Broker
from tests import kafka_proxy as kp
from tests.filestools import (
    ENDS,
    IDS,
    PER_TASK,
    FilesPlace,
    make_place,
    open_sink,
    publish_all,
    stage,
    what,
)  # fmt: skip
from tests.kafka_proxy import KafkaProxy, proxied_broker
from tests.kafkatools import producing_by

Proxied = tuple[Broker, KafkaProxy]


@pytest.fixture(scope="module")
def proxied() -> Iterator[Proxied]:
    with proxied_broker() as both:
        yield both


@pytest.fixture
def place(proxied: Proxied, tmp_path: Path) -> FilesPlace:
    broker, proxy = proxied
    made = make_place(broker, tmp_path)
    return dataclasses.replace(made, bootstrap=broker._inner, brokers=proxy.bootstrap)


def whole(place: FilesPlace, batches: int = 1) -> None:
    shifted = [one + PER_TASK * n for n in range(batches) for one in IDS]
    assert place.ids() == sorted(shifted)
    assert len(place.world.records(place.world.rejects)) == batches
    assert place.world.shown() == {tp.partition: at * batches for tp, at in ENDS.items()}


@pytest.mark.parametrize("taken_over", [False, True], ids=["same run", "newer run"])
def test_the_end_of_an_earlier_transaction_comes_in_the_middle_of_the_next(
    place: FilesPlace, proxied: Proxied, taken_over: bool
) -> None:
    """It can neither commit nor abort what the next one holds, though both have one id.

    The client asks again when no answer comes, so the first batch is published; the request that
    was held is still on its way.
    """
    old = place.sink()
    fence = open_sink(old).fence
    with proxied[1].fault(kp.END_TXN, "hold request") as fault:
        publish_all(old, what(stage(old, fence)), fence)
        assert fault.met.is_set()
        whole(place)
        named = len(messages(place.bootstrap, place.world.manifest))
        released = []

        def late(producer: Any, timeout: float) -> None:
            """When all is with the broker but the commit."""
            producer.flush(timeout)
            if not released:
                released.append(True)
                fault.release()
                # What it could do, it has done: only what was committed before may be seen.
                assert len(messages(place.bootstrap, place.world.manifest)) == named
            producer.commit_transaction(timeout)

        hurt = place.sink(kafka=producing_by(commit_transaction=late))
        if taken_over:
            fence = open_sink(hurt).fence
        else:
            hurt.prepare()
        publish_all(hurt, what(stage(hurt, fence, 1, PER_TASK), PER_TASK), fence)
        assert released
    whole(place, 2)
    if taken_over:
        with pytest.raises(Fenced):
            publish_all(old, what(stage(old, Fence(place.name, 1))), Fence(place.name, 1))
    whole(place, 2)


@pytest.mark.parametrize("kind", ["lose request", "lose response", "hold request"])
@pytest.mark.parametrize("api", kp.NAMES, ids=list(kp.NAMES.values()))
@pytest.mark.long
def test_a_frame_of_a_publication_is_lost_or_late(
    place: FilesPlace, proxied: Proxied, api: int, kind: kp.Kind
) -> None:
    sink = place.sink()
    fence = open_sink(sink).fence
    staged = stage(sink, fence)
    with proxied[1].fault(api, kind) as fault:
        publish_all(sink, what(staged), fence)
        assert fault.met.is_set()
        if kind == "hold request":
            fault.release()
    whole(place)
    assert publish_all(sink, what(staged), fence)  # it has taken effect, and does not twice
    whole(place)
