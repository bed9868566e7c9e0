"""``oncely rejects list`` and ``oncely rejects replay``."""

from __future__ import annotations

from pathlib import Path

from oncely.cli import screen
from oncely.cli.opened import opened
from oncely.cli.run import importable
from oncely.cli.spark_log import SparkLog
from oncely.cli.tables import LEFT, REST, RIGHT, show
from oncely.pipeline.rejects import as_json as rejects_as_json
from oncely.runtimes.spark import session

_LONGEST = 200


def list_rejects(file: Path, limit: int, as_json: bool) -> None:
    """Print the first dead letters."""
    found = opened(file).rejects(limit)
    if as_json:
        screen.show_json(rejects_as_json(found))
        return
    if found.listed:
        show(
            [
                ("topic", LEFT),
                ("part.", RIGHT),
                ("offset", RIGHT),
                ("stage", LEFT),
                ("reason", REST),
                ("value", REST),
            ],
            (
                (*one.partition, one.offset, one.stage, _printable(one.reason), _bytes(one.value))
                for one in found.listed
            ),
        )
        screen.out.print()
    more = found.total - len(found.listed)
    screen.out.print(f"{found.total:,} rejects" + (f", {more:,} more than shown" if more else ""))


def _bytes(value: bytes | None) -> str | None:
    return None if value is None else _printable(value[:_LONGEST].decode("utf-8", "replace"))


def _printable(text: str) -> str:
    """One line, and nothing that a terminal would obey."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text[:_LONGEST])


def replay_rejects(file: Path, as_json: bool) -> None:
    """Decode dead letters again; print how many were moved."""
    pipeline = opened(file)
    importable(file)
    with SparkLog(pipeline.settings.name, None) as log:
        spark = None
        if pipeline.spark_path is not None and pipeline.status().rejects:
            spark = pipeline.start_spark(log.file)
        try:
            moved, kept = pipeline.replay(spark=spark)
        finally:
            if spark is not None:
                session.stop(spark)
    if as_json:
        screen.show_json({"moved": moved, "kept": kept})
        return
    screen.out.print(f"{moved:,} moved, {kept:,} stay rejects")
    if kept:
        screen.note("`oncely rejects list` tells why, by the newer reasons")
