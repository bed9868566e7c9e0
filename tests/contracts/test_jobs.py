"""The contract of jobs: what the loop of a run relies on, on processes and on Spark alike."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from contextvars import copy_context
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from oncely.core.ranges import TopicPartition
from oncely.errors import Fenced, OncelyError, SourceMismatch, TooManyRejects, Unavailable
from oncely.phases import Seconds, into, phase
from oncely.runtimes.jobs import Attempt, Jobs, ProcessJobs, ShuffleBlock, Spent, all_of, sort_out
from oncely.runtimes.spark import session
from oncely.runtimes.spark.jobs import SparkJobs
from oncely.secrets import Secrets, redact, scope
from oncely.testing.processes import await_that, kill_self

_ATTEMPTS = 4
_FENCED = Fenced("p", 1, 2, [TopicPartition("events", 3)])

# -- tasks, which other processes import -------------------------------------------------------


def ending_late(folder: Path, share: int, attempt: Attempt) -> Iterator[object]:
    """The first of them ends after the second."""
    if share == 0:
        await_that((folder / "1").exists, "the end of the second")
    yield "begun", share
    yield "done", share
    (folder / str(share)).touch()


def numbered(share: int, attempt: Attempt) -> Iterator[object]:
    with phase("read"):
        yield attempt.number


def telling(secret: str, share: int, attempt: Attempt) -> Iterator[object]:
    yield redact(f"with {secret}")
    raise SourceMismatch(f"of {secret}", way_out=f"without {secret}")


def again(share: int, attempt: Attempt) -> Iterator[object]:
    yield share, attempt.again


def first_time(folder: Path, share: object) -> bool:
    """True for the first attempt at a share; notes each."""
    attempts = folder / str(share)
    with attempts.open("a") as file:
        file.write(".")
    return attempts.stat().st_size == 1


def dying_once(folder: Path, share: int, attempt: Attempt) -> Iterator[object]:
    yield share, attempt.again
    if share != 1 and first_time(folder, share):
        kill_self()


def failing_once(folder: Path, share: int, attempt: Attempt) -> Iterator[object]:
    yield share, attempt.again
    if share != 1 and first_time(folder, share):
        raise ValueError("for now")


def failing(folder: Path, error: Exception, share: int, attempt: Attempt) -> Iterator[object]:
    yield share
    if share == 1:
        first_time(folder, share)
        raise error


def dying(share: int, attempt: Attempt) -> Iterator[object]:
    yield share
    kill_self()


def sending(folder: Path, share: int, attempt: Attempt) -> Iterator[object]:
    """To bucket 0, and to those of the share's digits; the first attempt of share 12 dies."""
    for bucket in {0, *map(int, str(share))}:
        yield ShuffleBlock(bucket, f"{bucket}:{share}".encode())
    if share == 12 and first_time(folder, share):
        kill_self()
    yield "sent", share


def staging(packets: Any, attempt: Attempt) -> Iterator[object]:
    yield sorted(bytes(one).decode() for one in packets)


def refusing(packets: Any, attempt: Attempt) -> Iterator[object]:
    if [*packets]:
        raise _FENCED
    yield "none"


def refusing_to_send(share: int, attempt: Attempt) -> Iterator[object]:
    yield ShuffleBlock(share, str(share).encode())
    if share == 1:
        raise _FENCED


def waiting(folder: Path, share: int, attempt: Attempt) -> Iterator[object]:
    (folder / str(os.getpid())).touch()
    time.sleep(600)
    yield share


# -- the contract --------------------------------------------------------------------------


@contextmanager
def beside(jobs: Jobs, work: Callable[[], list[object]]) -> Iterator[Future[list[object]]]:
    """Jobs of a batch, in a thread of its own, as a run does them."""

    def batch() -> list[object]:
        jobs.enter("a batch")
        return work()

    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(copy_context().run, batch)


def run(jobs: Jobs, task: Any, shares: Sequence[object]) -> list[Any]:
    with beside(jobs, lambda: jobs.run(task, shares)) as found:
        return found.result()


def shuffled(jobs: Jobs, send: Any, shares: Sequence[object], stage: Any) -> list[Any]:
    """Over four buckets."""
    with beside(jobs, lambda: jobs.shuffled(send, shares, stage, 4)) as found:
        return found.result()


class BaseJobs:
    """What each runtime promises; its class has a fixture ``make``."""

    @pytest.fixture(scope="class")
    @classmethod
    def jobs(cls, make: Callable[[], Jobs]) -> Iterator[Jobs]:
        with closing(make()) as made:
            yield made

    def test_answers_of_a_share_are_together_and_in_the_order_of_shares(
        self, jobs: Jobs, tmp_path: Path
    ) -> None:
        found = run(jobs, partial(ending_late, tmp_path), range(7))
        kinds = [one if isinstance(one, tuple) else type(one) for one in found]
        assert kinds == [
            each for share in range(7) for each in (("begun", share), ("done", share), Spent)
        ]

    def test_every_attempt_has_a_number_of_its_own(self, jobs: Jobs) -> None:
        found = all_of(run(jobs, numbered, [0, 1]) + run(jobs, numbered, [0, 1]))
        assert len(set(found)) == len(found) == 4

    def test_the_seconds_of_tasks_reach_the_driver(self, jobs: Jobs) -> None:
        seconds: Seconds = {}
        with into(seconds):
            all_of(run(jobs, numbered, [0]))
        assert seconds.keys() == {"read"}

    def test_secrets_of_the_driver_are_hidden_in_tasks_and_in_errors(self, jobs: Jobs) -> None:
        secret = "hush-4711"
        with scope(Secrets.of([secret])):
            found = run(jobs, partial(telling, secret), [0, 1])
        texts, error = sort_out(found)
        assert texts == ["with ***"] * 2
        assert error is not None
        assert (error.message, error.way_out) == ("of ***", "without ***")

    def test_a_task_whose_process_dies_is_repeated(self, jobs: Jobs, tmp_path: Path) -> None:
        found = all_of(run(jobs, partial(dying_once, tmp_path), [0, 1, 2]))
        assert [share for share, _ in found] == [0, 1, 2]
        assert (found[0], found[2]) == ((0, True), (2, True))

    def test_a_task_that_raises_is_repeated_and_answers_once(
        self, jobs: Jobs, tmp_path: Path
    ) -> None:
        found = all_of(run(jobs, partial(failing_once, tmp_path), [0, 1, 2]))
        assert found == [(0, True), (1, False), (2, True)]

    @pytest.mark.parametrize(
        "error",
        [_FENCED, TooManyRejects("too many", way_out="correct it"), Unavailable("no answer")],
        ids=lambda one: type(one).__name__,
    )
    def test_an_error_of_oncely_is_an_answer_and_no_task_is_repeated(
        self, jobs: Jobs, tmp_path: Path, error: OncelyError
    ) -> None:
        found, told = sort_out(run(jobs, partial(failing, tmp_path, error), [0, 1, 2]))
        assert found == [0, 1, 2]
        assert type(told) is type(error)
        kept = {key: value for key, value in vars(error).items() if key != "refused"}
        assert vars(told).items() >= kept.items()
        assert str(told) == str(error)
        assert (tmp_path / "1").read_text() == "."

    def test_another_error_in_all_attempts_fails_the_job(self, jobs: Jobs, tmp_path: Path) -> None:
        task = partial(failing, tmp_path, ValueError("told"))
        with pytest.raises(Exception) as caught:  # noqa: PT011 - of the runtime
            run(jobs, task, [0, 1, 2])
        assert (tmp_path / "1").read_text() == "." * _ATTEMPTS
        meaning = jobs.meaning(caught.value)
        assert type(meaning) is Unavailable
        assert "ValueError: told" in meaning.message
        assert all_of(run(jobs, again, [5])) == [(5, False)], "the next job"

    def test_a_process_that_dies_in_all_attempts_fails_the_job(self, jobs: Jobs) -> None:
        with pytest.raises(Exception) as caught:  # noqa: PT011 - of the runtime
            run(jobs, dying, [0])
        assert type(jobs.meaning(caught.value)) is Unavailable
        jobs.require()
        assert all_of(run(jobs, again, [5])) == [(5, False)], "the next job"

    def test_packets_of_a_bucket_meet_in_one_task_and_none_is_doubled(
        self, jobs: Jobs, tmp_path: Path
    ) -> None:
        shares = [1, 2, 12, 0, 20]
        found = shuffled(jobs, partial(sending, tmp_path), shares, staging)
        told = all_of(found)
        sent = [one for one in told if isinstance(one, tuple)]
        assert {one[0] for one in sent} == {"sent"}
        assert sorted(share for _, share in sent) == sorted(shares)
        staged = [one for one in told if isinstance(one, list)]
        assert len(staged) == 4
        assert sorted(one for task in staged for one in task) == [
            "0:0", "0:1", "0:12", "0:2", "0:20", "1:1", "1:12", "2:12", "2:2", "2:20",
        ]  # fmt: skip
        for bucket in "012":
            assert sum(any(one[0] == bucket for one in task) for task in staged) == 1
        assert sum(isinstance(one, Spent) for one in found) >= 4

    def test_an_error_of_oncely_before_a_shuffle_is_an_answer(self, jobs: Jobs) -> None:
        _, error = sort_out(shuffled(jobs, refusing_to_send, [0, 1], staging))
        assert isinstance(error, Fenced)
        assert error.lost == _FENCED.lost

    def test_an_error_of_oncely_after_a_shuffle_is_an_answer_beside_the_others(
        self, jobs: Jobs, tmp_path: Path
    ) -> None:
        found, error = sort_out(shuffled(jobs, partial(sending, tmp_path), [0, 1], refusing))
        assert isinstance(error, Fenced)
        assert error.lost == _FENCED.lost
        sent = [one for one in found if isinstance(one, tuple)]
        assert sorted(sent) == [("sent", 0), ("sent", 1)]

    def test_a_cancelled_job_ends_with_its_tasks(
        self, make: Callable[[], Jobs], tmp_path: Path
    ) -> None:
        with (
            closing(make()) as jobs,
            beside(jobs, lambda: jobs.run(partial(waiting, tmp_path), [0, 1])) as found,
        ):
            await_that(lambda: len([*tmp_path.iterdir()]) == 2, "both tasks")
            jobs.cancel()
            assert found.exception(180) is not None
        for one in tmp_path.iterdir():
            await_that(lambda pid=int(one.name): not psutil.pid_exists(pid), "the end of a task")


class TestProcesses(BaseJobs):
    @pytest.fixture(scope="class")
    @classmethod
    def make(cls) -> Callable[[], Jobs]:
        return partial(ProcessJobs, 2)


class TestSpark(BaseJobs):
    @pytest.fixture(scope="class")
    @classmethod
    def make(cls, spark: Any) -> Callable[[], Jobs]:
        return partial(SparkJobs, spark, "p")

    def test_jobs_have_a_description_and_the_pool_of_the_session(self, spark: Any) -> None:
        local = spark.sparkContext.getLocalProperty

        def described() -> list[object]:
            return [local("spark.job.description"), local("spark.scheduler.pool")]

        def made() -> list[object]:
            own = session.enter(spark, "p", {}, alone=False)
            with beside(SparkJobs(own, "p"), described) as found:
                return found.result()

        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(made).result() == ["a batch", "p"]

    def test_the_end_of_the_jvm_ends_a_run_that_waits(
        self, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ended = SimpleNamespace(poll=lambda: 137)
        monkeypatch.setattr(session, "java_process", lambda: ended)
        with pytest.raises(ConnectionError, match="has ended"):
            jobs.require()
