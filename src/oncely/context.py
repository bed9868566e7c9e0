"""Values that travel with a record: the trace, and others that its producer has put into headers;
and a record as functions of users get it (:class:`Record`).

    from oncely import context

    with context.using({"traceparent": span, "user": "7"}):     # in the service that produces
        producer.produce("orders", order, headers=context.headers())

    @worker.handle("orders")
    def bill(batch, tx):
        for record in batch:                                    # `current` is the record's own
            producer.produce("mails", mail(record), headers=context.headers())

A context is a mapping of names to texts. In Kafka each value is a header of its name, as W3C Trace
Context has it for messages. A worker takes the headers ``traceparent``, ``tracestate`` and
``baggage``, and those that ``sink.context`` names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

TRACE = ("traceparent", "tracestate", "baggage")
"""The headers of W3C Trace Context and W3C Baggage."""

T = TypeVar("T")
Context = Mapping[str, str]
Header = tuple[str, bytes | None]

_NOTHING: Context = {}
_current: ContextVar[Callable[[], Context]] = ContextVar("context", default=lambda: _NOTHING)


def current() -> Context:
    """The context here: of the record or the batch that is handled, or of :func:`using`."""
    return _current.get()()


def headers(more: Iterable[Header] = ()) -> list[Header]:
    """The current context as headers of a message, before ``more``, whose names win."""
    others = list(more)
    taken = {name for name, _ in others}
    own = ((name, value) for name, value in current().items() if name not in taken)
    return [*((name, value.encode(errors="surrogateescape")) for name, value in own), *others]


@contextmanager
def using(values: Context | Callable[[], Context]) -> Iterator[None]:
    """Within the block the current context is this one, also in coroutines that it starts.

    Args:
        values: the context; or computes it, when it is asked for.
    """
    token = _current.set(values if callable(values) else lambda: values)
    try:
        yield
    finally:
        _current.reset(token)


def following(found: Iterable[T], context_of: Callable[[T], Context]) -> Iterator[T]:
    """Iterate; while a loop is at an item, its context is the current one.

    At the end of the loop the one before it is current again. After a ``break`` it stays until
    the end of the :func:`using` around: an iterator that is closed late, by the garbage collector,
    would put it back in a wrong place.
    """
    before = _current.get()
    for one in found:
        _current.set(partial(context_of, one))
        yield one
    _current.set(before)


def of_headers(found: Iterable[Header], names: Collection[str]) -> dict[str, str]:
    """The context that headers contain; of a name that occurs several times the last one counts.

    Bytes that are no UTF-8 travel unchanged, as :func:`headers` encodes them again.
    """
    return {
        name: value.decode(errors="surrogateescape")
        for name, value in found
        if value is not None and name in names
    }


@dataclass(frozen=True, eq=False)
class Record:
    """A record, as decoded and transformed.

    Attributes:
        topic, partition, offset: where it was read.
        row: the columns by name. With ``decode.format = "raw"``: ``key``, ``value`` (bytes or
            None) and ``timestamp``.
        headers: names and values, in order.
        deleted: it is a tombstone; its row has the columns of the key only.
    """

    topic: str
    partition: int
    offset: int
    row: Mapping[str, Any]
    headers: Sequence[tuple[str, bytes | None]]
    deleted: bool
    number: int = field(repr=False)
    """Its index in the chunk."""
    context: Context = field(default_factory=dict, repr=False)
    """The values that travel with it; current while a loop over the batch is here."""

    def __getitem__(self, column: str) -> Any:
        return self.row[column]

    @property
    def key(self) -> Any:
        """The column ``key``."""
        return self._column("key")

    @property
    def value(self) -> Any:
        """The column ``value``."""
        return self._column("value")

    @property
    def timestamp(self) -> Any:
        """The column ``timestamp``."""
        return self._column("timestamp")

    def _column(self, name: str) -> Any:
        if name not in self.row:
            raise AttributeError(
                f"the decoded record has no column {name!r}, but {', '.join(self.row)}"
            )
        return self.row[name]
