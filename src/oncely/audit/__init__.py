"""The audit: compares a topic with its destination, by offset. It trusts nothing of the pipeline.

    from oncely import Pipeline
    from oncely.audit import audit

    report = audit(Pipeline.from_file("flights.toml"))
    assert report.verdict == "clean"

Imports no kind, no runtime, no commit path, no decoder and no ledger of the engine. What it needs
of decode and transform, to name the records of a range that differs, is passed in
(:class:`oncely.audit.evidence.Expected`); no verdict depends on it alone. The order in which
snapshot and topics are read, and why a running pipeline does not disturb it:
docs/decisions/0042.
"""

from typing import TYPE_CHECKING, Any

from oncely.audit.report import Report

if TYPE_CHECKING:
    from oncely.audit.of_pipeline import audit

__all__ = ["Report", "audit"]


def __getattr__(name: str) -> Any:
    if name != "audit":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from oncely.audit import of_pipeline  # commands that read one module need not import the rest

    return of_pipeline.audit
