------------------------------ MODULE FilesTable ------------------------------
(***************************************************************************)
(* A table of files that a manifest topic names.                           *)
(*                                                                         *)
(* Tasks write files whose names nobody knows.  One Kafka transaction by   *)
(* the publisher's transactional id names them, with the schema and the    *)
(* position.  Compaction replaces named files by one, by a transactional   *)
(* id of its own.  Vacuum deletes files that nobody names and nobody can   *)
(* name any more.  Readers hold a manifest that they read some time ago.   *)
(*                                                                         *)
(* Code: sinks/files/publication.py (publish), files/compact.py,           *)
(* files/vacuum.py, files/read.py.  Decision: 0016.                        *)
(*                                                                         *)
(* `now` is the store's clock.  The clock of a driver may differ from it   *)
(* by Drift over the life of a batch.  The broker aborts a transaction     *)
(* that is open for longer than Timeout.                                   *)
(***************************************************************************)
EXTENDS Integers, FiniteSets, TLC

CONSTANTS
    Publishers,     \* runs and replays: processes that publish
    Replays,        \* the replays among them: they publish one dead letter, and no position
    Compactors,
    Files,          \* names that files may get
    Records,        \* offsets of the source are 0 .. Records - 1
    Ages,           \* values of max_staging_age in the pipeline file, at any time
    Timeout,        \* the transaction timeout
    Drift,          \* how far a driver's clock may be off
    Slack,          \* what vacuum adds
    MaxTime,        \* bound
    MaxCrashes,     \* bound
    Mistake         \* "none", or the mistake that is switched on

None == "none"
Processes == Publishers \cup Compactors
Times == 0 .. MaxTime
Letter == Records   \* the record of the dead letter
Max(S) == CHOOSE x \in S : \A y \in S : y <= x

(* Replays publish by the publisher's id, because two ids could take back  *)
(* a field of the schema that the other one has published.                 *)
Id(r) == CASE r \in Compactors -> "compactor"
           [] Mistake = "a replay has its own id" -> r
           [] OTHER -> "publisher"
Ids == {Id(r) : r \in Processes}

VARIABLES
    now,
    store,       \* file -> when it was written; a file that is deleted is gone
    rows,        \* file -> the records in it
    named,       \* files that the manifest names
    removed,     \* file -> when a compaction replaced it
    schema,      \* fields that are published; a record's field is its offset
    position,    \* the next offset
    marker,      \* the largest max_staging_age of any run, kept with the root
    holder,      \* transactional id -> the process that initialised it last
    transaction, \* transactional id -> the open or committing transaction
    proc,
    vacuum,      \* the state of the vacuum
    reader,      \* what a reader holds: files of a manifest, and when it was read
    crashes

vars == <<now, store, rows, named, removed, schema, position, marker, holder, transaction, proc,
          vacuum, reader, crashes>>

NoTransaction == [state |-> "ended", opened |-> 0, adds |-> {}, takes |-> {}, at |-> 0,
                  schema |-> {}]
Down == [pc |-> "down", age |-> 0, file |-> None, born |-> 0, from |-> 0, inputs |-> {},
         schema |-> {}]
NoVacuum == [pc |-> "down", age |-> 0, clock |-> 0, listed |-> {}, named |-> {}, removed |-> <<>>]
NoReader == [files |-> {}, at |-> 0]

Init ==
    /\ now = 0
    /\ store = <<>>
    /\ rows = [f \in Files |-> {}]
    /\ named = {}
    /\ removed = <<>>
    /\ schema = {}
    /\ position = 0
    /\ marker = 0
    /\ holder = [i \in Ids |-> None]
    /\ transaction = [i \in Ids |-> NoTransaction]
    /\ proc = [r \in Processes |-> Down]
    /\ vacuum = NoVacuum
    /\ reader = NoReader
    /\ crashes = MaxCrashes

Set(r, fields) == proc' = [proc EXCEPT ![r] = fields @@ @]
table == <<named, removed, schema, position>>
files == <<store, rows>>

----------------------------------------------------------------------------
(* Time and Kafka *)

(* A transaction does not stay open for longer than its timeout.           *)
Tick ==
    /\ now < MaxTime
    /\ \A i \in Ids : transaction[i].state = "open" => now < transaction[i].opened + Timeout
    /\ now' = now + 1
    /\ UNCHANGED <<files, table, marker, holder, transaction, proc, vacuum, reader, crashes>>

TransactionTimeout(i) ==
    /\ transaction[i].state = "open"
    /\ now >= transaction[i].opened + Timeout
    /\ transaction' = [transaction EXCEPT ![i] = NoTransaction]
    /\ holder' = [holder EXCEPT ![i] = None]
    /\ UNCHANGED <<now, files, table, marker, proc, vacuum, reader, crashes>>

WriteMarkers(i) ==
    LET t == transaction[i] IN
    /\ t.state = "committing"
    /\ named' = (named \cup t.adds) \ t.takes
    /\ removed' = [f \in t.takes |-> now] @@ removed
    /\ schema' = IF i = "compactor" THEN schema ELSE t.schema
    /\ position' = IF i = "compactor" THEN position ELSE t.at
    /\ transaction' = [transaction EXCEPT ![i] = NoTransaction]
    /\ UNCHANGED <<now, files, marker, holder, proc, vacuum, reader, crashes>>

(* The manifest is read to its end when no transaction is open in it. *)
Settled == \A i \in Ids : transaction[i].state = "ended"

----------------------------------------------------------------------------
(* Runs and replays: FilesTask, ManifestLoad *)

(* A run lives by the max_staging_age of its start; `open` keeps it with   *)
(* the root.                                                               *)
Open(r, age) ==
    /\ proc[r].pc = "down"
    /\ r \in Publishers
    /\ marker' = IF Mistake = "age judged by the vacuum's own settings" THEN 0
                 ELSE Max({marker, age})
    /\ Set(r, [pc |-> "idle", age |-> age])
    /\ UNCHANGED <<now, files, table, holder, transaction, vacuum, reader, crashes>>

Unused(f) == f \notin DOMAIN store /\ f \notin named /\ rows[f] = {}

(* What a publisher writes next, and whether that waits to be written.     *)
RecordOf(r) == IF r \in Replays THEN Letter ELSE position
Waits(r, record) ==
    IF r \in Replays THEN ~\E f \in named : Letter \in rows[f]
    ELSE record = position /\ position < Records

Stage(r, f) ==
    /\ proc[r].pc = "idle"
    /\ r \in Publishers
    /\ Settled
    /\ Waits(r, RecordOf(r))
    /\ Unused(f)
    /\ store' = (f :> now) @@ store
    /\ rows' = [rows EXCEPT ![f] = {RecordOf(r)}]
    /\ Set(r, [pc |-> "staged", file |-> f, born |-> now, from |-> RecordOf(r), schema |-> schema])
    /\ UNCHANGED <<now, table, marker, holder, transaction, vacuum, reader, crashes>>

InitId(r) ==
    /\ proc[r].pc = "staged"
    /\ transaction[Id(r)].state # "committing"
    /\ holder' = [holder EXCEPT ![Id(r)] = r]
    /\ transaction' = [transaction EXCEPT ![Id(r)] = NoTransaction]
    /\ Set(r, [pc |-> "initialised"])
    /\ UNCHANGED <<now, files, table, marker, vacuum, reader, crashes>>

(* After `init`: the position must be the one that was staged from, and    *)
(* the schema is read again.                                               *)
ReadAgain(r) ==
    /\ proc[r].pc = "initialised"
    /\ r \in Publishers
    /\ Settled \/ Mistake = "a replay has its own id"
    /\ IF ~Waits(r, proc[r].from)
       THEN Set(r, [Down EXCEPT !.pc = "idle", !.age = proc[r].age])
       ELSE Set(r, [pc |-> "read", schema |->
               IF Mistake = "schema read before init" THEN proc[r].schema ELSE schema])
    /\ UNCHANGED <<now, files, table, marker, holder, transaction, vacuum, reader, crashes>>

(* Begin and send; the broker's clock runs from here. *)
Send(r) ==
    /\ proc[r].pc = "read"
    /\ IF holder[Id(r)] = r
       THEN /\ transaction' = [transaction EXCEPT ![Id(r)] =
                  [NoTransaction EXCEPT !.state = "open", !.opened = now,
                     !.adds = {proc[r].file}, !.takes = proc[r].inputs,
                     !.at = position + (IF r \in Replays THEN 0 ELSE 1), !.schema = proc[r].schema \cup {proc[r].from}]]
            /\ Set(r, [pc |-> "sent"])
       ELSE /\ Set(r, [Down EXCEPT !.pc = "idle", !.age = proc[r].age])
            /\ UNCHANGED transaction
    /\ UNCHANGED <<now, files, table, marker, holder, vacuum, reader, crashes>>

(* The age is looked at inside the transaction.  The driver's clock may be *)
(* behind by Drift.                                                        *)
LookAtAge(r) ==
    /\ proc[r].pc = (IF Mistake = "age looked at before the transaction" THEN "staged" ELSE "sent")
    /\ IF now - proc[r].born - Drift <= proc[r].age
       THEN Set(r, [pc |-> IF Mistake = "age looked at before the transaction"
                           THEN "young" ELSE "fresh"])
       ELSE Set(r, [Down EXCEPT !.pc = "idle", !.age = proc[r].age])
    /\ UNCHANGED <<now, files, table, marker, holder, transaction, vacuum, reader, crashes>>

InitYoung(r) ==
    /\ proc[r].pc = "young"
    /\ Set(r, [pc |-> "staged"])
    /\ UNCHANGED <<now, files, table, marker, holder, transaction, vacuum, reader, crashes>>

Commit(r) ==
    /\ \/ proc[r].pc = "fresh"
       \/ proc[r].pc = "sent" /\ Mistake = "age looked at before the transaction"
    /\ IF holder[Id(r)] = r /\ transaction[Id(r)].state = "open"
       THEN transaction' = [transaction EXCEPT ![Id(r)].state = "committing"]
       ELSE UNCHANGED transaction
    /\ Set(r, [Down EXCEPT !.pc = "idle", !.age = proc[r].age])
    /\ UNCHANGED <<now, files, table, marker, holder, vacuum, reader, crashes>>

----------------------------------------------------------------------------
(* Compaction: files/compact.py *)

OpenCompaction(r, age) ==
    /\ proc[r].pc = "down"
    /\ r \in Compactors
    /\ Set(r, [pc |-> "idle", age |-> age])
    /\ marker' = IF Mistake = "age judged by the vacuum's own settings" THEN 0
                 ELSE Max({marker, age})
    /\ UNCHANGED <<now, files, table, holder, transaction, vacuum, reader, crashes>>

WriteOutput(r, f) ==
    /\ proc[r].pc = "idle"
    /\ r \in Compactors
    /\ Settled
    /\ Cardinality(named) > 1
    /\ Unused(f)
    /\ named \subseteq DOMAIN store
    /\ store' = (f :> now) @@ store
    /\ rows' = [rows EXCEPT ![f] = UNION {rows[g] : g \in named}]
    /\ Set(r, [pc |-> "staged", file |-> f, born |-> now, inputs |-> named])
    /\ UNCHANGED <<now, table, marker, holder, transaction, vacuum, reader, crashes>>

ReadManifest(r) ==
    /\ proc[r].pc = "initialised"
    /\ r \in Compactors
    /\ Settled
    /\ IF proc[r].inputs \subseteq named \/ Mistake = "compaction does not read after init"
       THEN Set(r, [pc |-> "read"])
       ELSE Set(r, [Down EXCEPT !.pc = "idle", !.age = proc[r].age])
    /\ UNCHANGED <<now, files, table, marker, holder, transaction, vacuum, reader, crashes>>

----------------------------------------------------------------------------
(* Vacuum: files/vacuum.py *)

ReadClockAndList(age) ==
    /\ vacuum.pc = "down"
    /\ vacuum' = [NoVacuum EXCEPT !.pc = "listed", !.clock = now, !.listed = DOMAIN store,
                                  !.age = Max({age, marker})]
    /\ UNCHANGED <<now, files, table, marker, holder, transaction, proc, reader, crashes>>

VacuumReadsManifest ==
    /\ vacuum.pc = "listed"
    /\ Settled
    /\ vacuum' = [vacuum EXCEPT !.pc = "read", !.named = named, !.removed = removed]
    /\ UNCHANGED <<now, files, table, marker, holder, transaction, proc, reader, crashes>>

(* The manifest is read before the store is listed: a file that is named   *)
(* between the two looks like an orphan.                                   *)
VacuumReadsManifestFirst(age) ==
    /\ Mistake = "manifest read before the listing"
    /\ vacuum.pc = "down"
    /\ Settled
    /\ vacuum' = [NoVacuum EXCEPT !.pc = "manifest", !.named = named, !.removed = removed,
                                  !.age = Max({age, marker})]
    /\ UNCHANGED <<now, files, table, marker, holder, transaction, proc, reader, crashes>>

VacuumListsLast ==
    /\ vacuum.pc = "manifest"
    /\ vacuum' = [vacuum EXCEPT !.pc = "read", !.clock = now, !.listed = DOMAIN store]
    /\ UNCHANGED <<now, files, table, marker, holder, transaction, proc, reader, crashes>>

Orphan(f) ==
    /\ f \in DOMAIN store
    /\ f \notin vacuum.named
    /\ IF f \in DOMAIN vacuum.removed
       THEN vacuum.removed[f] < vacuum.clock - vacuum.age - Slack
       ELSE store[f] < vacuum.clock - vacuum.age - Timeout - Slack

Delete ==
    /\ vacuum.pc = "read"
    /\ store' = [f \in {g \in DOMAIN store : ~(g \in vacuum.listed /\ Orphan(g))} |-> store[f]]
    /\ vacuum' = NoVacuum
    /\ UNCHANGED <<now, rows, table, marker, holder, transaction, proc, reader, crashes>>

----------------------------------------------------------------------------
(* A reader takes the files of a manifest, and reads them within the       *)
(* smallest max_staging_age.                                               *)
ReaderReadsManifest ==
    /\ reader' = [files |-> named, at |-> now]
    /\ UNCHANGED <<now, files, table, marker, holder, transaction, proc, vacuum, crashes>>

Crash(r) ==
    /\ crashes > 0
    /\ proc[r].pc # "down"
    /\ proc' = [proc EXCEPT ![r] = Down]
    /\ crashes' = crashes - 1
    /\ UNCHANGED <<now, files, table, marker, holder, transaction, vacuum, reader>>

Next ==
    \/ Tick
    \/ \E i \in Ids : TransactionTimeout(i) \/ WriteMarkers(i)
    \/ \E r \in Processes :
        \/ \E age \in Ages : Open(r, age) \/ OpenCompaction(r, age)
        \/ \E f \in Files : Stage(r, f) \/ WriteOutput(r, f)
        \/ InitId(r) \/ ReadAgain(r) \/ ReadManifest(r) \/ Send(r) \/ LookAtAge(r) \/ InitYoung(r)
        \/ Commit(r) \/ Crash(r)
    \/ \E age \in Ages : ReadClockAndList(age) \/ VacuumReadsManifestFirst(age)
    \/ VacuumReadsManifest \/ VacuumListsLast \/ Delete
    \/ ReaderReadsManifest

Spec == Init /\ [][Next]_vars

----------------------------------------------------------------------------
(* Every record before the position is in exactly one named file. *)
ExactlyOnce ==
    \A o \in 0 .. Records - 1 :
        Cardinality({f \in named : o \in rows[f]}) = IF o < position THEN 1 ELSE 0

LetterAtMostOnce == Cardinality({f \in named : Letter \in rows[f]}) <= 1

NamedFilesExist == named \subseteq DOMAIN store

(* A file that is named resolves to the published schema. *)
SchemasCoverFiles == \A f \in named : rows[f] \subseteq schema

ReadersFindTheirFiles ==
    \A f \in reader.files : now - reader.at <= Max(Ages) => f \in DOMAIN store
=============================================================================
