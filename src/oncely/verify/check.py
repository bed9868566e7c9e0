"""The check: values in, the first broken step out."""

from __future__ import annotations

from oncely.verify.files import check_files
from oncely.verify.history import Proofs, check_ledger
from oncely.verify.log import Log
from oncely.verify.report import Broken, Finding, Report, Unknown
from oncely.verify.runs import story
from oncely.verify.state import Ledger, Rules
from oncely.verify.together import begun_in, check_log, check_together, explained_by, proven_by

_NO_LOG = Log()


def check(
    ledger: Ledger,
    log: Log = _NO_LOG,
    rules: Rules = Rules(),  # noqa: B008 - a frozen value
    before: Log | None = None,
) -> Report:
    """Check a ledger, and the event logs of its runs.

    Args:
        ledger: the ledger and the files of a pipeline.
        log: the event logs, read after the ledger.
        rules: what follows from the settings of the pipeline.
        before: the event logs, read before the ledger; None if no run has gone on meanwhile.
    """
    told = story(log, rules)
    grown = before is not None and len(before.lines) < len(log.lines)
    earlier = story(before, rules) if before is not None and grown else told
    found: list[Finding] = [
        *log.problems,
        *check_log(told, rules),
        *check_ledger(
            ledger, rules, Proofs(explained_by(told), begun_in(told), proven_by(told, ledger))
        ),
        *check_together(ledger, told, earlier, rules),
    ]
    if ledger.files is not None:
        found += check_files(ledger.files, ledger)
    broken = [one for one in found if isinstance(one, Broken)]
    unknown = [one for one in found if isinstance(one, Unknown)]
    return Report(
        ledger.pipeline,
        sorted(broken, key=lambda one: one.order),
        list(dict.fromkeys(unknown)),
        _checked(ledger, log),
    )


def _checked(ledger: Ledger, log: Log) -> dict[str, int]:
    files = ledger.files
    named = {one.path for one in files.named} if files else set()
    return {
        "partitions": len(ledger.positions),
        "ranges": len(ledger.history),
        "events": len(log.lines),
        "files": len(named),
        "orphans": len(files.stored.keys() - named) if files else 0,
    }
