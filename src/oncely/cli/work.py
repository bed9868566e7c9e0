"""``oncely work``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from oncely.cli import screen
from oncely.cli.opened import opened, opened_app
from oncely.cli.run import progress_of, until_stopped
from oncely.cli.signals import Signals
from oncely.cli.together import Run, finished
from oncely.pipeline import Pipeline
from oncely.pipeline.probes import Http, probed
from oncely.pipeline.running import logged
from oncely.pipeline.standby import OnFenced
from oncely.pipeline.working import group_of
from oncely.runtimes.stop import StopSignal
from oncely.telemetry import configure

_APP = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def work_file(
    file: Path,
    until: Literal["latest"] | None,
    events: Path | None = None,
    http: Http | None = None,
    on_fenced: OnFenced = "end",
) -> int:
    """Work on a pipeline file, or ``module:app``, until it ends or a signal ends it.

    Returns the exit code.
    """

    def begun(stop: StopSignal, signals: Signals) -> list[Run]:
        pipeline = _opened(file)
        with (
            progress_of(pipeline) as progress,
            logged(pipeline, events, progress) as told,
            probed(pipeline, http, told, group_of(pipeline)) as listener,
        ):
            progress.say("checking topics and table")
            signals.idle = False
            done = pipeline.work(until, stop=stop, listener=listener, on_fenced=on_fenced)
        return [finished(pipeline, progress, done=done)]

    return until_stopped(until, _force, begun)


def _opened(file: Path) -> Pipeline:
    if _APP.fullmatch(str(file)) and not file.exists():
        pipeline = opened_app(str(file))
    else:
        pipeline = opened(file, imports=True)
    configure()
    return pipeline


def _force() -> None:
    """End at once, even if a thread hangs. Safe: uncommitted records are read again."""
    screen.err.print(
        "error: a server did not answer, or a function did not return, in time; committed records"
        " are kept"
    )
    screen.leave_now(1)
