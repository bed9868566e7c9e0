"""Clients of librdkafka: lazy, with deadlines, errors classified, log lines routed.

librdkafka retries forever on an unreachable broker, a wrong password or an unknown authority, and
prints messages. Here its lines go to the logger ``oncely.kafka.source`` at level DEBUG, the wait
for an answer is bounded, and errors that no retry can fix are raised at once.

``oncely_native`` calls librdkafka itself, by the address of a client's ``rd_kafka_t``. It looks
librdkafka's functions up through confluent-kafka's own module, so they are those of the library
with which that module is linked, and calls them on the same instance: begin, offsets and commit are
calls of confluent-kafka (docs/decisions/0015).

An instance keeps its handle, ``rd_kafka_t *rk``, as the first field after its object header. This
is undocumented. So it is read only in versions in which it was tested; with any other version
records go through confluent-kafka's own methods, as without the package.
"""

from __future__ import annotations

import ctypes
import logging
import re
import time
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any, TypeVar

import confluent_kafka as ck
from confluent_kafka import KafkaError, KafkaException, cimpl
from confluent_kafka.admin import AdminClient

from oncely import extras as package
from oncely.core.ranges import TopicPartition
from oncely.errors import (
    ConfigError,
    Denied,
    InvariantViolation,
    OncelyError,
    Unavailable,
    UnreadableBatch,
    WrongInput,
)
from oncely.kafka import properties
from oncely.peers import protocol_at, refuses
from oncely.secrets import Secrets
from oncely.threads import tries

K = TypeVar("K", bound=Hashable)

_logger = logging.getLogger("oncely.kafka.source")
_GRACE = 2.0  # librdkafka ends a request by itself; this is for a request that it does not end
# librdkafka opens its second connection, by the broker's own address, no sooner than half of this
# after the first one. With its default of 100 each new client waits for 40 ms more.
_RECONNECT_MS = 20
_CREATING = re.compile(r"^Failed to create [\w ]+: ")
_AT_LEAST = re.compile(r"`(\S+)` must be >= `(\S+)`(?: \+ (\d+))?")
_MESSAGE = 1_000_000  # bytes, librdkafka's default of message.max.bytes
_PATIENCE = 1.0  # seconds without an answer to the first request, before the server is looked at
_REFUSED = 1.5  # seconds, after which a command that starts does not wait for a broker's start
# A client caches leaders for minutes, and these errors do not make it refresh the cache. They do
# not end the client: librdkafka may abort the process when one is closed that looks for a leader.
_LEADERLESS = (
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError._NOENT,
)
_LOST = (KafkaError._TIMED_OUT, KafkaError._TRANSPORT)
_PASSING = (
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.OFFSET_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    *_LEADERLESS,
)
_DENIED = (
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
)
_FINAL = (
    KafkaError.INVALID_CONFIG,
    KafkaError.INVALID_GROUP_ID,
    KafkaError.INVALID_PARTITIONS,
    KafkaError.POLICY_VIOLATION,
    KafkaError.TOPIC_EXCEPTION,
    KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT,
    KafkaError.UNSUPPORTED_SASL_MECHANISM,
    KafkaError.UNSUPPORTED_VERSION,
    KafkaError._UNSUPPORTED_FEATURE,
)
"""Answers that another attempt gets, too."""

SILENCE = 30.0
"""Seconds without a record or an end of a partition after which a read fails."""

OFFSETS_DELAYED = (
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    KafkaError.UNSTABLE_OFFSET_COMMIT,
)
"""The group's coordinator moves or starts, or an offset is pending in a transaction."""
_OFFSETS_AGAIN = 0.05  # seconds
_LOGIN = (KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED)
_UNTRUSTED = (
    "certificate verify failed",
    "certificate required",
    "bad certificate",
    "handshake failure",
    "unknown ca",
)


_starts: ContextVar[bool] = ContextVar("starts", default=False)


@contextmanager
def at_start() -> Iterator[None]:
    """Where a command begins: it does not wait for brokers that refuse every connection.

    A run that is under way waits for their restart.
    """
    token = _starts.set(True)
    try:
        yield
    finally:
        _starts.reset(token)


class LogRoute:
    """Receives librdkafka's log lines. Consecutive repetitions of a line are dropped."""

    def __init__(self, secrets: Secrets) -> None:
        self._last, self._secrets = "", secrets

    def log(self, _level: int, template: str, *parts: object) -> None:
        """Log at DEBUG: relevant errors are also returned by a call."""
        line = self._secrets.redact(template % parts if parts else template)
        if line != self._last:
            self._last = line
            _logger.debug("%s", line)


class ErrorState:
    """The last error of a client, and the error that no retry can fix."""

    def __init__(self, brokers: str) -> None:
        self._brokers = brokers
        self.newest = ""
        self.final: OncelyError | None = None
        self.secrets = Secrets()

    def __call__(self, error: KafkaError) -> None:
        """The client's ``error_cb``."""
        if error.code() != KafkaError._ALL_BROKERS_DOWN:  # contains no reason
            self.newest = self.secrets.redact(error.str())
        if error.code() in _LOGIN or _untrusted(error):
            self.final = classify_error(error, "connect", self._brokers)
            self.final.hide(self.secrets)


class Handle:
    """A client of librdkafka that ends when it is closed, or, if a call is running, with that call.

    librdkafka's threads and connections end with the last reference to a client. A bound method, or
    a frame in the traceback of an error that was kept, is one, and a reference cycle keeps it until
    the next full collection of garbage. Such references are to the handle.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, name)

    def _call(self, name: str, *args: Any, **more: Any) -> Any:
        return getattr(self._opened(), name)(*args, **more)

    def _opened(self) -> Any:
        if self._client is None:
            raise KafkaException(KafkaError(KafkaError._STATE, "the client is closed"))
        return self._client

    def holds(self, client: object) -> bool:
        """True if it is this client."""
        return self._client is client

    def close(self) -> None:
        """End the client; nothing is flushed."""
        self._client = None


class KafkaAdmin:
    """An admin client with bounded waits; refreshes stale metadata, reconnects after no answer.

    Safe for several threads.
    """

    def __init__(self, brokers: str, kafka: Mapping[str, object], timeout: float) -> None:
        self._brokers, self._kafka, self._timeout = brokers, kafka, timeout
        self._error_state = ErrorState(brokers)
        self._client: AdminClient | None = self._new()  # reports invalid settings at once
        self._connected: AdminClient | None = None

    def close(self) -> None:
        """Close the client; the next request creates a new one."""
        self._client = self._connected = None

    def ask(
        self, doing: str, request: Callable[[Any, float], Mapping[K, Future[Any]]]
    ) -> dict[K, Any]:
        """Send one request and wait for all of its results; a result may be an exception.

        Raises:
            ConfigError: the broker refuses the login, or is not trusted.
            Unavailable: no answer within the timeout.
        """
        client = Handle(self._shared())
        client.poll(0)  # earlier errors do not belong to this request
        self._error_state.newest, self._error_state.final = "", None
        answers: dict[K, Any] = {}
        try:
            self._connect(doing, client)
            futures = request(client, self._timeout)
            self._await(doing, client, list(futures.values()))
            answers = {key: one.exception() or one.result() for key, one in futures.items()}
            if any(_is_one_of(_LEADERLESS, answer) for answer in answers.values()):
                with suppress(KafkaException):  # the next request fails, too, and says why
                    client.list_topics(timeout=self._timeout)  # a topic asked by name is created
        except KafkaException as error:
            raise classify_error(error.args[0], doing, self._brokers) from error
        finally:
            lost = not answers or any(_is_one_of(_LOST, answer) for answer in answers.values())
            if lost and client.holds(self._client):  # else another thread has made a new one
                self.close()
            client.close()
        return answers

    def _shared(self) -> AdminClient:
        client = self._client
        if client is None:
            client = self._client = self._new()
        return client

    def _new(self) -> AdminClient:
        client: AdminClient = make(AdminClient, self._brokers, self._kafka, self._error_state)
        return client

    def _connect(self, doing: str, client: Handle) -> None:
        """Before the first request, wait until the brokers' own addresses are known.

        Then the connection by the configured address is closed, and librdkafka repeats the requests
        that were lost with it only after one to three seconds. This request waits for the metadata
        that it needs, and is not lost.
        """
        if not client.holds(self._connected):
            answer = client.describe_cluster(request_timeout=self._timeout)
            looks = [(_PATIENCE, partial(refuse_strangers, self._brokers, self._kafka))]
            if _starts.get():
                looks.append((_REFUSED, partial(self._refuse_absent, doing)))
            self._await(doing, client, [answer], looks)
            if error := answer.exception():
                raise self.sorted(error, doing)
            self._connected = client._client

    def _await(
        self,
        doing: str,
        client: Handle,
        futures: list[Future[Any]],
        looks: Sequence[tuple[float, Callable[[], None]]] = (),
    ) -> None:
        """Wait, and serve the client's callbacks meanwhile: they run inside ``poll`` only.

        After the seconds of each of ``looks`` its function is called, which raises to end the wait.
        """
        begun, left = time.monotonic(), list(looks)
        deadline = begun + self._timeout + _GRACE
        pending = set(futures)
        while pending:
            pending = wait(pending, timeout=0.05).not_done
            client.poll(0)
            if pending and self._error_state.final:
                raise self._error_state.final
            if pending and left and time.monotonic() > begun + left[0][0]:
                left.pop(0)[1]()
            if time.monotonic() > deadline:
                raise unanswered(doing, self._brokers, self._error_state.newest)

    def _refuse_absent(self, doing: str) -> None:
        """Raise :class:`Unavailable` if every address refuses a connection."""
        if all(refuses(*address) for address in _addresses(self._brokers)):
            raise unanswered(doing, self._brokers, self._error_state.newest)

    def one(
        self,
        doing: str,
        request: Callable[[Any, float], Mapping[K, Future[Any]]],
        errors_in: Callable[[Any], Iterable[KafkaError]] = lambda _: (),
    ) -> dict[K, Any]:
        """Like :meth:`ask`, for requests whose results must all be good.

        A partition that was just created has no leader for a moment, and a group no coordinator
        after a broker's restart: the request is repeated after such a result.

        Args:
            doing: the operation, for messages.
            request: sends it, with a timeout in seconds.
            errors_in: returns the errors inside a good result, such as those of single partitions.
        """
        for _ in tries(self._timeout):
            answers = self.ask(doing, request)
            bad = [a for a in answers.values() if isinstance(a, Exception)]
            if not bad:
                bad = [KafkaException(e) for a in answers.values() for e in errors_in(a)]
            if not bad:
                return answers
            lasting = [error for error in bad if not _is_one_of(_PASSING, error)]
            if lasting:
                break
        raise self.sorted((lasting or bad)[0], doing)

    def sorted(self, error: Exception, doing: str) -> OncelyError:
        """The error as an Oncely error, with the reason that the client has reported meanwhile."""
        if not isinstance(error, KafkaException):
            return InvariantViolation(f"{doing}: {error!r}")
        code = error.args[0].code()
        if code in (KafkaError._TIMED_OUT, KafkaError._TRANSPORT):
            return self._error_state.final or unanswered(
                doing, self._brokers, self._error_state.newest
            )
        return classify_error(error.args[0], doing, self._brokers)


def make(
    kind: Callable[..., Any],
    brokers: str,
    kafka: Mapping[str, object],
    error_state: ErrorState,
    **own: Any,
) -> Any:
    """Create a client of librdkafka, with its log lines and errors routed.

    Raises:
        ConfigError: librdkafka does not accept a value; the error names ``source.kafka``, or the
            key in it.
    """
    config = {
        "socket.timeout.ms": 10_000,
        "reconnect.backoff.ms": _RECONNECT_MS,
        **properties.librdkafka(kafka),
        **own,
        "bootstrap.servers": brokers,
        "error_cb": error_state,
    }
    error_state.secrets = properties.secrets(kafka)
    try:
        return kind(config, logger=LogRoute(error_state.secrets))
    except KafkaException as error:
        raise _refused(error_state.secrets.redact(error.args[0].str()), config) from None


def committed_offsets(
    consumer: Any, partitions: Iterable[TopicPartition], timeout: float, doing: str, brokers: str
) -> list[Any]:
    """The committed offsets of a consumer's group, as confluent-kafka's ``TopicPartition``; of
    those without any the offset is negative.

    For a consumer alone: librdkafka 2.16 ends the process by a signal if an admin client gets the
    error that the group's coordinator has moved, or was created just now
    (``rd_kafka_handle_OffsetFetch``).

    Args:
        consumer: with ``group.id``. With ``isolation.level`` read_committed it waits for offsets
            that are pending in a transaction (KIP-447).
        timeout: seconds to wait.
        doing: for errors.

    Raises:
        ConfigError: the broker refuses the client.
        Unavailable: a transaction stayed open, or no answer.
    """
    wanted = [ck.TopicPartition(*tp) for tp in partitions]
    bad = None
    for left in tries(timeout, _OFFSETS_AGAIN):
        try:
            found: list[Any] = consumer.committed(wanted, left)
            bad = next((one.error for one in found if one.error), None)
        except KafkaException as error:
            bad = error.args[0]
        if bad is None:
            return found
        if bad.code() not in OFFSETS_DELAYED:
            break
    raise classify_error(bad, doing, brokers)


def refuse_strangers(brokers: str, kafka: Mapping[str, object]) -> None:
    """Refuse addresses at which no broker answers in the client's protocol, but something else.

    Raises:
        ConfigError: it names what answers.
    """
    protocol = str(kafka.get("security.protocol", "plaintext")).upper()
    spoken = sorted({protocol_at(*one) for one in _addresses(brokers)} - {""})
    if spoken and ("TLS" if protocol.endswith("SSL") else "Kafka without TLS") not in spoken:
        raise ConfigError(
            "source.brokers",
            f"{brokers} speaks {' and '.join(spoken)}, and security.protocol is {protocol}",
            way_out="name host and port of Kafka brokers; in [source.kafka] security.protocol is"
            " SSL or SASL_SSL for a port with TLS, else PLAINTEXT or SASL_PLAINTEXT",
        )


def _addresses(brokers: str) -> list[tuple[str, str]]:
    """Host and port of each broker."""
    parts = (one.strip().rpartition(":") for one in brokers.split(","))
    return [(host.strip("[]"), port) for host, _, port in parts]


def stay_connected(client: Any, topic: str, seconds: float) -> None:
    """Wait until a consumer or producer has a permanent connection.

    The first connection, by the configured address, is closed when the brokers' own addresses are
    known; a response on it has the broker id -1. Without another connection librdkafka looks for
    leaders and coordinators not when it is connected, but after half a second or more.

    Raises:
        KafkaException: no answer within the timeout.
    """
    deadline = time.monotonic() + seconds
    while client.list_topics(topic, timeout=seconds).orig_broker_id < 0:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            return  # only time is lost


def _untrusted(error: KafkaError) -> bool:
    """A certificate is missing or wrong, on either side; the broker reports it by a TLS alert."""
    tls = error.code() in (KafkaError._SSL, KafkaError._TRANSPORT)
    return tls and any(words in error.str() for words in _UNTRUSTED)


def _is_one_of(codes: tuple[int, ...], answer: object) -> bool:
    return isinstance(answer, KafkaException) and answer.args[0].code() in codes


def _refused(text: str, config: Mapping[str, Any]) -> ConfigError:
    key, way_out = "", "correct the value; librdkafka's CONFIGURATION.md lists the allowed values"
    if "GSSAPI" in text:
        way_out = (
            "the wheel of confluent-kafka comes without Kerberos: install librdkafka with "
            "libsasl2, then pip install --no-binary confluent-kafka confluent-kafka"
        )
    elif bound := _AT_LEAST.search(text):
        key = f".{bound[1]}"
        least = int(config.get(bound[2], _MESSAGE)) + int(bound[3] or 0)
        way_out = f"set {bound[1]} to {least} or more, or remove it"
    reason = _CREATING.sub("", text)
    return ConfigError(f"source.kafka{key}", f"librdkafka refuses it: {reason}", way_out=way_out)


def classify_error(error: KafkaError, doing: str, brokers: str) -> OncelyError:
    """An error of librdkafka or of the broker, by its consequence."""
    if error.code() in _LOGIN:
        return ConfigError(
            "source.kafka",
            f"{brokers} refuses the login: {error.str()}",
            way_out="check sasl.mechanism, sasl.username and sasl.password",
        )
    if _untrusted(error):
        return ConfigError(
            "source.kafka",
            f"no TLS trust between this client and {brokers}: {error.str()}",
            way_out="ssl.ca.location must contain the authority that signed the broker's "
            "certificate; ssl.certificate.location and ssl.key.location are this client's own",
        )
    if error.code() in _DENIED:
        return Denied(
            "source.topics",
            f"{doing}: {brokers} denies it: {error.str()}",
            way_out="grant this user Describe and Read on the topics of the source, and on those of"
            " the sink what is granted by the kafka-acls commands of `oncely plan --ddl`",
        )
    text = f"{doing}: {brokers}: {error.str()}"
    if error.code() in _FINAL:
        return WrongInput(
            text, way_out="another attempt gets the same answer: change what it names"
        )
    return Unavailable(text)


def largest_fetch(kafka: Mapping[str, object]) -> int:
    """The size in bytes of a response, and of a decompressed batch of zstd, that librdkafka
    accepts."""
    return int(str(kafka.get("receive.message.max.bytes", 100_000_000)))


def unreadable(tp: TopicPartition, offset: int, kafka: Mapping[str, object]) -> UnreadableBatch:
    """librdkafka can't decompress the batch that begins at an offset; it repeats the attempt for
    ever."""
    return UnreadableBatch(tp.topic, tp.partition, offset, largest_fetch(kafka))


def unanswered(doing: str, brokers: str, reason: str) -> Unavailable:
    """No answer in time, with the last error of the client if it had one."""
    return Unavailable(
        f"{doing}: no answer from {brokers}" + (f": {reason}" if reason else ""),
        way_out="check that the broker is running, and source.brokers",
    )


def members(admin: KafkaAdmin, group: str) -> Collection[Any]:
    """The members of a group, as described; none if there is no such group.

    Raises:
        ConfigError: ``worker.group``, the broker denies it; or it refuses the client.
        Unavailable: no answer.
    """
    doing = f"describe group {group!r}"
    answer = admin.ask(
        doing, lambda client, wait: client.describe_consumer_groups([group], request_timeout=wait)
    )[group]
    if not isinstance(answer, Exception):
        found: Collection[Any] = answer.members
        return found
    code = answer.args[0].code() if isinstance(answer, KafkaException) else None
    if code == KafkaError.GROUP_ID_NOT_FOUND:
        return ()
    if code == KafkaError.GROUP_AUTHORIZATION_FAILED:
        raise ConfigError(
            "worker.group",
            f"no right to describe group {group!r}: {answer}",
            way_out="grant this user Describe on the group",
        ) from answer
    raise admin.sorted(answer, doing) from answer


# -- the handle of an instance --------------------------------------------------------------

_direct_logger = logging.getLogger(__name__)

TRIED = frozenset({"2.16.0"})
"""Tested versions of confluent-kafka, and of the librdkafka in it."""

_HANDLE = object.__basicsize__  # after PyObject_HEAD


def handle_of(client: ck.Producer | ck.Consumer) -> int:
    """The address of a client's ``rd_kafka_t``, which is valid until the client is closed.

    Raises:
        KafkaException: the client is closed.
        TypeError: it is another object.
    """
    if not isinstance(client, cimpl.Producer | cimpl.Consumer):
        raise TypeError(f"{type(client).__name__} is not a client of librdkafka")
    handle = ctypes.c_void_p.from_address(id(client) + _HANDLE).value
    if not handle:
        raise KafkaException(KafkaError(KafkaError._STATE, "the client is closed"))
    return handle


def native() -> Any | None:
    """The package ``oncely_native``; None without it, or if it can't call librdkafka."""
    module = package.native()
    return module if module is not None and _callable() else None


@lru_cache(maxsize=1)
def _callable() -> bool:
    """True if librdkafka may be called directly; if not, the reason is logged."""
    if reason := _obstacle():
        _direct_logger.warning(
            "records are passed to librdkafka separately, which is slower: %s", reason
        )
    return not reason


def _obstacle() -> str:
    name, number = ck.libversion()
    for version, what in ((ck.__version__, "confluent-kafka"), (name, "librdkafka")):
        if version not in TRIED:
            return f"{what} {version} was not tested; {', '.join(sorted(TRIED))} was"
    try:
        found = ctypes.CDLL(cimpl.__file__).rd_kafka_version()
    except (OSError, AttributeError) as error:
        return f"it can't be called directly: {error}"
    return "" if found == number else "confluent-kafka uses another copy of it"
