----------------------------- MODULE TopicLedger -----------------------------
(***************************************************************************)
(* The ledger in Kafka: records, dead letters and positions in one Kafka   *)
(* transaction.  A position is kept twice, in the ledger topic and as a    *)
(* group offset, both written by that transaction.                         *)
(*                                                                         *)
(* Code: sinks/kafka/takeover.py (open, reset), settling.py, sink.py       *)
(* (commit by a task), publishing.py (commit by the driver).               *)
(* Decisions: 0010, 0012.                                                  *)
(*                                                                         *)
(* Kafka as far as it matters here.  A transactional id has one current    *)
(* instance: `init` raises the id's producer epoch, which fences the       *)
(* earlier instance and aborts its open transaction, and it waits for a    *)
(* transaction that is being committed.  A commit is answered before its   *)
(* markers are written: until then the transaction is "committing", its    *)
(* group offsets are pending and its records are not visible.              *)
(***************************************************************************)
EXTENDS Integers, FiniteSets, TLC

CONSTANTS
    Processes,
    Partitions,
    Records,        \* offsets of a partition are 0 .. Records - 1
    Holes,          \* <<partition, offset>> that hold no record
    Modes,          \* modes in which runs may open: a subset of {"partition", "batch"}
    Partial,        \* TRUE: a takeover takes some of the partitions (worker)
    MaxEpoch,       \* bound: epochs of the pipeline
    MaxResets,      \* bound
    MaxCrashes,     \* bound
    MaxExpiries,    \* bound: group offsets that expire
    MaxForeign,     \* bound: group offsets that another pipeline commits
    MaxLate,        \* bound: EndTxn requests that arrive a second time, late
    BumpsOnEnd,     \* TRUE: the broker raises the producer epoch at each end (KIP-890)
    Mistake         \* "none", or the mistake that is switched on

None == "none"
Foreign == "another pipeline"
Offset == 0 .. Records - 1
Publisher == "publisher"
Opener == "opener"
Ids == Partitions \cup {Publisher, Opener}
Empty == [x \in {} |-> 0]

(* A position: the next offset, the epoch of the pipeline that may move it *)
(* and the mode that names the transactional id that moves it.  `owner`    *)
(* names the pipeline in the stored form; here it names the run that took  *)
(* the position last, which invariants compare.                            *)
NoPosition == [at |-> 0, epoch |-> 0, mode |-> "partition", owner |-> None]
NoTransaction == [state |-> "ended", moves |-> Empty, effects |-> {}, resets |-> {}]

VARIABLES
    holder,      \* per transactional id: the process that initialised it last
    transaction, \* per transactional id: the open or committing transaction
    ledger,      \* per partition: the position in the ledger topic
    group,       \* per partition: the position as group offset; NoPosition: expired
    pipeline,    \* the pipeline's record: its epoch, and the targets of a reset
    effects,     \* per partition and offset: how often it took effect since a reset
    half,        \* partitions that a begun reset has not put back yet
    proc,        \* the state of each process
    late,        \* ids whose current instance has an EndTxn request that may arrive again
    left         \* how many faults of each kind are still allowed

kafka == <<holder, transaction, ledger, group>>
vars == <<kafka, pipeline, effects, half, proc, late, left>>

Down == [pc |-> "down", run |-> None, epoch |-> 0, mode |-> "partition", resets |-> FALSE,
         takes |-> {},             \* partitions of the takeover
         id |-> None,              \* the id that a commit uses
         positions |-> Empty,      \* partition -> the position that was read
         done |-> {}]              \* partitions that a takeover has written

Idle == [pc |-> "idle", id |-> None, positions |-> Empty, done |-> {}]

Init ==
    /\ holder = [i \in Ids |-> None]
    /\ transaction = [i \in Ids |-> NoTransaction]
    /\ ledger = [p \in Partitions |-> NoPosition]
    /\ group = [p \in Partitions |-> NoPosition]
    /\ pipeline = [epoch |-> 0, targets |-> Empty]
    /\ effects = [p \in Partitions |-> [o \in Offset |-> 0]]
    /\ half = {}
    /\ proc = [r \in Processes |-> Down]
    /\ late = {}
    /\ left = [resets |-> MaxResets, crashes |-> MaxCrashes, expiries |-> MaxExpiries,
               foreign |-> MaxForeign, late |-> MaxLate]

----------------------------------------------------------------------------
(* Kafka *)

Set(r, fields) == proc' = [proc EXCEPT ![r] = fields @@ @]

Alive(i) == transaction[i].state # "ended"

CanInit(ids) == \A i \in ids : transaction[i].state # "committing"

InitIds(r, ids, fields) ==
    /\ holder' = [i \in Ids |-> IF i \in ids THEN r ELSE holder[i]]
    /\ transaction' = [i \in Ids |-> IF i \in ids THEN NoTransaction ELSE transaction[i]]
    /\ late' = late \ ids
    /\ Set(r, fields)

Current(r, i) == holder[i] = r

(* A group offset is stable when no transaction holds it pending; the end  *)
(* of the ledger topic is visible when no transaction is open in it.       *)
Stable(p) == \A i \in Ids : Alive(i) => p \notin DOMAIN transaction[i].moves
LedgerVisible == \A i \in Ids : DOMAIN transaction[i].moves = {}

(* Another pipeline's group offset is not believed, whichever epoch it has. *)
Believed(p) ==
    /\ group[p] # NoPosition
    /\ group[p].owner = Foreign => Mistake = "group offset believed without owner"

(* The position of p, from the group, or where that has none, from the     *)
(* ledger topic, which is read to its end.                                 *)
CanRead(p) == Stable(p) /\ (~Believed(p) => LedgerVisible)
Position(p) == IF Believed(p) THEN group[p] ELSE ledger[p]

(* The one transactional id that may move a position (0012). *)
Mover(p, position) == IF position.mode = "batch" THEN Publisher ELSE p

(* The end of a transaction.  A client that repeats the request sends the  *)
(* same producer epoch again; a broker that raises the epoch at each end   *)
(* refuses it.                                                             *)
End(i) ==
    /\ transaction' = [transaction EXCEPT ![i].state = "committing"]
    /\ late' = IF MaxLate > 0 /\ ~BumpsOnEnd THEN late \cup {i} ELSE late

LateEndTxn(i) ==
    /\ i \in late
    /\ left.late > 0
    /\ transaction[i].state = "open"
    /\ transaction' = [transaction EXCEPT ![i].state = "committing"]
    /\ late' = late \ {i}
    /\ left' = [left EXCEPT !.late = @ - 1]
    /\ UNCHANGED <<holder, ledger, group, pipeline, effects, half, proc>>

WriteMarkers(i) ==
    LET t == transaction[i] IN
    /\ t.state = "committing"
    /\ ledger' = t.moves @@ ledger
    /\ group' = t.moves @@ group
    /\ effects' = [p \in Partitions |-> [o \in Offset |->
          IF p \in t.resets /\ o >= t.moves[p].at THEN 0
          ELSE effects[p][o] + (IF <<p, o>> \in t.effects THEN 1 ELSE 0)]]
    /\ half' = half \ t.resets
    /\ transaction' = [transaction EXCEPT ![i] = NoTransaction]
    /\ UNCHANGED <<holder, pipeline, proc, late, left>>

(* The broker aborts a transaction that is open for too long. *)
TransactionTimeout(i) ==
    /\ transaction[i].state = "open"
    /\ transaction' = [transaction EXCEPT ![i] = NoTransaction]
    /\ holder' = [holder EXCEPT ![i] = None]
    /\ UNCHANGED <<ledger, group, pipeline, effects, half, proc, late, left>>

----------------------------------------------------------------------------
(* Open: kafka.takeover.Takeover *)

Own(S) == S \cup (IF Partial THEN {} ELSE {Publisher})

(* Step 1: the ids of all partitions that are taken, and the publisher's.  *)
InitAll(r, S, mode, resets) ==
    /\ proc[r].pc = "down"
    /\ pipeline.epoch < MaxEpoch
    /\ resets => left.resets > 0
    /\ CanInit(Own(S))
    /\ InitIds(r, Own(S), [pc |-> "fencing", run |-> r, mode |-> mode, resets |-> resets,
                           takes |-> S, done |-> {}])
    /\ left' = [left EXCEPT !.resets = @ - (IF resets THEN 1 ELSE 0)]
    /\ UNCHANGED <<ledger, group, pipeline, effects, half>>

(* Step 2: the pipeline's own id, then the ledger is read to its end.  The *)
(* group's copy counts where the ledger topic lags behind.                 *)
ReadLedger(r) ==
    LET S == proc[r].takes
        newest(p) == IF Believed(p) /\ group[p].epoch > ledger[p].epoch THEN group[p] ELSE ledger[p]
    IN
    /\ proc[r].pc = "fencing"
    /\ CanInit({Opener})
    /\ LedgerVisible
    /\ \A p \in S : Stable(p)
    /\ InitIds(r, {Opener}, [pc |-> "found", positions |-> [p \in S |-> newest(p)]])
    /\ UNCHANGED <<ledger, group, pipeline, effects, half, left>>

(* Step 2, its transaction: the next epoch, with the targets of a reset.   *)
(* Targets of an earlier reset that was not finished are kept.             *)
WriteEpoch(r, targets) ==
    LET kept == IF Mistake = "reset without kept targets" THEN Empty ELSE pipeline.targets
        forced == (IF proc[r].resets THEN targets ELSE Empty) @@ kept
        epoch == pipeline.epoch + 1
    IN
    /\ proc[r].pc = "found"
    /\ IF Current(r, Opener)
       THEN /\ pipeline' = [epoch |-> epoch, targets |-> forced]
            /\ Set(r, [pc |-> "settling", epoch |-> epoch,
                       positions |-> [p \in proc[r].takes |->
                          IF p \in DOMAIN forced
                          THEN [proc[r].positions[p] EXCEPT !.at = forced[p]]
                          ELSE proc[r].positions[p]]])
       ELSE /\ Set(r, Down)
            /\ UNCHANGED pipeline
    /\ UNCHANGED <<kafka, effects, half, late, left>>

Forced(r) ==
    IF proc[r].resets \/ Mistake # "reset without kept targets"
    THEN DOMAIN pipeline.targets ELSE {}

Taken(r, position) ==
    [position EXCEPT !.epoch = proc[r].epoch, !.mode = proc[r].mode, !.owner = r]

(* Step 3: positions get our epoch and mode, by the id that the OLD        *)
(* position names, in one transaction for each id.                         *)
Settle(r, i) ==
    LET mine == {p \in proc[r].takes \ proc[r].done : Mover(p, proc[r].positions[p]) = i}
        forced == mine \cap Forced(r)
    IN
    /\ proc[r].pc = "settling"
    /\ mine # {}
    /\ Current(r, i)
    /\ transaction' = [transaction EXCEPT ![i] =
          [state |-> "committing", effects |-> {}, resets |-> forced,
           moves |-> [p \in mine |-> Taken(r, proc[r].positions[p])]]]
    /\ half' = IF forced = {} THEN half ELSE half \cup (DOMAIN pipeline.targets \ proc[r].done)
    /\ Set(r, [done |-> proc[r].done \cup mine])
    /\ UNCHANGED <<holder, ledger, group, pipeline, effects, late, left>>

(* Step 3 for an id that another instance initialised since: a new         *)
(* instance, and where the position stands now.                            *)
SettleAgain(r, p) ==
    LET i == Mover(p, proc[r].positions[p]) IN
    /\ proc[r].pc = "settling"
    /\ p \in proc[r].takes \ proc[r].done
    /\ ~Current(r, i)
    /\ CanInit({i})
    /\ InitIds(r, {i}, [pc |-> "rereading", id |-> p])
    /\ UNCHANGED <<ledger, group, pipeline, effects, half, left>>

Reread(r) ==
    LET p == proc[r].id
        now == Position(p)
        at == IF p \in Forced(r) THEN proc[r].positions[p].at ELSE now.at
    IN
    /\ proc[r].pc = "rereading"
    /\ CanRead(p)
    /\ IF now.epoch > proc[r].epoch
       THEN Set(r, [pc |-> "fenced"])
       ELSE Set(r, [pc |-> "settling",
                    positions |-> [proc[r].positions EXCEPT ![p] = [now EXCEPT !.at = at]]])
    /\ UNCHANGED <<kafka, pipeline, effects, half, late, left>>

(* Step 4: the takeover is noted as finished; the targets are done.        *)
NoteSettled(r) ==
    /\ proc[r].pc = "settling"
    /\ proc[r].done = proc[r].takes
    /\ CanInit({Opener})
    /\ LedgerVisible
    /\ InitIds(r, {Opener},
          CASE ~Partial /\ pipeline.epoch # proc[r].epoch -> [pc |-> "superseded"]
            [] proc[r].resets -> [pc |-> "closed"]
            [] OTHER -> Idle)
    /\ pipeline' = IF pipeline.epoch = proc[r].epoch
                   THEN [pipeline EXCEPT !.targets = Empty] ELSE pipeline
    /\ UNCHANGED <<ledger, group, effects, half, left>>

----------------------------------------------------------------------------
(* Commit: KafkaSink.commit, Publisher.publish *)

(* A second attempt of the same task. *)
SameJobTwice(r, q) ==
    /\ proc[r].pc = "down"
    /\ proc[q].pc = "idle"
    /\ Set(r, [pc |-> "idle", run |-> proc[q].run, epoch |-> proc[q].epoch,
               mode |-> proc[q].mode, takes |-> proc[q].takes])
    /\ UNCHANGED <<kafka, pipeline, effects, half, late, left>>

(* What one transaction moves: a task one partition, the driver all.  In a *)
(* run of batch commit holes go by the publisher's id, too.                *)
InitForCommit(r, S, i) ==
    /\ proc[r].pc = (IF Mistake = "read before init" THEN "read first" ELSE "idle")
    /\ Mistake = "read before init" => S = DOMAIN proc[r].positions
    /\ CASE proc[r].mode = "partition" -> \E p \in proc[r].takes : S = {p} /\ i = p
         [] Mistake = "holes by the partition's own id" ->
               \/ S = proc[r].takes /\ i = Publisher
               \/ \E p \in proc[r].takes : S = {p} /\ i = p
         [] OTHER -> S = proc[r].takes /\ i = Publisher
    /\ CanInit({i})
    /\ IF Mistake = "one producer instance for many transactions" /\ Current(r, i)
       THEN /\ Set(r, [pc |-> "initialised", id |-> i, done |-> S])
            /\ UNCHANGED <<holder, transaction, late>>
       ELSE InitIds(r, {i}, [pc |-> IF Mistake = "read before init" THEN "read" ELSE "initialised",
                             id |-> i, done |-> S])
    /\ UNCHANGED <<ledger, group, pipeline, effects, half, left>>

ReadFirst(r, S) ==
    /\ Mistake = "read before init"
    /\ proc[r].pc = "idle"
    /\ S \subseteq proc[r].takes
    /\ \A p \in S : CanRead(p) /\ Position(p).epoch = proc[r].epoch
    /\ Set(r, [pc |-> "read first", positions |-> [p \in S |-> Position(p)]])
    /\ UNCHANGED <<kafka, pipeline, effects, half, late, left>>

(* Read the positions and decide: nothing can move them by this id before  *)
(* our own commit.                                                         *)
ReadPositions(r) ==
    LET S == proc[r].done
        hole(p) == \E o \in Offset : o = Position(p).at /\ <<p, o>> \in Holes
        right(p) ==
            \/ Mover(p, Position(p)) = proc[r].id
            \/ Mistake = "holes by the partition's own id" /\ hole(p)
    IN
    /\ proc[r].pc = "initialised"
    /\ \A p \in S : CanRead(p)
    /\ CASE \E p \in S : Position(p).epoch > proc[r].epoch -> Set(r, [pc |-> "fenced"])
         [] \E p \in S : Position(p).epoch < proc[r].epoch -> Set(r, [pc |-> "stopped"])
         [] \E p \in S : ~right(p) -> Set(r, Idle)
         [] OTHER -> Set(r, [pc |-> "read", positions |-> [p \in S |-> Position(p)]])
    /\ UNCHANGED <<kafka, pipeline, effects, half, late, left>>

Claims(r) == {p \in DOMAIN proc[r].positions : proc[r].positions[p].at < Records}

(* Begin and send the records; positions are sent last. *)
SendRecords(r) ==
    LET i == proc[r].id
        sent == {<<p, proc[r].positions[p].at>> : p \in Claims(r)} \ Holes
    IN
    /\ proc[r].pc = "read"
    /\ IF Current(r, i) /\ Claims(r) # {}
       THEN /\ transaction' = [transaction EXCEPT ![i] =
                  [state |-> "open", moves |-> Empty, resets |-> {}, effects |-> sent]]
            /\ Set(r, [pc |-> "sent"])
       ELSE /\ Set(r, Idle)
            /\ UNCHANGED transaction
    /\ UNCHANGED <<holder, ledger, group, pipeline, effects, half, late, left>>

SendPositions(r) ==
    LET i == proc[r].id IN
    /\ proc[r].pc = "sent"
    /\ IF Current(r, i) /\ transaction[i].state = "open"
       THEN /\ transaction' = [transaction EXCEPT ![i].moves =
                  [p \in Claims(r) |-> [proc[r].positions[p] EXCEPT !.at = @ + 1]]]
            /\ Set(r, [pc |-> "ready"])
       ELSE /\ Set(r, Idle)
            /\ UNCHANGED transaction
    /\ UNCHANGED <<holder, ledger, group, pipeline, effects, half, late, left>>

(* The answer may be lost: in either case the ledger is asked next. *)
Commit(r) ==
    LET i == proc[r].id IN
    /\ proc[r].pc = "ready"
    /\ IF Current(r, i) /\ transaction[i].state = "open"
       THEN End(i)
       ELSE UNCHANGED <<transaction, late>>
    /\ Set(r, Idle)
    /\ UNCHANGED <<holder, ledger, group, pipeline, effects, half, left>>

----------------------------------------------------------------------------
(* Faults *)

Crash(r) ==
    /\ proc[r].pc \notin {"down", "fenced", "superseded", "closed"}
    /\ left.crashes > 0
    /\ Set(r, Down)
    /\ holder' = [i \in Ids |-> IF holder[i] = r THEN None ELSE holder[i]]
    /\ left' = [left EXCEPT !.crashes = @ - 1]
    /\ UNCHANGED <<transaction, ledger, group, pipeline, effects, half, late>>

Expire(p) ==
    /\ left.expiries > 0
    /\ group[p] # NoPosition
    /\ Stable(p)
    /\ group' = [group EXCEPT ![p] = NoPosition]
    /\ left' = [left EXCEPT !.expiries = @ - 1]
    /\ UNCHANGED <<holder, transaction, ledger, pipeline, effects, half, proc, late>>

(* Another pipeline with the same source.group commits its own position.   *)
ForeignCommit(p) ==
    /\ left.foreign > 0
    /\ Stable(p)
    /\ group' = [group EXCEPT ![p] =
          [at |-> Records, epoch |-> 1, mode |-> "partition", owner |-> Foreign]]
    /\ left' = [left EXCEPT !.foreign = @ - 1]
    /\ UNCHANGED <<holder, transaction, ledger, pipeline, effects, half, proc, late>>

----------------------------------------------------------------------------
Takes == IF Partial THEN SUBSET Partitions \ {{}} ELSE {Partitions}
Targets(r) == IF proc[r].resets THEN [proc[r].takes -> {0}] ELSE {Empty}

Next ==
    \/ \E r \in Processes :
        \/ \E S \in Takes, mode \in Modes, resets \in BOOLEAN : InitAll(r, S, mode, resets)
        \/ ReadLedger(r)
        \/ \E targets \in Targets(r) : WriteEpoch(r, targets)
        \/ \E i \in Ids : Settle(r, i)
        \/ \E p \in Partitions : SettleAgain(r, p)
        \/ Reread(r)
        \/ NoteSettled(r)
        \/ \E q \in Processes : SameJobTwice(r, q)
        \/ \E S \in SUBSET Partitions \ {{}} : ReadFirst(r, S) \/ \E i \in Ids : InitForCommit(r, S, i)
        \/ ReadPositions(r)
        \/ SendRecords(r)
        \/ SendPositions(r)
        \/ Commit(r)
        \/ Crash(r)
    \/ \E i \in Ids : WriteMarkers(i) \/ TransactionTimeout(i)
    \/ \E i \in late : LateEndTxn(i)
    \/ \E p \in Partitions : Expire(p) \/ ForeignCommit(p)

Spec == Init /\ [][Next]_vars

----------------------------------------------------------------------------
(* Every record before the position took effect once, every other record   *)
(* did not.                                                                *)
ExactlyOnce ==
    \A p \in Partitions, o \in Offset :
        effects[p][o] = IF o < ledger[p].at /\ <<p, o>> \notin Holes THEN 1 ELSE 0

(* A run ends with "fenced" only when another run holds its partition. *)
FencedByAnOwner ==
    \A r \in Processes : proc[r].pc = "fenced" =>
        \E p \in proc[r].takes : Position(p).epoch > proc[r].epoch

(* A run that has opened finds no reset that is half done. *)
ResetsAreWhole ==
    \A r \in Processes :
        proc[r].pc = "idle" /\ (\A p \in proc[r].takes : ledger[p].epoch = proc[r].epoch)
            => half \cap proc[r].takes = {}

NobodyStops == \A r \in Processes : proc[r].pc # "stopped"

PositionsGoBackByResetsOnly ==
    [][\A p \in Partitions :
          ledger'[p].at >= ledger[p].at \/ (\E i \in Ids : p \in transaction[i].resets)]_vars
=============================================================================
