"""Runs a pipeline as a member of a consumer group, without Spark."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from oncely.commit.backoff import Backoff
from oncely.commit.path import attempts
from oncely.commit.run import OpenLedger
from oncely.config import FilterSettings
from oncely.core import events
from oncely.core.progress import RunResult
from oncely.kafka.client import at_start
from oncely.kafka.group import GroupConsumer, Membership, worker_id
from oncely.kinds.base import CommitsChunks, SendsOffsets
from oncely.pipeline.guarantee import refuse_unfit
from oncely.pipeline.running import RunOptions, observed
from oncely.runtimes.takeover import EndOffsets
from oncely.runtimes.worker.assignment import BufferLimits, Delay, Throttle
from oncely.runtimes.worker.member import Member, WorkerRun
from oncely.threads import StopSignal

if TYPE_CHECKING:
    from oncely.pipeline.parts import Parts


_AHEAD = 10_000  # records that threads have in hand: they finish fewer ranges beyond a position


def work(pipeline: Parts, given: RunOptions) -> RunResult:
    """See :meth:`oncely.pipeline.Pipeline.work`."""
    group, spans = pipeline.settings.worker_group, pipeline.kind.spans
    return observed(pipeline, given, group, _started, spans=spans)


def _started(pipeline: Parts, given: RunOptions) -> bool:
    refuse_unfit(pipeline.settings)
    with at_start():
        pipeline.preflight()
    once = partial(pipeline.with_newest_schema, partial(_work, pipeline, given))
    if given.on_fenced == "wait":
        from oncely.pipeline.standby import work_when_alone

        return work_when_alone(pipeline, once, given.stop, given.listener)
    return once()


def _work(pipeline: Parts, given: RunOptions) -> bool:
    """Be a member of the group until stopped, fenced, or done."""
    run = _run_of(pipeline, given.listener)
    source, worker, context = pipeline.source, pipeline.settings.worker, run.ledger.context
    membership = Membership(
        pipeline.settings.worker_group, worker.protocol, worker.instance, worker.session_timeout,
        polled_bytes=worker.buffer // 8, marks=not isinstance(context.sink, SendsOffsets),
    )  # fmt: skip
    records = min(worker.max_records, _AHEAD) if run.by_key else worker.max_records
    waits = _waits(pipeline.settings.filter)
    needs = context.needs | ({"timestamp"} if waits else set())
    member = Member(
        run,
        lambda rebalances: _joined(
            run,
            GroupConsumer(
                source.brokers,
                source.kafka,
                source.topics,
                _named(membership, run),
                rebalances,
                needs,
            ),
        ),
        # A second commit is decoded while one is in hand.
        limits=BufferLimits(records, bytes=worker.buffer // 8, buffered_bytes=worker.buffer // 2),
        revoke_seconds=worker.revoke_timeout,
        restarts=worker.on_rebalance == "restart",
        patience=worker.patience,
        stop=given.stop,
        listener=given.listener,
        gates=Throttle(waits),
    )
    try:
        if not _begun(run, given.stop):
            return False
        goal = None
        if given.until == "latest":
            goal = EndOffsets(replace(source), pipeline.settings.source.on_gap, source.stable_end())
        done = member.work(goal)
        run.ledger.finish()
        return done
    finally:
        run.ledger.close()


def _begun(run: WorkerRun, stop: StopSignal) -> bool:
    """Begin; False when asked to stop. Into Kafka also while another member, which may have died,
    is in a transaction: that hides the end of the ledger topic, until the broker aborts it."""
    sink = run.ledger.context.sink
    seconds = sink.hidden_seconds if isinstance(sink, SendsOffsets) else 0.0
    for attempt in attempts(Backoff(first=1.0, total=seconds, wait=stop.wait)):
        if stop.draining:
            return False
        with attempt:
            run.begin()
    return True


def _named(membership: Membership, run: WorkerRun) -> Membership:
    """With a client id that says where it writes, by the ledger that the run has opened."""
    ledger: Any = run.ledger.context.ledger
    given = "client.id" in run.takeovers.source.kafka
    name = None if given else worker_id(run.takeovers.name, ledger.identity())
    return replace(membership, client=name)


def _joined(run: WorkerRun, group: GroupConsumer) -> GroupConsumer:
    """Offsets in a transaction name the member that sends them."""
    sink = run.ledger.context.sink
    if isinstance(sink, SendsOffsets):
        sink.joined(group.metadata)
    return group


def _sink_of(pipeline: Parts) -> CommitsChunks:
    """The sink; :func:`refuse_unfit` has refused those that commit no chunks."""
    sink: Any = pipeline.sink(pipeline.row_schema())
    return sink.for_worker() if isinstance(sink, SendsOffsets) else sink


def _waits(given: FilterSettings) -> Delay:
    rate, delay = given.throttle, given.delay
    return Delay(
        None if delay is None else round(delay * 1000),
        None if rate is None else (rate.records, round(rate.seconds * 1000)),
    )


def _run_of(pipeline: Parts, listener: events.Listener) -> WorkerRun:
    context = pipeline.context(_sink_of(pipeline))
    source = replace(pipeline.source)  # its readers are not shared between threads
    ledger = OpenLedger(replace(context, source=source))
    return WorkerRun(ledger, pipeline.takeovers(ledger, listener), pipeline.row_transform)
