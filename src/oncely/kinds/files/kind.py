"""Files as a kind of destination."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from oncely.errors import Unavailable
from oncely.extras import require
from oncely.kinds.files.settings import FilesSinkSettings
from oncely.kinds.kind import BOTH_DELETED, Kind, Parts, Proposed, Texts, folder_url, one_folder

if TYPE_CHECKING:
    from oncely.kinds.destination import Destination
    from oncely.kinds.files.manifest import Contents
    from oncely.kinds.trial import Trial


def _destination(parts: Parts) -> Destination:
    from oncely.kinds.files.destination import FilesDestination

    return FilesDestination(parts)


def _listed(parts: Parts) -> Contents:
    from oncely.kinds.files.table import table_of

    return table_of(parts).look()


def _trial() -> Trial:
    from oncely.kinds.files.trial import TRIAL

    return TRIAL


def _proposed(to: str, topic: str, _: str) -> dict[str, Any] | None:
    if (url := folder_url(to)) is None:
        return None
    return {"url": url, "format": "parquet", "manifest_topic": f"{topic}.manifest"}


def _first_time(found: Mapping[str, str]) -> list[str]:
    times = [name for name, kind in found.items() if kind.upper().startswith(("TIMESTAMP", "DATE"))]
    return [f"date({name})" for name in times[:1]]


KIND = Kind(
    name="files",
    rank=3,
    settings=FilesSinkSettings,
    destination=_destination,
    require=lambda _: require("files", "sink.kind", "files"),
    dead_letters=lambda sink: f"topic {sink.rejects}",
    again=lambda _: "records that are written again are duplicate rows, in separate files",
    unchecked=one_folder,
    texts=Texts(
        by_driver="tasks write files that are not visible; the driver lists them in the manifest"
        " topic, with all rejects and all positions of the batch, in one transaction of Kafka: "
        "readers of the manifest with isolation.level=read_committed see each row once",
        why_driver="a file can't be part of a transaction, and its name in the manifest can",
        ends=(
            "it covers the files of the manifest: a listing of the folders also shows files of"
            " failed attempts, until `oncely files vacuum` removes them",
            BOTH_DELETED,
        ),
        untransacted=("files are published separately: there is no transaction",),
    ),
    commits="ranges",
    ledger="source",
    ledger_key=lambda _: "source.brokers",
    silent_after=(Unavailable,),
    listed=_listed,
    trial=_trial,
    proposed=Proposed(("",), _proposed, partition_by=_first_time),
)
