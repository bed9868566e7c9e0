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
(* A takeover also carries the number of the assignment (the generation of *)
(* the group), which the ledger keeps: a worker that was paused between    *)
(* its assignment and its takeover must not fence the worker to which the  *)
(* group has assigned the partition since, because the group would not     *)
(* assign it again.                                                        *)
(*                                                                         *)
(* KIP-848: assignments are deltas, and a client goes on fetching while    *)
(* the coordinator is away.                                                *)
(***************************************************************************)
EXTENDS Integers, FiniteSets, TLC

CONSTANTS
    Workers,
    Partitions,
    Records,        \* offsets of a partition are 0 .. Records - 1
    MaxRebalances,  \* bound: changes of the assignment
    MaxSpark,       \* bound: how often Spark takes over
    MaxCrashes,     \* bound
    Mistake         \* "none", or the mistake that is switched on

None == "none"
Spark == "spark"
Owners == Workers \cup {Spark}
Offset == 0 .. Records - 1

VARIABLES
    assignment, \* per partition: the worker to which the coordinator has assigned it, and the
                \* number of that assignment
    ledger,     \* per partition: position, epoch, the owner of that epoch, and the number of
                \* the assignment by which it was taken over
    epoch,      \* the newest epoch of the pipeline
    effects,    \* per partition and offset: how often it took effect
    worker,     \* per owner and partition: what it knows
    spark,      \* TRUE while a Spark run is up; workers are not started then
    fenced,     \* <<owner, partition>> that lost a partition without another one taking it
    left        \* how many rebalances, Spark runs and crashes are still allowed

vars == <<assignment, ledger, epoch, effects, worker, spark, fenced, left>>

(* assigned: the number of the assignment that the worker has heard of;    *)
(* epoch: of its takeover, 0 before it; next: the next offset to process;  *)
(* from: the position that the batch in memory begins at.                  *)
Nothing == [pc |-> "none", assigned |-> 0, epoch |-> 0, next |-> 0, from |-> 0]

Init ==
    /\ assignment = [p \in Partitions |-> [to |-> None, number |-> 0]]
    /\ ledger = [p \in Partitions |-> [at |-> 0, epoch |-> 0, owner |-> None, number |-> 0]]
    /\ epoch = 0
    /\ effects = [p \in Partitions |-> [o \in Offset |-> 0]]
    /\ worker = [w \in Owners |-> [p \in Partitions |-> Nothing]]
    /\ spark = FALSE
    /\ fenced = {}
    /\ left = [rebalances |-> MaxRebalances, spark |-> MaxSpark, crashes |-> MaxCrashes]

Set(w, p, fields) == worker' = [worker EXCEPT ![w][p] = fields @@ @]

----------------------------------------------------------------------------
(* The group *)

Rebalance(p, w) ==
    /\ left.rebalances > 0
    /\ assignment[p].to # w
    /\ assignment' = [assignment EXCEPT ![p] = [to |-> w, number |-> @.number + 1]]
    /\ left' = [left EXCEPT !.rebalances = @ - 1]
    /\ UNCHANGED <<ledger, epoch, effects, worker, spark, fenced>>

(* The worker hears of its assignment: it has nothing of this partition in *)
(* memory.                                                                 *)
Assigned(w, p) ==
    /\ assignment[p].to = w
    /\ worker[w][p].assigned < assignment[p].number
    /\ Set(w, p, [Nothing EXCEPT !.pc = "assigned", !.assigned = assignment[p].number,
                     !.next = IF Mistake = "memory kept over a revocation"
                              THEN worker[w][p].next ELSE 0])
    /\ UNCHANGED <<assignment, ledger, epoch, effects, spark, fenced, left>>

(* The worker hears that it has lost the partition; it may also never hear. *)
Revoked(w, p) ==
    /\ worker[w][p].pc \notin {"none", "lost"}
    /\ assignment[p].to # w
    /\ Set(w, p, [pc |-> "lost", epoch |-> 0])
    /\ UNCHANGED <<assignment, ledger, epoch, effects, spark, fenced, left>>

----------------------------------------------------------------------------
(* A worker *)

IsNewest(w, p) ==
    \/ worker[w][p].assigned >= ledger[p].number
    \/ Mistake = "generations are not compared"

RefusedTakeOver(w, p) ==
    /\ worker[w][p].pc = "assigned"
    /\ ~IsNewest(w, p)
    /\ Set(w, p, [pc |-> "lost"])
    /\ UNCHANGED <<assignment, ledger, epoch, effects, spark, fenced, left>>

(* Takeover.partitions: the partitions that were assigned, no others.      *)
TakeOver(w, p) ==
    LET S == IF Mistake = "a worker takes all partitions" THEN Partitions ELSE {p} IN
    /\ worker[w][p].pc = "assigned"
    /\ IsNewest(w, p)
    /\ epoch' = epoch + 1
    /\ ledger' = [q \in Partitions |->
          IF q \in S THEN [ledger[q] EXCEPT !.epoch = epoch + 1, !.owner = w,
                                        !.number = worker[w][p].assigned] ELSE ledger[q]]
    /\ fenced' = fenced \cup {<<ledger[q].owner, q>> : q \in {x \in S \ {p} :
                       assignment[x].to = ledger[x].owner /\ ledger[x].owner # w}}
    /\ LET next == CASE Mistake = "memory kept over a revocation" ->
                          IF worker[w][p].next > 0 THEN worker[w][p].next ELSE ledger[p].at
                     [] OTHER -> ledger[p].at
       IN Set(w, p, [pc |-> "owner", epoch |-> epoch + 1, next |-> next, from |-> next])
    /\ UNCHANGED <<assignment, effects, spark, left>>

Process(w, p) ==
    /\ worker[w][p].pc = "owner"
    /\ worker[w][p].next < Records
    /\ Set(w, p, [next |-> worker[w][p].next + 1])
    /\ UNCHANGED <<assignment, ledger, epoch, effects, spark, fenced, left>>

(* Compare-and-set on position and epoch.  A worker that is fenced lets go *)
(* of the partition; it takes it over again only when the group assigns it *)
(* once more.                                                              *)
Commit(w, p) ==
    LET m == worker[w][p]
        same == /\ ledger[p].epoch = m.epoch \/ Mistake = "epoch is not compared"
                /\ \/ ledger[p].at = m.from
                   \/ Mistake = "memory kept over a revocation"
    IN
    /\ m.pc = "owner"
    /\ m.from < m.next
    /\ IF same
       THEN /\ ledger' = [ledger EXCEPT ![p].at = m.next]
            /\ effects' = [effects EXCEPT ![p] = [o \in Offset |->
                  @[o] + (IF m.from <= o /\ o < m.next THEN 1 ELSE 0)]]
            /\ Set(w, p, [from |-> m.next])
       ELSE /\ Set(w, p, IF Mistake = "a fenced worker takes over again" /\ w \in Workers
                         THEN [pc |-> "assigned", epoch |-> 0] ELSE [pc |-> "lost", epoch |-> 0])
            /\ UNCHANGED <<ledger, effects>>
    /\ UNCHANGED <<assignment, epoch, spark, fenced, left>>

Crash(w) ==
    /\ left.crashes > 0
    /\ \E p \in Partitions : worker[w][p].pc # "none"
    /\ worker' = [worker EXCEPT ![w] = [p \in Partitions |->
          [Nothing EXCEPT !.assigned = assignment[p].number - (IF assignment[p].to = w THEN 1 ELSE 0)]]]
    /\ spark' = (spark /\ w # Spark)
    /\ left' = [left EXCEPT !.crashes = @ - 1]
    /\ UNCHANGED <<assignment, ledger, epoch, effects, fenced>>

----------------------------------------------------------------------------
(* Spark takes all partitions, whatever the group says.  Workers that are  *)
(* up are fenced at each of them and let go.                               *)
SparkOpens ==
    /\ left.spark > 0
    /\ ~spark
    /\ epoch' = epoch + 1
    /\ ledger' = [p \in Partitions |-> [ledger[p] EXCEPT !.epoch = epoch + 1, !.owner = Spark]]
    /\ worker' = [worker EXCEPT ![Spark] = [p \in Partitions |->
          [Nothing EXCEPT !.pc = "owner", !.epoch = epoch + 1, !.next = ledger[p].at,
                          !.from = ledger[p].at]]]
    /\ spark' = TRUE
    /\ left' = [left EXCEPT !.spark = @ - 1]
    /\ UNCHANGED <<assignment, effects, fenced>>

(* Spark ends; workers are started again and join the group anew.          *)
SparkEnds ==
    /\ spark
    /\ spark' = FALSE
    /\ worker' = [w \in Owners |-> [p \in Partitions |-> Nothing]]
    /\ UNCHANGED <<assignment, ledger, epoch, effects, fenced, left>>

Next ==
    \/ \E p \in Partitions, w \in Workers : Rebalance(p, w) \/ Assigned(w, p) \/ Revoked(w, p)
    \/ \E p \in Partitions, w \in Workers : TakeOver(w, p) \/ RefusedTakeOver(w, p)
    \/ \E p \in Partitions, w \in Owners : Process(w, p) \/ Commit(w, p)
    \/ \E w \in Owners : Crash(w)
    \/ SparkOpens
    \/ SparkEnds

Fairness ==
    /\ \A p \in Partitions, w \in Workers : WF_vars(Assigned(w, p)) /\ WF_vars(TakeOver(w, p))
    /\ \A p \in Partitions, w \in Owners : WF_vars(Process(w, p)) /\ WF_vars(Commit(w, p))

Spec == Init /\ [][Next]_vars /\ Fairness

----------------------------------------------------------------------------
ExactlyOnce ==
    \A p \in Partitions, o \in Offset :
        effects[p][o] = IF o < ledger[p].at THEN 1 ELSE 0

(* A worker loses a partition only to the owner that the group or the      *)
(* operator has named.                                                     *)
NobodyLosesByMistake == fenced = {}

PositionsNeverGoBack == [][\A p \in Partitions : ledger'[p].at >= ledger[p].at]_vars

(* Once a partition stays assigned and no Spark run is up, its records     *)
(* take effect.                                                            *)
Progress ==
    \A p \in Partitions :
        <>[](assignment[p].to # None /\ ~spark) => <>(ledger[p].at = Records \/ spark)

(* Owners do not take a partition from each other for ever. *)
Bound == epoch <= MaxRebalances + MaxSpark + MaxCrashes + Cardinality(Partitions)
=============================================================================
