------------------------------ MODULE SqlLedger ------------------------------
(***************************************************************************)
(* The ledger of a SQL sink: rows, dead letters and positions in one       *)
(* database transaction.                                                   *)
(*                                                                         *)
(* Code: sinks/sql/takeover.py (open, reset), runtimes/commit.py and       *)
(* sinks/sql/sink.py (commit), sinks/sql/ledger.py (the statements).       *)
(* Decisions: 0005, 0006, 0009.                                            *)
(*                                                                         *)
(* A process is a driver with its task, a second attempt of that task, or  *)
(* a replay of dead letters.  A process that takes no step is paused.      *)
(* The database is one record, so a failover to an asynchronous replica is *)
(* one assignment.  Each action is one statement or one transaction;       *)
(* between two actions anything may happen.                                *)
(***************************************************************************)
EXTENDS Integers, FiniteSets, TLC

CONSTANTS
    Processes,
    Partitions,
    Records,        \* offsets of a partition are 0 .. Records - 1
    Bad,            \* <<partition, offset>> of records that become dead letters
    MaxEpoch,       \* bound: epochs that are given out
    MaxResets,      \* bound
    MaxCrashes,     \* bound
    MaxFailovers,   \* bound; 0: commits are never lost
    Partial,        \* TRUE: a takeover takes some of the partitions (worker)
    EndsSessions,   \* FALSE: the database user may not end other sessions
    Mistake         \* "none", or the mistake that is switched on

None   == "none"
Offset == 0 .. Records - 1
NoClaim == [partition |-> None, from |-> 0, to |-> 0, read |-> 0, at |-> 0, epoch |-> 0]
NoLetter == <<None, 0>>

VARIABLES
    db,       \* the committed state of the database
    old,      \* an earlier committed state, which a replica holds
    lock,     \* per partition: the process whose transaction holds its position's row lock
    proc,     \* the state of each process
    left      \* how many resets, crashes and failovers are still allowed

vars == <<db, old, lock, proc, left>>

(* positions[p].at is the next offset; absent positions have epoch 0.      *)
(* positions[p].owner is not stored: it names the run that took the        *)
(* position last, and invariants compare it.                               *)
(* effects[p][o] counts how often a record took effect (a row or a dead    *)
(* letter) since a reset put the position before it.                       *)
EmptyDb ==
    [epoch     |-> 0,
     run       |-> None,
     positions |-> [p \in Partitions |-> [at |-> 0, epoch |-> 0, owner |-> None]],
     effects   |-> [p \in Partitions |-> [o \in Offset |-> 0]],
     letters   |-> {},
     history   |-> {}]

Down == [pc |-> "down", run |-> None, epoch |-> 0, takes |-> {}, resets |-> FALSE,
         claim |-> NoClaim, letter |-> NoLetter]

Init ==
    /\ db = EmptyDb
    /\ old = EmptyDb
    /\ lock = [p \in Partitions |-> None]
    /\ proc = [r \in Processes |-> Down]
    /\ left = [resets |-> MaxResets, crashes |-> MaxCrashes, failovers |-> MaxFailovers]

----------------------------------------------------------------------------
(* Helpers *)

Set(r, fields) == proc' = [proc EXCEPT ![r] = fields @@ @]
Unlocked(r) == [p \in Partitions |-> IF lock[p] = r THEN None ELSE lock[p]]
TakenBy(r) == {p \in proc[r].takes : db.positions[p].epoch = proc[r].epoch}

(* Another run holds a partition that this run took: the verdict on which  *)
(* a run ends.  The epoch in the pipeline's row is no verdict: its owner   *)
(* may have died before it took any position.                              *)
IsFenced(r) == \E p \in proc[r].takes : db.positions[p].epoch > proc[r].epoch

FencedByRow(r, mistake) == Mistake = mistake /\ db.epoch # proc[r].epoch

----------------------------------------------------------------------------
(* Open: takeover.take_epoch, end_sessions, takeover.take_positions *)

(* Step 1: the next epoch.  The answer of the COMMIT may be lost; then the *)
(* process asks for another epoch.                                         *)
TakeEpoch(r, S, resets, answered) ==
    /\ proc[r].pc \in {"down", "again"}
    /\ db.epoch < MaxEpoch
    /\ resets => left.resets > 0 /\ proc[r].pc = "down"
    /\ proc[r].pc = "again" =>
         /\ ~IsFenced(r)
         /\ ~(Mistake = "reopen judged by the row" /\ db.run # r)
         /\ S = proc[r].takes
    /\ db' = [db EXCEPT !.epoch = @ + 1, !.run = r]
    /\ IF answered
       THEN Set(r, [pc |-> "given", run |-> r, epoch |-> db.epoch + 1, takes |-> S, resets |-> resets])
       ELSE UNCHANGED proc
    /\ left' = [left EXCEPT !.resets = @ - (IF resets THEN 1 ELSE 0)]
    /\ UNCHANGED <<old, lock>>

(* A process that opens again finds that it is fenced. *)
FencedAtReopen(r) ==
    /\ proc[r].pc = "again"
    /\ IsFenced(r) \/ (Mistake = "reopen judged by the row" /\ db.run # r)
    /\ Set(r, [pc |-> "fenced"])
    /\ UNCHANGED <<db, old, lock, left>>

(* Step 2: end the sessions of older epochs that hold a partition which    *)
(* this takeover takes.  Their transactions are rolled back.               *)
Loses(q, r) ==
    /\ q # r
    /\ proc[q].pc \in {"written", "moved"}
    /\ proc[q].epoch < proc[r].epoch
    /\ \/ proc[q].takes \cap proc[r].takes # {}
       \/ Mistake = "partial takeover ends all sessions"

EndSessions(r) ==
    /\ proc[r].pc \in {"given", "alone"}
    /\ LET ended == IF EndsSessions THEN {q \in Processes : Loses(q, r)} ELSE {}
       IN /\ proc[r].pc = "alone" => ended # {}   \* looking again, when a lock is held
          /\ proc' = [q \in Processes |->
                CASE q = r -> [proc[q] EXCEPT !.pc = "alone"]
                  [] q \in ended -> [proc[q] EXCEPT !.pc = "ended"]
                  [] OTHER -> proc[q]]
          /\ lock' = [p \in Partitions |-> IF lock[p] \in ended THEN None ELSE lock[p]]
    /\ UNCHANGED <<db, old, left>>

(* A process whose session was ended opens a new one and asks the ledger. *)
SessionAgain(r) ==
    /\ proc[r].pc = "ended"
    /\ Set(r, [pc |-> "idle", claim |-> NoClaim])
    /\ UNCHANGED <<db, old, lock, left>>

(* Step 3: every position that this takeover takes gets its epoch, in one  *)
(* transaction, which waits for the row locks.  A reset puts positions     *)
(* elsewhere in the same transaction: what was beyond them counts no more, *)
(* and its dead letters go.                                                *)
TakePositions(r, targets, answered) ==
    /\ proc[r].pc = "alone"
    /\ \A p \in proc[r].takes : lock[p] = None
    /\ ~IsFenced(r)
    /\ \A p \in proc[r].takes : db.positions[p].epoch < proc[r].epoch
    /\ LET S == proc[r].takes
           at(p) == IF proc[r].resets THEN targets[p] ELSE db.positions[p].at
       IN /\ \A p \in S : at(p) <= db.positions[p].at
          /\ db' = [db EXCEPT
                !.positions = [p \in Partitions |->
                    IF p \in S THEN [at |-> at(p), epoch |-> proc[r].epoch, owner |-> r] ELSE @[p]],
                !.effects = [p \in Partitions |-> [o \in Offset |->
                    IF p \in S /\ o >= at(p) THEN 0 ELSE @[p][o]]],
                !.letters = {l \in @ : ~(l[1] \in S /\ l[2] >= at(l[1]))},
                !.history = {h \in @ : ~(h[1] \in S /\ h[2] >= at(h[1]))}]
    /\ Set(r, [pc |-> CASE ~answered -> "again"
                        [] proc[r].resets -> "closed"
                        [] OTHER -> "idle"])
    /\ UNCHANGED <<old, lock, left>>

FencedWhileOpening(r) ==
    /\ proc[r].pc = "alone"
    /\ IsFenced(r)
    /\ Set(r, [pc |-> "fenced"])
    /\ UNCHANGED <<db, old, lock, left>>

Targets == [Partitions -> 0 .. Records]

----------------------------------------------------------------------------
(* Commit: runtimes.commit.commit, SqlSink.commit *)

(* A second attempt of the same task: speculative, or a retry whose        *)
(* predecessor still runs.                                                 *)
SameJobTwice(r, q) ==
    /\ proc[r].pc = "down"
    /\ proc[q].pc \in {"idle", "decided", "written", "moved"}
    /\ Set(r, [pc |-> "idle", run |-> proc[q].run, epoch |-> proc[q].epoch, takes |-> proc[q].takes])
    /\ UNCHANGED <<db, old, lock, left>>

(* Read the ledger and decide.  The task read the records `from .. read`   *)
(* of the planned range `from .. to`; it claims what it has read.          *)
ReadLedgerAndDecide(r, p, to, read) ==
    /\ proc[r].pc = "idle"
    /\ p \in proc[r].takes
    /\ db.positions[p].epoch = proc[r].epoch
    /\ LET at == db.positions[p].at
       IN /\ at < read /\ read <= to /\ to <= Records
          /\ (Mistake # "planned end is claimed") => read = to
          /\ Set(r, [pc |-> "decided",
                     claim |-> [partition |-> p, from |-> at, to |-> to, read |-> read,
                                at |-> at, epoch |-> proc[r].epoch]])
    /\ UNCHANGED <<db, old, lock, left>>

FencedByLedger(r) ==
    /\ proc[r].pc = "idle"
    /\ IsFenced(r)
    /\ Set(r, [pc |-> "fenced"])
    /\ UNCHANGED <<db, old, lock, left>>

(* The ledger went back to an earlier state: open again. *)
LedgerWentBack(r) ==
    /\ proc[r].pc = "idle"
    /\ \E p \in proc[r].takes : db.positions[p].epoch < proc[r].epoch
    /\ ~IsFenced(r)
    /\ Set(r, [pc |-> "again"])
    /\ UNCHANGED <<db, old, lock, left>>

(* BEGIN and COPY: rows are sent, nobody sees them, no lock of the ledger. *)
WriteRows(r) ==
    /\ proc[r].pc = "decided"
    /\ Set(r, [pc |-> "written"])
    /\ UNCHANGED <<db, old, lock, left>>

(* The compare-and-set.  It waits for the row lock, then compares with     *)
(* the newest committed row.                                               *)
CompareAndSet(r) ==
    LET c == proc[r].claim IN
    /\ proc[r].pc = "written"
    /\ lock[c.partition] = None
    /\ IF \/ db.positions[c.partition].at = c.at /\ db.positions[c.partition].epoch = c.epoch
          \/ Mistake = "no compare-and-set"
          \/ Mistake = "compare position only" /\ db.positions[c.partition].at = c.at
       THEN /\ lock' = [lock EXCEPT ![c.partition] = r]
            /\ Set(r, [pc |-> "moved"])
       ELSE /\ Set(r, [pc |-> "idle", claim |-> NoClaim])   \* ROLLBACK; read again
            /\ UNCHANGED lock
    /\ UNCHANGED <<db, old, left>>

(* With the history written first, two attempts at one range meet in its   *)
(* key and the second is told of a duplicate: it sets the record aside.    *)
HistoryBeforeCompareAndSet(r) ==
    LET c == proc[r].claim IN
    /\ Mistake = "history before compare-and-set"
    /\ proc[r].pc = "written"
    /\ <<c.partition, c.from, c.epoch>> \in db.history
    /\ Set(r, [pc |-> "stopped"])
    /\ UNCHANGED <<db, old, lock, left>>

(* COMMIT.  When its answer is lost the process does what it does after an *)
(* answer: it reads the ledger before it decides again.                    *)
Commit(r) ==
    LET c == proc[r].claim
        took == {o \in Offset : c.from <= o /\ o < c.read}
    IN
    /\ proc[r].pc = "moved"
    /\ db' = [db EXCEPT
          !.positions[c.partition].at = c.to,
          !.effects[c.partition] = [o \in Offset |-> @[o] + (IF o \in took THEN 1 ELSE 0)],
          !.letters = @ \cup {<<c.partition, o>> : o \in {x \in took : <<c.partition, x>> \in Bad}},
          !.history = @ \cup {<<c.partition, c.from, c.epoch>>}]
    /\ lock' = Unlocked(r)
    /\ Set(r, [pc |-> "idle", claim |-> NoClaim])
    /\ UNCHANGED <<old, left>>

----------------------------------------------------------------------------
(* Housekeeping: SqlSink.tidy and add_partitions hold the pipeline's row   *)
(* and judge whether the run is fenced.                                    *)
Housekeeping(r) ==
    /\ proc[r].pc = "idle"
    /\ FencedByRow(r, "tidy judged by the row")
    /\ Set(r, [pc |-> "fenced"])
    /\ UNCHANGED <<db, old, lock, left>>

----------------------------------------------------------------------------
(* Replay of dead letters: pipeline/rejects.py *)

ReadLetter(r, l) ==
    /\ proc[r].pc = "down"
    /\ l \in db.letters
    /\ Set(r, [pc |-> "judged", letter |-> l])
    /\ UNCHANGED <<db, old, lock, left>>

(* One transaction: the letter's row is locked, deleted, and its record    *)
(* becomes a row.  A letter that is gone was replayed, or reset.           *)
ReplayLetter(r) ==
    LET l == proc[r].letter IN
    /\ proc[r].pc = "judged"
    /\ IF l \in db.letters
       THEN db' = [db EXCEPT !.letters = @ \ {l}]       \* still one effect: now it is a row
       ELSE IF Mistake = "replay does not look at resets"
            THEN db' = [db EXCEPT !.effects[l[1]][l[2]] = @ + 1]
            ELSE UNCHANGED db
    /\ Set(r, Down)
    /\ UNCHANGED <<old, lock, left>>

----------------------------------------------------------------------------
(* Faults *)

Crash(r) ==
    /\ proc[r].pc \notin {"down", "fenced", "closed"}
    /\ left.crashes > 0
    /\ proc' = [proc EXCEPT ![r] = Down]
    /\ lock' = Unlocked(r)
    /\ left' = [left EXCEPT !.crashes = @ - 1]
    /\ UNCHANGED <<db, old>>

Replicate ==
    /\ left.failovers > 0
    /\ old # db
    /\ old' = db
    /\ UNCHANGED <<db, lock, proc, left>>

(* The replica takes over: rows and ledger go back together, every session *)
(* is ended.                                                               *)
Failover ==
    /\ left.failovers > 0
    /\ db # old
    /\ db' = old
    /\ lock' = [p \in Partitions |-> None]
    /\ proc' = [r \in Processes |->
          IF proc[r].pc \in {"written", "moved"} THEN [proc[r] EXCEPT !.pc = "ended"] ELSE proc[r]]
    /\ left' = [left EXCEPT !.failovers = @ - 1]
    /\ UNCHANGED old

----------------------------------------------------------------------------
Takes == IF Partial THEN SUBSET Partitions \ {{}} ELSE {Partitions}

Step(r) ==
    \/ FencedAtReopen(r)
    \/ EndSessions(r)
    \/ SessionAgain(r)
    \/ \E targets \in IF proc[r].resets THEN Targets ELSE {[p \in Partitions |-> 0]},
          answered \in BOOLEAN : TakePositions(r, targets, answered)
    \/ FencedWhileOpening(r)
    \/ \E p \in Partitions, to, read \in 1 .. Records : ReadLedgerAndDecide(r, p, to, read)
    \/ FencedByLedger(r)
    \/ LedgerWentBack(r)
    \/ WriteRows(r)
    \/ CompareAndSet(r)
    \/ HistoryBeforeCompareAndSet(r)
    \/ Commit(r)
    \/ Housekeeping(r)
    \/ ReplayLetter(r)

Start(r) ==
    \/ \E S \in Takes, resets, answered \in BOOLEAN : TakeEpoch(r, S, resets, answered)
    \/ \E q \in Processes : SameJobTwice(r, q)
    \/ \E l \in db.letters : ReadLetter(r, l)

Next ==
    \/ \E r \in Processes : Step(r) \/ Start(r) \/ Crash(r)
    \/ Replicate
    \/ Failover

Spec == Init /\ [][Next]_vars

----------------------------------------------------------------------------
(* Every record before the position took effect once, every other record   *)
(* did not.                                                                *)
ExactlyOnce ==
    \A p \in Partitions, o \in Offset :
        db.effects[p][o] = IF o < db.positions[p].at THEN 1 ELSE 0

(* Only the run that took a position last moves it. *)
NobodyCommitsOutsideTheFence ==
    \A r \in Processes : proc[r].pc = "moved" =>
        db.positions[proc[r].claim.partition].owner = proc[r].run

(* A run ends with "fenced" only when another run holds its partition. *)
FencedByAnOwner ==
    \A r \in Processes : proc[r].pc = "fenced" =>
        \/ \E p \in proc[r].takes : db.positions[p].epoch > proc[r].epoch
        \/ MaxFailovers > 0

(* A takeover ends no transaction of a run that loses nothing. *)
OnlyLosersAreEnded ==
    [][\A q \in Processes :
          proc[q].pc # "ended" /\ proc'[q].pc = "ended" /\ left' = left =>
              \E r \in Processes \ {q} :
                  proc'[r].pc = "alone" /\ proc[q].takes \cap proc[r].takes # {}]_vars

NobodyStops == \A r \in Processes : proc[r].pc # "stopped"

PositionsGoBackByResetsOnly ==
    [][\A p \in Partitions :
          db'.positions[p].at >= db.positions[p].at
          \/ (\E r \in Processes : proc[r].pc = "alone" /\ proc[r].resets /\ proc'[r].pc # "alone")
          \/ left'.failovers < left.failovers]_vars
=============================================================================
