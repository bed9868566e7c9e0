"""Workers and runs in batches against a scripted broker and ledger, with a schedule that is drawn
from a seed.

Nothing waits, one thread runs at a time, and nothing is real but the code of worker, loop and
tasks, the reader and the commit path. Of workers: polls, assignments, late and lost revocations,
pauses and a run of all partitions. Of runs in batches: tasks that are repeated, copied and commit
late, drivers that die or take over, logs with transactions, retention, compaction, new leaders and
cuts. Of both: failures, lost answers and crashes. After the faults everything must be committed
exactly once.
"""
