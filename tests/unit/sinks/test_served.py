"""A fatal error is told as an exception, whatever confluent-kafka makes of it."""

from __future__ import annotations

import ctypes
import sys
import threading

import pytest
from confluent_kafka import KafkaError, KafkaException, cimpl

from oncely.core.ranges import TopicPartition
from oncely.errors import Unavailable
from oncely.kafka import transaction
from oncely.kafka.client import ErrorState, make
from oncely.kafka.sender import InstanceFenced, Producer, Sender, served
from oncely.kafka.transaction import Transaction

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


def test_a_log_line_behind_a_fatal_error_does_not_hide_it() -> None:
    """The line goes to the logger while the error is set: Python makes a SystemError of it."""
    producer = make(Producer, "127.0.0.1:1", {}, ErrorState("h:1"), **{"debug": "all"})
    producer.produce("t", b"what flush waits for")
    set_fatal = ctypes.CDLL(cimpl.__file__).rd_kafka_test_fatal_error
    set_fatal.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p]
    handle = ctypes.c_void_p.from_address(id(producer._client) + object.__basicsize__)
    set_fatal(handle.value, KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, b"by a test")
    with pytest.raises(KafkaException, match=r"OUT_OF_ORDER_SEQUENCE_NUMBER|_FATAL"):
        served(lambda: producer.flush(1.0))


CALL = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


class MethodDefinition(ctypes.Structure):
    """PyMethodDef."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("call", CALL),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


def test_an_exception_that_a_log_line_has_cleared_is_a_fatal_error() -> None:
    """A C function that returns NULL and sets no exception."""
    definition = MethodDefinition(b"flush", CALL(lambda *_: None), 0x4, b"")  # METH_NOARGS
    make_function = ctypes.pythonapi.PyCFunction_NewEx
    make_function.restype = ctypes.py_object
    make_function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    with pytest.raises(KafkaException) as caught:
        served(make_function(ctypes.addressof(definition), None, None))
    assert caught.value.args[0].code() == KafkaError._FATAL


def test_a_cause_is_found_behind_several_log_lines() -> None:
    def chained() -> None:
        first = SystemError("the first line")
        first.__cause__ = KafkaException(FENCED)
        raise SystemError("the second line") from first

    with pytest.raises(KafkaException) as caught:
        served(chained)
    assert caught.value.args == (FENCED,)


def test_other_exceptions_are_as_they_are() -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    def fail() -> None:
        raise SystemError("another extension's")

    with pytest.raises(KeyboardInterrupt):
        served(stop)
    with pytest.raises(SystemError, match="another extension's"):
        served(fail)
    assert served(lambda: 3) == 3


class Overdue:
    """A producer whose offsets are never answered, until the test's end."""

    def __init__(self) -> None:
        self.end = threading.Event()
        self.calls: list[str] = []

    def begin_transaction(self) -> None:
        pass

    def send_offsets_to_transaction(self, *_: object) -> None:
        assert self.end.wait(180)

    def abort_transaction(self, _: float) -> None:
        self.calls.append("abort_transaction")

    def unanswered(self) -> int:
        return 0

    def close(self) -> None:
        self.calls.append("close")


def test_a_call_that_overstays_its_timeout_is_left_with_its_instance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transaction, "_GRACE", 0.1)
    instance = Overdue()
    try:
        with Transaction(instance, 0.1, "h:1", "t") as writer:
            writer.begin()
            with pytest.raises(Unavailable, match="send_offsets_to_transaction: no answer"):
                writer.send_offsets({TopicPartition("t", 0): (1, "")}, None)
        assert "abort_transaction" not in instance.calls, "it would wait for the other call"
    finally:
        instance.end.set()


class Fenced:
    """A producer that was fenced; responses to two requests are under way."""

    def __init__(self, unanswered: int = 2) -> None:
        self.left, self.calls = unanswered, list[str]()

    def unanswered(self) -> int:
        return self.left

    def purge(self, *, in_flight: bool, blocking: bool) -> None:
        assert not in_flight, "their responses would arrive all the same"
        assert not blocking

    def flush(self, seconds: float) -> int:
        assert 0 < seconds <= transaction._ANSWERS
        self.left -= 1
        self.calls.append("flush")
        raise KafkaException(FENCED)

    def close(self) -> None:
        self.calls.append("close")


def test_an_instance_is_closed_when_what_it_has_sent_is_answered() -> None:
    instance = Fenced()
    with Transaction(instance, 1.0, "h:1", "t"):
        pass
    assert instance.calls == ["flush", "flush", "close"]


def test_an_instance_without_answers_is_closed_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transaction, "_ANSWERS", 0.05)
    instance = Fenced(1 << 60)
    with Transaction(instance, 1.0, "h:1", "t"):
        pass
    assert instance.calls[-1] == "close"
