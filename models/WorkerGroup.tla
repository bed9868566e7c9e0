----------------------------- MODULE WorkerGroup -----------------------------
(***************************************************************************)
(* Workers of a consumer group that commit to a ledger, and a Spark run    *)
(* that takes over from them and gives back.                               *)
(*                                                                         *)
(* The group's coordinator assigns partitions; a worker learns of that     *)
(* late, or not at all (a lost revocation, a paused worker).  So the       *)
(* ledger fences: a worker that was assigned a partition takes it over     *)
(* with an epoch of its own, and commits by compare-and-set on position    *)
(* and epoch.  A takeover is one step here; SqlLedger and TopicLedger take *)
(* it apart.                                                               *)
(*                                                                         *)
(* Two races are left to the rules of the worker (decision 0036):          *)
(*                                                                         *)
(* - A worker that was paused between its assignment and its takeover      *)
(*   fences the worker to which the group has assigned the partition       *)
(*   since, and the group would not assign it again.  So a worker that is  *)
(*   fenced asks the group, and takes over again when it is still named.   *)
(* - The same worker would fence a Spark run that was started since.  So   *)
(*   a takeover carries the epoch of the last run that took everything, as *)
(*   the worker has found it at its start, and the ledger compares it.     *)
(*                                                                         *)
(* KIP-848: assignments are deltas, and a client goes on fetching while    *)
(* the coordinator is away.                                                *)
(***************************************************************************)
EXTENDS Integers, FiniteSets, TLC

CONSTANTS
    Workers,
    Partitions,
    Records,        \* offsets of a partition are 0 .. Records - 1
    MaxRebalances,  \* bound: partitions taken from one live worker for another
    MaxSpark,       \* bound: how often Spark takes over
    MaxCrashes,     \* bound
    MaxDeletions,   \* bound: how often the group is deleted and begins to count anew
    Mistake         \* "none", or the mistake that is switched on

None == "none"
Spark == "spark"
Owners == Workers \cup {Spark}
Offset == 0 .. Records - 1

VARIABLES
    assignment, \* per partition: the worker to which the coordinator has assigned it, the number
                \* of that assignment, and the group's generation
    ledger,     \* per partition: position, epoch, the owner of that epoch, and its generation
    epoch,      \* the newest epoch of the pipeline
    whole,      \* the epoch of the last run that took all partitions
    effects,    \* per partition and offset: how often it took effect
    worker,     \* per owner and partition: what it knows
    process,    \* per worker: whether it is up, and `whole` as it was at its start
    spark,      \* TRUE while a Spark run is up
    left        \* how many rebalances, Spark runs, crashes and deletions are still allowed

vars == <<assignment, ledger, epoch, whole, effects, worker, process, spark, left>>

(* heard: the number of the assignment that the worker has heard of;       *)
(* generation: of the group at that time; epoch: of its takeover; next:    *)
(* the next offset to process; from: the position that the batch in memory *)
(* begins at.                                                              *)
Nothing == [pc |-> "none", heard |-> 0, generation |-> 0, epoch |-> 0, next |-> 0, from |-> 0]
HeardOf(p) == [Nothing EXCEPT !.heard = assignment[p].number]

Init ==
    /\ assignment = [p \in Partitions |-> [to |-> None, number |-> 0, generation |-> 0]]
    /\ ledger = [p \in Partitions |-> [at |-> 0, epoch |-> 0, owner |-> None, generation |-> 0]]
    /\ epoch = 0
    /\ whole = 0
    /\ effects = [p \in Partitions |-> [o \in Offset |-> 0]]
    /\ worker = [w \in Owners |-> [p \in Partitions |-> Nothing]]
    /\ process = [w \in Workers |-> [up |-> TRUE, since |-> 0]]
    /\ spark = FALSE
    /\ left = [rebalances |-> MaxRebalances, spark |-> MaxSpark, crashes |-> MaxCrashes,
               deletions |-> MaxDeletions]

Set(w, p, fields) == worker' = [worker EXCEPT ![w][p] = fields @@ @]
group == <<assignment, process, left>>
positions == <<ledger, epoch, whole, effects>>

----------------------------------------------------------------------------
(* The group *)

Given(p, w) ==
    assignment' = [assignment EXCEPT ![p] = [to |-> w, number |-> @.number + 1,
                                             generation |-> @.generation + 1]]

(* A partition that nobody has goes to a member.                           *)
Assign(p, w) ==
    /\ assignment[p].to = None
    /\ process[w].up
    /\ Given(p, w)
    /\ UNCHANGED <<positions, worker, process, spark, left>>

(* A member loses a partition to another one: a new member, or a pause     *)
(* that is longer than the session timeout.                                *)
Rebalance(p, w) ==
    /\ left.rebalances > 0
    /\ assignment[p].to \notin {w, None}
    /\ process[w].up
    /\ Given(p, w)
    /\ left' = [left EXCEPT !.rebalances = @ - 1]
    /\ UNCHANGED <<positions, worker, process, spark>>

(* The group is deleted while all members are out of it (expired, or by an *)
(* operator), and its generation begins anew.  A paused worker may have    *)
(* been one of them.                                                       *)
GroupDeleted ==
    /\ left.deletions > 0
    /\ assignment' = [p \in Partitions |-> [assignment[p] EXCEPT !.to = None, !.generation = 0]]
    /\ left' = [left EXCEPT !.deletions = @ - 1]
    /\ UNCHANGED <<positions, worker, process, spark>>

(* The worker hears of its assignment: it has nothing of this partition in *)
(* memory.                                                                 *)
Hears(w, p) ==
    /\ process[w].up
    /\ assignment[p].to = w
    /\ worker[w][p].heard < assignment[p].number
    /\ Set(w, p, [HeardOf(p) EXCEPT !.pc = "assigned", !.generation = assignment[p].generation,
                     !.next = IF Mistake = "memory kept over a revocation"
                              THEN worker[w][p].next ELSE 0])
    /\ UNCHANGED <<group, positions, spark>>

(* The worker hears that it has lost the partition; it may also never hear. *)
Revoked(w, p) ==
    /\ worker[w][p].pc \notin {"none", "lost"}
    /\ assignment[p].to # w
    /\ Set(w, p, [pc |-> "lost", epoch |-> 0])
    /\ UNCHANGED <<group, positions, spark>>

(* A worker that is fenced asks the group whether the partition is still   *)
(* its own.                                                                *)
Asks(w, p) ==
    /\ worker[w][p].pc = "fenced"
    /\ Set(w, p, [pc |-> IF assignment[p].to = w \/ Mistake = "a fenced worker takes over again"
                         THEN "named" ELSE "lost"])
    /\ UNCHANGED <<group, positions, spark>>

(* A process ends: the group takes its partitions from it.                 *)
Ends(w) ==
    /\ process' = [process EXCEPT ![w].up = FALSE]
    /\ worker' = [worker EXCEPT ![w] = [p \in Partitions |-> HeardOf(p)]]
    /\ assignment' = [p \in Partitions |->
          IF assignment[p].to = w THEN [assignment[p] EXCEPT !.to = None] ELSE assignment[p]]

Crash(w) ==
    /\ left.crashes > 0
    /\ process[w].up
    /\ Ends(w)
    /\ left' = [left EXCEPT !.crashes = @ - 1]
    /\ UNCHANGED <<positions, spark>>

StartWorker(w) ==
    /\ ~process[w].up
    /\ process' = [process EXCEPT ![w] = [up |-> TRUE, since |-> whole]]
    /\ UNCHANGED <<assignment, positions, worker, spark, left>>

----------------------------------------------------------------------------
(* A worker *)

(* A Spark run has taken everything since this worker was started: the     *)
(* worker ends, with exit code 3.                                          *)
Superseded(w) == /\ process[w].since # whole
                 /\ Mistake # "a worker does not look for a run on Spark"

Older(w, p) == /\ worker[w][p].generation < ledger[p].generation
               /\ Mistake = "generations are compared, and nobody asks"

(* Takeover.partitions: the partitions that were assigned, no others.      *)
TakeOver(w, p) ==
    LET S == IF Mistake = "a worker takes all partitions" THEN Partitions ELSE {p}
        next == IF Mistake = "memory kept over a revocation" /\ worker[w][p].next > 0
                THEN worker[w][p].next ELSE ledger[p].at
    IN
    /\ worker[w][p].pc \in {"assigned", "named"}
    /\ ~Superseded(w)
    /\ ~Older(w, p)
    /\ epoch' = epoch + 1
    /\ ledger' = [q \in Partitions |->
          IF q \in S THEN [ledger[q] EXCEPT !.epoch = epoch + 1, !.owner = w,
                                            !.generation = worker[w][p].generation]
          ELSE ledger[q]]
    /\ Set(w, p, [pc |-> "owner", epoch |-> epoch + 1, next |-> next, from |-> next])
    /\ UNCHANGED <<group, whole, effects, spark>>

RefusedTakeOver(w, p) ==
    /\ worker[w][p].pc \in {"assigned", "named"}
    /\ \/ /\ Superseded(w)
          /\ Ends(w)
       \/ /\ Older(w, p)
          /\ Set(w, p, [pc |-> "lost"])
          /\ UNCHANGED <<assignment, process>>
    /\ UNCHANGED <<positions, spark, left>>

Process(w, p) ==
    /\ worker[w][p].pc = "owner"
    /\ worker[w][p].next < Records
    /\ Set(w, p, [next |-> worker[w][p].next + 1])
    /\ UNCHANGED <<group, positions, spark>>

Pending(w, p) == worker[w][p].pc = "owner" /\ worker[w][p].from < worker[w][p].next
SameAsInLedger(w, p) ==
    /\ ledger[p].epoch = worker[w][p].epoch \/ Mistake = "epoch is not compared"
    /\ ledger[p].at = worker[w][p].from \/ Mistake = "memory kept over a revocation"

(* Compare-and-set on position and epoch.                                  *)
Commit(w, p) ==
    LET m == worker[w][p] IN
    /\ Pending(w, p)
    /\ SameAsInLedger(w, p)
    /\ ledger' = [ledger EXCEPT ![p].at = m.next]
    /\ effects' = [effects EXCEPT ![p] = [o \in Offset |->
          @[o] + (IF m.from <= o /\ o < m.next THEN 1 ELSE 0)]]
    /\ Set(w, p, [from |-> m.next])
    /\ UNCHANGED <<group, epoch, whole, spark>>

(* A worker that is fenced drops what it has in memory.  A Spark run that  *)
(* loses one partition ends.                                               *)
Fenced(w, p) ==
    /\ Pending(w, p)
    /\ ~SameAsInLedger(w, p)
    /\ CASE w = Spark ->
              /\ spark' = FALSE
              /\ worker' = [worker EXCEPT ![Spark] = [q \in Partitions |-> Nothing]]
              /\ UNCHANGED <<assignment, process>>
         [] w # Spark /\ Superseded(w) ->
              Ends(w) /\ UNCHANGED spark
         [] OTHER ->
              /\ Set(w, p, [epoch |-> 0, pc |->
                     IF Mistake \in {"a fenced worker lets go",
                                     "generations are compared, and nobody asks"}
                     THEN "lost" ELSE "fenced"])
              /\ UNCHANGED <<assignment, process, spark>>
    /\ UNCHANGED <<positions, left>>

----------------------------------------------------------------------------
(* Spark takes all partitions, whatever the group says.                    *)
SparkOpens ==
    /\ left.spark > 0
    /\ ~spark
    /\ epoch' = epoch + 1
    /\ whole' = epoch + 1
    /\ ledger' = [p \in Partitions |-> [ledger[p] EXCEPT !.epoch = epoch + 1, !.owner = Spark]]
    /\ worker' = [worker EXCEPT ![Spark] = [p \in Partitions |->
          [Nothing EXCEPT !.pc = "owner", !.epoch = epoch + 1, !.next = ledger[p].at,
                          !.from = ledger[p].at]]]
    /\ spark' = TRUE
    /\ left' = [left EXCEPT !.spark = @ - 1]
    /\ UNCHANGED <<assignment, effects, process>>

(* Spark ends or is killed.                                                *)
SparkEnds ==
    /\ spark
    /\ spark' = FALSE
    /\ worker' = [worker EXCEPT ![Spark] = [p \in Partitions |-> Nothing]]
    /\ UNCHANGED <<group, positions>>

Next ==
    \/ \E p \in Partitions, w \in Workers :
        \/ Assign(p, w) \/ Rebalance(p, w) \/ Hears(w, p) \/ Revoked(w, p) \/ Asks(w, p)
        \/ TakeOver(w, p) \/ RefusedTakeOver(w, p)
    \/ \E p \in Partitions, w \in Owners : Process(w, p) \/ Commit(w, p) \/ Fenced(w, p)
    \/ \E w \in Workers : Crash(w) \/ StartWorker(w)
    \/ GroupDeleted
    \/ SparkOpens
    \/ SparkEnds

(* Nobody is paused for ever (a crash is that), the group gives partitions *)
(* to members, and workers are started when no Spark run is up.  That a    *)
(* revocation is heard of, nobody promises.                                *)
Fairness ==
    /\ \A p \in Partitions : WF_vars(\E w \in Workers : Assign(p, w))
    /\ \A p \in Partitions, w \in Workers :
        /\ WF_vars(Hears(w, p))
        /\ WF_vars(Asks(w, p))
        /\ WF_vars(TakeOver(w, p))
        /\ WF_vars(RefusedTakeOver(w, p))
    /\ \A p \in Partitions, w \in Owners :
        WF_vars(Process(w, p)) /\ WF_vars(Commit(w, p)) /\ WF_vars(Fenced(w, p))
    /\ \A w \in Workers : WF_vars(~spark /\ StartWorker(w))

Spec == Init /\ [][Next]_vars /\ Fairness

----------------------------------------------------------------------------
ExactlyOnce ==
    \A p \in Partitions, o \in Offset :
        effects[p][o] = IF o < ledger[p].at THEN 1 ELSE 0

PositionsNeverGoBack == [][\A p \in Partitions : ledger'[p].at >= ledger[p].at]_vars

Taken(p) == ledger'[p].epoch # ledger[p].epoch /\ ledger'[p].owner \in Workers

OnlyTheOwnerCommits ==
    [][\A p \in Partitions, w \in Owners :
        ledger'[p].at # ledger[p].at /\ worker'[w][p].from # worker[w][p].from
            => worker[w][p].epoch = ledger[p].epoch]_vars

(* A worker takes what the group has assigned to it, and nothing else.     *)
WorkersTakeWhatWasAssigned ==
    [][\A p \in Partitions :
        Taken(p) => worker[ledger'[p].owner][p].pc \in {"assigned", "named"}]_vars

(* A Spark run loses a partition only to a worker that was started later.  *)
SparkLosesToLaterWorkers ==
    [][\A p \in Partitions : Taken(p) => process[ledger'[p].owner].since = whole]_vars

(* Whoever has the partitions in the end, and whatever has happened, all   *)
(* records take effect.                                                    *)
Progress == \A p \in Partitions : <>(ledger[p].at = Records)

(* Owners do not take a partition from each other for ever: an assignment  *)
(* is followed by a takeover, and by a second one of who was fenced by it. *)
Assignments ==
    Cardinality(Partitions) * (1 + MaxCrashes + MaxDeletions + MaxSpark * Cardinality(Workers))
    + MaxRebalances
Bound == epoch <= MaxSpark + 2 * Assignments
=============================================================================
