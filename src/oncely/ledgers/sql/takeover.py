"""Taking the ledger over: the next epoch, older sessions ended, a position for every partition.

Two transactions, because an old run may hold a row lock that only ending its session frees:

1. The pipeline's row gives out the next epoch. From here on two openers differ.
2. Older sessions are ended, found by their application name.
3. The pipeline's row is locked; every position takes our epoch, and the row names it as the one
   that holds them. A commit of the old run that was waiting for a position now finds another
   epoch and changes nothing; one that held it has finished before, and its position is what we
   read.

The epoch that HOLDS the positions decides everywhere who may write, not the one given out last.
An opener that died or pauses between 1 and 3 has changed nothing else, and the old run A goes on
unharmed: it commits, tidies, takes new partitions in, and opens again. What then becomes of an
opener B that only paused, with A holding epoch 1 and B given 2:

- A did not open again: B takes the positions wherever they stand, and A is fenced.
- A opened again and holds 3: B finds a higher epoch than its own, and is fenced.
- A opens again and was given 3, and B takes the positions (2) before A does: A finds that another
  run has taken them since it held 1, and is fenced, though its number is the higher one.
- A third run has taken them with 3: B is fenced. Given 3 and not there yet, it will fence B.

A run whose own step 3 got no answer finds its name beside the epoch that holds the positions.

A failover to a replica that lagged behind takes epochs back, and they are given out again. So the
name of the run stands beside the epoch, in the pipeline's row and at each position, and both are
compared.
"""

from __future__ import annotations

from dataclasses import dataclass

from oncely.clients.sql.connection import Connection, Contention, TableName
from oncely.clients.sql.session import application_prefix, transaction
from oncely.core.budget import NOTHING_COUNTED
from oncely.core.claim import Fence, Opened, Positions, Takeover
from oncely.core.topics import SourceIdentity
from oncely.errors import Fenced, InvariantViolation, LedgerWentBack, TableMismatch
from oncely.ledgers.same_source import same_cluster, same_topics
from oncely.ledgers.sql.dead_letters import DeadLetters
from oncely.ledgers.sql.history import History
from oncely.ledgers.sql.same_table import check_same_table, note_table
from oncely.ledgers.sql.statements import LedgerStatements, Registered
from oncely.ledgers.sql.tables import LedgerTables

_TRIES = 3


def create_ledger(connection: Connection, tables: LedgerTables) -> None:
    """Create the ledger's tables and columns where they are missing, and nothing else."""
    if not tables.missing(connection):
        return
    with transaction(connection):
        tables.dialect.lock_for_setup(connection)
        for statement in tables.missing(connection):
            connection.execute(statement)


def require_ledger(connection: Connection, tables: LedgerTables) -> None:
    """Refuse to go on without the ledger's tables.

    Raises:
        TableMismatch: a table or column of the ledger is missing and ``create`` is false.
    """
    missing = tables.missing(connection)
    if not missing:
        return
    added = [one for one in missing if one.startswith("ALTER TABLE")]
    if added and tables.exists(connection):
        raise TableMismatch(
            "sink.create is false and the ledger's tables are of an earlier version of Oncely",
            way_out="add their new columns: " + "; ".join(added).replace("%%", "%"),
        )
    raise TableMismatch(
        "sink.create is false and the ledger's tables are missing",
        way_out="create them with the DDL that `oncely plan` prints",
    )


@dataclass(frozen=True)
class Opener:
    """A run that takes the ledger over, or a reset.

    Attributes:
        run: its own name, by which it recognises what it took when an answer was lost.
        expected: the epoch that this very run has held, or None.
        table: what the pipeline writes; None where a person says where to go on (a reset),
            which holds for the table that the file names then.
    """

    run: str
    expected: int | None
    table: TableName | None

    def require_turn(self, known: Registered, fence: Fence) -> None:
        """Refuse to take positions from a newer run; ``fence`` is the epoch that takes them.

        Raises:
            Fenced: another run has taken them since ``expected``, or with a higher epoch.
        """
        ours = fence.epoch if self.expected is None else self.expected
        since = known.held_epoch >= min(ours, fence.epoch) and known.held_by != self.run
        if since or known.held_epoch > fence.epoch:
            raise Fenced(fence.pipeline, ours, known.held_epoch)


def take_epoch(
    connection: Connection, tables: LedgerTables, source: SourceIdentity, opener: Opener
) -> Fence:
    """Step 1: the next epoch.

    Raises:
        Fenced: another run has taken the positions since this one held them.
        SourceMismatch: the ledger belongs to another cluster or topic.
        TableMismatch: the pipeline has written to another table; or its table is missing.
    """
    ledger = LedgerStatements(tables)
    with transaction(connection):
        ledger.register(connection, source.cluster_id)
        registered = _locked(connection, ledger)
        same_cluster(registered.cluster_id, source, tables.pipeline)
        same_topics(ledger.topic_ids(connection), source, tables.pipeline)
        if opener.table is not None:
            check_same_table(connection, ledger, registered)
        fence = Fence(tables.pipeline, ledger.next_epoch(connection, opener.run), opener.run)
        opener.require_turn(registered, fence)
    return fence


def require_held(registered: Registered | None, fence: Fence) -> None:
    """Refuse to go on when another run than ours holds the positions, or another epoch of it.

    Raises:
        Fenced: a newer run has taken them.
        LedgerWentBack: an older one has them again.
    """
    held, by = (registered.held_epoch, registered.held_by) if registered else (0, "")
    if held > fence.epoch or (held == fence.epoch and by != fence.run):
        raise Fenced(fence.pipeline, fence.epoch, held)
    if held < fence.epoch:
        told = f"epoch {held} holds the ledger, though epoch {fence.epoch} has held it"
        raise LedgerWentBack(fence.pipeline, told)


def _locked(connection: Connection, ledger: LedgerStatements) -> Registered:
    registered = ledger.registered(connection, lock=True)
    if registered is None:
        raise InvariantViolation("a pipeline that was registered has no row")
    return registered


def take_positions(
    connection: Connection,
    tables: LedgerTables,
    fence: Fence,
    opener: Opener,
    takeover: Takeover,
) -> Opened:
    """Steps 2 and 3; a reset puts positions elsewhere in the same transaction.

    Raises:
        Fenced: a newer run has taken them in between.
    """
    for attempt in range(_TRIES):
        # None of them is ours: nobody works with our epoch yet. Not even one of its number, which
        # a failover may have left behind.
        tables.dialect.end_sessions(connection, application_prefix(fence.pipeline), tables.all())
        try:
            return _settle(connection, tables, fence, opener, takeover)
        except Contention:
            # A session that opened after we looked still holds a position's lock: end it too.
            if attempt == _TRIES - 1:
                raise
    raise InvariantViolation("a loop that returns or raises has ended")


def _settle(
    connection: Connection, tables: LedgerTables, fence: Fence, opener: Opener, takeover: Takeover
) -> Opened:
    ledger = LedgerStatements(tables)
    with transaction(connection):
        registered = _locked(connection, ledger)
        opener.require_turn(registered, fence)
        ledger.take_positions(connection, fence.epoch, opener.run)
        if opener.table is None:
            ledger.retarget(connection)
            ledger.note_rejects(connection, NOTHING_COUNTED)
        else:
            check_same_table(connection, ledger, registered)
        note_table(connection, ledger, accept=opener.table is None)
        known = ledger.entries(connection)
        first_start = not known
        wanted = dict(takeover.start() if first_start else takeover.earliest)
        missing = {tp: at for tp, at in wanted.items() if tp not in known}
        ledger.add_positions(connection, missing, takeover.source.topic_ids, fence)
        positions = {tp: entry.position for tp, entry in known.items()} | missing
        if takeover.reset is not None:
            # Asked only now: until its positions were taken, the old run may have moved on.
            moved = dict(takeover.reset(positions))
            _put(connection, tables, moved, fence.epoch)
            positions |= moved
        counted = ledger.counted(connection)
        leader_epochs = ledger.leader_epochs(connection)
    return Opened(fence, positions, first_start, counted, leader_epochs)


def _put(
    connection: Connection,
    tables: LedgerTables,
    positions: Positions,
    epoch: int,
) -> None:
    """Put positions where a person wants them; what was beyond them no longer counts.

    History is kept and marked. Dead letters go: their records are judged anew, and a replay
    of one that has become a row in the meantime would write it twice.
    """
    ledger, history, dead_letters = LedgerStatements(tables), History(tables), DeadLetters(tables)
    for tp, at in sorted(positions.items()):
        ledger.put(connection, tp, at)
        history.supersede(connection, tp, at, epoch)
        dead_letters.remove_from(connection, tp, at)
