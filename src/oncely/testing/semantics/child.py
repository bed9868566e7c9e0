"""The process that is killed: ``python -m oncely.testing.semantics.child JOB``.

It first resumes the pipeline of the previous trial, as a restart does, and then runs its own until
it is killed. So one start of a process, or of Spark, serves for the restart of one trial and the
run of the next.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from oncely.config import parse
from oncely.core import events
from oncely.kinds.trial import POSITION, Killer
from oncely.pipeline import Pipeline
from oncely.runtimes.spark import session
from oncely.testing.semantics.cells import TRIALS

_ARMED_FROM = 2  # the batch that is killed; earlier ones are committed
_TIMER_FIRES = 1  # the batch at whose start the timer of `none` saves positions


def main(job: Path) -> int:
    """Execute a job: ``{"resume": pipeline | null, "run": pipeline | null, "point": …, "files":
    number per batch, "on_spark": …}``."""
    order: dict[str, Any] = json.loads(job.read_text())
    spark = session.start("semantics", "local[2,4]", {}) if order["on_spark"] else None
    if order["resume"] is not None:
        Pipeline(parse(order["resume"])).run("latest", spark=spark)
        job.with_suffix(".resumed").touch()
    if order["run"] is not None:
        java = session.java_process()
        pipeline, killer = _dying(order, java.pid if java else 0)
        pipeline.run("latest", spark=spark, listener=_arming(killer))
        return 1  # it was not killed
    if spark is not None:
        session.stop(spark)
    return 0


def _dying(order: dict[str, Any], jvm: int) -> tuple[Pipeline, Killer]:
    settings, sink = parse(order["run"]), order["run"]["sink"]
    killer = Killer(
        settings.name, order["point"], settings.delivery, os.getpid(), jvm, order["files"]
    )
    faulty = TRIALS[sink["kind"]].faulty(killer, sink)
    return Pipeline(settings).replaced(**faulty), killer


def _arming(killer: Killer) -> events.Listener:
    timer = killer.delivery == "none" and killer.point == POSITION
    batch = _TIMER_FIRES if timer else _ARMED_FROM

    def hear(event: events.Event) -> None:
        if isinstance(event, events.BatchPlanned) and event.batch_id == batch:
            killer.armed = True

    return hear


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
