"""The audit: compares a topic with its destination, by offset. It trusts nothing of the pipeline.

    from oncely import Pipeline
    from oncely.audit import audit

    report = audit(Pipeline.from_file("flights.toml"))
    assert report.verdict == "clean"

Imports ``core``, ``clients`` and ``config`` only. What it needs of decode and transform, to name
the records of a range that differs, is passed in (:class:`oncely.audit.evidence.Expected`); no
verdict depends on it alone. The order in which snapshot and topics are read, and why a running
pipeline does not disturb it: docs/decisions/0042.
"""

from oncely.audit.of_pipeline import audit
from oncely.audit.report import Report

__all__ = ["Report", "audit"]
