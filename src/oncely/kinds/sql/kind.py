"""SQL databases as a kind of destination."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncely.errors import ConfigError, Unavailable
from oncely.extras import require
from oncely.kinds.kind import RESTORED, Kind, Parts, Proposed, Texts, again
from oncely.kinds.sql.settings import SqlSinkSettings
from oncely.stores.sql.connection import LONGEST_NAME

if TYPE_CHECKING:
    from oncely.kinds.destination import Destination
    from oncely.kinds.trial import Trial


def _destination(parts: Parts) -> Destination:
    from oncely.kinds.sql.destination import SqlDestination

    return SqlDestination(parts)


def _require(sink: SqlSinkSettings) -> None:
    if sink.dialect != "sqlite":
        require("sql", "sink.url", "PostgreSQL")


def _unchecked(parts: Parts, beside: bool) -> str:
    del beside
    if not parts.settings.on_cluster:
        return ""
    return (
        "not checked: variables and files from which libpq takes passwords and certificates"
        " (PGPASSWORD, ~/.pgpass) must also be where the tasks run"
    )


def _trial() -> Trial:
    from oncely.kinds.sql.trial import TRIAL

    return TRIAL


_SYSTEM = frozenset(("ctid", "xmin", "xmax", "cmin", "cmax", "tableoid"))
"""The names of PostgreSQL's system columns."""


def _fits(name: str) -> bool:
    return "\0" not in name and len(name.encode()) <= LONGEST_NAME and name not in _SYSTEM


KIND = Kind(
    name="sql",
    rank=1,
    settings=SqlSinkSettings,
    destination=_destination,
    require=_require,
    dead_letters=lambda _: "oncely_rejects",
    again=again,
    unchecked=_unchecked,
    texts=Texts(
        by_task="each task writes rows, rejects and the new position of its topic-partitions in one"
        " transaction of the database; records of a partition keep their order",
        by_driver="tasks stage rows; the driver publishes them with all rejects and all positions"
        " of the batch in one transaction of the database",
        ends=(
            "it covers the table and the ledger beside it, in one database: rows of other writers"
            " are not covered",
            RESTORED,
        ),
        refused="the table refuses",
    ),
    silent_after=(Unavailable, ConfigError),
    has_json=True,
    replays_beside_store=True,
    trial=_trial,
    proposed=Proposed(
        ("sqlite://", "postgresql://", "postgres://"),
        lambda to, _, table: {"url": to, "table": table, "mode": "append"},
        _fits,
    ),
)
