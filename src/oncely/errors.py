"""Everything Oncely raises, by what it means for the person who runs the pipeline.

OncelyError
├── WrongInput            change something, then start again          exit 2, never retried
│   ├── ConfigError       a key of the pipeline file
│   │   └── TopicMissing  no such topic, or one that this user may not see
│   ├── TableMismatch     the sink's table does not fit the rows
│   └── SourceMismatch    not the topic that the ledger was written for
├── Fenced                a newer run has taken over                  exit 3: do not restart
├── Stopped               a person must decide                        exit 1, never retried
│   ├── DataLost          records left the topic before they were read
│   └── TooManyRejects    the reject budget is spent
├── Unavailable           a server did not answer; ask again later    exit 1, retried
│   └── LedgerWentBack    rows and ledger are an older state; go on   exit 1, retried
└── InvariantViolation    a defect in Oncely: nothing was committed   exit 1, never retried
"""

from __future__ import annotations

from oncely.refused import Refused
from oncely.secrets import Secrets, redact


class OncelyError(Exception):
    """Base of everything raised on purpose. The text holds no secret of the scope around it."""

    exit_code = 1
    retryable = False

    def __init__(self, message: str, *, way_out: str = "") -> None:
        self.message = redact(message)
        self.way_out = redact(way_out)
        super().__init__(self.message)

    @property
    def details(self) -> list[str]:
        """Lines between the message and the way out."""
        return []

    def __str__(self) -> str:
        lines = [self.message, *(f"  {line}" for line in self.details)]
        return "\n".join([*lines, f"  way out: {self.way_out}"] if self.way_out else lines)

    def hide(self, secrets: Secrets) -> None:
        """Take the secrets out of the texts: the error was made where they were not known."""
        for name, value in self.__dict__.items():
            if isinstance(value, str):
                self.__dict__[name] = secrets.redact(value)
        self.args = tuple(secrets.redact(a) if isinstance(a, str) else a for a in self.args)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.__dict__.copy()))


def _rebuild(kind: type[OncelyError], state: dict[str, object]) -> OncelyError:
    """Unpickle an error that crossed from an executor without calling its constructor."""
    # An executor may not know every secret that the driver knows.
    shown = {k: redact(v) if isinstance(v, str) else v for k, v in state.items()}
    error = kind.__new__(kind)
    Exception.__init__(error, shown.get("message", ""))
    error.__dict__.update(shown)
    return error


class WrongInput(OncelyError):
    """The pipeline can't run as it is described; nothing was written."""

    exit_code = 2


class ConfigError(WrongInput):
    """A key of the pipeline file is unknown, missing or has a value that can't work."""

    def __init__(self, key: str, problem: str, *, way_out: str = "") -> None:
        self.key = key
        super().__init__(f"{key}: {problem}", way_out=way_out)


class TopicMissing(ConfigError):
    """A topic of ``source.topics`` is not there; to a user who may not Describe it, neither."""


class TableMismatch(WrongInput):
    """The sink's table is missing or its columns don't take the pipeline's rows."""


class SourceMismatch(WrongInput):
    """Cluster, topic id or end of the log contradict the ledger: another topic by the same name."""


class Fenced(OncelyError):
    """A newer run of this pipeline holds the ledger; this one may not write. Do not restart it."""

    exit_code = 3

    def __init__(self, pipeline: str, ours: int, theirs: int) -> None:
        self.pipeline, self.ours, self.theirs = pipeline, ours, theirs
        by = f"epoch {theirs}, a newer run"
        if theirs == ours:  # a failover had lost it, and the ledger has given it out again
            by = f"another run that was given epoch {theirs} after the database went back"
        super().__init__(
            f"pipeline {pipeline!r}: epoch {ours} is fenced by {by}",
            way_out="leave this one stopped; a supervisor must not restart it on exit code 3",
        )


class Stopped(OncelyError):
    """Going on needs a person's decision; a restart alone ends here again."""


class DataLost(Stopped):
    """The topic no longer holds records that the ledger expects (retention, deletion)."""


class TooManyRejects(Stopped):
    """More records were rejected than `sink.max_rejects` allows; that batch was not committed.

    Attributes:
        refused: reasons with their counts, and a sample of the records.
    """

    def __init__(self, message: str, *, way_out: str = "", refused: Refused | None = None) -> None:
        super().__init__(message, way_out=way_out)
        self.refused = refused or Refused()

    def hide(self, secrets: Secrets) -> None:
        """In the sample of records, too."""
        super().hide(secrets)
        self.refused = self.refused.without(secrets)

    @property
    def details(self) -> list[str]:
        """Reasons, and a few of the records."""
        return self.refused.lines()


class Unavailable(OncelyError):
    """A broker or database did not answer or ended the session. Safe to try again."""

    retryable = True


class LedgerWentBack(Unavailable):
    """The database is an older state of itself, rows and ledger alike.

    A failover to a replica that lagged behind, or a restore. What it has lost is read again from
    the position that it has now.
    """

    def __init__(self, pipeline: str, what: str) -> None:
        super().__init__(
            f"pipeline {pipeline!r}: {what}: the database went back to an older state, rows and"
            " ledger together (a failover to a replica that lagged behind, or a restore); going on"
            " from there",
            way_out="start again: the records that it has lost are read again",
        )


class InvariantViolation(OncelyError):
    """Something that can't be, was. Nothing was committed after it was seen."""


def check(condition: bool, message: str) -> None:
    """Assert an invariant also under ``python -O``.

    Raises:
        InvariantViolation: when ``condition`` is false.
    """
    if not condition:
        raise InvariantViolation(message)
