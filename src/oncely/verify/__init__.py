"""The check of the state machine: ledger, manifest and event log, without rows and without topic.

Readers turn what is stored into the values of :mod:`oncely.verify.reading`, and
:func:`oncely.verify.check.check` is a function of these values alone. Imports ``core``,
``clients``, ``config`` and the readers of stored formats in ``oncely.audit.stored`` only: it trusts
nothing of the pipeline.
"""
