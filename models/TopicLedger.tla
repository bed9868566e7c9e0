----------------------------- MODULE TopicLedger -----------------------------
(***************************************************************************)
(* The ledger in Kafka: records, dead letters and positions in one Kafka   *)
(* transaction.  A position is kept twice, in the ledger topic and as a    *)
(* group offset, both written by that transaction.                         *)
(*                                                                         *)
(* Code: stores/topic/takeover.py (open, reset), compare_and_set.py,      *)
(* sink.py (commit by a task), topic_publishing.py (commit by the driver), *)
(* and of a replay), change.py (repair), ledger.py (partitions found while *)
(* running).  Decisions: 0010, 0012, 0013, 0019, 0021, 0040, 0043, 0047.   *)
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
    Modes,          \* modes in which runs may open: of {"partition", "batch", "turns"}
    Partial,        \* TRUE: a takeover takes some of the partitions (worker)
    Twins,          \* TRUE: a task may have a second attempt
    MaxEpoch,       \* bound: epochs of the pipeline
    MaxResets,      \* bound
    MaxReplays,     \* bound: transactions of replays
    MaxDamage,      \* bound: records that the output loses
    MaxRepairs,     \* bound: repairs of a record
    MaxCrashes,     \* bound
    MaxTimeouts,    \* bound: transactions of living processes that the broker aborts
    MaxExpiries,    \* bound: group offsets that expire
    MaxForeign,     \* bound: group offsets that another pipeline commits
    MaxLosses,      \* bound: positions of which both copies are lost
    MaxLate,        \* bound: EndTxn requests that arrive a second time, late
    BumpsOnEnd,     \* TRUE: the broker raises the producer epoch at each end (KIP-890)
    AtOnce,         \* TRUE: nothing happens while the markers of a commit are written
    Mistake         \* "none", or the mistake that is switched on

None == "none"
Us == "this pipeline"
Foreign == "another pipeline"
Offset == 0 .. Records - 1

(* A run in mode "turns" moves a position by two ids, p and Second(p), in  *)
(* turn: while one works, the other is initialised.  The position names    *)
(* the one that moves it next: its mode is "first" or "second".            *)
InTurn == "turns" \in Modes
Turns == {"first", "second"}
Second(p) == <<p, 2>>
Named(id) == IF InTurn THEN <<id>> ELSE id  \* TLC compares no string with a tuple
Publisher == Named("publisher")
Opener == Named("opener")
Replayer == Named("replayer")
Ids == Partitions \cup {Publisher, Opener, Replayer}
       \cup (IF InTurn THEN {Second(p) : p \in Partitions} ELSE {})
Empty == [x \in {} |-> 0]

(* A position: the next offset, the epoch of the pipeline that may move it *)
(* and the mode that names the transactional id that moves it.             *)
NoPosition == [at |-> 0, epoch |-> 0, mode |-> "partition", owner |-> None]
NoTransaction == [state |-> "ended", moves |-> Empty, effects |-> {}, letters |-> <<>>,
                  replayed |-> 0, repaired |-> {}, putBack |-> {}]
NoLetter == [from |-> 0, to |-> 0, resets |-> {}]
NoWhole == [held |-> 0, given |-> 0]

VARIABLES
    holder,      \* per transactional id: the process that initialised it last
    transaction, \* per transactional id: the open or committing transaction
    ledger,      \* per partition: the position in the ledger topic
    group,       \* per partition: the position as group offset; NoPosition: expired
    pipeline,    \* the pipeline's record: its epoch, the run that it was given to,
                 \* `targets`, the partitions that a reset has yet to put back to offset 0,
                 \* `settled`, those that have had a position (kept where one may be lost),
                 \* and `whole`, of takeovers of all partitions: the epoch that holds or has
                 \* held positions, and the newest that was given out
    resets,      \* <<partition, epoch>> of each reset, in the ledger topic
    letters,     \* the rejects' topic: dead letters in order
    replayed,    \* the position of replays in it: this many letters have been replayed
    effects,     \* per partition and offset: how often it took effect since it was put back
    gone,        \* <<partition, offset>> of records that the output has lost
    half,        \* partitions of a reset that was decided which are not put back yet
    proc,        \* the state of each process
    late,        \* ids whose current instance has an EndTxn request that may arrive again
    left         \* how many faults of each kind are still allowed

kafka == <<holder, transaction, ledger, group>>
rejects == <<resets, letters, replayed>>
vars == <<kafka, pipeline, rejects, effects, gone, half, proc, late, left>>

Down == [pc |-> "down", epoch |-> 0, mode |-> "partition", resets |-> FALSE,
         expects |-> FALSE,        \* TRUE: it has held epoch `epoch`, and a newer one fences it
         takes |-> {},             \* partitions of the takeover, later on of the run
         since |-> 0,              \* who had taken all partitions when it was started
         whole |-> NoWhole,        \* the record's `whole`, as it was read
         forced |-> {},            \* partitions that this takeover puts back
         ids |-> {},               \* ids that it has initialised and not used yet
         spare |-> {},             \* the id that it has initialised for the transaction after
         positions |-> Empty,      \* partition -> the position that was read
         done |-> {},              \* partitions that a takeover has written
         adds |-> FALSE,           \* TRUE: this settles a partition that the run has found
         letter |-> NoLetter,      \* what a replay has read
         lost |-> {}]              \* the record that an audit has found lost

Idle == [pc |-> "idle", expects |-> TRUE, forced |-> {}, ids |-> {}, spare |-> {},
         positions |-> Empty, done |-> {}, adds |-> FALSE, whole |-> NoWhole]

Init ==
    /\ holder = [i \in Ids |-> None]
    /\ transaction = [i \in Ids |-> NoTransaction]
    /\ ledger = [p \in Partitions |-> NoPosition]
    /\ group = [p \in Partitions |-> NoPosition]
    /\ pipeline = [epoch |-> 0, run |-> None, targets |-> {}, settled |-> {},
                   whole |-> NoWhole]
    /\ resets = {}
    /\ letters = <<>>
    /\ replayed = 0
    /\ effects = [p \in Partitions |-> [o \in Offset |-> 0]]
    /\ gone = {}
    /\ half = {}
    /\ proc = [r \in Processes |-> Down]
    /\ late = {}
    /\ left = [resets |-> MaxResets, replays |-> MaxReplays, crashes |-> MaxCrashes,
               timeouts |-> MaxTimeouts, expiries |-> MaxExpiries, foreign |-> MaxForeign,
               damage |-> MaxDamage, repairs |-> MaxRepairs, losses |-> MaxLosses, late |-> MaxLate]

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
Writes(t) == DOMAIN t.moves # {} \/ t.replayed > 0 \/ t.repaired # {}
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

(* Positions that were there and are not; they are lost, unless a reset is *)
(* about to put them somewhere.                                            *)
Missing == {p \in pipeline.settled : ledger[p] = NoPosition /\ ~Believed(p)}
Lost == Missing \ pipeline.targets
Had(S) == IF MaxLosses = 0 THEN {} ELSE pipeline.settled \cup S

(* The one transactional id that may move a position.  A partition without *)
(* a position is given its first one by its own id, whatever the mode.     *)
Mover(p, position, mode) ==
    LET named == IF Mistake = "first position by the run's mode" /\ position.epoch = 0
                 THEN mode ELSE position.mode
    IN CASE named = "batch" -> Publisher
         [] named = "second" -> Second(p)
         [] OTHER -> p

(* The ids that a takeover initialises: both of a position in turns, so    *)
(* that its mover has one, whichever of them the position names by then.   *)
IdsOf(p, position, mode) ==
    IF position.mode \in Turns THEN {p, Second(p)} ELSE {Mover(p, position, mode)}

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
    /\ UNCHANGED <<holder, ledger, group, pipeline, rejects, effects, gone, half, proc>>

(* Markers may be written in another order than transactions were sent in, *)
(* and readers go by the logs all the same: those of topics wait for the   *)
(* earlier one, and the group keeps the offset that is later in its log.   *)
Before(j, i) ==
    LET earlier == transaction[j] later == transaction[i] IN
    /\ earlier.state = "committing"
    /\ \E p \in DOMAIN earlier.moves \cap DOMAIN later.moves :
          /\ earlier.moves[p].epoch = later.moves[p].epoch
          /\ earlier.moves[p].at < later.moves[p].at

WriteMarkers(i) ==
    LET t == transaction[i]
        cleared == t.putBack \cap half
    IN
    /\ t.state = "committing"
    /\ \A j \in Ids : ~Before(j, i)
    /\ ledger' = t.moves @@ ledger
    /\ group' = t.moves @@ group
    /\ effects' = [p \in Partitions |-> [o \in Offset |->
          IF p \in cleared THEN 0
          ELSE effects[p][o] + (IF <<p, o>> \in t.effects THEN 1 ELSE 0)]]
    /\ letters' = letters \o t.letters
    /\ replayed' = IF t.replayed > 0 THEN t.replayed ELSE replayed
    /\ gone' = {x \in gone \ t.repaired : x[1] \notin cleared}
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
    /\ UNCHANGED <<ledger, group, pipeline, rejects, effects, gone, half, proc, late>>

----------------------------------------------------------------------------
(* Open: kafka.takeover.Takeover *)

(* Step 1: the ids of all partitions that are taken, the second ones as far *)
(* as positions are known to be moved in turns.  A takeover of all          *)
(* initialises the publisher's and the one of replays, too.                *)
Own(S, finishes) ==
    LET some == Partial /\ S # Partitions IN
    S \cup {Second(p) : p \in {q \in S : ledger[q].mode \in Turns}}
      \cup (IF some THEN {} ELSE {Publisher})
      \cup (IF some \/ (finishes /\ Mistake = "reset leaves replays alone") THEN {}
            ELSE {Replayer})

(* An epoch that was given to a takeover of all partitions counts from the *)
(* first position that has it.                                             *)
Whole ==
    LET known == pipeline.whole
        taken == known.given > 0 /\ \E p \in Partitions : ledger[p].epoch = known.given
    IN [known EXCEPT !.held = IF taken THEN known.given ELSE @]

TakesSome(r) == Partial /\ proc[r].takes # Partitions
IsSuperseded(r) ==
    /\ TakesSome(r)
    /\ Whole.held > proc[r].since
    /\ Mistake # "the last takeover of all is not compared"

(* A first takeover of all is done again when takeovers of some have taken *)
(* positions by a later epoch.                                             *)
IsFirstOfAll(r) == Partial /\ proc[r].takes = Partitions /\ ~proc[r].expects
TakesAgain(r) ==
    /\ IsFirstOfAll(r)
    /\ pipeline.whole.given <= proc[r].epoch
    /\ Mistake # "a takeover of some fences one of all"

(* A first start, or a reset. *)
InitAll(r, S, mode, reset) ==
    /\ proc[r].pc = "down"
    /\ pipeline.epoch < MaxEpoch
    /\ reset => left.resets > 0 /\ S = Partitions
    /\ InitIds(r, Own(S, FALSE))
    /\ Set(r, [pc |-> "fencing", mode |-> mode, resets |-> reset, takes |-> S,
               since |-> IF Partial /\ S # Partitions THEN Whole.held ELSE 0])
    /\ left' = [left EXCEPT !.resets = @ - (IF reset THEN 1 ELSE 0)]
    /\ UNCHANGED <<ledger, group, pipeline, rejects, effects, gone, half>>

(* A run that opens again, an opener that was overtaken by another one,    *)
(* and the second takeover of a reset.                                     *)
InitAllAgain(r) ==
    LET S == IF proc[r].resets THEN Partitions ELSE proc[r].takes IN
    /\ proc[r].pc = "again"
    /\ InitIds(r, Own(S, TRUE))
    /\ Set(r, [pc |-> "fencing", takes |-> S, forced |-> {}, ids |-> {}, positions |-> Empty, done |-> {}])
    /\ UNCHANGED <<ledger, group, pipeline, rejects, effects, gone, half, left>>

OpenAgain(r) ==
    LET newer == \E p \in proc[r].takes : ledger[p].epoch > proc[r].epoch IN
    /\ proc[r].pc = "idle"
    /\ pipeline.epoch < MaxEpoch
    /\ newer => LedgerVisible      \* it looks before it disturbs anybody
    /\ Set(r, [pc |-> IF newer THEN "fenced" ELSE "again"])
    /\ UNCHANGED <<kafka, pipeline, rejects, effects, gone, half, late, left>>

(* Step 2: the pipeline's own id, then the ledger is read to its end.  The *)
(* group's copy counts where the ledger topic lags behind.  A group that   *)
(* holds another pipeline's positions is refused.  So is an open after     *)
(* which a lost position would begin anew; a reset, whose targets are all  *)
(* partitions, goes on without it until it is decided.                     *)
ReadLedger(r) ==
    LET S == proc[r].takes \cup
             (IF Partial THEN {} ELSE {p \in Partitions : ledger[p] # NoPosition})
        newest(p) == IF Believed(p) /\ group[p].epoch > ledger[p].epoch THEN group[p] ELSE ledger[p]
        foreign == {p \in S : group[p].owner = Foreign /\ ~Believed(p)}
        taken == IF proc[r].resets /\ Mistake # "a lost position is put before the decision"
                 THEN S \ Lost ELSE S
    IN
    /\ proc[r].pc = "fencing"
    /\ LedgerVisible
    /\ \A p \in S : Stable(p)
    /\ InitIds(r, {Opener})
    /\ CASE foreign # {} -> Set(r, Down)
         [] proc[r].expects /\ (\E p \in S : ledger[p].epoch > proc[r].epoch) ->
               Set(r, [pc |-> "fenced", takes |-> S])
         [] IsSuperseded(r) -> Set(r, [pc |-> "fenced"])
         [] Lost # {} /\ ~proc[r].resets /\ Mistake # "a lost position begins anew" -> Set(r, Down)
         [] OTHER -> Set(r, [pc |-> "found", takes |-> taken,
                             positions |-> [p \in taken |-> newest(p)],
                             whole |-> Whole])
    /\ UNCHANGED <<ledger, group, pipeline, rejects, effects, gone, half, left>>

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
            /\ pipeline' = [epoch |-> epoch, run |-> r, targets |-> kept,
                            settled |-> Had({p \in proc[r].takes :
                                               proc[r].positions[p] # NoPosition}),
                            whole |-> CASE TakesSome(r) -> proc[r].whole
                                        [] Partial -> [proc[r].whole EXCEPT !.given = epoch]
                                        [] OTHER -> NoWhole]
            /\ Set(r, [pc |-> "settling", epoch |-> epoch, forced |-> kept \cap proc[r].takes])
       ELSE /\ Set(r, [pc |-> "again"])
            /\ UNCHANGED pipeline
    /\ UNCHANGED <<kafka, rejects, effects, gone, half, late, left>>

----------------------------------------------------------------------------
(* Step 3: take_positions.PositionTakeover.  Positions get our epoch and   *)
(* mode, by the ids that the OLD positions name, in one transaction each.  *)

Unsettled(r) == proc[r].takes \ proc[r].done
MoverFor(r, p) ==
    IF Mistake = "a takeover knows the first id only" /\ proc[r].positions[p].mode = "second"
    THEN p ELSE Mover(p, proc[r].positions[p], proc[r].mode)

(* A replay that has compared before a reset was decided is ended before   *)
(* that puts a position back.                                              *)
EndsReplays(r) ==
    /\ proc[r].forced # {}
    /\ Mistake # "reset leaves replays alone"

SettleInit(r) ==
    LET both(p) == IF Mistake = "a takeover knows the first id only" THEN {MoverFor(r, p)}
                   ELSE IdsOf(p, proc[r].positions[p], proc[r].mode)
        ids == UNION {both(p) : p \in Unsettled(r)}
    IN
    /\ proc[r].pc = "settling"
    /\ ids # {}
    /\ InitIds(r, IF EndsReplays(r) THEN ids \cup {Replayer} ELSE ids)
    /\ Set(r, [pc |-> "settle read", ids |-> ids])
    /\ UNCHANGED <<ledger, group, pipeline, rejects, effects, gone, half, left>>

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
       THEN Set(r, [pc |-> IF TakesAgain(r) THEN "again" ELSE "fenced"])
       ELSE Set(r, [pc |-> "settle write", positions |-> seen @@ proc[r].positions])
    /\ UNCHANGED <<kafka, pipeline, rejects, effects, gone, half, late, left>>

Taken(r, p) ==
    [at |-> IF p \in proc[r].forced THEN 0 ELSE proc[r].positions[p].at,
     epoch |-> proc[r].epoch, mode |-> IF proc[r].mode = "turns" THEN "first" ELSE proc[r].mode,
     owner |-> Us]

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
    /\ UNCHANGED <<holder, ledger, group, pipeline, rejects, effects, gone, half, late, left>>

Settled(r) == proc[r].pc = "settling" /\ Unsettled(r) = {}

(* LedgerInTopic.add_partitions: a run finds a partition.                  *)
AddPartition(r, p) ==
    /\ proc[r].pc = "idle"
    /\ New
    /\ p \in Partitions \ proc[r].takes
    /\ Set(r, [pc |-> "settling", takes |-> proc[r].takes \cup {p}, done |-> proc[r].takes,
               positions |-> [q \in {p} |-> NoPosition], adds |-> TRUE])
    /\ UNCHANGED <<kafka, pipeline, rejects, effects, gone, half, late, left>>

Added(r) ==
    /\ Settled(r)
    /\ proc[r].adds
    /\ LedgerVisible
    /\ Set(r, Idle)
    /\ UNCHANGED <<kafka, pipeline, rejects, effects, gone, half, late, left>>

----------------------------------------------------------------------------
(* Steps 4 and 5 *)

(* Step 4: the takeover is noted as finished, with what it has put back.   *)
(* An opener that was given an epoch since, and has taken no position, is  *)
(* no reason to end: the takeover is done again, so that whoever was given *)
(* an epoch before the last one finds newer positions.  A worker does that *)
(* only where a reset is to be finished, which that opener may know of.    *)
NoteSettled(r) ==
    LET ours == pipeline.epoch = proc[r].epoch /\ pipeline.run = r
        newer == \E p \in proc[r].takes : ledger[p].epoch > proc[r].epoch
        again == ~TakesSome(r) \/ proc[r].forced # {}
        noted == IF Mistake = "a partial takeover ends the whole reset"
                 THEN {} ELSE pipeline.targets \ proc[r].forced
    IN
    /\ Settled(r)
    /\ ~proc[r].adds
    /\ LedgerVisible
    /\ InitIds(r, {Opener})
    /\ IF ~ours /\ (newer \/ again)
       THEN /\ Set(r, [pc |-> IF (newer /\ ~TakesAgain(r))
                                 \/ Mistake = "the opener's number fences"
                              THEN "fenced" ELSE "again"])
            /\ UNCHANGED pipeline
       ELSE /\ Set(r, IF proc[r].resets THEN [pc |-> "asked"] ELSE Idle)
            /\ pipeline' = [pipeline EXCEPT !.targets = noted, !.settled = Had(proc[r].takes)]
    /\ UNCHANGED <<ledger, group, rejects, effects, gone, half, left>>

(* Step 5: one transaction decides a reset, and voids older dead letters.  *)
(* The next takeover puts positions back.  First what would hide the end   *)
(* of the ledger is ended.  Where another opener was given an epoch since, *)
(* the takeover is done again, which tells whether it has taken a position.*)
EndOthers(r) ==
    /\ proc[r].pc = "asked"
    /\ InitIds(r, {Publisher, Replayer})
    /\ Set(r, [pc |-> "deciding"])
    /\ UNCHANGED <<ledger, group, pipeline, rejects, effects, gone, half, left>>

NoteReset(r) ==
    LET ours == pipeline.epoch = proc[r].epoch /\ pipeline.run = r
        S == proc[r].takes \cup Lost
    IN
    /\ proc[r].pc = "deciding"
    /\ LedgerVisible
    /\ InitIds(r, {Opener})
    /\ IF ours
       THEN /\ pipeline' = [pipeline EXCEPT !.targets = S]
            /\ resets' = resets \cup {<<p, proc[r].epoch>> : p \in S}
            /\ half' = S
            /\ Set(r, [pc |-> "again", resets |-> FALSE, expects |-> TRUE, takes |-> S])
       ELSE /\ Set(r, [pc |-> IF Mistake = "the opener's number fences a reset"
                              THEN "fenced" ELSE "again", expects |-> TRUE])
            /\ UNCHANGED <<pipeline, resets, half>>
    /\ UNCHANGED <<ledger, group, letters, replayed, effects, gone, left>>

(* takeover.note_leader_epochs, note_rejects: a run changes the record as  *)
(* the holder of the positions, whoever was given an epoch.                *)
NoteAsRun(r) ==
    LET newer == \E p \in proc[r].takes : ledger[p].epoch > proc[r].epoch IN
    /\ proc[r].pc = "idle"
    /\ newer \/ ~Current(r, Opener)      \* else nothing changes
    /\ LedgerVisible
    /\ InitIds(r, {Opener})
    /\ IF newer
       THEN Set(r, [pc |-> "fenced"])
       ELSE UNCHANGED proc
    /\ UNCHANGED <<ledger, group, pipeline, rejects, effects, gone, half, left>>

----------------------------------------------------------------------------
(* Commit: KafkaSink.commit, Publisher.publish *)

(* A second attempt of the same task. *)
SameJobTwice(r, q) ==
    /\ Twins
    /\ proc[r].pc = "down"
    /\ proc[q].pc = "idle"
    /\ Set(r, [pc |-> "idle", epoch |-> proc[q].epoch, mode |-> proc[q].mode, expects |-> TRUE,
               takes |-> proc[q].takes])
    /\ UNCHANGED <<kafka, pipeline, rejects, effects, gone, half, late, left>>

Waiting(S) == \E p \in S : Position(p).at < Records

OneInstance == Mistake = "one producer instance for many transactions"

(* What one transaction moves: a task one partition, the driver all.  In a *)
(* run of batch commit holes go by the publisher's id, too.  A run in      *)
(* turns initialises both ids before it reads, here and in `InitLate`.     *)
InitForCommit(r, S, i) ==
    LET first == Mistake = "read before init"
        ids == IF proc[r].mode = "turns" THEN {i, Second(i)} ELSE {i}
    IN
    /\ proc[r].pc = (IF first THEN "read first" ELSE "idle")
    /\ first => S = DOMAIN proc[r].positions
    /\ Waiting(S)
    /\ CASE proc[r].mode \in {"partition", "turns"} -> \E p \in proc[r].takes : S = {p} /\ i = p
         [] Mistake = "one mode for the pipeline" ->
               \/ S = proc[r].takes /\ i = Publisher
               \/ \E p \in proc[r].takes : S = {p} /\ i = p
         [] OTHER -> S = proc[r].takes /\ i = Publisher
    /\ IF OneInstance /\ \A j \in ids : Current(r, j)
       THEN CanInit(ids) /\ UNCHANGED <<holder, transaction, late>>
       ELSE InitIds(r, ids)
    /\ Set(r, [pc |-> IF first THEN "read" ELSE "initialised", ids |-> ids, done |-> S])
    /\ UNCHANGED <<ledger, group, pipeline, rejects, effects, gone, half, left>>

ReadFirst(r, S) ==
    /\ Mistake = "read before init"
    /\ proc[r].pc = "idle"
    /\ S \subseteq proc[r].takes
    /\ \A p \in S : CanRead(p) /\ Position(p).epoch = proc[r].epoch
    /\ Set(r, [pc |-> "read first", positions |-> [p \in S |-> Position(p)]])
    /\ UNCHANGED <<kafka, pipeline, rejects, effects, gone, half, late, left>>

(* Read the positions and decide: nothing can move them by this id before  *)
(* our own commit.                                                         *)
ReadPositions(r) ==
    LET S == proc[r].done
        own(p) == Mistake = "one mode for the pipeline" /\ Position(p).at \in Holes
    IN
    /\ proc[r].pc = "initialised"
    /\ \A p \in S : CanRead(p)
    /\ CASE S \cap Missing # {} -> Set(r, Down)
         [] \E p \in S : Position(p).epoch > proc[r].epoch -> Set(r, [pc |-> "fenced"])
         [] \E p \in S : Position(p).epoch < proc[r].epoch -> Set(r, [pc |-> "stopped"])
         [] \E p \in S : Mover(p, Position(p), proc[r].mode) \notin proc[r].ids /\ ~own(p) ->
               Set(r, Idle)
         [] OTHER ->
               LET movers == {Mover(p, Position(p), proc[r].mode) : p \in S} IN
               Set(r, [pc |-> "read", positions |-> [p \in S |-> Position(p)],
                       ids |-> IF proc[r].mode = "turns" THEN movers ELSE proc[r].ids,
                       spare |-> IF proc[r].mode = "turns" THEN proc[r].ids \ movers ELSE {}])
    /\ UNCHANGED <<kafka, pipeline, rejects, effects, gone, half, late, left>>

Claims(r) == {p \in DOMAIN proc[r].positions : proc[r].positions[p].at < Records}
Moves(r) ==
    [p \in Claims(r) |-> [proc[r].positions[p] EXCEPT
        !.at = IF Mistake = "planned end is claimed" THEN Records ELSE @ + 1,
        !.mode = CASE @ = "first" -> "second" [] @ = "second" -> "first" [] OTHER -> @]]

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
    /\ UNCHANGED <<holder, ledger, group, pipeline, rejects, effects, gone, half, late, left>>

SendPositions(r) ==
    LET i == TheId(r) IN
    /\ proc[r].pc = "sent"
    /\ IF Current(r, i) /\ transaction[i].state = "open"
       THEN /\ transaction' = [transaction EXCEPT ![i].moves = Moves(r)]
            /\ Set(r, [pc |-> "ready"])
       ELSE /\ Set(r, Idle)
            /\ UNCHANGED transaction
    /\ UNCHANGED <<holder, ledger, group, pipeline, rejects, effects, gone, half, late, left>>

(* The answer may be lost: in either case the ledger is asked next.  With  *)
(* an answer, a run in turns knows the position.  If the other id was      *)
(* initialised before, nobody else can have moved the position by it: who  *)
(* has read the position has initialised that id since, which fences us.   *)
Commit(r) ==
    LET i == TheId(r)
        done == Current(r, i) /\ transaction[i].state = "open"
        knows == done \/ Mistake = "a lost answer counts as a commit"
        next == [pc |-> IF proc[r].spare = {} THEN "late" ELSE "read",
                 positions |-> Moves(r), ids |-> proc[r].spare, spare |-> {}]
    IN
    /\ proc[r].pc = "ready"
    /\ IF done THEN End(i) ELSE UNCHANGED <<transaction, late>>
    /\ \/ Set(r, Idle)
       \/ proc[r].mode = "turns" /\ knows /\ Set(r, next)
    /\ UNCHANGED <<holder, ledger, group, pipeline, rejects, effects, gone, half, left>>

(* While one id works, the other one is initialised.                       *)
InitSpare(r) ==
    LET ids == UNION {{p, Second(p)} : p \in proc[r].done} \ proc[r].ids IN
    /\ InTurn
    /\ proc[r].mode = "turns"
    /\ proc[r].pc \in {"read", "sent", "ready"}
    /\ proc[r].spare = {}
    /\ IF OneInstance /\ \A j \in ids : Current(r, j)
       THEN CanInit(ids) /\ UNCHANGED <<holder, transaction, late>>
       ELSE InitIds(r, ids)
    /\ Set(r, [spare |-> ids])
    /\ UNCHANGED <<ledger, group, pipeline, rejects, effects, gone, half, left>>

(* It was not initialised before the commit: the position is read again.   *)
InitLate(r) ==
    LET ids == {Mover(p, proc[r].positions[p], "turns") : p \in proc[r].done}
        trusts == Mistake = "the other id is initialised late and nothing is read"
    IN
    /\ proc[r].pc = "late"
    /\ InitIds(r, ids)
    /\ Set(r, [pc |-> IF trusts THEN "read" ELSE "initialised", ids |-> ids])
    /\ UNCHANGED <<ledger, group, pipeline, rejects, effects, gone, half, left>>

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
    /\ UNCHANGED <<ledger, group, pipeline, rejects, effects, gone, half>>

ReplayInit(r) ==
    /\ proc[r].pc = "judged"
    /\ InitIds(r, {Replayer})
    /\ Set(r, [pc |-> "replay initialised"])
    /\ UNCHANGED <<ledger, group, pipeline, rejects, effects, gone, half, left>>

(* What was read is compared: the position, and the resets. *)
ReplayCompare(r) ==
    LET was == proc[r].letter IN
    /\ proc[r].pc = "replay initialised"
    /\ LedgerVisible
    /\ IF replayed = was.from
          /\ (resets = was.resets \/ Mistake = "replay does not look at resets")
       THEN Set(r, [pc |-> "replay compared"])
       ELSE Set(r, Down)
    /\ UNCHANGED <<kafka, pipeline, rejects, effects, gone, half, late, left>>

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
    /\ UNCHANGED <<holder, ledger, group, pipeline, rejects, effects, gone, half, late, left>>

----------------------------------------------------------------------------
(* Repair of a lost record: kafka.rewrite.KafkaRewrites.  It takes the id   *)
(* of replays, so a reset ends it like a replay, and so does another       *)
(* repair.  The record is sent if it is below the position, no reset is    *)
(* about to put that back, and it has neither effect nor dead letter then: *)
(* an audit may be older.                                                  *)
LettersOf(p, o) ==
    Cardinality({k \in 1 .. Len(letters) : letters[k].p = p /\ letters[k].o = o /\ Waits(k)})

RepairFind(r) ==
    /\ proc[r].pc = "down"
    /\ left.repairs > 0
    /\ \E x \in gone : Set(r, [pc |-> "lost", lost |-> {x}])
    /\ left' = [left EXCEPT !.repairs = @ - 1]
    /\ UNCHANGED <<kafka, pipeline, rejects, effects, gone, half, late>>

RepairInit(r) ==
    /\ proc[r].pc = "lost"
    /\ IF Mistake = "repair has no transactional id of replays"
       THEN UNCHANGED <<holder, transaction, late>> /\ Quiet
       ELSE InitIds(r, {Replayer})
    /\ Set(r, [pc |-> "repair initialised"])
    /\ UNCHANGED <<ledger, group, pipeline, rejects, effects, gone, half, left>>

RepairCompare(r) ==
    LET isLost(p, o) ==
            /\ o < ledger[p].at \/ Mistake = "repair of a record beyond the position"
            /\ p \notin pipeline.targets \/ Mistake = "repair does not look at a reset under way"
            /\ effects[p][o] = 0 \/ Mistake = "repair reads the output before init"
            /\ LettersOf(p, o) = 0 \/ Mistake = "repair does not look at dead letters"
    IN
    /\ proc[r].pc = "repair initialised"
    /\ LedgerVisible
    /\ IF \A x \in proc[r].lost : isLost(x[1], x[2])
       THEN Set(r, [pc |-> "repair compared"])
       ELSE Set(r, Down)
    /\ UNCHANGED <<kafka, pipeline, rejects, effects, gone, half, late, left>>

RepairCommit(r) ==
    LET sent == Current(r, Replayer) \/ Mistake = "repair has no transactional id of replays" IN
    /\ proc[r].pc = "repair compared"
    /\ sent => ~Alive(Replayer)
    /\ transaction' = IF ~sent THEN transaction
                      ELSE [transaction EXCEPT ![Replayer] = [NoTransaction EXCEPT
                             !.state = "committing",
                             !.effects = proc[r].lost,
                             !.repaired = proc[r].lost]]
    /\ Set(r, Down)
    /\ UNCHANGED <<holder, ledger, group, pipeline, rejects, effects, gone, half, late, left>>

----------------------------------------------------------------------------
(* Faults *)

(* The output loses a committed record. *)
Damage(p, o) ==
    /\ Quiet
    /\ left.damage > 0
    /\ o < ledger[p].at
    /\ p \notin half
    /\ effects[p][o] = 1
    /\ effects' = [effects EXCEPT ![p][o] = 0]
    /\ gone' = gone \cup {<<p, o>>}
    /\ left' = [left EXCEPT !.damage = @ - 1]
    /\ UNCHANGED <<kafka, pipeline, rejects, half, proc, late>>

Crash(r) ==
    /\ proc[r].pc \notin {"down", "fenced"}
    /\ left.crashes > 0
    /\ Set(r, Down)
    /\ holder' = [i \in Ids |-> IF holder[i] = r THEN None ELSE holder[i]]
    /\ left' = [left EXCEPT !.crashes = @ - 1]
    /\ UNCHANGED <<transaction, ledger, group, pipeline, rejects, effects, gone, half, late>>

(* A run is stopped in order: a reset or a replay may follow. *)
Stop(r) ==
    /\ proc[r].pc = "idle"
    /\ left.resets + left.replays + left.repairs > 0
    /\ Set(r, Down)
    /\ holder' = [i \in Ids |-> IF holder[i] = r THEN None ELSE holder[i]]
    /\ UNCHANGED <<transaction, ledger, group, pipeline, rejects, effects, gone, half, late, left>>

Expire(p) ==
    /\ Quiet
    /\ left.expiries > 0
    /\ group[p] # NoPosition
    /\ Stable(p)
    /\ group' = [group EXCEPT ![p] = NoPosition]
    /\ left' = [left EXCEPT !.expiries = @ - 1]
    /\ UNCHANGED <<holder, transaction, ledger, pipeline, rejects, effects, gone, half, proc, late>>

(* The group offset has expired, and the ledger topic has lost its record. *)
(* Not in the middle of a takeover, which goes on with what it has read.   *)
Lose(p) ==
    /\ Quiet
    /\ left.losses > 0
    /\ ledger[p] # NoPosition
    /\ Stable(p)
    /\ \A r \in Processes :
          proc[r].pc \notin {"fencing", "found", "settling", "settle read", "settle write"}
    /\ ledger' = [ledger EXCEPT ![p] = NoPosition]
    /\ group' = [group EXCEPT ![p] = NoPosition]
    /\ left' = [left EXCEPT !.losses = @ - 1]
    /\ UNCHANGED <<holder, transaction, pipeline, rejects, effects, gone, half, proc, late>>

(* Another pipeline with the same source.group commits its own position.   *)
ForeignCommit(p) ==
    /\ Quiet
    /\ left.foreign > 0
    /\ Stable(p)
    /\ group' = [group EXCEPT ![p] =
          [at |-> Records, epoch |-> 1, mode |-> "partition", owner |-> Foreign]]
    /\ left' = [left EXCEPT !.foreign = @ - 1]
    /\ UNCHANGED <<holder, transaction, ledger, pipeline, rejects, effects, gone, half, proc, late>>

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
    \/ InitSpare(r)
    \/ InitLate(r)
    \/ ReplayInit(r)
    \/ ReplayCompare(r)
    \/ \E passes \in BOOLEAN : ReplayCommit(r, passes)
    \/ RepairInit(r)
    \/ RepairCompare(r)
    \/ RepairCommit(r)

Start(r) ==
    \/ \E S \in Takes, mode \in Modes, reset \in BOOLEAN : InitAll(r, S, mode, reset)
    \/ OpenAgain(r)
    \/ NoteAsRun(r)
    \/ \E q \in Processes : SameJobTwice(r, q)
    \/ ReplayRead(r)
    \/ RepairFind(r)

Next ==
    \/ \E r \in Processes : Step(r) \/ Start(r) \/ Crash(r) \/ Stop(r)
    \/ \E i \in Ids : WriteMarkers(i) \/ TransactionTimeout(i) \/ LateEndTxn(i)
    \/ \E p \in Partitions : Expire(p) \/ Lose(p) \/ ForeignCommit(p)
    \/ \E p \in Partitions, o \in Offset : Damage(p, o)

Spec ==
    /\ Init
    /\ [][Next]_vars
    /\ \A r \in Processes : WF_vars(Step(r))
    /\ \A i \in Ids : WF_vars(WriteMarkers(i)) /\ WF_vars(TransactionTimeout(i))

----------------------------------------------------------------------------
(* Every record before the position took effect once or has a dead letter  *)
(* that waits, but for those that the output has lost; every other record  *)
(* did not and has none.  While a reset is                                 *)
(* under way, letters that it has voided may still be replayed: at most    *)
(* once.  Of a position that is not there nothing can be compared.         *)
ExactlyOnce ==
    \A p \in Partitions, o \in Offset :
        LET found == effects[p][o] + LettersOf(p, o) IN
        IF p \in half \cup Missing THEN found <= 1
        ELSE found = IF o < ledger[p].at /\ o \notin Holes /\ <<p, o>> \notin gone THEN 1 ELSE 0

(* A run ends with "fenced" only when another run holds its partition, or  *)
(* one of all has come after its process.                                  *)
FencedByAnOwner ==
    \A r \in Processes : proc[r].pc = "fenced" =>
        \/ \E p \in proc[r].takes :
              ledger[p].epoch > proc[r].epoch \/ (ledger[p] = NoPosition /\ left.losses < MaxLosses)
        \/ TakesSome(r) /\ pipeline.whole.given > proc[r].since

(* A run that holds all partitions loses them to processes only that were  *)
(* started later, and none of them ends a first takeover of all.           *)
AllComeBeforeSome ==
    [][/\ \A q \in Processes, p \in Partitions :
             /\ Partial /\ proc[q].pc = "idle" /\ proc[q].takes = Partitions
             /\ \A o \in Partitions : ledger[o].epoch = proc[q].epoch
             /\ ledger'[p].epoch > ledger[p].epoch
             => \A r \in Processes :
                   TakesSome(r) /\ proc[r].epoch = ledger'[p].epoch
                       => proc[r].since >= proc[q].epoch
       /\ \A r \in Processes :
             IsFirstOfAll(r) /\ proc[r].pc # "fenced" /\ proc'[r].pc = "fenced"
                 => pipeline.whole.given > proc[r].epoch]_vars

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
          \/ p \in half /\ ledger'[p].epoch > ledger[p].epoch
          \/ left'.losses < left.losses]_vars

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
----------------------------------------------------------------------------
(* TLC takes states for the same that differ only in values which no step  *)
(* reads before it overwrites them, and which no property reads: the       *)
(* holder of an id that initialises it again before its next transaction,  *)
(* the run in the pipeline's record when no takeover of that run is under  *)
(* way, positions that were read for a decision that is made.              *)
Taking == {"settling", "settle read", "settle write", "asked", "deciding"}
Moving == {"settle read", "settle write", "initialised", "read", "sent", "ready"}

Asked(r) ==
    CASE Mistake = "one producer instance for many transactions" -> Ids
      [] proc[r].pc = "found" -> {Opener}
      [] proc[r].pc \in Moving -> proc[r].ids \cup proc[r].spare
      [] proc[r].pc \in {"replay initialised", "replay compared",
                          "repair initialised", "repair compared"} -> {Replayer}
      [] OTHER -> {}

Needed(r) ==
    LET of == proc[r] IN
    CASE of.pc = "fenced" -> [Down EXCEPT !.pc = "fenced", !.epoch = of.epoch, !.takes = of.takes,
                                          !.since = of.since]
      [] of.pc \in {"settling", "settle read", "settle write"} ->
            [of EXCEPT !.positions = [p \in Unsettled(r) |-> of.positions[p]]]
      [] of.pc = "ready" /\ of.mode # "turns" -> [of EXCEPT !.positions = Empty, !.done = {}]
      [] OTHER -> of

View ==
    <<[i \in Ids |-> IF \E r \in Processes : holder[i] = r /\ i \in Asked(r)
                      THEN holder[i] ELSE None],
      transaction, ledger, group,
      [pipeline EXCEPT !.run = IF \E r \in Processes : @ = r /\ proc[r].pc \in Taking
                               THEN @ ELSE None],
      rejects, effects, gone, half, [r \in Processes |-> Needed(r)], late, left>>
=============================================================================
