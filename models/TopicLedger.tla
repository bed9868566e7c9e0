----------------------------- MODULE TopicLedger -----------------------------
(***************************************************************************)
(* The ledger in Kafka: records, dead letters and positions in one Kafka   *)
(* transaction.  A position is kept twice, in the ledger topic and as a    *)
(* group offset, both written by that transaction.                         *)
(*                                                                         *)
(* Code: ledgers/topic/takeover.py (open, reset), settling.py, sink.py       *)
(* (commit by a task), publishing.py (commit by the driver), replay.py,    *)
(* ledger.py (partitions found while running).                             *)
(* Decisions: 0010, 0012, 0013, 0019, 0021.                                *)
(*                                                                         *)
(* Kafka as far as it matters here.  A transactional id has one current    *)
(* instance: `init` raises the id's producer epoch, which fences the       *)
(* earlier instance and aborts its open transaction, and it waits for a    *)
(* transaction that is being committed.  A commit is answered before its   *)
(* markers are written: until then the transaction is "committing", its    *)
(* group offsets are pending and its records are not visible.              *)
(*                                                                         *)
(* A transaction of the pipeline's own id is one step: whoever reads the   *)
(* ledger topic to its end waits for it, so nobody sees it half done.      *)
(***************************************************************************)
EXTENDS Integers, FiniteSets, Sequences, TLC

CONSTANTS
    Processes,
    Partitions,
    New,            \* TRUE: a run may know some of the partitions only when it opens
    Records,        \* offsets of a partition are 0 .. Records - 1
    Holes,          \* offsets that hold no record, in every partition
    Bad,            \* offsets of records that a run may reject, in every partition
    Modes,          \* modes in which runs may open: a subset of {"partition", "batch"}
    Partial,        \* TRUE: a takeover takes some of the partitions (worker)
    Twins,          \* TRUE: a task may have a second attempt
    MaxEpoch,       \* bound: epochs of the pipeline
    MaxResets,      \* bound
    MaxReplays,     \* bound: transactions of replays
    MaxCrashes,     \* bound
    MaxTimeouts,    \* bound: transactions of living processes that the broker aborts
    MaxExpiries,    \* bound: group offsets that expire
    MaxForeign,     \* bound: group offsets that another pipeline commits
    MaxLate,        \* bound: EndTxn requests that arrive a second time, late
    BumpsOnEnd,     \* TRUE: the broker raises the producer epoch at each end (KIP-890)
    AtOnce,         \* TRUE: nothing happens while the markers of a commit are written
    Mistake         \* "none", or the mistake that is switched on

None == "none"
Us == "this pipeline"
Foreign == "another pipeline"
Offset == 0 .. Records - 1
Publisher == "publisher"
Opener == "opener"
Replayer == "replayer"
Ids == Partitions \cup {Publisher, Opener, Replayer}
Empty == [x \in {} |-> 0]

(* A position: the next offset, the epoch of the pipeline that may move it *)
(* and the mode that names the transactional id that moves it.             *)
NoPosition == [at |-> 0, epoch |-> 0, mode |-> "partition", owner |-> None]
NoTransaction == [state |-> "ended", moves |-> Empty, effects |-> {}, letters |-> <<>>,
                  replayed |-> 0, putBack |-> {}]
NoLetter == [from |-> 0, to |-> 0, resets |-> {}]

VARIABLES
    holder,      \* per transactional id: the process that initialised it last
    transaction, \* per transactional id: the open or committing transaction
    ledger,      \* per partition: the position in the ledger topic
    group,       \* per partition: the position as group offset; NoPosition: expired
    pipeline,    \* the pipeline's record: its epoch, the run that it was given to, and
                 \* `targets`, the partitions that a reset has yet to put back to offset 0
    resets,      \* <<partition, epoch>> of each reset, in the ledger topic
    letters,     \* the rejects' topic: dead letters in order
    replayed,    \* the position of replays in it: this many letters have been replayed
    effects,     \* per partition and offset: how often it took effect since it was put back
    half,        \* partitions of a reset that was decided which are not put back yet
    proc,        \* the state of each process
    late,        \* ids whose current instance has an EndTxn request that may arrive again
    left         \* how many faults of each kind are still allowed

kafka == <<holder, transaction, ledger, group>>
rejects == <<resets, letters, replayed>>
vars == <<kafka, pipeline, rejects, effects, half, proc, late, left>>

Down == [pc |-> "down", epoch |-> 0, mode |-> "partition", resets |-> FALSE,
         expects |-> FALSE,        \* TRUE: it has held epoch `epoch`, and a newer one fences it
         takes |-> {},             \* partitions of the takeover, later on of the run
         forced |-> {},            \* partitions that this takeover puts back
         ids |-> {},               \* ids that it has initialised and not used yet
         positions |-> Empty,      \* partition -> the position that was read
         done |-> {},              \* partitions that a takeover has written
         adds |-> FALSE,           \* TRUE: this settles a partition that the run has found
         letter |-> NoLetter]      \* what a replay has read

Idle == [pc |-> "idle", expects |-> TRUE, forced |-> {}, ids |-> {}, positions |-> Empty,
         done |-> {}, adds |-> FALSE]

Init ==
    /\ holder = [i \in Ids |-> None]
    /\ transaction = [i \in Ids |-> NoTransaction]
    /\ ledger = [p \in Partitions |-> NoPosition]
    /\ group = [p \in Partitions |-> NoPosition]
    /\ pipeline = [epoch |-> 0, run |-> None, targets |-> {}]
    /\ resets = {}
    /\ letters = <<>>
    /\ replayed = 0
    /\ effects = [p \in Partitions |-> [o \in Offset |-> 0]]
    /\ half = {}
    /\ proc = [r \in Processes |-> Down]
    /\ late = {}
    /\ left = [resets |-> MaxResets, replays |-> MaxReplays, crashes |-> MaxCrashes,
               timeouts |-> MaxTimeouts, expiries |-> MaxExpiries, foreign |-> MaxForeign,
               late |-> MaxLate]

----------------------------------------------------------------------------
(* Kafka *)

Alive(i) == transaction[i].state # "ended"
Committing(ids) == \E i \in ids : transaction[i].state = "committing"
Quiet == AtOnce => ~Committing(Ids)

Set(r, fields) == Quiet /\ proc' = [proc EXCEPT ![r] = fields @@ @]

CanInit(ids) == Quiet /\ ~Committing(ids)

InitIds(r, ids) ==
    /\ CanInit(ids)
    /\ holder' = [i \in Ids |-> IF i \in ids THEN r ELSE holder[i]]
    /\ transaction' = [i \in Ids |-> IF i \in ids THEN NoTransaction ELSE transaction[i]]
    /\ late' = late \ ids

Current(r, i) == holder[i] = r

(* A group offset is stable when no transaction holds it pending; the end  *)
(* of the ledger topic is visible when no transaction is open in it.       *)
Writes(t) == DOMAIN t.moves # {} \/ t.replayed > 0
Stable(p) == \A i \in Ids : Alive(i) => p \notin DOMAIN transaction[i].moves
LedgerVisible == \A i \in Ids : ~Writes(transaction[i])

(* Another pipeline's group offset is not believed, whichever epoch it has. *)
Believed(p) ==
    /\ group[p] # NoPosition
    /\ group[p].owner = Foreign => Mistake = "group offset believed without owner"

(* The position of p, from the group, or where that has none, from the     *)
(* ledger topic, which is read to its end.                                 *)
CanRead(p) == Stable(p) /\ (~Believed(p) => LedgerVisible)
Position(p) == IF Believed(p) THEN group[p] ELSE ledger[p]

(* The one transactional id that may move a position.  A partition without *)
(* a position is given its first one by its own id, whatever the mode.     *)
Mover(p, position, mode) ==
    LET named == IF Mistake = "first position by the run's mode" /\ position.epoch = 0
                 THEN mode ELSE position.mode
    IN IF named = "batch" THEN Publisher ELSE p

(* The end of a transaction.  A client that repeats the request sends the  *)
(* same producer epoch again; a broker that raises the epoch at each end   *)
(* refuses it.                                                             *)
End(i) ==
    /\ transaction' = [transaction EXCEPT ![i].state = "committing"]
    /\ late' = IF MaxLate > 0 /\ ~BumpsOnEnd THEN late \cup {i} ELSE late

LateEndTxn(i) ==
    /\ Quiet
    /\ i \in late
    /\ left.late > 0
    /\ transaction[i].state = "open"
    /\ transaction' = [transaction EXCEPT ![i].state = "committing"]
    /\ late' = late \ {i}
    /\ left' = [left EXCEPT !.late = @ - 1]
    /\ UNCHANGED <<holder, ledger, group, pipeline, rejects, effects, half, proc>>

WriteMarkers(i) ==
    LET t == transaction[i]
        cleared == t.putBack \cap half
    IN
    /\ t.state = "committing"
    /\ ledger' = t.moves @@ ledger
    /\ group' = t.moves @@ group
    /\ effects' = [p \in Partitions |-> [o \in Offset |->
          IF p \in cleared THEN 0
          ELSE effects[p][o] + (IF <<p, o>> \in t.effects THEN 1 ELSE 0)]]
    /\ letters' = letters \o t.letters
    /\ replayed' = IF t.replayed > 0 THEN t.replayed ELSE replayed
    /\ half' = half \ cleared
    /\ transaction' = [transaction EXCEPT ![i] = NoTransaction]
    /\ UNCHANGED <<holder, pipeline, resets, proc, late, left>>

(* The broker aborts a transaction that is open for too long: one whose    *)
(* process is gone, or is slow.                                            *)
TransactionTimeout(i) ==
    LET slow == holder[i] # None IN
    /\ Quiet
    /\ transaction[i].state = "open"
    /\ slow => left.timeouts > 0
    /\ transaction' = [transaction EXCEPT ![i] = NoTransaction]
    /\ holder' = [holder EXCEPT ![i] = None]
    /\ left' = [left EXCEPT !.timeouts = @ - (IF slow THEN 1 ELSE 0)]
    /\ UNCHANGED <<ledger, group, pipeline, rejects, effects, half, proc, late>>

----------------------------------------------------------------------------
(* Open: kafka.takeover.Takeover *)

(* Step 1: the ids of all partitions that are taken, the publisher's and   *)
(* the one of replays.                                                     *)
Own(S, finishes) ==
    S \cup (IF Partial THEN {} ELSE {Publisher})
      \cup (IF Partial \/ (finishes /\ Mistake = "reset leaves replays alone") THEN {}
            ELSE {Replayer})

(* A first start, or a reset. *)
InitAll(r, S, mode, reset) ==
    /\ proc[r].pc = "down"
    /\ pipeline.epoch < MaxEpoch
    /\ reset => left.resets > 0 /\ S = Partitions
    /\ InitIds(r, Own(S, FALSE))
    /\ Set(r, [pc |-> "fencing", mode |-> mode, resets |-> reset, takes |-> S])
    /\ left' = [left EXCEPT !.resets = @ - (IF reset THEN 1 ELSE 0)]
    /\ UNCHANGED <<ledger, group, pipeline, rejects, effects, half>>

(* A run that opens again, an opener that was overtaken by another one,    *)
(* and the second takeover of a reset.                                     *)
InitAllAgain(r) ==
    /\ proc[r].pc = "again"
    /\ InitIds(r, Own(proc[r].takes, TRUE))
    /\ Set(r, [pc |-> "fencing", forced |-> {}, ids |-> {}, positions |-> Empty, done |-> {}])
    /\ UNCHANGED <<ledger, group, pipeline, rejects, effects, half, left>>

OpenAgain(r) ==
    LET newer == \E p \in proc[r].takes : ledger[p].epoch > proc[r].epoch IN
    /\ proc[r].pc = "idle"
    /\ pipeline.epoch < MaxEpoch
    /\ newer => LedgerVisible      \* it looks before it disturbs anybody
    /\ Set(r, [pc |-> IF newer THEN "fenced" ELSE "again"])
    /\ UNCHANGED <<kafka, pipeline, rejects, effects, half, late, left>>

(* Step 2: the pipeline's own id, then the ledger is read to its end.  The *)
(* group's copy counts where the ledger topic lags behind.  A group that   *)
(* holds another pipeline's positions is refused.                          *)
ReadLedger(r) ==
    LET S == proc[r].takes \cup
             (IF Partial THEN {} ELSE {p \in Partitions : ledger[p] # NoPosition})
        newest(p) == IF Believed(p) /\ group[p].epoch > ledger[p].epoch THEN group[p] ELSE ledger[p]
        foreign == {p \in S : group[p].owner = Foreign /\ ~Believed(p)}
    IN
    /\ proc[r].pc = "fencing"
    /\ LedgerVisible
    /\ \A p \in S : Stable(p)
    /\ InitIds(r, {Opener})
    /\ CASE foreign # {} -> Set(r, Down)
         [] proc[r].expects /\ (\E p \in S : ledger[p].epoch > proc[r].epoch) ->
               Set(r, [pc |-> "fenced", takes |-> S])
         [] OTHER -> Set(r, [pc |-> "found", takes |-> S, positions |-> [p \in S |-> newest(p)]])
    /\ UNCHANGED <<ledger, group, pipeline, rejects, effects, half, left>>

(* Step 2, its transaction: the next epoch.  The targets of a reset that   *)
(* was not finished are kept, and this takeover puts positions there.      *)
WriteEpoch(r) ==
    LET kept == IF Mistake = "reset without kept targets" /\ ~proc[r].expects
                THEN {} ELSE pipeline.targets
        epoch == IF Mistake = "reset in one epoch" /\ proc[r].expects /\ kept # {}
                 THEN pipeline.epoch ELSE pipeline.epoch + 1
    IN
    /\ proc[r].pc = "found"
    /\ IF Current(r, Opener)
       THEN /\ epoch <= MaxEpoch
            /\ pipeline' = [epoch |-> epoch, run |-> r, targets |-> kept]
            /\ Set(r, [pc |-> "settling", epoch |-> epoch, forced |-> kept \cap proc[r].takes])
       ELSE /\ Set(r, [pc |-> "again"])
            /\ UNCHANGED pipeline
    /\ UNCHANGED <<kafka, rejects, effects, half, late, left>>

----------------------------------------------------------------------------
(* Step 3: kafka.settling.Settling.  Positions get our epoch and mode, by  *)
(* the ids that the OLD positions name, in one transaction for each id.    *)

Unsettled(r) == proc[r].takes \ proc[r].done
MoverFor(r, p) == Mover(p, proc[r].positions[p], proc[r].mode)

SettleInit(r) ==
    LET ids == {MoverFor(r, p) : p \in Unsettled(r)} IN
    /\ proc[r].pc = "settling"
    /\ ids # {}
    /\ InitIds(r, ids)
    /\ Set(r, [pc |-> "settle read", ids |-> ids])
    /\ UNCHANGED <<ledger, group, pipeline, rejects, effects, half, left>>

(* Where the positions stand now.  One that another id moves waits for the *)
(* next round, which takes that id.                                        *)
SettleRead(r) ==
    LET now == [p \in Unsettled(r) |-> Position(p)]
        seen == IF Mistake = "mover is guessed once"
                THEN [p \in Unsettled(r) |->
                        IF Mover(p, now[p], proc[r].mode) \in proc[r].ids
                        THEN now[p] ELSE proc[r].positions[p]]
                ELSE now
    IN
    /\ proc[r].pc = "settle read"
    /\ \A p \in Unsettled(r) : CanRead(p)
    /\ IF \E p \in Unsettled(r) : now[p].epoch > proc[r].epoch
       THEN Set(r, [pc |-> "fenced"])
       ELSE Set(r, [pc |-> "settle write", positions |-> seen @@ proc[r].positions])
    /\ UNCHANGED <<kafka, pipeline, rejects, effects, half, late, left>>

Taken(r, p) ==
    [at |-> IF p \in proc[r].forced THEN 0 ELSE proc[r].positions[p].at,
     epoch |-> proc[r].epoch, mode |-> proc[r].mode, owner |-> Us]

SettleWrite(r, i) ==
    LET now == proc[r].positions
        asRead(p) == Mistake = "mover is guessed once" => now[p] = Position(p)
        mine == {p \in Unsettled(r) : MoverFor(r, p) = i /\ asRead(p)}
        has == {p \in mine : now[p].epoch = proc[r].epoch /\ now[p].at = Taken(r, p).at}
        written == mine \ has
        current == Current(r, i)
        ids == proc[r].ids \ {i}
    IN
    /\ proc[r].pc = "settle write"
    /\ i \in proc[r].ids
    /\ transaction' = IF written # {} /\ current
                      THEN [transaction EXCEPT ![i] =
                             [NoTransaction EXCEPT !.state = "committing",
                                !.moves = [p \in written |-> Taken(r, p)],
                                !.putBack = written \cap proc[r].forced]]
                      ELSE transaction
    /\ Set(r, [pc |-> IF ids = {} THEN "settling" ELSE "settle write", ids |-> ids,
               done |-> proc[r].done \cup has \cup (IF current THEN written ELSE {})])
    /\ UNCHANGED <<holder, ledger, group, pipeline, rejects, effects, half, late, left>>

Settled(r) == proc[r].pc = "settling" /\ Unsettled(r) = {}

(* LedgerInTopic.add_partitions: a run finds a partition.                  *)
AddPartition(r, p) ==
    /\ proc[r].pc = "idle"
    /\ New
    /\ p \in Partitions \ proc[r].takes
    /\ Set(r, [pc |-> "settling", takes |-> proc[r].takes \cup {p}, done |-> proc[r].takes,
               positions |-> [q \in {p} |-> NoPosition], adds |-> TRUE])
    /\ UNCHANGED <<kafka, pipeline, rejects, effects, half, late, left>>

Added(r) ==
    /\ Settled(r)
    /\ proc[r].adds
    /\ LedgerVisible
    /\ Set(r, Idle)
    /\ UNCHANGED <<kafka, pipeline, rejects, effects, half, late, left>>

----------------------------------------------------------------------------
(* Steps 4 and 5 *)

(* Step 4: the takeover is noted as finished, with what it has put back.   *)
(* An opener that was given an epoch since, and has taken no position, is  *)
(* no reason to end: the takeover is done again.  A worker does that only  *)
(* where a reset is to be finished, which that opener may know of.         *)
NoteSettled(r) ==
    LET ours == pipeline.epoch = proc[r].epoch /\ pipeline.run = r
        newer == \E p \in proc[r].takes : ledger[p].epoch > proc[r].epoch
        again == ~Partial \/ proc[r].forced # {}
        noted == IF Mistake = "a partial takeover ends the whole reset"
                 THEN {} ELSE pipeline.targets \ proc[r].forced
    IN
    /\ Settled(r)
    /\ ~proc[r].adds
    /\ LedgerVisible
    /\ InitIds(r, {Opener})
    /\ IF ~ours /\ (newer \/ again)
       THEN /\ Set(r, [pc |-> IF newer \/ Mistake = "the opener's number fences"
                              THEN "fenced" ELSE "again"])
            /\ UNCHANGED pipeline
       ELSE /\ Set(r, IF proc[r].resets THEN [pc |-> "asked"] ELSE Idle)
            /\ pipeline' = [pipeline EXCEPT !.targets = noted]
    /\ UNCHANGED <<ledger, group, rejects, effects, half, left>>

(* Step 5: one transaction decides a reset, and voids older dead letters.  *)
(* The next takeover puts positions back.  First what would hide the end   *)
(* of the ledger is ended.                                                 *)
EndOthers(r) ==
    /\ proc[r].pc = "asked"
    /\ InitIds(r, {Publisher, Replayer})
    /\ Set(r, [pc |-> "deciding"])
    /\ UNCHANGED <<ledger, group, pipeline, rejects, effects, half, left>>

NoteReset(r) ==
    LET ours == pipeline.epoch = proc[r].epoch /\ pipeline.run = r
        S == proc[r].takes
    IN
    /\ proc[r].pc = "deciding"
    /\ LedgerVisible
    /\ InitIds(r, {Opener})
    /\ IF ours
       THEN /\ pipeline' = [pipeline EXCEPT !.targets = S]
            /\ resets' = resets \cup {<<p, proc[r].epoch>> : p \in S}
            /\ half' = S
            /\ Set(r, [pc |-> "again", resets |-> FALSE, expects |-> TRUE])
       ELSE /\ Set(r, Down)
            /\ UNCHANGED <<pipeline, resets, half>>
    /\ UNCHANGED <<ledger, group, letters, replayed, effects, left>>

(* takeover.note_leader_epochs, note_rejects: a run changes the record as  *)
(* the holder of the positions, whoever was given an epoch.                *)
NoteAsRun(r) ==
    /\ proc[r].pc = "idle"
    /\ ~Current(r, Opener)
    /\ LedgerVisible
    /\ InitIds(r, {Opener})
    /\ IF \E p \in proc[r].takes : ledger[p].epoch > proc[r].epoch
       THEN Set(r, [pc |-> "fenced"])
       ELSE UNCHANGED proc
    /\ UNCHANGED <<ledger, group, pipeline, rejects, effects, half, left>>

----------------------------------------------------------------------------
(* Commit: KafkaSink.commit, Publisher.publish *)

(* A second attempt of the same task. *)
SameJobTwice(r, q) ==
    /\ Twins
    /\ proc[r].pc = "down"
    /\ proc[q].pc = "idle"
    /\ Set(r, [pc |-> "idle", epoch |-> proc[q].epoch, mode |-> proc[q].mode, expects |-> TRUE,
               takes |-> proc[q].takes])
    /\ UNCHANGED <<kafka, pipeline, rejects, effects, half, late, left>>

Waiting(S) == \E p \in S : Position(p).at < Records

(* What one transaction moves: a task one partition, the driver all.  In a *)
(* run of batch commit holes go by the publisher's id, too.                *)
InitForCommit(r, S, i) ==
    LET first == Mistake = "read before init" IN
    /\ proc[r].pc = (IF first THEN "read first" ELSE "idle")
    /\ first => S = DOMAIN proc[r].positions
    /\ Waiting(S)
    /\ CASE proc[r].mode = "partition" -> \E p \in proc[r].takes : S = {p} /\ i = p
         [] Mistake = "one mode for the pipeline" ->
               \/ S = proc[r].takes /\ i = Publisher
               \/ \E p \in proc[r].takes : S = {p} /\ i = p
         [] OTHER -> S = proc[r].takes /\ i = Publisher
    /\ IF Mistake = "one producer instance for many transactions" /\ Current(r, i)
       THEN CanInit({i}) /\ UNCHANGED <<holder, transaction, late>>
       ELSE InitIds(r, {i})
    /\ Set(r, [pc |-> IF first THEN "read" ELSE "initialised", ids |-> {i}, done |-> S])
    /\ UNCHANGED <<ledger, group, pipeline, rejects, effects, half, left>>

ReadFirst(r, S) ==
    /\ Mistake = "read before init"
    /\ proc[r].pc = "idle"
    /\ S \subseteq proc[r].takes
    /\ \A p \in S : CanRead(p) /\ Position(p).epoch = proc[r].epoch
    /\ Set(r, [pc |-> "read first", positions |-> [p \in S |-> Position(p)]])
    /\ UNCHANGED <<kafka, pipeline, rejects, effects, half, late, left>>

(* Read the positions and decide: nothing can move them by this id before  *)
(* our own commit.                                                         *)
ReadPositions(r) ==
    LET S == proc[r].done
        own(p) == Mistake = "one mode for the pipeline" /\ Position(p).at \in Holes
    IN
    /\ proc[r].pc = "initialised"
    /\ \A p \in S : CanRead(p)
    /\ CASE \E p \in S : Position(p).epoch > proc[r].epoch -> Set(r, [pc |-> "fenced"])
         [] \E p \in S : Position(p).epoch < proc[r].epoch -> Set(r, [pc |-> "stopped"])
         [] \E p \in S : Mover(p, Position(p), proc[r].mode) \notin proc[r].ids /\ ~own(p) ->
               Set(r, Idle)
         [] OTHER -> Set(r, [pc |-> "read", positions |-> [p \in S |-> Position(p)]])
    /\ UNCHANGED <<kafka, pipeline, rejects, effects, half, late, left>>

Claims(r) == {p \in DOMAIN proc[r].positions : proc[r].positions[p].at < Records}
Moves(r) ==
    [p \in Claims(r) |-> [proc[r].positions[p] EXCEPT
        !.at = IF Mistake = "planned end is claimed" THEN Records ELSE @ + 1]]

TheId(r) == CHOOSE i \in proc[r].ids : TRUE

(* Begin and send the records and dead letters; positions are sent last.   *)
(* Only a late EndTxn can tell whether they have been sent.                *)
SendRecords(r, rejected) ==
    LET i == TheId(r)
        at(p) == proc[r].positions[p].at
        one == CHOOSE p \in rejected : TRUE
    IN
    /\ proc[r].pc = "read"
    /\ rejected \subseteq {p \in Claims(r) : at(p) \in Bad}
    /\ Cardinality(rejected) <= 1
    /\ IF Current(r, i) /\ Claims(r) # {}
       THEN /\ transaction' = [transaction EXCEPT ![i] = [NoTransaction EXCEPT
                  !.state = "open",
                  !.effects = {<<p, at(p)>> : p \in {q \in Claims(r) \ rejected : at(q) \notin Holes}},
                  !.letters = IF rejected = {} THEN <<>>
                              ELSE <<[p |-> one, o |-> at(one), epoch |-> proc[r].epoch]>>,
                  !.moves = IF MaxLate = 0 THEN Moves(r) ELSE Empty]]
            /\ Set(r, [pc |-> IF MaxLate = 0 THEN "ready" ELSE "sent"])
       ELSE /\ Set(r, Idle)
            /\ UNCHANGED transaction
    /\ UNCHANGED <<holder, ledger, group, pipeline, rejects, effects, half, late, left>>

SendPositions(r) ==
    LET i == TheId(r) IN
    /\ proc[r].pc = "sent"
    /\ IF Current(r, i) /\ transaction[i].state = "open"
       THEN /\ transaction' = [transaction EXCEPT ![i].moves = Moves(r)]
            /\ Set(r, [pc |-> "ready"])
       ELSE /\ Set(r, Idle)
            /\ UNCHANGED transaction
    /\ UNCHANGED <<holder, ledger, group, pipeline, rejects, effects, half, late, left>>

(* The answer may be lost: in either case the ledger is asked next. *)
Commit(r) ==
    LET i == TheId(r) IN
    /\ proc[r].pc = "ready"
    /\ IF Current(r, i) /\ transaction[i].state = "open"
       THEN End(i)
       ELSE UNCHANGED <<transaction, late>>
    /\ Set(r, Idle)
    /\ UNCHANGED <<holder, ledger, group, pipeline, rejects, effects, half, left>>

----------------------------------------------------------------------------
(* Replay of dead letters: kafka.replay.Replay.  A letter of an older epoch *)
(* than a reset's waits no more: its record is read again.                 *)
Waits(k) ==
    /\ k > replayed
    /\ \A x \in resets : x[1] = letters[k].p => x[2] <= letters[k].epoch

FirstWaiting(k) == Waits(k) /\ \A j \in 1 .. k - 1 : ~Waits(j)

ReplayRead(r) ==
    /\ proc[r].pc = "down"
    /\ left.replays > 0
    /\ \A i \in Ids \ {Replayer} : ~Writes(transaction[i])
    /\ InitIds(r, {Replayer})
    /\ \E k \in 1 .. Len(letters) :
          /\ FirstWaiting(k)
          /\ Set(r, [pc |-> "judged", letter |-> [from |-> replayed, to |-> k, resets |-> resets]])
    /\ left' = [left EXCEPT !.replays = @ - 1]
    /\ UNCHANGED <<ledger, group, pipeline, rejects, effects, half>>

ReplayInit(r) ==
    /\ proc[r].pc = "judged"
    /\ InitIds(r, {Replayer})
    /\ Set(r, [pc |-> "replay initialised"])
    /\ UNCHANGED <<ledger, group, pipeline, rejects, effects, half, left>>

(* What was read is compared: the position, and the resets. *)
ReplayCompare(r) ==
    LET was == proc[r].letter IN
    /\ proc[r].pc = "replay initialised"
    /\ LedgerVisible
    /\ IF replayed = was.from
          /\ (resets = was.resets \/ Mistake = "replay does not look at resets")
       THEN Set(r, [pc |-> "replay compared"])
       ELSE Set(r, Down)
    /\ UNCHANGED <<kafka, pipeline, rejects, effects, half, late, left>>

(* The record, or a new letter with the same epoch when it fails again.    *)
ReplayCommit(r, passes) ==
    LET to == proc[r].letter.to
        tried == letters[to]
    IN
    /\ proc[r].pc = "replay compared"
    /\ transaction' = IF ~Current(r, Replayer) THEN transaction
                      ELSE [transaction EXCEPT ![Replayer] = [NoTransaction EXCEPT
                             !.state = "committing",
                             !.effects = IF passes THEN {<<tried.p, tried.o>>} ELSE {},
                             !.letters = IF passes THEN <<>> ELSE <<tried>>,
                             !.replayed = to]]
    /\ Set(r, Down)
    /\ UNCHANGED <<holder, ledger, group, pipeline, rejects, effects, half, late, left>>

----------------------------------------------------------------------------
(* Faults *)

Crash(r) ==
    /\ proc[r].pc \notin {"down", "fenced"}
    /\ left.crashes > 0
    /\ Set(r, Down)
    /\ holder' = [i \in Ids |-> IF holder[i] = r THEN None ELSE holder[i]]
    /\ left' = [left EXCEPT !.crashes = @ - 1]
    /\ UNCHANGED <<transaction, ledger, group, pipeline, rejects, effects, half, late>>

(* A run is stopped in order: a reset or a replay may follow. *)
Stop(r) ==
    /\ proc[r].pc = "idle"
    /\ left.resets + left.replays > 0
    /\ Set(r, Down)
    /\ holder' = [i \in Ids |-> IF holder[i] = r THEN None ELSE holder[i]]
    /\ UNCHANGED <<transaction, ledger, group, pipeline, rejects, effects, half, late, left>>

Expire(p) ==
    /\ Quiet
    /\ left.expiries > 0
    /\ group[p] # NoPosition
    /\ Stable(p)
    /\ group' = [group EXCEPT ![p] = NoPosition]
    /\ left' = [left EXCEPT !.expiries = @ - 1]
    /\ UNCHANGED <<holder, transaction, ledger, pipeline, rejects, effects, half, proc, late>>

(* Another pipeline with the same source.group commits its own position.   *)
ForeignCommit(p) ==
    /\ Quiet
    /\ left.foreign > 0
    /\ Stable(p)
    /\ group' = [group EXCEPT ![p] =
          [at |-> Records, epoch |-> 1, mode |-> "partition", owner |-> Foreign]]
    /\ left' = [left EXCEPT !.foreign = @ - 1]
    /\ UNCHANGED <<holder, transaction, ledger, pipeline, rejects, effects, half, proc, late>>

----------------------------------------------------------------------------
Takes ==
    CASE Partial -> SUBSET Partitions \ {{}}
      [] New -> SUBSET Partitions
      [] OTHER -> {Partitions}

(* What a living process goes on to do. *)
Step(r) ==
    \/ InitAllAgain(r)
    \/ ReadLedger(r)
    \/ WriteEpoch(r)
    \/ SettleInit(r)
    \/ SettleRead(r)
    \/ \E i \in Ids : SettleWrite(r, i)
    \/ \E p \in Partitions : AddPartition(r, p)
    \/ Added(r)
    \/ NoteSettled(r)
    \/ EndOthers(r)
    \/ NoteReset(r)
    \/ \E S \in SUBSET Partitions \ {{}} : ReadFirst(r, S) \/ \E i \in Ids : InitForCommit(r, S, i)
    \/ ReadPositions(r)
    \/ \E rejected \in SUBSET Partitions : SendRecords(r, rejected)
    \/ SendPositions(r)
    \/ Commit(r)
    \/ ReplayInit(r)
    \/ ReplayCompare(r)
    \/ \E passes \in BOOLEAN : ReplayCommit(r, passes)

Start(r) ==
    \/ \E S \in Takes, mode \in Modes, reset \in BOOLEAN : InitAll(r, S, mode, reset)
    \/ OpenAgain(r)
    \/ NoteAsRun(r)
    \/ \E q \in Processes : SameJobTwice(r, q)
    \/ ReplayRead(r)

Next ==
    \/ \E r \in Processes : Step(r) \/ Start(r) \/ Crash(r) \/ Stop(r)
    \/ \E i \in Ids : WriteMarkers(i) \/ TransactionTimeout(i) \/ LateEndTxn(i)
    \/ \E p \in Partitions : Expire(p) \/ ForeignCommit(p)

Spec ==
    /\ Init
    /\ [][Next]_vars
    /\ \A r \in Processes : WF_vars(Step(r))
    /\ \A i \in Ids : WF_vars(WriteMarkers(i)) /\ WF_vars(TransactionTimeout(i))

----------------------------------------------------------------------------
(* Every record before the position took effect once or has a dead letter  *)
(* that waits, every other record did not and has none.  While a reset is  *)
(* under way, letters that it has voided may still be replayed: at most    *)
(* once.                                                                   *)
LettersOf(p, o) ==
    Cardinality({k \in 1 .. Len(letters) : letters[k].p = p /\ letters[k].o = o /\ Waits(k)})

ExactlyOnce ==
    \A p \in Partitions, o \in Offset :
        LET found == effects[p][o] + LettersOf(p, o) IN
        IF p \in half THEN found <= 1
        ELSE found = IF o < ledger[p].at /\ o \notin Holes THEN 1 ELSE 0

(* A run ends with "fenced" only when another run holds its partition. *)
FencedByAnOwner ==
    \A r \in Processes : proc[r].pc = "fenced" =>
        \E p \in proc[r].takes : ledger[p].epoch > proc[r].epoch

(* A reset that was decided is known until all of it is done, and nobody   *)
(* reads before.                                                           *)
ResetsAreWhole ==
    /\ half \subseteq pipeline.targets
    /\ \A r \in Processes :
          proc[r].pc = "idle" /\ (\A p \in proc[r].takes : ledger[p].epoch = proc[r].epoch)
              => half \cap proc[r].takes = {}

NobodyStops == \A r \in Processes : proc[r].pc # "stopped"

(* Within an epoch positions only grow (newer in cluster.py goes by that). *)
PositionsGoBackByResetsOnly ==
    [][\A p \in Partitions :
          \/ ledger'[p].at >= ledger[p].at /\ ledger'[p].epoch >= ledger[p].epoch
          \/ p \in half /\ ledger'[p].epoch > ledger[p].epoch]_vars

(* No run is fenced for good, and none waits for good, while it alone is   *)
(* healthy.  (A run may end fenced by positions that a rival has taken     *)
(* before it died: FencedByAnOwner.)                                       *)
Alone(r) ==
    /\ proc[r].pc # "down"
    /\ \A q \in Processes \ {r} : proc[q].pc \in {"down", "fenced"}

Complete == \A p \in Partitions : ledger[p].at = Records

Progress ==
    \A r \in Processes :
        <>[]Alone(r) => <>(Complete \/ proc[r].pc = "fenced" \/ pipeline.epoch = MaxEpoch)
=============================================================================
