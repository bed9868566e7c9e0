"""The worker against a scripted broker and ledger, with a schedule that is drawn from a seed.

Polls, assignments, late and lost revocations, failures, lost answers, crashes, pauses and a run on
Spark come in an order that the seed decides; nothing waits and nothing is real but the worker's own
code and the commit path. After the faults everything must be committed exactly once.
"""
