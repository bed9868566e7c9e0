"""A fatal error is told as an exception, whatever confluent-kafka makes of it."""

from __future__ import annotations

import ctypes
import sys

import pytest
from confluent_kafka import KafkaError, KafkaException

from oncely.clients.kafka.sender import InstanceFenced, Sender, served
from oncely.clients.kafka.transaction import Transaction

BARE = pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="this Python makes an exception of whatever is raised"
)
FENCED = KafkaError(KafkaError._FENCED, "an old epoch", fatal=True)


def bare(*_: object) -> int:
    """Raise a KafkaError itself, as C code can."""
    raise_it = ctypes.pythonapi.PyErr_Restore
    raise_it.argtypes = [ctypes.py_object, ctypes.py_object, ctypes.c_void_p]
    raise_it.restype = None
    for stolen in (KafkaError, FENCED):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(stolen))
    raise_it(KafkaError, FENCED, None)
    return 0


class Instance:
    """A producer that was fenced."""

    poll = flush = produce = staticmethod(bare)


@BARE
def test_a_bare_error_passes_whoever_names_a_class() -> None:
    with pytest.raises(KafkaException):  # or this would be a test of nothing
        served(lambda: _told(BaseException))


def _told(kind: type[BaseException]) -> str:
    try:
        bare()
    except kind:
        return "seen"
    return "nothing raised"


@BARE
def test_it_is_told_as_an_exception() -> None:
    with pytest.raises(KafkaException) as caught:
        served(bare)
    assert caught.value.args == (FENCED,)
    assert caught.value.__context__ is None


@BARE
def test_whoever_serves_events_tells_it_by_its_consequence() -> None:
    with pytest.raises(InstanceFenced):
        Sender(Instance(), 1.0, "h:1").send("t", [])
    with pytest.raises(InstanceFenced):
        Transaction(Instance(), 1.0, "h:1", "t").flush(1.0)


def test_other_exceptions_are_as_they_are() -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        served(stop)
    assert served(lambda: 3) == 3
