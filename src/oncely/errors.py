"""The errors of Oncely, classified by the reaction that they require of the operator; the
summary of rejects that one of them has.

OncelyError
├── WrongInput            change something, then start again           exit 2, never retried
│   ├── ConfigError       a key of the pipeline file
│   │   └── TopicMissing  no such topic, or no permission to describe it
│   ├── TableMismatch     the sink's table does not fit the rows
│   ├── SourceMismatch    not the topic that the ledger was written for
│   ├── NewerFormat       a newer version of Oncely has written the stored data
│   └── OlderFormat       a version of Oncely before 0.1.0 has written the stored data
├── Fenced                a newer run has taken over                   exit 3: do not restart
├── Stopped               needs an operator's decision                 exit 1, never retried
│   ├── DataLost          records were deleted from the topic before they were read
│   └── TooManyRejects    the reject budget is spent
├── SchemaChanged         records have a newer schema than the columns exit 1, begun again by a run
├── Unavailable           a server did not answer; try again later     exit 1, retried
│   ├── GivenUp           a commit that nobody waits for
│   └── LedgerWentBack    rows and ledger were restored to an old state
└── InvariantViolation    a defect in Oncely: nothing was committed    exit 1, never retried
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from oncely.secrets import Secrets, redact
from oncely.wording import json_line


class OncelyError(Exception):
    """Base class of all errors that Oncely raises. The texts contain no secret of the current
    scope.

    Attributes:
        key: the key of the pipeline file that it is about; empty if it is about none.
        problem: what is wrong, without the key.
        way_out: the recommended action; may be empty.
    """

    exit_code = 1
    retryable = False

    def __init__(self, problem: str, *, key: str = "", way_out: str = "") -> None:
        self.key, self.problem, self.way_out = key, redact(problem), redact(way_out)
        super().__init__(self.message)

    @property
    def message(self) -> str:
        """The problem, with the key."""
        return f"{self.key}: {self.problem}" if self.key else self.problem

    @property
    def details(self) -> list[str]:
        """Lines between the message and ``way_out``."""
        return []

    def __str__(self) -> str:
        lines = [self.message, *(f"  {line}" for line in self.details)]
        return "\n".join([*lines, f"  way out: {self.way_out}"] if self.way_out else lines)

    def hide(self, secrets: Secrets) -> None:
        """Redact secrets in the texts: the error was created where they were not known."""
        for name, value in self.__dict__.items():
            if isinstance(value, str):
                self.__dict__[name] = secrets.redact(value)
        self.args = tuple(secrets.redact(a) if isinstance(a, str) else a for a in self.args)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.__dict__.copy()))


def _rebuild(kind: type[OncelyError], state: dict[str, object]) -> OncelyError:
    """Unpickle an error that crossed from an executor without calling its constructor."""
    # An executor may not have every secret that the driver has.
    error = kind.__new__(kind)
    error.__dict__.update(
        {name: redact(one) if isinstance(one, str) else one for name, one in state.items()}
    )
    Exception.__init__(error, error.message)
    return error


class Interrupted(BaseException):
    """A signal arrived while no batch was running: leave, with cleanup on the way."""


class WrongInput(OncelyError):
    """The pipeline cannot run as configured; nothing was written."""

    exit_code = 2


class ConfigError(WrongInput):
    """A key of the pipeline file is unknown, missing or has an invalid value."""

    def __init__(self, key: str, problem: str, *, way_out: str = "") -> None:
        super().__init__(problem, key=key, way_out=way_out)


class Denied(ConfigError):
    """The broker denies a request for the lack of a right."""


class TopicMissing(ConfigError):
    """A topic of ``source.topics`` does not exist, or the user may not Describe it."""


class UnreadableBatch(ConfigError):
    """The records of a partition from an offset on can't be decompressed.

    Attributes:
        topic, partition, offset: the first of these records.
    """

    def __init__(self, topic: str, partition: int, offset: int, bound: int) -> None:
        self.topic, self.partition, self.offset = topic, partition, offset
        super().__init__(
            "source.kafka.receive.message.max.bytes",
            f"{topic}-{partition}: the records from offset {offset} on can't be decompressed: they"
            f" are broken, or larger than {bound:,} bytes",
            way_out="set it to the size of these records, 2147483647 at most, for which memory must"
            f" suffice; or pass over them: oncely offsets reset FILE --topic {topic}:{partition}"
            " --to-offset N",
        )


class TableMismatch(WrongInput):
    """The sink's table is missing or its columns do not accept the pipeline's rows."""


class SourceMismatch(WrongInput):
    """Cluster, topic id or end of the log contradict the ledger: another topic of the same name."""


class NewerFormat(WrongInput):
    """Stored data has a format that only a newer version of Oncely knows; nothing was written."""

    def __init__(self, what: str, found: object, known: int) -> None:
        super().__init__(
            f"{what} has format {found}, and this version of Oncely knows formats up to {known}:"
            " a newer version has written it; nothing was written now",
            way_out="upgrade Oncely here, at least to the version that has run this pipeline last"
            " (docs/runbook.md)",
        )


class OlderFormat(WrongInput):
    """Stored data has a format from before 0.1.0, which is not read; nothing was written."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} has the format of a version of Oncely before 0.1.0, which this version does"
            " not read; nothing was written now",
            way_out="begin again, and set the positions of the old one with `oncely offsets reset`"
            ' (docs/runbook.md, "State of versions before 0.1.0")',
        )


class Fenced(OncelyError):
    """A newer run of this pipeline holds the ledger; this one may not write. Do not restart it.

    Attributes:
        lost: the partitions that were taken from a run that holds some of them; it continues with
            its others. Empty: all.
    """

    exit_code = 3

    def __init__(
        self, pipeline: str, ours: int, theirs: int, lost: Collection[object] = ()
    ) -> None:
        self.pipeline, self.ours, self.theirs = pipeline, ours, theirs
        self.lost = frozenset(lost)
        by = f"epoch {theirs}, a newer run"
        if theirs == ours:  # a failover had lost the epoch, and the ledger has given it out again
            by = f"another run that was given epoch {theirs} after the database went back"
        where = f" at {', '.join(map(str, sorted(lost, key=str)))}" if lost else ""
        super().__init__(
            f"pipeline {pipeline!r}: epoch {ours} is fenced{where} by {by}",
            way_out="leave this one stopped; a supervisor must not restart it on exit code 3."
            " Started with --on-fenced wait it stands by instead",
        )


class InstanceTaken(Fenced):
    """A newer process has joined the group as the same static member (KIP-345)."""

    def __init__(self, group: str, instance: str) -> None:
        super().__init__(group, 0, 0)
        self.problem = f"another process has joined group {group!r} as {instance!r}"
        self.args = (self.message,)


class Stopped(OncelyError):
    """Continuing needs an operator's decision; a restart alone fails again."""


class DataLost(Stopped):
    """The topic no longer holds records that the ledger expects (retention, deletion)."""


class TooManyRejects(Stopped):
    """More records were rejected than `sink.max_rejects` allows; that batch was not committed.

    Attributes:
        refused: reasons with their counts, and a sample of the records.
    """

    def __init__(
        self, problem: str, *, way_out: str = "", refused: RejectSummary | None = None
    ) -> None:
        super().__init__(problem, key="sink.max_rejects", way_out=way_out)
        self.refused = refused or RejectSummary()

    def hide(self, secrets: Secrets) -> None:
        """Redact the sample of records, too."""
        super().hide(secrets)
        self.refused = self.refused.without(secrets)

    @property
    def details(self) -> list[str]:
        """The reasons, and some of the records."""
        return self.refused.lines()


class SchemaChanged(OncelyError):
    """Records have a newer schema than that from which the columns were derived; none of them was
    written. A run begins again, with the checks of a start and the columns of the newest schema."""


class Unavailable(OncelyError):
    """A broker or database did not answer or ended the session. Safe to try again."""

    retryable = True


class TooLong(Unavailable):
    """A time limit of the database has ended a commit: a smaller one may pass."""


class GivenUp(Unavailable):
    """Nobody waits for the commit any more: a stop, or its partitions change hands."""


class LedgerWentBack(Unavailable):
    """The database was put back to an older state, rows and ledger alike.

    The cause is a failover to a replica that lagged behind, or a restore. Records that it has lost
    are read again from its present position.
    """

    def __init__(self, pipeline: str, what: str) -> None:
        super().__init__(
            f"pipeline {pipeline!r}: {what}: the database was put back to an older state, rows and"
            " ledger together (a failover to a replica that lagged behind, or a restore); "
            "continuing from there",
            way_out="start again: the records that it has lost are read again",
        )


class InvariantViolation(OncelyError):
    """An impossible state was observed. Nothing was committed after that."""


def check(condition: bool, message: str) -> None:
    """Assert an invariant also under ``python -O``.

    Raises:
        InvariantViolation: when ``condition`` is false.
    """
    if not condition:
        raise InvariantViolation(message)


# -- the summary of rejects -----------------------------------------------------------------

SAMPLE = 20
"""Records in a sample, at most."""

_GROUPS = 10
_EXAMPLES = 5  # records in the text of an error; the file contains the whole sample
KEPT = 16_384
"""Maximum bytes of a value that are sent to the driver."""
_REASON = 300  # characters
_VALUE = 200
# Parts that differ between records with the same mistake: quoted values, numbers, and the values in
# PostgreSQL's details: "Key (email)=(a@b.example) already exists", "Failing row contains (1, a)". A
# reason may be cut before the second quote.
_VARIABLE = re.compile(
    r"(?<!\w)'[^']*(?:'|$)|\"[^\"]*(?:\"|$)|(?:(?<==)|(?<=contains ))\(.*|\d+(?:\.\d+)?", re.DOTALL
)


class RejectSample(NamedTuple):
    """A rejected record and the reason. The value is None if it is unknown, or for a tombstone."""

    topic: str
    partition: int
    offset: int
    stage: str
    reason: str
    value: bytes | None

    def without(self, secrets: Secrets) -> RejectSample:
        """A copy with reason and value redacted."""
        text = "" if self.value is None else self.value.decode(errors="replace")
        clean = secrets.redact(text)
        value = self.value if clean == text else clean.encode()
        return self._replace(reason=secrets.redact(self.reason), value=value)

    def shown(self) -> dict[str, object]:
        """The record as written to the file: shortened, without secrets."""
        value = None if self.value is None else _short(self.value.decode(errors="replace"), _VALUE)
        place = {"topic": self.topic, "partition": self.partition, "offset": self.offset}
        return {
            **place,
            "stage": self.stage,
            "reason": _short(self.reason, _REASON),
            "value": value,
        }

    def __str__(self) -> str:
        shown = self.shown()
        value = "no value" if shown["value"] is None else f"value {shown['value']}"
        return f"{self.topic}-{self.partition} offset {self.offset}: {shown['reason']}; {value}"


@dataclass(frozen=True)
class RejectSummary:
    """The rejects of a pipeline that has exceeded its reject budget.

    None of them was written, so this is the only place where they are visible. Executors send the
    sample unchanged; it is shortened when it is shown, after secrets were redacted: an executor
    does not have every secret, and a truncated secret would not be recognised.

    Attributes:
        reasons: the most frequent reasons, each in the words of its first record, with the number
            of records. Reasons that differ only in numbers and quoted values are counted together.
        records: a sample, with records of every reason.
    """

    reasons: tuple[tuple[str, int], ...] = ()
    records: tuple[RejectSample, ...] = ()

    @classmethod
    def of(
        cls,
        reasons: Sequence[str],
        records: Callable[[Sequence[int]], Iterable[RejectSample]],
    ) -> RejectSummary:
        """Count reasons and choose a sample.

        Args:
            reasons: the reason of each reject.
            records: returns the records at some indices.
        """
        groups = by_reason(reasons)
        frequent = tuple((reasons[own[0]], len(own)) for own in groups[:_GROUPS])
        return cls(frequent, tuple(records(_sample(groups))))

    def without(self, secrets: Secrets) -> RejectSummary:
        """A copy with reasons and values redacted."""
        reasons = tuple((secrets.redact(reason), count) for reason, count in self.reasons)
        return RejectSummary(reasons, tuple(one.without(secrets) for one in self.records))

    def lines(self) -> list[str]:
        """Lines for a text: reasons with their counts, then examples."""
        found = [f"{count:,} x {_short(reason, _REASON)}" for reason, count in self.reasons]
        return [*found, *(f"for example {one}" for one in self.records[:_EXAMPLES])]

    def as_json_lines(self) -> Iterator[str]:
        """Lines for a file: one for each reason, then one for each record of the sample."""
        for reason, count in self.reasons:
            yield json_line({"reason": _short(reason, _REASON), "records": count})
        for one in self.records:
            yield json_line(one.shown())


def masked(reason: str) -> str:
    """The reason without quoted values and numbers, which may be parts of the record."""
    return _VARIABLE.sub("…", reason)


def by_reason(reasons: Sequence[str]) -> list[list[int]]:
    """Indices by reason, ignoring numbers and quoted values; the largest group first."""
    groups: dict[str, list[int]] = {}
    for at, reason in enumerate(reasons):
        groups.setdefault(masked(reason), []).append(at)
    return sorted(groups.values(), key=len, reverse=True)


def _sample(groups: Sequence[Sequence[int]]) -> list[int]:
    """Indices of at most :data:`SAMPLE` records, taken from the groups in turn."""
    longest = max(map(len, groups), default=0)
    dealt = [own[turn] for turn in range(min(longest, SAMPLE)) for own in groups if turn < len(own)]
    return dealt[:SAMPLE]


def _short(text: str, length: int) -> str:
    clean = redact(text)
    return clean if len(clean) <= length else f"{clean[:length]}… ({len(clean):,} characters)"
