"""The offsets that other pipelines have committed into a table, by the ledger beside it."""

from __future__ import annotations

from oncely.clients.sql.connection import Connection
from oncely.core.ranges import OffsetRange
from oncely.core.topics import TopicPartition

# Another table of the same name beside the same ledger was dropped; a restore changes both.
_SAME = """(theirs.target = ours.target OR theirs.target_identity = ours.target_identity)
    AND NOT COALESCE(theirs.target_identity <> ours.target_identity
        AND theirs.ledger_identity = ours.ledger_identity, FALSE)"""
_CLAIMS = """
SELECT r.pipeline, r.topic, r."partition", r.range_start, r.range_end FROM {ranges} r
JOIN {pipelines} theirs ON theirs.pipeline = r.pipeline
JOIN {pipelines} ours ON ours.pipeline = %s AND ours.pipeline <> theirs.pipeline
WHERE r.range_start >= 0 AND r.range_start < r.range_end AND r.kind <> 'skipped' AND {same}
ORDER BY 1, 2, 3, 4
"""

Claim = tuple[str, TopicPartition, OffsetRange]
"""Pipeline, topic-partition and offsets."""


def claims(
    connection: Connection, ranges: str, pipelines: str, pipeline: str, *, identities: bool = True
) -> list[Claim]:
    """All of them; also ranges that a reset has undone: their rows may still be there.

    Args:
        connection: a session.
        ranges, pipelines: the ledger's tables, quoted.
        pipeline: of which the others are told.
        identities: the ledger has the identities of tables; it is of a later version than 1.
    """
    same = _SAME if identities else "theirs.target = ours.target"
    statement = _CLAIMS.format(ranges=ranges, pipelines=pipelines, same=same)
    return [
        (str(name), TopicPartition(topic, int(number)), OffsetRange(start, end))
        for name, topic, number, start, end in connection.query(statement, (pipeline,))
    ]
