"""The ledger of a Delta table: a document below its root, selected by an application transaction.

Each commit writes a document ``_oncely/ledger-<pipeline>/<version>.json`` first: positions, epoch,
notes and the files of dead letters. The table commit then raises the pipeline's application
transaction to that version, and only this makes the document the ledger. The upper half of a
version counts the pipeline's commits, the lower half is random: no two attempts share a document.

Application transactions are kept by checkpoints; the metadata of commits expires with the log's
retention (docs/decisions/0039).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from oncely.core.batch import Reject
from oncely.core.change import Containing
from oncely.core.claim import (
    Amendment,
    Claim,
    Counts,
    Entry,
    Fence,
    Notes,
    Opened,
    PositionMoved,
    Positions,
    RejectCount,
    Takeover,
)
from oncely.core.ranges import SourceIdentity, TopicPartition, by_topic, from_tree
from oncely.errors import Fenced, LedgerWentBack, Stopped, TableMismatch, Unavailable, check
from oncely.stores.delta import Change, DeltaTables
from oncely.stores.document import (
    Totals,
    add_range,
    covered_by,
    refuse_lacking,
    require_known_format,
    same_cluster,
    same_topics,
)
from oncely.stores.objects.store import NoSuchFile, Store

FOLDER = "_oncely"
"""The folder below the table's root: VACUUM skips directories that begin with an underscore."""

_LOG = 10_000  # commits of other writers behind which the pipeline's newest one is looked for
_TRIES = 20
_FORMAT = 1
Changes = Callable[[Containing], Sequence[Amendment]]
_NUMBERS = dict[str, dict[int, int]]
_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_AFTER_A_RESTORE = ("repair", "reset")
"""Kinds of commits that may follow a RESTORE."""
_WITHOUT_ROWS = ("takeover", "partitions", "notes")
"""Kinds of commits of which a RESTORE takes nothing back."""

_LETTERS = pa.schema(
    [("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64()),
     ("timestamp_ms", pa.int64()), ("key", pa.binary()), ("value", pa.binary()),
     ("headers", _HEADERS), ("stage", pa.string()), ("reason", pa.string())]
)  # fmt: skip


class Document(msgspec.Struct, frozen=True):
    """The complete state of the ledger.

    Attributes:
        rejects: files of dead letters, and the number of pending ones in each.
        replay: a unique name of the last transaction of a replay, which identifies it.
        totals: counts and digest of the ranges since an offset, replays included.
        started: the first offset of each partition that was to be read.
        format: the version of this format.
    """

    pipeline: str
    epoch: int
    run: str
    cluster_id: str
    topic_ids: dict[str, str]
    positions: _NUMBERS
    leader_epochs: _NUMBERS
    counted: tuple[str, int, int]
    rejects: list[tuple[str, int]]
    replay: str
    totals: dict[str, dict[int, Totals]]
    started: _NUMBERS
    format: int


@dataclass(frozen=True)
class State:
    """The ledger in one handle on the table; ``version`` is 0 before the first commit."""

    table: Any
    version: int
    document: Document


class DeltaLedger:
    """Epochs and positions of one pipeline in a Delta table; only the driver moves them.

    Args:
        pipeline: its name.
        tables: the table's client.
        store: the store of the folder :data:`FOLDER` below the table's root.
        log: the store of the table's log.
        run: a unique name of this run, which identifies it in the ledger.
    """

    one_store = True

    def __init__(
        self, pipeline: str, tables: DeltaTables, store: Store, log: Store, run: str
    ) -> None:
        self.app_id, self._folder, self._run = f"oncely/{pipeline}", f"ledger-{pipeline}", run
        self._pipeline, self._tables, self._store, self._log = pipeline, tables, store, log

    # -- reading and committing ------------------------------------------------------------

    def read(self) -> State:
        """The present ledger; an empty document before the first commit.

        Raises:
            Stopped: the document that the table refers to is missing.
            NewerFormat, OlderFormat: another version of Oncely has written it.
        """
        for _ in range(_TRIES):
            table = self._tables.load()
            version = table.transaction_version(self.app_id) if table is not None else None
            if version is None:
                none = Document(
                    self._pipeline, 0, "", "", {}, {}, {}, ("", 0, 0), [], "", {}, {}, _FORMAT
                )
                return State(table, 0, none)
            try:
                found = self._store.read(f"{self._folder}/{version}.json")
            except NoSuchFile:  # unless a newer commit has replaced it meanwhile, it is lost
                continue
            what = f"the ledger of pipeline {self._pipeline!r} in the Delta table"
            require_known_format(found, _FORMAT, what)
            try:
                return State(table, version, msgspec.json.decode(found, type=Document))
            except msgspec.ValidationError as error:
                refuse_lacking(error, what, ("totals", "started", "format"))
                raise
        raise Stopped(
            f"pipeline {self._pipeline!r}: the table names the ledger"
            f" {FOLDER}/{self._folder}/{version}.json, which is gone",
            way_out="restore it, or give the pipeline a new name and say where to start",
        )

    def keep(self, state: State, rejects: Sequence[Reject]) -> list[tuple[str, int]]:
        """A file of dead letters for the document of the next commit; empty if there are none."""
        if not rejects:
            return []
        rows, out = [_row(one) for one in rejects], pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(rows, _LETTERS), out)
        path = f"{self._folder}/{_following(state.version)}.parquet"
        self._store.write(path, out.getvalue())
        return [(path, sum(one.pending for one in rejects))]

    def letters(self, path: str) -> list[Reject]:
        """The dead letters of a file, also discarded ones, by topic, partition and offset.

        Raises:
            Unavailable: another commit has replaced it, and the ledger was tidied.
        """
        try:
            rows = pq.read_table(pa.BufferReader(self._store.read(path)))
        except NoSuchFile as error:
            raise Unavailable(f"{error.message}: dead letters were replayed meanwhile?") from None
        by = [(name, "ascending") for name in ("topic", "partition", "offset")]
        return [_reject(row) for row in rows.sort_by(by).to_pylist()]

    def commit(
        self, state: State, document: Document, metadata: Mapping[str, Any], **load: Any
    ) -> None:
        """Commit to the table: the document becomes the ledger, and the load becomes part of the
        table.

        Args:
            state: the state on which the document is based.
            document: the new ledger.
            metadata: metadata of the commit.
            load: ``files``, ``gone`` or ``merge`` of a :class:`Change`.

        Raises:
            PositionMoved: another commit came first; read again and decide again.
            Unavailable: the outcome is unknown; likewise.
        """
        if state.table is None:
            raise TableMismatch(
                "there is no Delta table at sink.url, which holds the positions",
                way_out="run the pipeline once, or create the table",
            )
        if metadata["kind"] not in _AFTER_A_RESTORE and (refused := self.taken_back(state)):
            raise refused
        version = _following(state.version)
        self._store.write(f"{self._folder}/{version}.json", msgspec.json.encode(document))
        self._store.durable()
        new = {path for path, _ in document.rejects} - {path for path, _ in state.document.rejects}
        whole = {"pipeline": self._pipeline, "epoch": document.epoch, **metadata}
        whole |= {"run": document.run, "positions": document.positions, "rejects": sorted(new)}
        self._tables.commit(state.table, Change(self.app_id, version, whole, **load))

    def taken_back(self, state: State) -> Stopped | None:
        """The refusal of a table that a RESTORE has taken back: it lacks rows, and the positions
        are behind them. None if it is not refused."""
        version = self._restored(state.table.version()) if state.version else None
        if version is None:
            return None
        return Stopped(
            f"version {version} of the table at sink.url is a RESTORE to a version before the"
            f" newest rows of pipeline {self._pipeline!r}, or to a time: it may lack rows of"
            " records that the positions have passed",
            way_out="`oncely repair FILE --execute` writes them again, or finds that none is"
            " missing. To continue without them:"
            " `oncely offsets reset FILE --shift-by 0 --execute`",
        )

    def end_refusal(self, refused: str) -> None:
        """Commit a repair without rows, if the table is still refused for this reason: an audit
        that began afterwards has found that it lacks nothing.

        A RESTORE that came during the audit is another reason, since the text contains its version.
        """

        def same(state: State) -> Document | None:
            now = self.taken_back(state)
            return state.document if now is not None and now.message == refused else None

        self._change("repair", same)

    def _restored(self, newest: int) -> int | None:
        """The version of a RESTORE that has taken rows of the pipeline back; None if there is none,
        or the log no longer contains it.

        delta-rs would keep all other threads of Python waiting while it reads the log.
        """
        restores: list[tuple[int, int]] = []
        own: int | None = None  # its oldest commit that was read
        for version in range(newest, max(-1, newest - _LOG), -1):  # mostly the newest is ours
            try:
                lines = self._log.read(f"{version:020}.json").splitlines()
            except NoSuchFile:
                break
            read = (msgspec.json.decode(line).get("commitInfo") for line in lines)
            info: dict[str, Any] = next((one for one in read if one), {})
            told = info.get("oncely") or {}
            if told.get("pipeline") == self._pipeline:
                own = version
                if not restores or told.get("kind") not in _WITHOUT_ROWS:
                    break
            if info.get("operation") == "RESTORE":
                to = (info.get("operationParameters") or {}).get("version") or -1
                restores.append((version, int(to)))
        return None if own is None else _taken_before(own, restores, newest)

    def claimed(
        self, document: Document, claim: Claim, counts: Mapping[TopicPartition, Counts]
    ) -> tuple[Document, dict[str, Any]]:
        """The document with a claim's positions moved, and the metadata of its commit: the ranges,
        and what became of their records.

        Raises:
            PositionMoved: the ledger differs from that of the claim's decision.
        """
        now, moved = _entries(document), from_tree(document.positions)
        totals = from_tree(document.totals)
        for tp, range_ in claim.ranges.items():
            if now.get(tp) != claim.expected[tp]:
                raise PositionMoved(str(tp))
            moved[tp] = claim.end(tp)
            start, epoch = range_.start, claim.fence.epoch
            totals[tp] = add_range(totals.get(tp), start, counts[tp], epoch)
        read = {tp: one for tp, one in claim.ranges.items() if not one.is_empty}
        ranges = by_topic({tp: (one.start, one.end) for tp, one in read.items()})
        told = by_topic({tp: _told(counts[tp]) for tp in read})
        metadata = {"kind": claim.kind, "ranges": ranges, "counts": told}
        moves = {"positions": by_topic(moved), "totals": by_topic(totals)}
        return msgspec.structs.replace(document, **moves), metadata

    def amended(self, document: Document, changes: Changes) -> Document:
        """The document with the changes of a replay added to the totals."""
        totals = from_tree(document.totals)
        covered = covered_by(totals)
        for tp, change in covered.changes(changes(covered)).items():
            totals[tp] = totals[tp].plus(change)
        return msgspec.structs.replace(document, totals=by_topic(totals))

    def _change(self, kind: str, change: Callable[[State], Document | None]) -> None:
        """Commit a document only, unless it is None; decided again if others commit in between."""
        for _ in range(_TRIES):
            state = self.read()
            document = change(state)
            if document is None:
                return None
            try:
                return self.commit(state, document, {"kind": kind})
            except PositionMoved:
                continue
        raise Unavailable(f"pipeline {self._pipeline!r}: other writers commit all the time")

    # -- the port --------------------------------------------------------------------------

    def open(self, takeover: Takeover) -> Opened:
        """Take the next epoch and every position, and execute a reset, in one commit."""
        check(takeover.partitions is None, "a Delta table is written by a run of all partitions")
        started: list[Positions] = []  # called once, even if the commit is decided again
        opened: list[Opened] = []

        def take(state: State) -> Document:
            old, known = state.document, from_tree(state.document.positions)
            self._check(old, takeover)
            if not known and not started:
                started.append(takeover.start())
            positions = {**(takeover.earliest if known else started[0]), **known}
            added = {tp: at for tp, at in positions.items() if tp not in known}
            new = _started(self._taken(old, takeover), added)
            if takeover.reset is not None:
                moved = takeover.reset(positions)
                positions |= moved
                new = _started(self._forgotten(state, new, moved), {}, moved)
            fence = Fence(self._pipeline, new.epoch, new.run)
            counted, leaders = RejectCount(*new.counted), from_tree(new.leader_epochs)
            begun = frozenset(added)
            opened[:] = [Opened(fence, positions, not known, counted, leaders, begun=begun)]
            return msgspec.structs.replace(new, positions=by_topic(positions))

        self._change("takeover" if takeover.reset is None else "reset", take)
        return opened[0]

    def _check(self, old: Document, takeover: Takeover) -> None:
        expected, source = takeover.expected, takeover.source
        same_cluster(old.cluster_id or source.cluster_id, source, self._pipeline)
        same_topics(old.topic_ids, source, self._pipeline)
        if expected is not None and old.epoch >= expected and old.run != self._run:
            raise Fenced(self._pipeline, expected, old.epoch)

    def _taken(self, old: Document, takeover: Takeover) -> Document:
        return msgspec.structs.replace(
            old,
            epoch=max(old.epoch, takeover.expected or 0) + 1,
            run=self._run,
            cluster_id=takeover.source.cluster_id,
            topic_ids={**old.topic_ids, **takeover.source.topic_ids},
        )

    def _forgotten(self, state: State, document: Document, moved: Positions) -> Document:
        """The document without the counts, totals, leader epochs and dead letters that a reset
        makes void.

        Records from the new positions on are processed again: a replay of their dead letters would
        write them twice.
        """
        letters = [one for path, _ in document.rejects for one in self.letters(path)]
        kept = [x for x in letters if x.offset < moved.get(x.partition, x.offset + 1)]
        leaders = {tp: e for tp, e in from_tree(document.leader_epochs).items() if tp not in moved}
        totals = {tp: one for tp, one in from_tree(document.totals).items() if tp not in moved}
        return msgspec.structs.replace(
            document,
            rejects=document.rejects if kept == letters else self.keep(state, kept),
            leader_epochs=by_topic(leaders),
            totals=by_topic(totals),
            counted=("", 0, 0),
        )

    def positions(
        self, fence: Fence, of: Collection[TopicPartition] = (), *, settled: bool = False
    ) -> dict[TopicPartition, Entry]:
        """The positions, read from the table."""
        del fence, of, settled
        return _entries(self.read().document)

    def move(self, claim: Claim, counts: Mapping[TopicPartition, Counts]) -> None:
        """Commit without a load; the table's history contains the ranges."""
        state = self.read()
        self.commit(state, *self.claimed(state.document, claim, counts))

    def add_partitions(self, fence: Fence, positions: Positions, source: SourceIdentity) -> None:
        """Add positions; existing positions are kept."""
        del source

        def add(state: State) -> Document:
            known = from_tree(self._held(state, fence).positions)
            new = {tp: at for tp, at in positions.items() if tp not in known}
            both = by_topic({**known, **new})
            return msgspec.structs.replace(_started(state.document, new), positions=both)

        self._change("partitions", add)

    def note(self, fence: Fence, notes: Notes) -> None:
        """Store notes in a separate commit."""

        def noted(state: State) -> Document:
            old, counted = self._held(state, fence), notes.counted
            leaders = by_topic({**from_tree(old.leader_epochs), **notes.leader_epochs})
            now = (counted.setting, counted.records, counted.rejects) if counted else old.counted
            return msgspec.structs.replace(old, leader_epochs=leaders, counted=now)

        self._change("notes", noted)

    def tidy(self, fence: Fence) -> None:
        """Remove documents that no commit can refer to any more: attempts and ledgers before the
        newest one.

        An attempt with a higher count than the newest commit may be about to become the ledger.
        """
        del fence
        state = self.read()
        named = {f"{self._folder}/{state.version}.json", *(p for p, _ in state.document.rejects)}
        mine = (f.path for f in self._store.list() if f.path.startswith(f"{self._folder}/"))
        old = [path for path in mine if _count(path) <= state.version >> 32]
        self._store.delete(set(old) - named)

    def close(self) -> None:
        """Nothing is open between calls."""

    def _held(self, state: State, fence: Fence) -> Document:
        """The document, if the run holds the ledger.

        Raises:
            Fenced, LedgerWentBack: it does not.
        """
        now = state.document
        if now.epoch < fence.epoch:
            raise LedgerWentBack(fence.pipeline, f"the ledger's epoch is {now.epoch}")
        if (now.epoch, now.run) != (fence.epoch, fence.run):
            raise Fenced(fence.pipeline, fence.epoch, now.epoch)
        return now


def _told(done: Counts) -> dict[str, Any]:
    """Counts in a commit's metadata; the digest as text, since JSON readers round such numbers."""
    digest = {"digest": str(done.digest), "recipe": done.recipe} if done.recipe else {}
    return {
        "records": done.records, "rows": done.rows, "rejects": done.rejects,
        "filtered": done.filtered, **digest,
    }  # fmt: skip


def _entries(document: Document) -> dict[TopicPartition, Entry]:
    one = document.epoch, (), document.run
    return {tp: Entry(at, *one) for tp, at in from_tree(document.positions).items()}


def _started(document: Document, added: Positions, moved: Positions | None = None) -> Document:
    """The document with the first offsets of added partitions, and of those that a reset has moved
    back."""
    known = from_tree(document.started)
    back = {tp: min(at, known[tp]) for tp, at in (moved or {}).items() if tp in known}
    return msgspec.structs.replace(document, started=by_topic({**known, **added, **back}))


def _taken_before(own: int, restores: Sequence[tuple[int, int]], version: int) -> int | None:
    """The RESTORE to a version before ``own`` that determines the rows of a version; None if there
    is none.

    The rows are those of the version that the newest RESTORE names, which an earlier RESTORE may
    have made in turn. A RESTORE that a later one has undone determines nothing.

    Args:
        own: a version.
        restores: versions of RESTOREs and the versions that they name, the newest first.
        version: the version whose rows are asked for.
    """
    for at, to in restores:
        if own < at <= version:
            if to < own:
                return at
            version = to
    return None


def _following(version: int) -> int:
    """A version of the next commit that no other attempt has."""
    return ((version >> 32) + 1 << 32) | secrets.randbits(32)


def _count(path: str) -> int:
    """The number of the pipeline's commit in a file's name."""
    return int(path.rpartition("/")[2].partition(".")[0]) >> 32


def _row(one: Reject) -> dict[str, Any]:
    headers = [{"key": key, "value": value} for key, value in one.headers]
    tp = {"topic": one.partition.topic, "partition": one.partition.partition}
    return {**vars(one), **tp, "headers": headers}


def _reject(row: dict[str, Any]) -> Reject:
    tp = TopicPartition(row.pop("topic"), row.pop("partition"))
    headers = [(one["key"], one["value"]) for one in row.pop("headers")]
    return Reject(tp, headers=headers, **row)
