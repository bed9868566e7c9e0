"""Taking the ledger over: the next epoch, older sessions ended, a position for every partition.

Two transactions, because an old run may hold a row lock that only ending its session releases:

1. The pipeline's row gets the next epoch. From here on two openers differ.
2. Older sessions are ended, found by their application name.
3. The pipeline's row is locked; every position takes our epoch, and the row stores it as the epoch
   that holds them. A commit of the old run that was waiting for a position now compares with
   another epoch and changes nothing; a commit that held it has finished before, and its position is
   read.

The epoch that HOLDS the positions determines the writer, not the last epoch. An opener that died or
is paused between 1 and 3 has changed nothing else, and the old run A continues: it commits, tidies,
adds partitions, and opens again. The outcome for an opener B that was only paused, with A holding
epoch 1 and B given 2:

- A did not open again: B takes the positions at their present values, and A is fenced.
- A opened again and holds 3: B reads a higher epoch than its own, and is fenced.
- A opens again and was given 3, and B takes the positions (2) before A does: A reads that another
  run has taken them since it held 1, and is fenced, although its epoch is higher.
- A third run has taken them with 3: B is fenced. Given 3 and not there yet, it will fence B.

A run whose own step 3 got no answer reads its name beside the epoch that holds the positions.

A failover to a replica that lagged behind loses epochs, and they are given out again. So the name
of the run is stored beside the epoch, in the pipeline's row and at each position, and both are
compared.

A takeover of some partitions (by a worker) does the same for their positions only: it ends the
sessions of the epochs at these positions, and compares and writes these epochs. The pipeline's row
keeps the last takeover of ALL positions, which a takeover of some compares in its step 3
(docs/decisions/0036): it is refused if a run or a reset has taken all of them since the worker's
process was started. A takeover of all positions that reads later epochs of takeovers of some in its
step 3 gets a new epoch there.

At the first start of a pipeline ``start`` is called for all partitions, also by a takeover of some.
The others get a position of epoch 0, which no run holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from oncely.core.claim import NOTHING_COUNTED, Entry, Fence, Opened, Positions, Takeover
from oncely.core.ranges import OffsetRange, Position, SourceIdentity, TopicPartition
from oncely.errors import Fenced, InvariantViolation, LedgerWentBack, TableMismatch
from oncely.stores.document import same_cluster, same_topics
from oncely.stores.sql.connection import (
    Connection,
    Contention,
    TableFacts,
    TableName,
    application_name,
    application_prefix,
    transaction,
)
from oncely.stores.sql.dead_letters import DeadLetterTable
from oncely.stores.sql.history import History
from oncely.stores.sql.statements import LedgerStatements, Registered
from oncely.stores.sql.tables import POSITIONS, LedgerTables

_ANY = ""
"""The identity that a reset stores for a missing table: the next table is accepted, or created."""


class _Identities(NamedTuple):
    """The ids by which the database distinguishes tables of one name; None: there is no table."""

    target: str | None
    ledger: str | None


def check_known_table(connection: Connection, tables: LedgerTables) -> None:
    """Compare the present table and ledger, before anything is created; reads only.

    Raises:
        TableMismatch: see :func:`check_same_table`; or a crash of the server empties a table of the
            ledger.
        NewerFormat, OlderFormat: another version has written the pipeline's ledger.
    """
    facts = tables.facts(connection)
    if any(one.identity is None for one in facts.values()):
        return
    for table, one in facts.items():
        require_fit(one)
        if one.relation.is_secured:
            raise TableMismatch(
                f"row-level security of {tables.beside.sibling(table)} applies to the"
                " role in sink.url: it could hide the positions",
                key="sink.table",
                way_out="use a role with BYPASSRLS, or disable it for the tables oncely_*",
            )
    ledger = LedgerStatements(tables)
    check_same_table(connection, ledger, ledger.registered(connection))


def require_fit(table: TableFacts) -> None:
    """Refuse a table whose rows would not be committed, or be lost, together with the ledger's.

    Raises:
        TableMismatch: the error names the table, or its partition.
    """
    if table.unfit is not None:
        problem, way_out = table.unfit
        raise TableMismatch(problem, key="sink.table", way_out=way_out)


def check_same_table(
    connection: Connection, ledger: LedgerStatements, registered: Registered | None
) -> None:
    """Compare the identities of the destination and ledger tables with those in the pipeline's row.

    A restore of table and ledger together changes both identities, and the positions belong to the
    rows. If only one of them changes, they do not.

    Raises:
        TableMismatch: a table of another name, a missing table, or another table of the same name,
            which would begin in the middle of the topic; or other positions for the same table.
    """
    if registered is None:
        return
    tables, pipeline = ledger.tables, ledger.tables.pipeline
    if registered.target != tables.beside.name:
        raise TableMismatch(
            f"it is {tables.beside.name!r}, and pipeline {pipeline!r} has written to"
            f" {registered.target!r}: the new table would begin where the old one ends",
            key="sink.table",
            way_out="give the pipeline a new name to begin again; if this is meant (the table was"
            " renamed), `oncely offsets reset FILE --shift-by 0 --execute` confirms it",
        )
    noted, now = _noted(registered), _identities(connection, tables)
    if noted.target == _ANY or noted == now or not ledger.begun(connection):
        return
    if now.target is None:
        raise TableMismatch(
            f"{tables.beside} is missing, and the ledger holds positions of pipeline"
            f" {pipeline!r}: a new table would begin in the middle of the topic",
            key="sink.table",
            way_out="restore table and ledger from the same backup; to begin again, "
            "`oncely offsets reset FILE --to-earliest --execute` (the next run creates the table)"
            " or a new name of the pipeline",
        )
    if noted.target is None or (noted.target != now.target and noted.ledger != now.ledger):
        return
    theirs, same = str(tables.beside), POSITIONS
    if noted.target == now.target:
        theirs, same = same, theirs
    raise TableMismatch(
        f"{theirs} is not the table that pipeline {pipeline!r} has written to, but"
        f" another one of its name (dropped and made again, or restored), and {same} is the same"
        " as before: rows and positions don't belong together",
        key="sink.table",
        way_out="restore table and ledger from the same backup; or set the positions:"
        " `oncely offsets reset FILE --to-earliest --execute` reads everything again,"
        " `--shift-by 0` accepts the present table",
    )


def note_table(connection: Connection, ledger: LedgerStatements, *, accept: bool = False) -> None:
    """Store the identities of table and ledger in the pipeline's row.

    Args:
        connection: in a transaction that holds the lock of the pipeline's row.
        ledger: the ledger's statements of the pipeline.
        accept: for a reset: a missing table may be created by the next run.
    """
    now = _identities(connection, ledger.tables)
    ledger.note_table(connection, now.target or (_ANY if accept else None), now.ledger)


def _noted(registered: Registered) -> _Identities:
    return _Identities(registered.target_identity, registered.ledger_identity)


def _identities(connection: Connection, tables: LedgerTables) -> _Identities:
    both = [tables.beside, tables.beside.sibling(POSITIONS)]
    return _Identities(*(one.identity for one in tables.dialect.facts(connection, both)))


_TRIES = 3
Beyond = Mapping[TopicPartition, tuple[OffsetRange, ...]]


def create_ledger(connection: Connection, tables: LedgerTables) -> None:
    """Create missing tables of the ledger, and nothing else; in one transaction.

    Two openers that do so at the same time are serialised, and the second one changes nothing.

    Raises:
        NewerFormat, OlderFormat: another version has written the pipeline's ledger.
    """
    if not tables.missing(connection):
        return
    with transaction(connection):
        tables.dialect.lock_for_setup(connection)
        for statement in tables.missing(connection):
            connection.execute(statement)


def require_ledger(connection: Connection, tables: LedgerTables) -> None:
    """Refuse to continue without the ledger's tables.

    Raises:
        TableMismatch: a table of the ledger is missing and ``create`` is false.
        NewerFormat, OlderFormat: another version has written the pipeline's ledger.
    """
    if tables.missing(connection):
        raise TableMismatch(
            "sink.create is false and the ledger's tables are missing",
            way_out="create them with the DDL of `oncely plan --ddl`",
        )


@dataclass(frozen=True)
class SqlTakeover:
    """A run, or a reset, that takes over the ledger.

    Attributes:
        run: its unique name, by which it recognises its own takeover when an answer was lost.
        expected: the epoch that this run has held, or None.
        table: the destination table; None for a reset, which accepts the table of the pipeline
            file.
        partitions: the partitions that it takes over; None: all.
        since: the last takeover of all partitions when the opener's process was started; None: not
            compared.
    """

    run: str
    expected: int | None
    table: TableName | None
    partitions: frozenset[TopicPartition] | None = None
    since: Fence | None = None

    def require_turn(
        self, known: Registered, entries: Mapping[TopicPartition, Entry], fence: Fence
    ) -> None:
        """Refuse to take positions from a newer run; ``fence`` is the epoch that takes them.

        Raises:
            Fenced: another run has taken them since ``expected``, or with a higher epoch. The
                first takeover of all by a run is fenced by another takeover of all only.
        """
        ours = fence.epoch if self.expected is None else self.expected
        if self.partitions is not None:
            self._refuse_whole(known, fence)
            self._refuse_taken(entries, fence, ours)
            return
        held, by = known.held_epoch, known.held_by
        if self.expected is None:
            held, by = known.whole_epoch, known.whole_by
        since = held >= min(ours, fence.epoch) and by != self.run
        if since or held > fence.epoch:
            raise Fenced(fence.pipeline, ours, held)

    def _refuse_whole(self, known: Registered, fence: Fence) -> None:
        whole, since = whole_of(known, fence.pipeline), self.since
        # An older one: the database went back, and no run has taken all positions since.
        if since is not None and since != whole and since.epoch <= whole.epoch:
            raise Fenced(fence.pipeline, since.epoch, whole.epoch)

    def _refuse_taken(
        self, entries: Mapping[TopicPartition, Entry], fence: Fence, ours: int
    ) -> None:
        lost = {
            tp: one.epoch
            for tp, one in entries.items()
            if fence.covers(tp)
            and (
                one.epoch > fence.epoch
                or (one.epoch >= min(ours, fence.epoch) and one.run != self.run)
            )
        }
        if lost:
            raise Fenced(fence.pipeline, ours, max(lost.values()), lost)


def whole_of(known: Registered, pipeline: str) -> Fence:
    """The last takeover of all positions."""
    return Fence(pipeline, known.whole_epoch, known.whole_by)


def take_epoch(
    connection: Connection, tables: LedgerTables, source: SourceIdentity, opener: SqlTakeover
) -> Fence:
    """Step 1: the next epoch, with the version of the schema that its run writes.

    The version was compared before anything was created, and is compared again with the pipeline's
    row locked: after a takeover by a newer version no older one takes an epoch.

    Raises:
        NewerFormat, OlderFormat: another version has written the pipeline's ledger.
        Fenced: another run has taken the positions since this one held them.
        SourceMismatch: the ledger belongs to another cluster or topic.
        TableMismatch: the pipeline has written to another table; or its table is missing.
    """
    ledger = LedgerStatements(tables)
    with transaction(connection):
        ledger.register(connection, source.cluster_id)
        registered = _locked(connection, ledger)
        tables.require_known(registered.schema_version)
        same_cluster(registered.cluster_id, source, tables.pipeline)
        same_topics(ledger.topic_ids(connection), source, tables.pipeline)
        if opener.table is not None:
            check_same_table(connection, ledger, registered)
        epoch = ledger.next_epoch(connection, opener.run)
        fence = Fence(tables.pipeline, epoch, opener.run, opener.partitions)
        opener.require_turn(registered, ledger.entries(connection), fence)
    return fence


def require_held(registered: Registered | None, fence: Fence) -> None:
    """Refuse to continue if another run holds the positions, or another epoch of this run.

    Raises:
        Fenced: a newer run has taken them.
        LedgerWentBack: an older run has them again.
    """
    held, by = (registered.held_epoch, registered.held_by) if registered else (0, "")
    if held > fence.epoch or (held == fence.epoch and by != fence.run):
        raise Fenced(fence.pipeline, fence.epoch, held)
    if held < fence.epoch:
        why = f"epoch {held} holds the ledger, though epoch {fence.epoch} has held it"
        raise LedgerWentBack(fence.pipeline, why)


def require_some(entries: Mapping[TopicPartition, Entry], fence: Fence) -> None:
    """Check that a run of some partitions still holds one of them.

    Raises:
        Fenced: newer runs have taken all of them.
        LedgerWentBack: older runs hold them again.
    """
    if not fence.held(entries):
        fence.refuse_taken(entries)
        raise LedgerWentBack(fence.pipeline, f"no partition has epoch {fence.epoch} any more")


def _locked(connection: Connection, ledger: LedgerStatements) -> Registered:
    registered = ledger.registered(connection, lock=True)
    if registered is None:
        raise InvariantViolation("a pipeline that was registered has no row")
    return registered


def take_positions(
    connection: Connection,
    tables: LedgerTables,
    fence: Fence,
    opener: SqlTakeover,
    takeover: Takeover,
) -> Opened:
    """Steps 2 and 3; a reset moves positions in the same transaction.

    Raises:
        Fenced: a newer run has taken them in between.
    """
    for attempt in range(_TRIES):
        _end_sessions(connection, tables, fence)
        try:
            return _settle(connection, tables, fence, opener, takeover)
        except Contention:
            # A session that was opened after the first call still holds a position's lock: end it
            # too.
            if attempt == _TRIES - 1:
                raise
    raise InvariantViolation("unreachable: the loop returns or raises")


def _end_sessions(connection: Connection, tables: LedgerTables, fence: Fence) -> None:
    """End the sessions that may hold the lock of a position that is taken over.

    No session with our epoch is ours: this run has not worked with it yet. That includes a session
    of the same number, which a failover may have left behind.
    """
    pipeline, only = fence.pipeline, None
    if fence.partitions is not None:
        known = LedgerStatements(tables).entries(connection)
        losing = {one.epoch for tp, one in known.items() if fence.covers(tp)}
        only = [application_name(pipeline, epoch) for epoch in losing | {fence.epoch}]
    tables.dialect.end_sessions(connection, application_prefix(pipeline), tables.all(), only)


def _settle(
    connection: Connection,
    tables: LedgerTables,
    fence: Fence,
    opener: SqlTakeover,
    takeover: Takeover,
) -> Opened:
    ledger = LedgerStatements(tables)
    with transaction(connection):
        registered = _locked(connection, ledger)
        before = ledger.entries(connection)
        opener.require_turn(registered, before, fence)
        if fence.partitions is None and registered.held_epoch >= fence.epoch:
            # Takeovers of some positions had later epochs. The lock of the row excludes more.
            fence = replace(fence, epoch=ledger.next_epoch(connection, opener.run))
        ledger.take_positions(connection, fence)
        if opener.table is None:
            ledger.retarget(connection)
            ledger.note_rejects(connection, NOTHING_COUNTED)
        else:
            check_same_table(connection, ledger, registered)
        note_table(connection, ledger, accept=opener.table is None)
        positions, beyond, first_start = _settle_positions(connection, ledger, fence, takeover)
        if takeover.reset is not None:
            # Called only now: until its positions were taken, the old run may have moved on.
            moved = dict(takeover.reset(positions))
            _put(connection, tables, moved, fence.epoch)
            _skip(connection, tables, positions, moved, beyond, fence.epoch)
            positions |= moved
            beyond = {tp: done for tp, done in beyond.items() if tp not in moved}
        counted = ledger.counted(connection)
        noted = ledger.leader_epochs(connection)
    whole = whole_of(registered, fence.pipeline) if fence.partitions is not None else fence
    leader_epochs = {tp: one for tp, one in noted.items() if fence.covers(tp)}
    begun = frozenset(tp for tp in positions if tp not in before or not before[tp].epoch)
    return Opened(fence, positions, first_start, counted, leader_epochs, whole, beyond, begun)


def _settle_positions(
    connection: Connection, ledger: LedgerStatements, fence: Fence, takeover: Takeover
) -> tuple[dict[TopicPartition, Position], Beyond, bool]:
    """Add missing positions.

    Returns:
        The positions that are taken over, the ranges beyond them that have taken effect, and True
        if this is the pipeline's first start.
    """
    known = ledger.entries(connection)
    wanted = dict(takeover.begins if known else takeover.start())
    missing = {tp: at for tp, at in wanted.items() if tp not in known}
    ours = {tp: at for tp, at in missing.items() if fence.covers(tp)}
    others = {tp: at for tp, at in missing.items() if tp not in ours}
    topic_ids = takeover.source.topic_ids
    ledger.add_positions(connection, ours, topic_ids, fence)
    ledger.add_positions(connection, others, topic_ids, Fence(fence.pipeline, 0))
    for some, epoch in ((ours, fence.epoch), (others, 0)):
        before = {tp: [OffsetRange(0, at)] for tp, at in some.items() if at}
        History(ledger.tables).skip(connection, before, epoch)
    taken = {tp: one for tp, one in known.items() if fence.covers(tp)}
    positions = ours | {tp: one.position for tp, one in taken.items()}
    takeover.require_positions(positions)
    return positions, {tp: one.done for tp, one in taken.items() if one.done}, not known


def _put(
    connection: Connection,
    tables: LedgerTables,
    positions: Positions,
    epoch: int,
) -> None:
    """Set positions for a reset; ranges beyond them no longer count.

    History is kept and marked. Dead letters are deleted: their records are processed again, and a
    replay of a dead letter that has become a row in the meantime would write it twice.
    """
    ledger, history, dead_letters = (
        LedgerStatements(tables),
        History(tables),
        DeadLetterTable(tables),
    )
    for tp, at in sorted(positions.items()):
        ledger.put(connection, tp, at)
        history.unskip(connection, tp, at)
        history.supersede(connection, tp, at, epoch)
        dead_letters.remove_from(connection, tp, at)


def _skip(
    connection: Connection,
    tables: LedgerTables,
    before: Positions,
    moved: Positions,
    beyond: Beyond,
    epoch: int,
) -> None:
    """Note the offsets over which positions were moved: audits and checks do not expect them."""
    skipped = {
        tp: OffsetRange(before[tp], at).minus(beyond.get(tp, ()))
        for tp, at in moved.items()
        if at > before.get(tp, at)
    }
    History(tables).skip(connection, skipped, epoch)
