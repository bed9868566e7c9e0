"""Delta tables as a kind of destination."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from oncely.errors import Unavailable
from oncely.extras import require
from oncely.kinds.delta.settings import DeltaSinkSettings
from oncely.kinds.kind import Kind, Parts, Proposed, Texts, again, folder_url, one_folder

if TYPE_CHECKING:
    from oncely.kinds.destination import Destination
    from oncely.kinds.trial import Trial


def _destination(parts: Parts) -> Destination:
    from oncely.kinds.delta.destination import DeltaDestination

    return DeltaDestination(parts)


def _trial() -> Trial:
    from oncely.kinds.delta.trial import TRIAL

    return TRIAL


def _proposed(to: str, *_: str) -> dict[str, Any] | None:
    url = folder_url(to.removeprefix("delta:"))
    return None if url is None else {"url": url, "mode": "append"}


def _first_day(found: Mapping[str, str]) -> list[str]:
    """Partitions are values of columns."""
    return [name for name, kind in found.items() if kind == "DATE"][:1]


KIND = Kind(
    name="delta",
    rank=4,
    settings=DeltaSinkSettings,
    destination=_destination,
    require=lambda _: require("delta", "sink.kind", "delta"),
    dead_letters=lambda _: "_oncely/ below the table's root",
    again=again,
    unchecked=one_folder,
    texts=Texts(
        by_driver="tasks write Parquet files that belong to no version of the table; the driver"
        " adds or merges them, with all rejects and all positions of the batch, in one commit to"
        " the table's log",
        why_driver="a file can't be part of a transaction, and its name in the table's log can",
        ends=(
            "it covers versions of the table: a listing of its folder also shows files of no"
            " version, which the table's VACUUM removes",
            "positions are in _oncely/ below the table's root, which must not be removed; after a"
            " RESTORE to a version before the newest rows a run is refused until `oncely repair`",
        ),
    ),
    commits="ranges",
    silent_after=(Unavailable,),
    replays_beside_store=True,
    trial=_trial,
    proposed=Proposed(("delta:",), _proposed, partition_by=_first_day),
)
