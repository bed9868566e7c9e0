------------------------------ MODULE SqlLedger ------------------------------
(***************************************************************************)
(* The ledger of a SQL sink: rows, dead letters and positions in one       *)
(* database transaction.                                                   *)
(*                                                                         *)
(* Code: stores/sql/takeover.py (open, reset), commit/path.py and       *)
(* kinds/sql/sink.py (commit), stores/sql/statements.py (the statements), *)
(* kinds/sql/change.py (repair and backfill).                             *)
(* Decisions: 0005, 0006, 0009, 0018, 0019, 0037, 0040, 0043, 0049, 0051, *)
(* 0052.                                                                   *)
(*                                                                         *)
(* A process is a driver with its task, or a further attempt of a task.  A *)
(* process that takes no step is paused.  The database is one record, so a *)
(* failover to an asynchronous replica is one assignment.  Each action is  *)
(* one statement or one transaction; between two actions anything may      *)
(* happen.                                                                 *)
(***************************************************************************)
EXTENDS Integers, FiniteSets, TLC

CONSTANTS
    Processes,
    Partitions,
    Records,        \* offsets of a partition are 0 .. Records - 1
    Bad,            \* <<partition, offset>> of records that become dead letters
    Holes,          \* <<partition, offset>> of offsets without a record
    Late,           \* partitions that an open may not have seen yet
    MaxEpoch,       \* bound: epochs that are given out
    MaxResets,      \* bound
    MaxFaults,      \* bound: processes that die, batches that fail, answers that are lost
    MaxFailovers,   \* bound; 0: commits are never lost
    MaxDamage,      \* bound: records whose rows are deleted, doubled or changed by others
    MaxRepairs,     \* bound: repairs and backfills
    Partial,        \* TRUE: a takeover takes some of the partitions (worker)
    Ahead,          \* TRUE: threads of a worker finish ranges beyond the position
    EndsSessions,   \* FALSE: the database user may not end other sessions
    Fair,           \* processes that go on, until a fault ends them; for Progress
    Mistake         \* "none", or the mistake that is switched on

None    == "none"
Offset  == 0 .. Records - 1
Nowhere == [p \in Partitions |-> 0]   \* the targets of what is no reset
NoRun   == <<0, 0>>
NoWhole == [epoch |-> 0, run |-> NoRun]
NoClaim == [partition |-> None, at |-> 0, to |-> 0, read |-> 0, known |-> {}]
NoLetter == <<None, 0>>
NoRewrite == [partition |-> None, offset |-> 0, epoch |-> 0, run |-> NoRun, removes |-> FALSE,
              rows |-> 0, letter |-> FALSE]

VARIABLES
    db,       \* the committed state of the database
    old,      \* an earlier committed state, which a replica holds, or NoCopy
    lock,     \* per partition: the process whose transaction holds its position's row lock
    proc,     \* the state of each process
    left      \* how many resets, faults, failovers, damages and repairs are still allowed

vars == <<db, old, lock, proc, left>>

(* positions[p].at is the next offset; epoch and run name the run that     *)
(* holds it.  A position of epoch 0 is absent.                             *)
(* effects[p][o] counts how often a record took effect (a row or a dead    *)
(* letter) since a reset put the position before it.                       *)
(* history is kept for the mistake that reads it.                          *)
(* damaged: records whose rows others have changed since they were         *)
(* written.  untold: records with rows that the history does not tell of.  *)
(* whole is the last takeover of all partitions.                           *)
(* beyond[p] are the finished offsets beyond the position: in the code,    *)
(* ranges of the history that end beyond it (LedgerStatements.entries).    *)
EmptyDb ==
    [epoch     |-> 0,
     run       |-> NoRun,
     whole     |-> NoWhole,
     positions |-> [p \in Partitions |-> [at |-> 0, epoch |-> 0, run |-> NoRun]],
     beyond    |-> [p \in Partitions |-> {}],
     effects   |-> [p \in Partitions |-> [o \in Offset |-> 0]],
     letters   |-> {},
     history   |-> {},
     damaged   |-> {},
     untold    |-> {}]

NoCopy == [EmptyDb EXCEPT !.epoch = -1]

(* run: the process's unique name.  epoch: of its fence.  held: the epoch  *)
(* by which it knows to have held the positions; 0 before, and in a        *)
(* further attempt of a task, which opens nothing.  since: `whole` as a    *)
(* process that takes some of the partitions has found it at its start.    *)
Down == [pc |-> "down", run |-> NoRun, epoch |-> 0, held |-> 0, takes |-> {}, resets |-> FALSE,
         since |-> NoWhole, claim |-> NoClaim, letter |-> NoLetter, rewrite |-> NoRewrite]

Init ==
    /\ db = EmptyDb
    /\ old = NoCopy
    /\ lock = [p \in Partitions |-> None]
    /\ proc = [r \in Processes |-> Down]
    /\ left = [resets |-> MaxResets, faults |-> MaxFaults, failovers |-> MaxFailovers,
                damage |-> MaxDamage, repairs |-> MaxRepairs]

----------------------------------------------------------------------------
(* Helpers *)

Set(r, fields) == proc' = [proc EXCEPT ![r] = fields @@ @]
Unlocked(r) == [p \in Partitions |-> IF lock[p] = r THEN None ELSE lock[p]]
IsOpening(r) == proc[r].pc \in {"given", "alone"}
IsWriting(r) == proc[r].pc \in {"written", "moved"}
IsRewriting(r) == proc[r].rewrite.partition # None
Min(a, b) == IF a < b THEN a ELSE b

Max(a, b) == IF a > b THEN a ELSE b

(* What has taken effect, and core.claim.advance: the end of contiguous    *)
(* offsets.                                                                *)
Done(p) == {o \in Offset : o < db.positions[p].at} \cup db.beyond[p]
IsDone(p, o) == o \in Done(p)
EndOf(done) ==
    CHOOSE to \in 0 .. Records :
        (\A o \in 0 .. to - 1 : o \in done) /\ (to = Records \/ to \notin done)

(* What becomes of a driver whose batch or open fails: it opens again,     *)
(* unless it has never held the positions.                                 *)
Failed(q) == IF q.held = 0 THEN Down
             ELSE [q EXCEPT !.pc = "again", !.epoch = q.held, !.claim = NoClaim]

IsThere(p) == db.positions[p].epoch > 0
Compares(r, p) == db.positions[p].run = proc[r].run \/ Mistake = "run's name is not compared"
IsMine(r, p) == db.positions[p].epoch = proc[r].epoch /\ Compares(r, p)

(* Another run holds a partition that this run took: the verdict on which  *)
(* a run ends (Ledger entries, takeover.require_held).  The epoch in the   *)
(* pipeline's row is no verdict: its owner may have died before it took    *)
(* any position.  A lower epoch than ours is none either: the database     *)
(* went back.                                                              *)
IsFenced(r) == \E p \in proc[r].takes :
    \/ db.positions[p].epoch > proc[r].epoch
    \/ db.positions[p].epoch = proc[r].epoch /\ ~Compares(r, p)

(* A process that takes some of the partitions was started before all of   *)
(* them were taken: it ends, whoever holds its own (decision 0036).        *)
IsSuperseded(r) ==
    /\ proc[r].takes # Partitions
    /\ proc[r].since # db.whole
    /\ proc[r].since.epoch <= db.whole.epoch     \* older: the database went back
    /\ Mistake # "the last takeover of all is not compared"

(* A first takeover of all is overtaken by another one of all only: it     *)
(* takes what takeovers of some have taken meanwhile.                      *)
IsFirstOfAll(r) ==
    /\ proc[r].takes = Partitions /\ proc[r].held = 0
    /\ Mistake # "a takeover of some fences one of all"

(* takeover.SqlTakeover.require_turn: another run has taken them since this one *)
(* held them, whatever epoch this one is given now; or by a higher epoch.  *)
IsOvertaken(r) ==
    \/ IsSuperseded(r)
    \/ /\ IsFirstOfAll(r)
       /\ \/ db.whole.epoch > proc[r].epoch
          \/ /\ Mistake # "run's name is not compared"
             /\ db.whole.epoch = proc[r].epoch /\ db.whole.run # proc[r].run
    \/ /\ ~IsFirstOfAll(r)
       /\ \E p \in proc[r].takes :
            LET at == db.positions[p]
                since == IF proc[r].held = 0 THEN proc[r].epoch
                         ELSE Min(proc[r].held, proc[r].epoch)
            IN \/ proc[r].pc = "alone" /\ at.epoch > proc[r].epoch
               \/ IF Mistake = "run's name is not compared"
                  THEN proc[r].held > 0 /\ at.epoch > proc[r].held /\ at.run # proc[r].run
                  ELSE at.epoch >= since /\ at.run # proc[r].run

FencedByRow(r, mistake) == Mistake = mistake /\ db.run # proc[r].run

----------------------------------------------------------------------------
(* Open: takeover.take_epoch, end_sessions, takeover.take_positions *)

(* Step 1: the next epoch.  A process that starts has a new name.  Epochs  *)
(* are given out twice only over a failover, so the first epoch and the    *)
(* number of failovers make one.                                           *)
TakeEpoch(r, S, resets) ==
    LET run == <<db.epoch + 1, left.failovers>> IN
    /\ proc[r].pc = "down"
    /\ db.epoch < MaxEpoch
    /\ resets => left.resets > 0 /\ S = Partitions
    /\ db' = [db EXCEPT !.epoch = @ + 1, !.run = run]
    /\ Set(r, [pc |-> "given", run |-> run, epoch |-> db.epoch + 1, takes |-> S,
               since |-> IF S = Partitions THEN NoWhole ELSE db.whole, resets |-> resets])
    /\ left' = [left EXCEPT !.resets = @ - (IF resets THEN 1 ELSE 0)]
    /\ UNCHANGED <<old, lock>>

(* The same, for a run whose batch has failed. *)
TakeEpochAgain(r) ==
    /\ proc[r].pc = "again"
    /\ db.epoch < MaxEpoch
    /\ ~IsOvertaken(r)
    /\ ~FencedByRow(r, "reopen judged by the row")
    /\ db' = [db EXCEPT !.epoch = @ + 1, !.run = proc[r].run]
    /\ Set(r, [pc |-> "given", epoch |-> db.epoch + 1])
    /\ UNCHANGED <<old, lock, left>>

Fences(r) == proc' = [proc EXCEPT ![r] = [Down EXCEPT !.pc = "fenced"]]

(* A process that opens again finds that it is fenced. *)
FencedAtReopen(r) ==
    /\ proc[r].pc = "again"
    /\ IsOvertaken(r) \/ FencedByRow(r, "reopen judged by the row")
    /\ Fences(r)
    /\ UNCHANGED <<db, old, lock, left>>

(* Step 2: end the sessions of others that may hold a partition which this *)
(* takeover takes, whatever their epoch.  Their transactions are rolled    *)
(* back; their processes open a new session and ask the ledger.  Again     *)
(* when step 3 finds a lock held.                                          *)
Loses(q, r) ==
    /\ q # r
    /\ IsWriting(q) \/ IsRewriting(q) \/ proc[q].pc = "paused"
    /\ \/ proc[q].takes \cap proc[r].takes # {}
       \/ Mistake = "partial takeover ends all sessions"

EndSessions(r) ==
    /\ IsOpening(r)
    /\ LET ended == IF EndsSessions /\ Mistake # "sessions are not ended"
                   THEN {q \in Processes : Loses(q, r)} ELSE {}
       IN /\ proc[r].pc = "alone" =>
                ~IsOvertaken(r) /\ \E p \in proc[r].takes : lock[p] \in ended
          /\ proc' = [q \in Processes |->
                CASE q = r -> [proc[q] EXCEPT !.pc = "alone"]
                  [] q \in ended /\ IsWriting(q) -> [proc[q] EXCEPT !.pc = "idle", !.claim = NoClaim]
                  [] q \in ended /\ IsRewriting(q) -> Down
                  [] OTHER -> proc[q]]
          /\ lock' = [p \in Partitions |-> IF lock[p] \in ended THEN None ELSE lock[p]]
    /\ UNCHANGED <<db, old, left>>

(* A reset waits for dead letters that a rewrite has locked.  Rows that a  *)
(* rewrite has deleted before the reset are not those that are counted     *)
(* after it.                                                               *)
IsFrom(w, at(_), S) == w.partition \in S /\ w.offset >= at(w.partition)
HoldsLetterFrom(q, at(_), S) == proc[q].rewrite.letter /\ IsFrom(proc[q].rewrite, at, S)
Unseen(q, at(_), S) == IF IsFrom(q.rewrite, at, S) THEN [q EXCEPT !.rewrite.rows = 0] ELSE q

(* Step 3: every position that this takeover takes gets its epoch and its  *)
(* name, in one transaction, which waits for the row locks; partitions     *)
(* without a position get one.  A reset puts positions elsewhere in the    *)
(* same transaction: what was beyond them counts no more, and its dead     *)
(* letters go.  When the answer is lost, the process does not know that it *)
(* holds them.  A first takeover of all that finds later epochs, of        *)
(* takeovers of some, is given another one here.                           *)
TakePositions(r, seen, targets, answered) ==
    LET S == {p \in proc[r].takes : IsThere(p) \/ p \in seen}
        at(p) == IF proc[r].resets THEN targets[p] ELSE db.positions[p].at
        later == IsFirstOfAll(r) /\ \E p \in Partitions : db.positions[p].epoch >= proc[r].epoch
        epoch == IF later THEN db.epoch + 1 ELSE proc[r].epoch
        Undone(record) ==
            proc[r].resets /\ record[1] \in S /\ record[2] >= at(record[1])
        Forgets == IF proc[r].resets THEN Mistake # "a reset keeps ranges beyond the position"
                   ELSE Mistake = "finished ranges are forgotten at a takeover"
    IN
    /\ proc[r].pc = "alone"
    /\ proc[r].resets \/ targets = Nowhere
    /\ \A p \in proc[r].takes : lock[p] = None
    /\ ~IsOvertaken(r)
    /\ \A p \in S : at(p) <= db.positions[p].at
    /\ proc[r].resets => \A q \in Processes : ~HoldsLetterFrom(q, at, S)
    /\ ~answered => left.faults > 0
    /\ epoch <= MaxEpoch
    /\ db' = [db EXCEPT
          !.epoch = IF later THEN epoch ELSE @,
          !.run = IF later THEN proc[r].run ELSE @,
          !.whole = IF proc[r].takes = Partitions THEN [epoch |-> epoch, run |-> proc[r].run] ELSE @,
          !.positions = [p \in Partitions |->
              IF p \in S THEN [at |-> at(p), epoch |-> epoch, run |-> proc[r].run] ELSE @[p]],
          !.beyond = [p \in Partitions |->
              IF p \in S /\ Forgets THEN {} ELSE @[p]],
          !.effects = [p \in Partitions |-> [o \in Offset |->
              IF p \in S /\ proc[r].resets /\ o >= at(p) THEN 0 ELSE @[p][o]]],
          !.letters = {l \in @ : ~Undone(l)},
          !.history = {h \in @ : ~Undone(h)},
          !.damaged = {h \in @ : ~Undone(h)},
          !.untold = {h \in @ : ~Undone(h)}]
    /\ proc' = [q \in Processes |->
          CASE q # r            -> IF proc[r].resets THEN Unseen(proc[q], at, S) ELSE proc[q]
            [] proc[r].resets   -> Down
            [] ~answered        -> Failed(proc[r])
            [] OTHER            -> [proc[r] EXCEPT !.pc = "idle", !.epoch = epoch, !.held = epoch]]
    /\ left' = [left EXCEPT !.faults = @ - (IF answered THEN 0 ELSE 1)]
    /\ UNCHANGED <<old, lock>>

FencedWhileOpening(r) ==
    /\ proc[r].pc = "alone"
    /\ IsOvertaken(r)
    /\ Fences(r)
    /\ UNCHANGED <<db, old, lock, left>>

----------------------------------------------------------------------------
(* Commit: runtimes.commit.commit, SqlSink.commit *)

(* A second attempt of the same task: speculative, or a retry whose        *)
(* predecessor still runs.  With Ahead also a second thread of a worker.   *)
SameJobTwice(r, q) ==
    /\ proc[r].pc = "down"
    /\ proc[q].pc \in {"idle", "written", "moved"}
    /\ Set(r, [pc |-> "idle", run |-> proc[q].run, epoch |-> proc[q].epoch, takes |-> proc[q].takes])
    /\ UNCHANGED <<db, old, lock, left>>

IsHole(p, o) == <<p, o>> \in Holes
Claim(p, at, to, read) ==
    [partition |-> p, at |-> at, to |-> to, read |-> read, known |-> IF Ahead THEN Done(p) ELSE {}]

(* Read the ledger, decide, BEGIN and COPY: rows are sent, nobody sees     *)
(* them, and no lock of the ledger is held.  A task has read the records   *)
(* up to `read` of the planned range up to `to`, and claims what it has    *)
(* read: a range that ends with a record.  Where only holes are left the   *)
(* driver moves the position over them.                                    *)
ReadDecideAndWriteRows(r, p, to, read) ==
    LET at == db.positions[p].at IN
    /\ proc[r].pc = "idle"
    /\ p \in proc[r].takes
    /\ IsMine(r, p)
    /\ at < read /\ read <= to
    /\ \A o \in at .. to - 1 : ~IsDone(p, o)
    /\ IF Mistake = "planned end is claimed" THEN ~IsHole(p, read - 1)
       ELSE /\ read = to
            /\ \/ ~IsHole(p, to - 1)
               \/ to = Records /\ \A o \in at .. to - 1 : IsHole(p, o)
    /\ Set(r, [pc |-> "written", claim |-> Claim(p, at, to, read)])
    /\ UNCHANGED <<db, old, lock, left>>

(* A thread of a worker: it has other keys than the threads before it, and *)
(* finishes a range that begins beyond the position.                       *)
ReadDecideAndWriteAhead(r, p, from, to) ==
    /\ Ahead
    /\ proc[r].pc = "idle"
    /\ p \in proc[r].takes
    /\ IsMine(r, p)
    /\ db.positions[p].at < from /\ from < to
    /\ \A o \in from .. to - 1 : ~IsDone(p, o)
    /\ ~IsHole(p, from - 1)     \* a range begins at the end of the record before
    /\ ~IsHole(p, to - 1)
    /\ Set(r, [pc |-> "written", claim |-> Claim(p, from, to, to)])
    /\ UNCHANGED <<db, old, lock, left>>

FencedByLedger(r) ==
    /\ proc[r].pc = "idle"
    /\ IsFenced(r)
    /\ Fences(r)
    /\ UNCHANGED <<db, old, lock, left>>

(* The ledger went back to an earlier state: the driver opens again, a     *)
(* further attempt of a task ends.                                         *)
LedgerWentBack(r) ==
    /\ proc[r].pc = "idle"
    /\ \E p \in proc[r].takes : db.positions[p].epoch < proc[r].epoch /\ (IsThere(p) \/ p \notin Late)
    /\ ~IsFenced(r)
    /\ Mistake # "a ledger that went back is read again"
    /\ proc' = [proc EXCEPT ![r] = Failed(@)]
    /\ UNCHANGED <<db, old, lock, left>>

(* The compare-and-set.  It waits for the row lock, then compares with     *)
(* the newest committed row.  Threads of a worker move the position at the *)
(* same time: they compare the epoch, and with the lock held they read     *)
(* what has taken effect since (SqlLedger.finish).                         *)
CompareAndSet(r) ==
    LET c == proc[r].claim
        at == db.positions[c.partition]
        same == IF ~Ahead THEN at.at = c.at
                ELSE \/ \A o \in c.at .. c.to - 1 : ~IsDone(c.partition, o)
                     \/ Mistake = "finished ranges are not compared"
    IN
    /\ proc[r].pc = "written"
    /\ lock[c.partition] = None
    /\ IF \/ same /\ IsMine(r, c.partition)
          \/ Mistake = "no compare-and-set"
          \/ Mistake = "compare position only" /\ at.at = c.at
       THEN /\ lock' = [lock EXCEPT ![c.partition] = r]
            /\ Set(r, [pc |-> "moved"])
       ELSE /\ Set(r, [pc |-> "idle", claim |-> NoClaim])   \* ROLLBACK; read again
            /\ UNCHANGED lock
    /\ UNCHANGED <<db, old, left>>

(* A process that has stopped for good holds the lock: the batch fails in  *)
(* the end, and the next open ends the session.                            *)
LockTimeout(r) ==
    /\ proc[r].pc = "written"
    /\ \E q \in Processes : lock[proc[r].claim.partition] = q /\ proc[q].pc = "paused"
    /\ proc' = [proc EXCEPT ![r] = Failed(@)]
    /\ UNCHANGED <<db, old, lock, left>>

(* With the history written first, two attempts at one range meet in its   *)
(* key and the second is told of a duplicate: it sets the record aside.    *)
HistoryBeforeCompareAndSet(r) ==
    LET c == proc[r].claim IN
    /\ Mistake = "history before compare-and-set"
    /\ proc[r].pc = "written"
    /\ <<c.partition, c.at, proc[r].epoch>> \in db.history
    /\ Set(r, [pc |-> "stopped"])
    /\ UNCHANGED <<db, old, lock, left>>

(* COMMIT.  When its answer is lost the process does what it does after an *)
(* answer: it reads the ledger before it decides again.                    *)
Commit(r) ==
    LET c == proc[r].claim
        took == {o \in Offset : c.at <= o /\ o < c.read /\ ~IsHole(c.partition, o)}
        finished == c.at .. c.to - 1
        at == db.positions[c.partition].at
        to == CASE ~Ahead -> c.to
                [] Mistake = "position moves over an unfinished offset" -> Max(at, c.to)
                [] Mistake = "position is computed without the lock" ->
                    Max(at, EndOf(c.known \cup finished))
                [] OTHER -> EndOf(Done(c.partition) \cup finished)
    IN
    /\ proc[r].pc = "moved"
    /\ db' = [db EXCEPT
          !.positions[c.partition].at = to,
          !.beyond[c.partition] = IF Ahead THEN {o \in @ \cup finished : o >= to} ELSE @,
          !.effects[c.partition] = [o \in Offset |-> @[o] + (IF o \in took THEN 1 ELSE 0)],
          !.letters = @ \cup {<<c.partition, o>> : o \in {x \in took : <<c.partition, x>> \in Bad}},
          !.history = IF Mistake # "history before compare-and-set" THEN {}
                      ELSE @ \cup {<<c.partition, c.at, proc[r].epoch>>}]
    /\ lock' = Unlocked(r)
    /\ Set(r, [pc |-> "idle", claim |-> NoClaim])
    /\ UNCHANGED <<old, left>>

----------------------------------------------------------------------------
(* With the pipeline's row locked: SqlSink.add_partitions, SqlSink.tidy *)

(* A partition that was found while running.  It must have the epoch of    *)
(* the others, so it is added by the run that holds them.                  *)
AddPartition(r, p) ==
    /\ ~Partial
    /\ proc[r].pc = "idle"
    /\ proc[r].held > 0
    /\ p \in Late /\ ~IsThere(p)
    /\ \/ /\ \E q \in Partitions : IsThere(q)
          /\ \A q \in Partitions : IsThere(q) => IsMine(r, q)
       \/ Mistake = "new partition is added without looking"
    /\ db' = [db EXCEPT !.positions[p] = [at |-> 0, epoch |-> proc[r].epoch, run |-> proc[r].run]]
    /\ UNCHANGED <<old, lock, proc, left>>

(* Tidying changes nothing that is modelled; it tells a run that it is     *)
(* fenced.                                                                 *)
Tidy(r) ==
    /\ proc[r].pc = "idle"
    /\ FencedByRow(r, "tidy judged by the row")
    /\ Fences(r)
    /\ UNCHANGED <<db, old, lock, left>>

----------------------------------------------------------------------------
(* Replay of dead letters: kinds/sql/change.py *)

(* One transaction locks the letter, judges it, deletes it and writes its  *)
(* row: still one effect.  A reset that deletes it waits, or came first.   *)
ReplayLetter(l) ==
    /\ l \in db.letters
    /\ \A q \in Processes :
          LET w == proc[q].rewrite IN ~(w.letter /\ <<w.partition, w.offset>> = l)
    /\ db' = [db EXCEPT !.letters = @ \ {l}]
    /\ UNCHANGED <<old, lock, proc, left>>

(* The mistake: the letter is read without its lock, and its row written   *)
(* whatever has become of it.                                              *)
ReadLetter(r, l) ==
    /\ Mistake = "replay does not look at resets"
    /\ proc[r].pc = "down"
    /\ l \in db.letters
    /\ Set(r, [pc |-> "judged", letter |-> l])
    /\ UNCHANGED <<db, old, lock, left>>

WriteLetter(r) ==
    LET l == proc[r].letter IN
    /\ proc[r].pc = "judged"
    /\ db' = IF l \in db.letters THEN [db EXCEPT !.letters = @ \ {l}]
             ELSE [db EXCEPT !.effects[l[1]][l[2]] = @ + 1]
    /\ Set(r, Down)
    /\ UNCHANGED <<old, lock, left>>

----------------------------------------------------------------------------
(* Repair and backfill: kinds/sql/change.py.  What a record has produced  *)
(* is deleted, and what is made of it today is written.                    *)

Rewrites(r, fields) == Set(r, [rewrite |-> fields @@ proc[r].rewrite])
Rows(p, o) == db.effects[p][o] - (IF <<p, o>> \in db.letters THEN 1 ELSE 0)

(* BEGIN, the lock of repairs, and the ledger: below the position a record *)
(* is rewritten.                                                           *)
BeginRewrite(r, p, o) ==
    LET at == db.positions[p] IN
    /\ proc[r].pc = "down"
    /\ left.repairs > 0
    /\ \/ \A q \in Processes : ~IsRewriting(q)
       \/ Mistake = "repair without the range lock"
    /\ IsThere(p)
    /\ o < at.at \/ Mistake = "repair of a range beyond the position"
    /\ Set(r, [pc |-> "rewrites", takes |-> {p},
               rewrite |-> [NoRewrite EXCEPT !.partition = p, !.offset = o,
                                             !.epoch = at.epoch, !.run = at.run]])
    /\ left' = [left EXCEPT !.repairs = @ - 1]
    /\ UNCHANGED <<db, old, lock>>

(* DELETE of the dead letter, which waits for a replay and locks it.  It   *)
(* is the first: a replay that has the letter writes a row, and only what  *)
(* is committed before the next statement is seen by it.                   *)
DeleteLetter(r) ==
    LET w == proc[r].rewrite IN
    /\ proc[r].pc = IF Mistake = "rows are deleted before dead letters" THEN "rowless" ELSE "rewrites"
    /\ Set(r, [pc |-> IF proc[r].pc = "rowless" THEN "deleted" ELSE "letterless",
               rewrite |-> [letter |-> <<w.partition, w.offset>> \in db.letters] @@ w])
    /\ UNCHANGED <<db, old, lock, left>>

(* DELETE of the rows that are committed now, then COPY. *)
DeleteRows(r) ==
    LET w == proc[r].rewrite
        first == Mistake = "rows are deleted before dead letters"
    IN
    /\ proc[r].pc = IF first THEN "rewrites" ELSE "letterless"
    /\ Set(r, [pc |-> IF first THEN "rowless" ELSE "deleted",
               rewrite |-> [rows |-> Rows(w.partition, w.offset)] @@ w])
    /\ UNCHANGED <<db, old, lock, left>>

(* The ledger is compared under the position's row lock, which is held     *)
(* from here to COMMIT: no run or reset has taken the position since, and  *)
(* it is beyond the record.  Otherwise everything is undone.               *)
CompareAndKeep(r) ==
    LET w == proc[r].rewrite
        at == db.positions[w.partition]
    IN
    /\ proc[r].pc = "deleted"
    /\ lock[w.partition] = None
    /\ IF /\ \/ at.epoch = w.epoch /\ at.run = w.run
             \/ Mistake = "repair does not look at resets"
          /\ w.offset < at.at \/ Mistake = "repair of a range beyond the position"
       THEN /\ lock' = [lock EXCEPT ![w.partition] = r]
            /\ Set(r, [pc |-> "kept"])
       ELSE /\ Set(r, Down)
            /\ UNCHANGED lock
    /\ UNCHANGED <<db, old, left>>

(* The mistake: the rows are deleted in a transaction of their own. *)
CommitDeletion(r) ==
    LET w == proc[r].rewrite IN
    /\ Mistake = "delete and insert in two transactions"
    /\ proc[r].pc = "deleted"
    /\ w.rows > 0
    /\ db' = [db EXCEPT !.effects[w.partition][w.offset] = @ - w.rows]
    /\ Rewrites(r, [rows |-> 0])
    /\ UNCHANGED <<old, lock, left>>

(* COMMIT: the new rows, or the dead letter, and the amendment of the      *)
(* history.                                                                *)
CommitRewrite(r) ==
    LET w == proc[r].rewrite
        record == <<w.partition, w.offset>>
        made == IF w.removes \/ IsHole(w.partition, w.offset) THEN 0 ELSE 1
        gone == w.rows + (IF w.letter THEN 1 ELSE 0)
    IN
    /\ proc[r].pc = "kept"
    /\ db' = [db EXCEPT
          !.effects[w.partition][w.offset] = @ - gone + made,
          !.letters = IF made = 1 /\ record \in Bad THEN @ \cup {record} ELSE @ \ {record},
          !.damaged = @ \ {record},
          !.untold = IF Mistake = "amendment apart from the rows" THEN @ \cup {record} ELSE @]
    /\ lock' = Unlocked(r)
    /\ Set(r, Down)
    /\ UNCHANGED <<old, left>>

(* A row of a record beyond the position is removed with the position's    *)
(* lock from the beginning: a commit of the record waits, and its row is   *)
(* not seen.                                                               *)
BeginRemoval(r, p, o) ==
    LET at == db.positions[p] IN
    /\ proc[r].pc = "down"
    /\ left.repairs > 0
    /\ \A q \in Processes : ~IsRewriting(q)
    /\ IsThere(p)
    /\ ~IsDone(p, o)
    /\ db.effects[p][o] > 0
    /\ lock[p] = None
    /\ lock' = IF Mistake = "rows beyond the position are removed without its lock" THEN lock
               ELSE [lock EXCEPT ![p] = r]
    /\ Set(r, [pc |-> "removes", takes |-> {p},
               rewrite |-> [NoRewrite EXCEPT !.partition = p, !.offset = o, !.removes = TRUE,
                                             !.epoch = at.epoch, !.run = at.run]])
    /\ left' = [left EXCEPT !.repairs = @ - 1]
    /\ UNCHANGED <<db, old>>

RemoveRows(r) ==
    LET w == proc[r].rewrite IN
    /\ proc[r].pc = "removes"
    /\ Set(r, [pc |-> "kept", rewrite |-> [rows |-> Rows(w.partition, w.offset)] @@ w])
    /\ UNCHANGED <<db, old, lock, left>>

----------------------------------------------------------------------------
(* Faults *)

(* Others delete the rows of a record, or its dead letter, write them      *)
(* twice or change them; or write a row of a record beyond the position.   *)
(* Not while the record is rewritten: the next audit reports that.         *)
Damage(p, o) ==
    LET below == IsDone(p, o) /\ ~IsHole(p, o) IN
    /\ left.damage > 0
    /\ <<p, o>> \notin db.damaged
    /\ \A q \in Processes : <<proc[q].rewrite.partition, proc[q].rewrite.offset>> # <<p, o>>
    /\ \E n \in IF below THEN 0 .. 2 ELSE {1} :
          db' = [db EXCEPT
              !.effects[p][o] = n,
              !.letters = IF n = 0 THEN @ \ {<<p, o>>} ELSE @,
              !.damaged = @ \cup {<<p, o>>}]
    /\ left' = [left EXCEPT !.damage = @ - 1]
    /\ UNCHANGED <<old, lock, proc>>

(* A process stops for good without letting go of its lock.  What stops    *)
(* for a while only takes no step.                                         *)
Pause(r) ==
    /\ r \in Fair
    /\ proc[r].pc = "moved"
    /\ left.faults > 0
    /\ Set(r, [pc |-> "paused"])
    /\ left' = [left EXCEPT !.faults = @ - 1]
    /\ UNCHANGED <<db, old, lock>>

Crash(r) ==
    /\ proc[r].pc \notin {"down", "fenced", "paused"}
    /\ left.faults > 0
    /\ proc' = [proc EXCEPT ![r] = Down]
    /\ lock' = Unlocked(r)
    /\ left' = [left EXCEPT !.faults = @ - 1]
    /\ UNCHANGED <<db, old>>

(* A batch or an open fails, and the driver opens again. *)
BatchFails(r) ==
    /\ IsOpening(r) \/ IsWriting(r) \/ proc[r].pc = "idle"
    /\ proc[r].held > 0
    /\ left.faults > 0
    /\ proc' = [proc EXCEPT ![r] = Failed(@)]
    /\ lock' = Unlocked(r)
    /\ left' = [left EXCEPT !.faults = @ - 1]
    /\ UNCHANGED <<db, old>>

(* What the replica has received when it takes over. *)
Replicate ==
    /\ left.failovers > 0
    /\ old = NoCopy
    /\ old' = db
    /\ UNCHANGED <<db, lock, proc, left>>

(* The replica takes over: rows and ledger go back together, every session *)
(* is ended.                                                               *)
Failover ==
    /\ old # NoCopy
    /\ old # db
    /\ db' = old
    /\ old' = NoCopy
    /\ lock' = [p \in Partitions |-> None]
    /\ proc' = [r \in Processes |->
          CASE IsOpening(r) -> Failed(proc[r])
            [] IsWriting(r) -> [proc[r] EXCEPT !.pc = "idle", !.claim = NoClaim]
            [] IsRewriting(r) -> Down
            [] OTHER -> proc[r]]
    /\ left' = [left EXCEPT !.failovers = @ - 1]

----------------------------------------------------------------------------
Takes == IF Partial THEN SUBSET Partitions \ {{}} ELSE {Partitions}
Seen == {S \in SUBSET Partitions : Partitions \ Late \subseteq S}
Targets == [Partitions -> 0 .. Records]

(* TLC names a step after an action that is reached through disjunctions   *)
(* and sets of constants only.                                             *)

(* What a process does by itself, once it was started. *)
Step(r) ==
    \/ TakeEpochAgain(r)
    \/ FencedAtReopen(r)
    \/ EndSessions(r)
    \/ \E seen \in Seen, targets \in Targets : TakePositions(r, seen, targets, TRUE)
    \/ FencedWhileOpening(r)
    \/ \E p \in Partitions, to, read \in 1 .. Records : ReadDecideAndWriteRows(r, p, to, read)
    \/ \E p \in Partitions, from, to \in 1 .. Records : ReadDecideAndWriteAhead(r, p, from, to)
    \/ FencedByLedger(r)
    \/ LedgerWentBack(r)
    \/ CompareAndSet(r)
    \/ LockTimeout(r)
    \/ HistoryBeforeCompareAndSet(r)
    \/ Commit(r)
    \/ \E p \in Late : AddPartition(r, p)
    \/ Tidy(r)
    \/ WriteLetter(r)
    \/ DeleteLetter(r)
    \/ DeleteRows(r)
    \/ CompareAndKeep(r)
    \/ CommitDeletion(r)
    \/ CommitRewrite(r)
    \/ RemoveRows(r)

Start(r) ==
    \/ \E S \in Takes, resets \in BOOLEAN : TakeEpoch(r, S, resets)
    \/ \E q \in Processes : SameJobTwice(r, q)
    \/ \E l \in Bad : ReadLetter(r, l)
    \/ \E p \in Partitions, o \in Offset : BeginRewrite(r, p, o)
    \/ \E p \in Partitions, o \in Offset : BeginRemoval(r, p, o)

Fault(r) ==
    \/ Pause(r)
    \/ Crash(r)
    \/ BatchFails(r)
    \/ \E seen \in Seen, targets \in Targets : TakePositions(r, seen, targets, FALSE)

Next ==
    \/ \E r \in Processes : Step(r) \/ Start(r) \/ Fault(r)
    \/ \E l \in Bad : ReplayLetter(l)
    \/ \E p \in Partitions, o \in Offset : Damage(p, o)
    \/ Replicate
    \/ Failover

(* Whoever waits for a lock gets it in turn. *)
Fairness ==
    \A r \in Fair :
        /\ WF_vars(Step(r))
        /\ SF_vars(\E seen \in Seen, targets \in Targets : TakePositions(r, seen, targets, TRUE))

Spec == Init /\ [][Next]_vars /\ Fairness

----------------------------------------------------------------------------
(* Every record before the position, or of a finished range beyond it,     *)
(* took effect once, every other record did not; unless others have        *)
(* changed its rows since.                                                 *)
ExactlyOnce ==
    \A p \in Partitions, o \in Offset : <<p, o>> \notin db.damaged =>
        db.effects[p][o] = IF IsDone(p, o) /\ ~IsHole(p, o) THEN 1 ELSE 0

(* The position is the end of the contiguous offsets. *)
FinishedRangesAreBeyond ==
    \A p \in Partitions : \A o \in db.beyond[p] : o > db.positions[p].at

(* A dead letter stands for a record that took effect. *)
LettersBelowPositions ==
    \A l \in db.letters : l \in Bad /\ IsDone(l[1], l[2])

(* The history tells of all rows. *)
HistoryTellsRows == db.untold = {}

(* Only the run that took a position last moves it. *)
NobodyCommitsOutsideTheFence ==
    \A r \in Processes : proc[r].pc = "moved" =>
        LET at == db.positions[proc[r].claim.partition]
        IN at.run = proc[r].run /\ at.epoch = proc[r].epoch

(* The positions of a pipeline have one holder. *)
OneHolder ==
    Partial \/ \A p, q \in Partitions : IsThere(p) /\ IsThere(q) =>
        /\ db.positions[p].epoch = db.positions[q].epoch
        /\ db.positions[p].run = db.positions[q].run

NobodyStops == \A r \in Processes : proc[r].pc # "stopped"

(* A run ends with "fenced" only when another run holds its partition (or, *)
(* for an attempt of a task, the same run by a newer epoch).               *)
FencedByAnOwner ==
    [][\A r \in Processes : proc[r].pc # "fenced" /\ proc'[r].pc = "fenced" =>
          \E p \in proc[r].takes :
              /\ IsThere(p)
              /\ \/ db.positions[p].run # proc[r].run
                 \/ db.positions[p].epoch > proc[r].epoch /\ proc[r].held = 0]_vars

(* A takeover ends no transaction of a run that loses nothing. *)
OnlyLosersAreEnded ==
    [][\A q \in Processes : \A r \in Processes \ {q} :
          EndSessions(r) /\ proc'[q] # proc[q] => proc[q].takes \cap proc[r].takes # {}]_vars

(* Who takes some of the partitions was started after the last takeover of *)
(* all, and none of them ends a first takeover of all.                     *)
AllComeBeforeSome ==
    [][\A r \in Processes : proc[r].pc = "alone" =>
          /\ proc[r].takes # Partitions
             /\ (\E p \in Partitions :
                    /\ db'.positions[p].epoch = proc[r].epoch
                    /\ db'.positions[p] # db.positions[p])
             => proc[r].since = db.whole \/ proc[r].since.epoch > db.whole.epoch
          /\ proc[r].takes = Partitions /\ proc[r].held = 0 /\ proc'[r].pc = "fenced"
             => db.whole.epoch >= proc[r].epoch]_vars

PositionsGoBackByResetsOnly ==
    [][\A p \in Partitions :
          db'.positions[p].at >= db.positions[p].at
          \/ (\E r \in Processes : proc[r].pc = "alone" /\ proc[r].resets /\ proc'[r].pc # "alone")
          \/ left'.failovers < left.failovers]_vars

IsUp(r) ==   \* a driver, not a further attempt of one of its tasks
    /\ proc[r].pc \notin {"down", "fenced", "paused"}
    /\ proc[r].held > 0 \/ IsOpening(r)

(* A run that stays up gets the records of its partitions done, whatever   *)
(* becomes of others.  With FencedByAnOwner: no run is fenced or kept      *)
(* waiting for good while it alone is healthy.  What has used up the bound *)
(* on epochs says nothing.                                                 *)
Progress ==
    \A r \in Fair :
        <>[](IsUp(r) /\ db.epoch < MaxEpoch)
            => <>[](\A p \in proc[r].takes : db.positions[p].at = Records)
=============================================================================
