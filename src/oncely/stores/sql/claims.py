"""The offsets that other pipelines have committed into a table, by the ledger beside it."""

from __future__ import annotations

from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.stores.sql.connection import Connection

# The table by its OID, its partitions, the tables that it is a partition of, and views of these.
_RELATED = """
WITH RECURSIVE partitions AS (
    SELECT inhrelid AS part, inhparent AS whole
    FROM pg_inherits JOIN pg_class ON oid = inhrelid WHERE relispartition
), views AS (
    SELECT r.ev_class AS a, d.refobjid AS b FROM pg_rewrite r JOIN pg_depend d ON d.objid = r.oid
    WHERE d.classid = 'pg_rewrite'::regclass AND d.refclassid = 'pg_class'::regclass
        AND d.refobjid <> r.ev_class
), same AS (
    SELECT a, b FROM views UNION SELECT b, a FROM views
), above AS (
    SELECT %s::oid AS id UNION
    SELECT next.b FROM above JOIN (SELECT * FROM same UNION SELECT part, whole FROM partitions) next
        ON next.a = above.id
), below AS (
    SELECT %s::oid AS id UNION
    SELECT next.b FROM below JOIN (SELECT * FROM same UNION SELECT whole, part FROM partitions) next
        ON next.a = below.id
)
SELECT id::text FROM above UNION SELECT id::text FROM below
"""
# Another table of the same name beside the same ledger was dropped; a restore changes both.
_SAME = """({known} OR theirs.target = ours.target
    AND NOT COALESCE(theirs.target_identity <> ours.target_identity
        AND theirs.ledger_identity = ours.ledger_identity, FALSE))"""
_CLAIMS = """
SELECT r.pipeline, r.topic, r."partition", r.range_start, r.range_end FROM {ranges} r
JOIN {pipelines} theirs ON theirs.pipeline = r.pipeline
JOIN {pipelines} ours ON ours.pipeline = %s AND ours.pipeline <> theirs.pipeline
WHERE r.range_start >= 0 AND r.range_start < r.range_end AND r.kind <> 'skipped' AND {same}
ORDER BY 1, 2, 3, 4
"""

Claim = tuple[str, TopicPartition, OffsetRange]
"""Pipeline, topic-partition and offsets."""


def claims(connection: Connection, ranges: str, pipelines: str, pipeline: str) -> list[Claim]:
    """All of them; also ranges that a reset has undone: their rows may still be there.

    Args:
        connection: a session.
        ranges, pipelines: the ledger's tables, quoted.
        pipeline: of which the others are told.
    """
    same = _SAME.format(known=_known(connection, pipelines, pipeline))
    statement = _CLAIMS.format(ranges=ranges, pipelines=pipelines, same=same)
    return [
        (str(name), TopicPartition(topic, int(number)), OffsetRange(start, end))
        for name, topic, number, start, end in connection.query(statement, (pipeline,))
    ]


def _known(connection: Connection, pipelines: str, pipeline: str) -> str:
    """The condition that their table has rows of ours, by its identity.

    Without one, as in SQLite, it is the name of the table, in which case is ignored.
    """
    rows = connection.query(
        f"SELECT target_identity FROM {pipelines} WHERE pipeline = %s", (pipeline,)
    )
    identity = str(rows[0][0]) if rows else ""
    if not identity.isdigit():
        return "lower(theirs.target) = lower(ours.target)"
    related = connection.query(_RELATED, (identity, identity))
    return f"theirs.target_identity IN ({', '.join(repr(one) for (one,) in related)})"
