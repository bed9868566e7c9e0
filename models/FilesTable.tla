------------------------------ MODULE FilesTable ------------------------------
(***************************************************************************)
(* A table of files that a manifest topic names.                           *)
(*                                                                         *)
(* Tasks write files whose names nobody knows.  One Kafka transaction by   *)
(* the publisher's transactional id names them, with the schema and the    *)
(* position.  Compaction replaces named files by one, by a transactional   *)
(* id of its own.  By the same id a rewrite replaces the files of some     *)
(* records by what the topic's records make (repair, backfill).  Vacuum deletes files that nobody names and nobody can   *)
(* name any more.  Readers hold a manifest that they read some time ago.   *)
(*                                                                         *)
(* Code: kinds/files/sink.py, kinds/files/manifest.py,                     *)
(* kinds/files/compact.py,                                                 *)
(* kinds/files/change.py, kinds/files/maintenance.py.                      *)
(* Decisions: 0016, 0023, 0044.                                            *)
(*                                                                         *)
(* `now` is the store's clock, and the broker's.  A driver measures how    *)
(* much time has passed; it may measure Drift less than that.  The broker  *)
(* aborts a transaction that is open for longer than its timeout.          *)
(***************************************************************************)
EXTENDS Integers, FiniteSets, Sequences, TLC

CONSTANTS
    Publishers,     \* runs and replays: processes that publish
    Replays,        \* the replays among them: they publish one dead letter, and no position
    Compactors,
    Rewriters,
    Files,          \* names that files may get, in the order of the sequence
    Records,        \* offsets of the source are 0 .. Records - 1
    Least,          \* how many files a compaction replaces at least: 2 in the code
    Settings,       \* <<max_staging_age, transaction_timeout>> of the pipeline file, at any time
    Drift,          \* how much less a driver may measure than has passed
    Slack,          \* what vacuum adds
    MaxTime,        \* bound
    MaxCrashes,     \* bound
    MaxReads,       \* bound: how often a reader reads the manifest
    MaxDrops,       \* bound: how often another program takes a file out of the manifest
    Mistake         \* "none", or the mistake that is switched on

None == "none"
Never == -1
Removers == Compactors \cup Rewriters
Processes == Publishers \cup Removers
Letter == Records   \* the record of the dead letter
Max(S) == CHOOSE x \in S : \A y \in S : y <= x
Min(S) == CHOOSE x \in S : \A y \in S : x <= y

(* Replays publish by the publisher's id, because two ids could take back  *)
(* a field of the schema that the other one has published.                 *)
Id(r) == CASE r \in Removers -> "compactor"
           [] Mistake = "a replay has its own id" -> r
           [] OTHER -> "publisher"
Ids == {Id(r) : r \in Processes}

VARIABLES
    now,
    store,       \* file -> when it was written; a file that is deleted is gone
    rows,        \* file -> the records in it
    leases,      \* staging leases below the root: age, timeout, when it was written
    log,         \* the manifest topic: messages of committed and of open transactions
    schema,      \* fields that are published; a record's field is its offset
    position,    \* the next offset
    lost,        \* records whose file another program has taken out
    holder,      \* transactional id -> the process that initialised it last
    transaction, \* transactional id -> the open or committing transaction
    proc,
    vacuum,      \* the state of the vacuum
    reader,      \* what a reader holds: files of a manifest, and when it was read
    left         \* how many crashes and readings are still allowed

vars == <<now, store, rows, leases, log, schema, position, lost, holder, transaction, proc, vacuum,
          reader, left>>

NoTransaction == [state |-> "ended", by |-> None, opened |-> 0, timeout |-> 0, at |-> 0,
                  schema |-> {}]
Down == [pc |-> "down", age |-> 0, timeout |-> 0, leased |-> Never, file |-> None, born |-> 0,
         from |-> 0, inputs |-> {}, span |-> {}, schema |-> {}]
(* A process that stages and publishes nothing; it keeps its lease.        *)
Idle(m) == [Down EXCEPT !.pc = "idle", !.age = m.age, !.timeout = m.timeout, !.leased = m.leased]
NoVacuum == [step |-> 0, age |-> 0, timeout |-> 0, clock |-> 0, listed |-> {}, leases |-> {},
             waits |-> {}, named |-> {}, removed |-> <<>>]
NoReader == [step |-> "none", files |-> {}, at |-> 0, schema |-> {}]

Init ==
    /\ now = 0
    /\ store = <<>>
    /\ rows = [f \in {Files[n] : n \in DOMAIN Files} |-> {}]
    /\ leases = {}
    /\ log = <<>>
    /\ schema = {}
    /\ position = 0
    /\ lost = {}
    /\ holder = [i \in Ids |-> None]
    /\ transaction = [i \in Ids |-> NoTransaction]
    /\ proc = [r \in Processes |-> Down]
    /\ vacuum = NoVacuum
    /\ reader = NoReader
    /\ left = [crashes |-> MaxCrashes, reads |-> MaxReads, drops |-> MaxDrops]

Set(r, fields) == proc' = [proc EXCEPT ![r] = fields @@ @]
files == <<store, rows, leases>>
table == <<log, schema, position, lost>>
kafka == <<holder, transaction>>
others == <<vacuum, reader, left>>

----------------------------------------------------------------------------
(* The manifest: Manifest._take_file *)

Open(e) == e.state = "open"

(* The files that the first n messages make a table of; messages of        *)
(* transactions that are open are passed over.                             *)
RECURSIVE Table(_)
Table(n) ==
    CASE n = 0 -> {}
      [] n > 0 /\ Open(log[n]) -> Table(n - 1)
      [] OTHER -> (Table(n - 1) \ log[n].takes) \cup log[n].adds
Named == Table(Len(log))

(* The last stable offset: committed readers read as far as to the first   *)
(* message of an open transaction.                                         *)
Stable == IF \E n \in DOMAIN log : Open(log[n])
          THEN Min({n \in DOMAIN log : Open(log[n])}) - 1 ELSE Len(log)
Settled == Stable = Len(log)

(* When a file was taken out: the time at which the broker has appended    *)
(* the first message that says so (LogAppendTime), not of the commit.      *)
Removed(n) ==
    [f \in UNION {log[k].takes : k \in 1 .. n} |->
        Min({log[k].at : k \in {j \in 1 .. n : f \in log[j].takes}})]

(* Messages of transactions that were aborted are left out of the log.     *)
Without(i) == SelectSeq(log, LAMBDA e : ~(Open(e) /\ e.id = i))

Message(r, adds, takes) == [id |-> Id(r), state |-> "open", adds |-> adds, takes |-> takes,
                            at |-> now]

----------------------------------------------------------------------------
(* Time and Kafka *)

Deadline(t) == t.opened + t.timeout

(* A transaction does not stay open for longer than its timeout; Slack     *)
(* covers what the coordinator takes to notice, and to write markers.      *)
Tick ==
    /\ now < MaxTime
    /\ \A i \in Ids : transaction[i].state # "ended" => now < Deadline(transaction[i])
    /\ now' = now + 1
    /\ UNCHANGED <<files, table, kafka, proc, others>>

End(i) == vacuum' = [vacuum EXCEPT !.waits = @ \ {i}]

TransactionTimeout(i) ==
    /\ transaction[i].state = "open"
    /\ now >= Deadline(transaction[i])
    /\ transaction' = [transaction EXCEPT ![i] = NoTransaction]
    /\ holder' = [holder EXCEPT ![i] = None]
    /\ log' = Without(i)
    /\ End(i)
    /\ UNCHANGED <<now, files, schema, position, lost, proc, reader, left>>

(* The end of a transaction reaches one topic before the other.            *)
Added(i) == UNION {log[n].adds : n \in {k \in DOMAIN log : Open(log[k]) /\ log[k].id = i}}

MarkManifest(i) ==
    LET t == transaction[i] IN
    /\ t.state = "committing"
    /\ \E n \in DOMAIN log : Open(log[n]) /\ log[n].id = i
    /\ log' = [n \in DOMAIN log |->
          IF log[n].id = i THEN [log[n] EXCEPT !.state = "committed"] ELSE log[n]]
    /\ position' = IF t.by \in Publishers \ Replays THEN t.at ELSE position
    /\ lost' = lost \ UNION {rows[f] : f \in Added(i)}
    /\ IF i = "compactor" \/ schema = t.schema
       THEN transaction' = [transaction EXCEPT ![i] = NoTransaction]
       ELSE UNCHANGED transaction
    /\ End(i)
    /\ UNCHANGED <<now, files, schema, holder, proc, reader, left>>

MarkSchema(i) ==
    LET t == transaction[i] IN
    /\ t.state = "committing"
    /\ i # "compactor"
    /\ schema # t.schema
    /\ schema' = t.schema
    /\ IF \E n \in DOMAIN log : Open(log[n]) /\ log[n].id = i
       THEN UNCHANGED transaction
       ELSE transaction' = [transaction EXCEPT ![i] = NoTransaction]
    /\ UNCHANGED <<now, files, log, position, lost, holder, proc, others>>

----------------------------------------------------------------------------
(* Runs and replays: FilesSink, FilesTask, ManifestLoad *)

(* A process lives by the settings of its start.                           *)
Start(r, settings) ==
    /\ proc[r].pc = "down"
    /\ Set(r, [pc |-> "idle", age |-> settings[1], timeout |-> settings[2]])
    /\ UNCHANGED <<now, files, table, kafka, others>>

(* What a publisher writes next, and whether that waits to be written.     *)
RecordOf(r) == IF r \in Replays THEN Letter ELSE position
Waits(r, record) ==
    IF r \in Replays THEN ~\E f \in Named : Letter \in rows[f]
    ELSE record = position /\ position < Records

(* begin_batch: no file of the batch is older than this moment.            *)
Begin(r) ==
    /\ proc[r].pc = "idle"
    /\ r \in Publishers
    /\ Waits(r, RecordOf(r))
    /\ Set(r, [pc |-> "begun", born |-> now, from |-> RecordOf(r), schema |-> schema])
    /\ UNCHANGED <<now, files, table, kafka, others>>

(* StagingLeases.hold: a lease serves batches that begin up to the age     *)
(* after it was written.                                                   *)
Hold(r) ==
    LET m == proc[r]
        late == Mistake = "lease written after the first file"
        needed == \/ m.leased = Never
                  \/ now - m.leased - Drift > m.age /\ Mistake # "lease written once"
    IN
    /\ m.pc = IF late THEN "written" ELSE "begun"
    /\ leases' = IF needed
                 THEN leases \cup {[age |-> m.age, timeout |-> m.timeout, at |-> now]}
                 ELSE leases
    /\ Set(r, [pc |-> IF late THEN "staged" ELSE "held",
               leased |-> IF needed THEN now ELSE m.leased])
    /\ UNCHANGED <<now, store, rows, table, kafka, others>>

Unused == {n \in DOMAIN Files : rows[Files[n]] = {}}

(* A task writes a file, or a compaction its output.  The inputs of a      *)
(* compaction may have been replaced and deleted meanwhile.                *)
Write(r) ==
    LET late == Mistake = "lease written after the first file"
        f == Files[Min(Unused)]
        m == proc[r]
    IN
    /\ m.pc = IF late THEN "begun" ELSE "held"
    /\ Unused # {}
    /\ IF m.inputs \subseteq DOMAIN store \/ r \in Rewriters
       THEN /\ store' = (f :> now) @@ store
            /\ rows' = [rows EXCEPT ![f] = CASE r \in Publishers -> {m.from}
                                             [] r \in Compactors -> UNION {rows[g] : g \in m.inputs}
                                             [] r \in Rewriters -> m.span]
            /\ Set(r, [pc |-> IF late THEN "written" ELSE "staged", file |-> f])
       ELSE /\ Set(r, Idle(m))
            /\ UNCHANGED <<store, rows>>
    /\ UNCHANGED <<now, leases, table, kafka, others>>

InitId(r) ==
    LET i == Id(r) IN
    /\ proc[r].pc = "staged"
    /\ transaction[i].state # "committing"
    /\ holder' = [holder EXCEPT ![i] = r]
    /\ transaction' = [transaction EXCEPT ![i] = NoTransaction]
    /\ log' = Without(i)
    /\ End(i)
    /\ Set(r, [pc |-> "initialised"])
    /\ UNCHANGED <<now, files, schema, position, lost, reader, left>>

(* After `init`: the position must be the one that was staged from, and    *)
(* the schema is read again.                                               *)
ReadAgain(r) ==
    /\ proc[r].pc = "initialised"
    /\ r \in Publishers
    /\ IF Waits(r, proc[r].from)
       THEN Set(r, [pc |-> "read", schema |->
               IF Mistake = "schema read before init" THEN proc[r].schema ELSE schema])
       ELSE Set(r, Idle(proc[r]))
    /\ UNCHANGED <<now, files, table, kafka, others>>

(* Begin and send; the broker's clock runs from here.  The message of a    *)
(* compaction's output names the inputs that it replaces; the first one of *)
(* a rewrite contains all of its files.                                    *)
Send(r) ==
    LET i == Id(r)
        m == proc[r]
        apart == r \in Rewriters /\ Mistake = "files of a rewrite are named one after the other"
        takes == IF Mistake = "an output does not name what it replaces" THEN {} ELSE m.inputs
        fields == IF r \in Publishers THEN m.schema \cup {m.from} ELSE {}
    IN
    /\ m.pc = "read"
    /\ Mistake # "named without a transaction"
    /\ IF holder[i] = r
       THEN /\ transaction' = [transaction EXCEPT ![i] =
                  [state |-> "open", by |-> r, opened |-> now, timeout |-> m.timeout,
                   at |-> position + 1, schema |-> fields]]
            /\ log' = Append(log, Message(r, IF apart THEN {} ELSE {m.file}, takes))
            /\ Set(r, [pc |-> IF r \in Removers THEN "half" ELSE "sent"])
       ELSE /\ Set(r, [pc |-> "staged"])
            /\ UNCHANGED <<transaction, log>>
    /\ UNCHANGED <<now, files, schema, position, lost, holder, others>>

(* Another transaction's messages may come in between.                     *)
SendTombstones(r) ==
    LET i == Id(r)
        again == IF r \in Rewriters THEN {proc[r].file} ELSE {}
    IN
    /\ proc[r].pc = "half"
    /\ IF holder[i] = r /\ transaction[i].state = "open"
       THEN /\ log' = Append(log, Message(r, again, proc[r].inputs))
            /\ Set(r, [pc |-> "sent"])
       ELSE /\ Set(r, [pc |-> "staged"])
            /\ UNCHANGED log
    /\ UNCHANGED <<now, files, schema, position, lost, kafka, others>>

(* ManifestLoad.fresh, _refuse_old: when the broker has all messages.      *)
LookAtAge(r) ==
    LET m == proc[r]
        early == Mistake = "age looked at before the transaction"
    IN
    /\ m.pc = CASE early -> "staged"
                [] Mistake = "named without a transaction" -> "read"
                [] OTHER -> "sent"
    /\ Set(r, IF now - m.born - Drift <= m.age
              THEN [pc |-> IF early THEN "young" ELSE "fresh"] ELSE Idle(m))
    /\ UNCHANGED <<now, files, table, kafka, others>>

InitYoung(r) ==
    /\ proc[r].pc = "young"
    /\ Set(r, [pc |-> "staged"])
    /\ UNCHANGED <<now, files, table, kafka, others>>

(* When the answer is lost, or there was an error, the process asks the    *)
(* ledger or the manifest, after `init`, and tries again.                  *)
Commit(r, answered) ==
    LET i == Id(r) IN
    /\ proc[r].pc = IF Mistake = "age looked at before the transaction" THEN "sent" ELSE "fresh"
    /\ Mistake # "named without a transaction"
    /\ IF holder[i] = r /\ transaction[i].state = "open"
       THEN transaction' = [transaction EXCEPT ![i].state = "committing"]
       ELSE UNCHANGED transaction /\ ~answered
    /\ Set(r, IF answered THEN Idle(proc[r]) ELSE [pc |-> "staged"])
    /\ UNCHANGED <<now, files, table, holder, others>>

(* Nothing ends what a plain producer does after a pause.                  *)
SendPlain(r) ==
    LET m == proc[r] IN
    /\ Mistake = "named without a transaction"
    /\ m.pc = "fresh"
    /\ r \in Publishers
    /\ log' = Append(log, [Message(r, {m.file}, {}) EXCEPT !.state = "committed"])
    /\ schema' = schema \cup {m.from}
    /\ position' = position + 1
    /\ lost' = lost
    /\ Set(r, Idle(m))
    /\ UNCHANGED <<now, files, kafka, others>>

----------------------------------------------------------------------------
(* Compaction: kinds/files/compact.py *)

BeginCompaction(r) ==
    LET inputs == Table(Stable) IN
    /\ proc[r].pc = "idle"
    /\ r \in Compactors
    /\ Cardinality(inputs) >= Least
    /\ Set(r, [pc |-> "begun", born |-> now, inputs |-> inputs])
    /\ UNCHANGED <<now, files, table, kafka, others>>

----------------------------------------------------------------------------
(* Repair and backfill: kinds/files/change.py *)

(* Another program takes a file out of the manifest: its records are lost. *)
Drop ==
    /\ left.drops > 0
    /\ \E f \in Table(Stable) :
        /\ Settled
        /\ Letter \notin rows[f]
        /\ log' = Append(log, [id |-> "outside", state |-> "committed", adds |-> {},
                              takes |-> {f}, at |-> now])
        /\ lost' = lost \cup rows[f]
    /\ left' = [left EXCEPT !.drops = @ - 1]
    /\ UNCHANGED <<now, files, schema, position, kafka, proc, vacuum, reader>>

(* The files of some records.  The dead letter's record is between them.   *)
FilesOf(span, S) == {f \in S : rows[f] \cap (span \cup {Letter}) # {}}

(* What is below the position, and what a replay has written of it: while  *)
(* the dead letter waits its record has no row.                            *)
BeginRewrite(r) ==
    LET end == IF Mistake = "a rewrite reaches beyond the position" THEN Records ELSE position
        named == Table(Stable)
        letter == {Letter} \cap UNION {rows[f] : f \in named}
    IN
    /\ proc[r].pc = "idle"
    /\ r \in Rewriters
    /\ end > 0
    /\ Set(r, [pc |-> "begun", born |-> now, inputs |-> FilesOf(0 .. end - 1, named),
               span |-> (0 .. end - 1) \cup letter])
    /\ UNCHANGED <<now, files, table, kafka, others>>

(* After `init`: the files of the records, and with them the dead letter,  *)
(* are those of the decision.                                              *)
CompareFiles(r) ==
    LET m == proc[r]
        same == \/ FilesOf(m.span, Named) = m.inputs
                \/ Mistake = "a rewrite does not compare the files"
    IN
    /\ m.pc = "initialised"
    /\ r \in Rewriters
    /\ Settled
    /\ Set(r, IF same THEN [pc |-> "read"] ELSE Idle(m))
    /\ store' = IF same \/ m.file \in Named THEN store
                ELSE [f \in DOMAIN store \ {m.file} |-> store[f]]
    /\ UNCHANGED <<now, rows, leases, table, kafka, others>>

----------------------------------------------------------------------------
(* An output that is named, or was until another compaction has replaced   *)
(* it, was published by a transaction whose answer was lost.  An output    *)
(* whose inputs are gone can't be published: it is deleted.                *)
ReadManifest(r) ==
    LET m == proc[r]
        was == /\ m.file \in DOMAIN Removed(Len(log))
               /\ Mistake # "an output that was named is deleted"
        again == m.inputs \subseteq Named \/ Mistake = "compaction does not read after init"
    IN
    /\ m.pc = "initialised"
    /\ r \in Compactors
    /\ Settled
    /\ Set(r, IF m.file \notin Named /\ ~was /\ again THEN [pc |-> "read"] ELSE Idle(m))
    /\ store' = IF m.file \in Named \/ was \/ again THEN store
                ELSE [f \in DOMAIN store \ {m.file} |-> store[f]]
    /\ UNCHANGED <<now, rows, leases, table, kafka, others>>

----------------------------------------------------------------------------
(* Vacuum: kinds/files/maintenance.py *)

(* The clock is read, then the store is listed, then the manifest is read. *)
(* Clock and listing are one step: an earlier clock only keeps more.       *)
Steps ==
    CASE Mistake = "manifest read before the listing" -> <<"manifest", "clock and list">>
      [] Mistake = "clock read last" -> <<"list", "manifest", "clock">>
      [] OTHER -> <<"clock and list", "manifest">>
Looks(fields) ==
    vacuum' = [fields @@ vacuum EXCEPT !.step = @ + 1]
IsAt(step) == vacuum.step \in DOMAIN Steps /\ Steps[vacuum.step] = step

StartVacuum(settings) ==
    /\ vacuum.step = 0
    /\ \E f \in DOMAIN store : store[f] < now
    /\ vacuum' = [NoVacuum EXCEPT !.step = 1, !.age = settings[1], !.timeout = settings[2]]
    /\ UNCHANGED <<now, files, table, kafka, proc, reader, left>>

VacuumReadsClock ==
    /\ IsAt("clock")
    /\ Looks([clock |-> now])
    /\ UNCHANGED <<now, files, table, kafka, proc, reader, left>>

VacuumLists ==
    /\ IsAt("clock and list") \/ IsAt("list")
    /\ Looks([clock |-> now, listed |-> DOMAIN store, leases |-> leases,
              waits |-> {log[n].id : n \in {k \in DOMAIN log : Open(log[k])}}])
    /\ UNCHANGED <<now, files, table, kafka, proc, reader, left>>

(* Settled: transactions that were open when it was asked have ended.      *)
VacuumReadsManifest ==
    /\ IsAt("manifest")
    /\ vacuum.waits = {}
    /\ Steps[1] = "manifest" => Settled
    /\ Looks([named |-> Table(Stable), removed |-> Removed(Stable)])
    /\ UNCHANGED <<now, files, table, kafka, proc, reader, left>>

(* Leases.valid: twice the age, because a batch may begin up to the age    *)
(* after the lease was written, and be named up to the age after that.     *)
Counts(lease) ==
    LET ages == IF Mistake = "lease counts for one batch" THEN 1 ELSE 2
    IN lease.at + ages * lease.age + lease.timeout >= vacuum.clock - Slack

Valid == IF Mistake = "vacuum reads no leases" THEN {} ELSE {l \in vacuum.leases : Counts(l)}
Age == Max({vacuum.age} \cup {l.age : l \in Valid})
Timeout == Max({vacuum.timeout} \cup {l.timeout : l \in Valid})
DoneFor == vacuum.clock - Age - Timeout - Slack
ForReaders == IF Mistake = "readers' time counts from the message"
              THEN vacuum.clock - Age - Slack ELSE DoneFor

Orphan(f) ==
    /\ f \notin vacuum.named
    /\ f \in DOMAIN vacuum.removed => vacuum.removed[f] < ForReaders
    /\ store[f] < DoneFor

Delete ==
    /\ vacuum.step = Len(Steps) + 1
    /\ store' = [f \in {g \in DOMAIN store : ~(g \in vacuum.listed /\ Orphan(g))} |-> store[f]]
    /\ leases' = leases \ {l \in vacuum.leases : ~Counts(l) /\ l.at < DoneFor}
    /\ vacuum' = NoVacuum
    /\ UNCHANGED <<now, rows, table, kafka, proc, reader, left>>

----------------------------------------------------------------------------
(* A reader takes the files of a manifest and then the schema, and reads   *)
(* the files within the smallest max_staging_age.                          *)
ReaderReadsManifest ==
    /\ left.reads > 0
    /\ Table(Stable) # {}
    /\ reader' = [NoReader EXCEPT !.step = "manifest", !.files = Table(Stable), !.at = now,
                     !.schema = IF Mistake = "schema read before the manifest" THEN schema ELSE {}]
    /\ left' = [left EXCEPT !.reads = @ - 1]
    /\ UNCHANGED <<now, files, table, kafka, proc, vacuum>>

Resolves(S, fields) == \A f \in S : rows[f] \subseteq fields

(* A file may name a schema that is not visible yet: then the reader waits *)
(* for the end of that transaction.                                        *)
ReaderReadsSchema ==
    /\ reader.step = "manifest"
    /\ \/ Resolves(reader.files, schema)
       \/ Mistake = "an unknown schema is not waited for"
       \/ Mistake = "schema read before the manifest"
    /\ reader' = [reader EXCEPT !.step = "schema",
                     !.schema = IF Mistake = "schema read before the manifest" THEN @ ELSE schema]
    /\ UNCHANGED <<now, files, table, kafka, proc, vacuum, left>>

Crash(r) ==
    /\ left.crashes > 0
    /\ proc[r].pc # "down"
    /\ proc' = [proc EXCEPT ![r] = Down]
    /\ left' = [left EXCEPT !.crashes = @ - 1]
    /\ UNCHANGED <<now, files, table, kafka, vacuum, reader>>

Next ==
    \/ Tick \/ Drop
    \/ \E i \in Ids : TransactionTimeout(i) \/ MarkManifest(i) \/ MarkSchema(i)
    \/ \E r \in Processes :
        \/ \E settings \in Settings : Start(r, settings)
        \/ Begin(r) \/ BeginCompaction(r) \/ BeginRewrite(r) \/ CompareFiles(r) \/ Hold(r) \/ Write(r)
        \/ InitId(r) \/ ReadAgain(r) \/ ReadManifest(r) \/ Send(r) \/ SendTombstones(r)
        \/ LookAtAge(r) \/ InitYoung(r) \/ SendPlain(r) \/ Crash(r)
        \/ \E answered \in BOOLEAN : Commit(r, answered)
    \/ \E settings \in Settings : StartVacuum(settings)
    \/ VacuumReadsClock \/ VacuumLists \/ VacuumReadsManifest \/ Delete
    \/ ReaderReadsManifest \/ ReaderReadsSchema

Spec == Init /\ [][Next]_vars

----------------------------------------------------------------------------
(* Every record before the position is in exactly one named file, except   *)
(* those that another program has taken out and no rewrite has repaired.   *)
ExactlyOnce ==
    \A o \in 0 .. Records - 1 :
        Cardinality({f \in Named : o \in rows[f]})
            = IF o < position /\ o \notin lost THEN 1 ELSE 0

LetterAtMostOnce == Cardinality({f \in Named : Letter \in rows[f]}) <= 1

NamedFilesExist == Named \subseteq DOMAIN store

(* A file that is named resolves to the published schema, as soon as the   *)
(* transaction that names it has ended.                                    *)
SchemasCoverFiles ==
    (\A i \in Ids : transaction[i].state # "committing") => Resolves(Named, schema)

(* A committed reader may see any prefix up to the last stable offset:     *)
(* none holds a record twice, and a longer one holds all of a shorter one. *)
RowsOf(S) == UNION {rows[f] : f \in S}
EachPrefixIsATable ==
    \A n \in 1 .. Stable :
        /\ \A f, g \in Table(n) : f # g => rows[f] \cap rows[g] = {}
        /\ log[n].id = "outside" \/ RowsOf(Table(n - 1)) \subseteq RowsOf(Table(n))

ReadersResolveFiles == reader.step = "schema" => Resolves(reader.files, reader.schema)

ReadersFindTheirFiles ==
    now - reader.at <= Min({s[1] : s \in Settings}) => reader.files \subseteq DOMAIN store
=============================================================================
