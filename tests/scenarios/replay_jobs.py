"""What the killed processes of the replay scenario do."""

from __future__ import annotations

from typing import Any

from oncely.commit import change as replays
from oncely.config import parse
from oncely.pipeline import Pipeline
from oncely.testing.faults import KillAt


def replay(settings: dict[str, Any], kill: dict[str, Any], at_once: int) -> Any:
    """Replay, dying where ``kill`` says; how many calls it took when it says nowhere."""
    replays.LETTERS_A_TRANSACTION = at_once
    plan = KillAt(**{"call": -1, "armed_by": "BEGIN", **kill})
    pipeline = Pipeline(parse(settings)).replaced(connect=plan)
    return pipeline.replay(), plan.counter.seen
