"""Run by quixstreams' own interpreter: a job a line, exactly once, a commit a second.

Arguments: brokers, state directory, what "late" is in minutes. Each line of standard input is a
job: "bytes" or "json", input topic, output topic, records of the output (0: until nothing comes
for some seconds). The answer is the millisecond since 1970 at which the first record was in hand.
``count`` ends an application, with a last commit, as soon as it has written all; it costs nothing
measurable a record.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from quixstreams import Application
from quixstreams.models import BytesDeserializer, Deserializer, JSONDeserializer

IDLE = 5.0  # seconds without a record; they are not in the rate, which ends at the last record


class First(Deserializer):  # type: ignore[misc]  # not installed where types are checked
    """Notes when the first value is decoded; the real deserializer does the work."""

    def __init__(self, real: Deserializer) -> None:
        super().__init__()
        self._real = real
        self.milliseconds = 0

    def __call__(self, value: bytes, ctx: Any) -> Any:
        """Decode one value."""
        if not self.milliseconds:
            self.milliseconds = time.time_ns() // 1_000_000
        return self._real(value, ctx)


def passed(job: str, source: str, target: str, outputs: int) -> int:
    """Move one topic; when it began."""
    brokers, state, late = sys.argv[1], sys.argv[2], float(sys.argv[3])
    application = Application(
        broker_address=brokers,
        consumer_group=target,
        auto_offset_reset="earliest",
        processing_guarantee="exactly-once",
        commit_interval=1.0,
        state_dir=state,
        auto_create_topics=False,
        loglevel="WARNING",
    )
    json = job == "json"
    first = First(JSONDeserializer() if json else BytesDeserializer())
    rows = application.dataframe(application.topic(source, value_deserializer=first))
    if json:
        rows = rows.filter(lambda flight: flight["dep_delay"] > late)
    rows.to_topic(application.topic(target, value_serializer="json" if json else "bytes"))
    application.run(count=outputs, timeout=0.0 if outputs else IDLE, collect=False)
    return first.milliseconds


def main() -> None:
    """Do the jobs that come in."""
    for line in sys.stdin:
        job, source, target, outputs = line.split()
        print(passed(job, source, target, int(outputs)), flush=True)


if __name__ == "__main__":
    main()
