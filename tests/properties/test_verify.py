"""Legal histories pass the check of the state machine, and each kind of mutation is found."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncely.core import events
from oncely.core.claim import Counts
from oncely.core.ranges import OffsetRange
from oncely.verify.check import check
from oncely.verify.log import parsed, read
from oncely.verify.reading import Entry
from tests.conftest import examples
from tests.verifytools import NAME, ROW_BY_ROW, STEPS, Run, Simulated, line, simulated

steps = st.lists(st.sampled_from(sorted(STEPS)), max_size=12)
randoms = st.randoms(use_true_random=False)


@settings(max_examples=examples(40))
@given(steps, randoms)
def test_a_legal_history_holds(chosen: list[str], random: Random) -> None:
    found = simulated(chosen, random).report()
    assert found.verdict != "broken", found.as_json()
    # A joined range hides steps that a killed run has not told of.
    if "joined" not in chosen:
        assert found.verdict == "holds", found.as_json()


@settings(max_examples=examples(40))
@given(steps, randoms)
def test_a_legal_history_without_a_log_is_not_broken(chosen: list[str], random: Random) -> None:
    of = simulated(chosen, random)
    found = check(of.ledger, rules=ROW_BY_ROW)
    assert found.verdict != "broken", found.as_json()
    if not {"joined", "reset"} & {*chosen}:
        # Nothing else tells that no range was before one that begins later.
        assert {one.partition for one in found.unknown} == {tp for tp, at in of.start.items() if at}


@settings(max_examples=examples(40))
@given(steps, randoms)
def test_runs_and_resets_without_a_log_are_not_broken(chosen: list[str], random: Random) -> None:
    of = Simulated(random)
    for number, one in enumerate(chosen):
        STEPS[one](of)
        if number % 3 == 2:
            silent = of.open(log=False)
            of.batch(silent)
            of.reset(log=False)
            of.runs.append(replace(silent, log=True))
            of.open()
    found = of.report()
    assert found.verdict != "broken", found.as_json()


@settings(max_examples=examples(40))
@given(steps, randoms, st.integers(0, 400))
def test_a_log_that_a_crash_has_cut_holds(chosen: list[str], random: Random, cut: int) -> None:
    """The last line is incomplete; what it told was committed is within the plan before it."""
    of = simulated(chosen, random)
    lines = told(of, "range_committed")
    if not lines:
        return
    whole = of.lines[lines[-1]]
    del of.lines[lines[-1] :]
    data = "".join(f"{one}\n" for one in of.lines) + whole[: cut % len(whole)]
    found = check(of.ledger, parsed(data.encode(), NAME, "events"), ROW_BY_ROW)
    assert found.verdict != "broken", found.as_json()


values = st.one_of(st.integers(-5, 500), st.none(), st.just("x"), st.just([]), st.just({}))


@settings(max_examples=examples(40))
@given(steps, randoms, values)
def test_nothing_that_a_log_contains_ends_the_check(
    chosen: list[str], random: Random, value: Any
) -> None:
    of = simulated(chosen, random)
    for _ in range(3):
        at = random.randrange(len(of.lines))
        found = json.loads(of.lines[at])
        inside = [found, *(one for one in found.values() if isinstance(one, dict) and one)]
        inside += [one["t"] for one in inside if isinstance(one.get("t"), dict) and one["t"]]
        of_this = random.choice(inside)
        of_this[random.choice(sorted(of_this))] = value
        of.lines[at] = json.dumps(found)
    of.report()


@settings(max_examples=25)
@given(steps, randoms)
def test_a_member_commits_under_several_epochs_while_its_partitions_are_assigned(
    chosen: list[str], random: Random
) -> None:
    of = simulated([*chosen, "member"], random)
    assert of.report().verdict != "broken", of.report().as_json()
    revoked = json.loads(of.lines.pop(told(of, "partitions_revoked")[-1]))
    planned = [
        at for at in told(of, "planned") if json.loads(of.lines[at])["run"] == revoked["run"]
    ]
    if planned:
        of.lines.insert(random.choice(planned), json.dumps(revoked))
        assert "partition" in {one.rule for one in of.report().broken}


@settings(max_examples=25)
@given(steps, randoms)
def test_a_member_to_which_nothing_was_assigned_commits_nothing(
    chosen: list[str], random: Random
) -> None:
    of = simulated([*chosen, "member"], random)
    member = json.loads(of.lines[told(of, "partitions_revoked")[-1]])["run"]
    of.lines = [
        one
        for one in of.lines
        if json.loads(one)["run"] != member or "partitions_assigned" not in one
    ]
    if any(json.loads(of.lines[at])["run"] == member for at in told(of, "planned")):
        assert "partition" in {one.rule for one in of.report().broken}


# -- what nothing can prove ------------------------------------------------------------------------


@settings(max_examples=examples(20))
@given(steps, randoms)
def test_without_a_log_the_first_ranges_of_a_partition_may_be_gone(
    chosen: list[str], random: Random
) -> None:
    """Its first range, or all of them. A reset may have moved the position over what is gone."""
    of = simulated(chosen, random)
    tp = random.choice(sorted(of.at))
    held = [
        one for one in of.entries if one.partition == tp and one.kind in ("data", "hole", "gap")
    ]
    mine = sorted(held, key=lambda one: one.start)
    first = mine[: random.choice([1, len(mine)])]
    of.entries = [one for one in of.entries if one not in first]
    if of.at[tp] and mine and "reset" not in chosen:
        assert check(of.ledger, rules=ROW_BY_ROW).verdict != "holds"
    told = of.report()
    # What a run has committed when it died stands in no line of the log but the plan's.
    proven = not any(one.startswith(("failed", "killed", "joined")) for one in chosen)
    assert told.verdict in (("broken",) if proven else ("broken", "unknown")) or all(
        one.superseded for one in first
    )


@pytest.mark.parametrize(
    ("fields", "proven"),
    [({"rejects": +1, "rows": -1}, 1), ({"filtered": +1, "rows": -1}, 0)],
)
@settings(max_examples=examples(20))
@given(chosen=steps, random=randoms)
def test_without_a_log_dead_letters_alone_prove_counts(
    fields: dict[str, int], proven: int, chosen: list[str], random: Random
) -> None:
    """Only rows, which are not read, would show a changed number of filtered records."""
    of = simulated(chosen, random)
    before = check(of.ledger, rules=ROW_BY_ROW)
    if recounted(of, random, **fields):
        found = check(of.ledger, rules=ROW_BY_ROW)
        assert found.verdict != "broken"
        assert len(found.unknown) == len(before.unknown) + proven


@settings(max_examples=examples(20))
@given(steps, randoms)
def test_a_digest_that_others_of_its_epoch_have(chosen: list[str], random: Random) -> None:
    """All of an epoch may be gone without a trace: a table may have none."""
    of = simulated([one for one in chosen if one != "joined"], random)
    before = Counter(one.epoch for one in of.entries if one.counts and one.counts.recipe)
    if not recounted(of, random, digest=None, recipe=""):
        return
    after = Counter(one.epoch for one in of.entries if one.counts and one.counts.recipe)
    (epoch,) = before - after
    found = of.report()
    assert found.verdict == ("unknown" if after[epoch] else "holds"), found.as_json()


@settings(max_examples=examples(20))
@given(steps, randoms)
def test_the_first_line_of_a_run_is_missing(chosen: list[str], random: Random) -> None:
    of = simulated(chosen, random)
    del of.lines[random.choice(told(of, "started"))]
    assert of.report().verdict == "unknown", of.report().as_json()


@settings(max_examples=examples(20))
@given(steps, randoms, st.integers(0, 400))
def test_lines_that_several_files_contain_count_once(
    tmp_path_factory: pytest.TempPathFactory, chosen: list[str], random: Random, part: int
) -> None:
    of = simulated([one for one in chosen if one != "joined"], random)
    of.lines = [json.dumps({**json.loads(x), "time": f"{n:06}"}) for n, x in enumerate(of.lines)]
    folder = tmp_path_factory.mktemp("logs")
    paths = [folder / "whole", folder / "part"]
    for path, some in zip(paths, (of.lines, of.lines[-part:]), strict=True):
        path.write_text("".join(f"{one}\n" for one in some))
    both = read([*random.sample(paths, 2), paths[0]], NAME)
    assert len(both.lines) == len(of.lines)
    found = check(of.ledger, both, ROW_BY_ROW)
    assert found.verdict == "holds", found.as_json()


# -- mutations -------------------------------------------------------------------------------------

Mutation = Callable[[Simulated, Random], bool]
MUTATIONS: dict[str, tuple[Mutation, set[str]]] = {}


def mutation(*rules: str) -> Callable[[Mutation], Mutation]:
    """Registers a mutation, and the rules of which one must be broken."""

    def register(do: Mutation) -> Mutation:
        MUTATIONS[do.__name__] = do, set(rules)
        return do

    return register


def own(of: Simulated) -> list[int]:
    """The unjoined entries in force."""
    return [i for i, e in enumerate(of.entries) if not e.superseded and e.kind == "data"]


def told(of: Simulated, kind: str) -> list[int]:
    return [i for i, one in enumerate(of.lines) if json.loads(one)["type"] == kind]


def change(of: Simulated, at: int, **fields: Any) -> None:
    of.lines[at] = json.dumps({**json.loads(of.lines[at]), **fields})


@mutation("missing", "ledger", "position")
def range_dropped(of: Simulated, random: Random) -> bool:
    del of.entries[random.choice(own(of))]
    return True


@mutation("overlap", "log", "epoch")
def range_doubled(of: Simulated, random: Random) -> bool:
    one = of.entries[random.choice(own(of))]
    of.entries.append(replace(one, epoch=random.choice([one.epoch, of.held[one.partition]])))
    return True


@mutation("missing", "entry", "ledger", "position")
def range_shortened(of: Simulated, random: Random) -> bool:
    at = random.choice(own(of))
    of.entries[at] = replace(of.entries[at], end=of.entries[at].end - 1)
    return True


@mutation("overlap", "position", "ledger", "epoch", "fence")
def range_lengthened(of: Simulated, random: Random) -> bool:
    at = random.choice(own(of))
    of.entries[at] = replace(of.entries[at], end=of.entries[at].end + 1)
    return True


@mutation("entry", "ledger")
def counts_changed(of: Simulated, random: Random) -> bool:
    at = random.choice(own(of))
    c = of.entries[at].counts or Counts(0, 0, 0, 0)
    of.entries[at] = replace(of.entries[at], counts=replace(c, rows=c.rows + 1))
    return True


def recounted(of: Simulated, random: Random, **fields: Any) -> bool:
    """A range of which an event tells has other counts; numbers are added to the old ones."""
    events = [json.loads(of.lines[at]) for at in told(of, "range_committed")]
    known = {(x["partition"], x["range"][0], x["epoch"]) for x in events if not x["replayed"]}
    some = [
        at
        for at in own(of)
        if (one := of.entries[at]).counts
        and one.counts.rows
        and (one.partition.partition, one.start, one.epoch) in known
    ]
    if not some:
        return False
    at = random.choice(some)
    old: Any = of.entries[at].counts
    new = {k: getattr(old, k) + v if isinstance(v, int) else v for k, v in fields.items()}
    of.entries[at] = replace(of.entries[at], counts=replace(old, **new))
    return True


@mutation("ledger")
def a_reject_more_and_a_row_less(of: Simulated, random: Random) -> bool:
    return recounted(of, random, rejects=+1, rows=-1)


@mutation("ledger")
def a_filtered_record_more_and_a_row_less(of: Simulated, random: Random) -> bool:
    return recounted(of, random, filtered=+1, rows=-1)


@mutation("entry")
def digest_removed(of: Simulated, random: Random) -> bool:
    return recounted(of, random, digest=None)


@mutation("entry")
def recipe_removed(of: Simulated, random: Random) -> bool:
    return recounted(of, random, recipe="")


@mutation("entry")
def letters_added(of: Simulated, random: Random) -> bool:
    at = random.choice(own(of))
    c = of.entries[at].counts or Counts(0, 0, 0, 0)
    of.entries[at] = replace(of.entries[at], letters=c.rejects + 1)
    return True


@mutation("epoch", "entry", "fence", "ledger", "log", "partition")
def epoch_back(of: Simulated, random: Random) -> bool:
    """The newest range by an epoch that was fenced before it."""
    last = max(own(of), key=lambda at: of.entries[at].order)
    one = of.entries[last]
    if one.epoch < 2:
        return False
    of.entries[last] = replace(one, epoch=one.epoch - 1)
    return True


@mutation("entry")
def epoch_ahead(of: Simulated, random: Random) -> bool:
    at = random.choice(own(of))
    of.entries[at] = replace(of.entries[at], epoch=of.epoch + 1)
    return True


@mutation("position")
def position_back(of: Simulated, random: Random) -> bool:
    tp = of.entries[random.choice(own(of))].partition
    of.at[tp] -= 1
    return True


@mutation("position", "missing")
def position_forward(of: Simulated, random: Random) -> bool:
    tp = of.entries[random.choice(own(of))].partition
    of.at[tp] += random.randint(1, 50)
    return True


@mutation("epoch")
def position_of_an_epoch_of_another(of: Simulated, random: Random) -> bool:
    """The next epoch has taken one partition, and the position of another gets it."""
    one, other = sorted(of.at)[:2]
    worker = Run("another")
    of.tell(worker, "started", {"version": 1, "cut": 0})
    of.hear(worker, events.PartitionsChanged("assigned", frozenset({one})))
    of.take(worker, only=[one])
    of.held[other] = of.held[one]
    return True


@mutation("epoch")
def position_of_an_older_epoch(of: Simulated, random: Random) -> bool:
    tp = random.choice(sorted(of.at))
    of.held[tp] -= 1
    of.entries = [one for one in of.entries if one.epoch <= of.held[tp]]
    return True


@mutation("fence", "position")
def commit_after_the_fence(of: Simulated, random: Random) -> bool:
    """An older run commits behind the position at which a newer one has opened."""
    run, tp = of.runs[-1], random.choice(sorted(of.at))
    late = OffsetRange(of.at[tp], of.at[tp] + random.randint(1, 9))
    of.hear(run, events.BatchPlanned(run.batch, {tp: late}))
    of.open()
    of.entries.append(Entry(tp, late.start, late.end, run.epoch, letters=0))
    of.at[tp] = late.end
    of.hear(run, events.RangeCommitted(tp, late, 0, 0, 0, 0))
    return True


@mutation("partition", "log")
def commit_of_a_partition_that_was_not_taken(of: Simulated, random: Random) -> bool:
    at = random.choice(told(of, "range_committed"))
    change(of, at, topic="another")
    return True


@mutation("partition")
def plan_of_a_partition_that_was_not_taken(of: Simulated, random: Random) -> bool:
    at = random.choice(told(of, "planned"))
    ranges = json.loads(of.lines[at])["ranges"]
    change(of, at, ranges={**ranges, "another": {"0": [0, 5]}})
    return True


@mutation("partition")
def partition_vanished(of: Simulated, random: Random) -> bool:
    later = told(of, "opened")[1:]
    if not later or not json.loads(of.lines[later[-1]])["every_partition"]:
        return False
    positions = json.loads(of.lines[later[-1]])["positions"]["t"]
    positions.pop(random.choice(sorted(positions)))
    change(of, later[-1], positions={"t": positions})
    return True


@mutation("missing", "log", "position")
def commit_event_missing(of: Simulated, random: Random) -> bool:
    lines = [at for at in told(of, "range_committed") if '"gap"' not in of.lines[at]]
    if lines:
        del of.lines[random.choice(lines)]
    return bool(lines)


@mutation("missing", "log", "overlap", "position")
def plan_missing(of: Simulated, random: Random) -> bool:
    """The only plan of a batch that was committed; of a batch without effect none need be told."""

    def batch(at: int) -> tuple[str, int, int]:
        found = json.loads(of.lines[at])
        return found["run"], found["epoch"], found["batch"]

    plans = Counter(batch(at) for at in told(of, "planned"))
    ended = {batch(at) for at in told(of, "batch_committed")}
    one = [at for at in told(of, "planned") if plans[batch(at)] == 1 and batch(at) in ended]
    if not one:
        return False
    del of.lines[random.choice(one)]
    return True


@mutation("log", "missing", "position")
def end_of_a_batch_missing(of: Simulated, random: Random) -> bool:
    def epoch(at: int) -> tuple[str, int]:
        found = json.loads(of.lines[at])
        return found["run"], found["epoch"]

    plans, ends = told(of, "planned"), told(of, "batch_committed")
    followed = [at for at in ends if any(p > at and epoch(p) == epoch(at) for p in plans)]
    if not followed:
        return False
    del of.lines[random.choice(followed)]
    return True


@mutation("epoch")
def opening_missing(of: Simulated, random: Random) -> bool:
    last = told(of, "opened")[-1]
    if not told_batch_after(of, last):
        return False
    del of.lines[last]
    return True


@mutation("epoch", "log")
def epoch_of_an_event_changed(of: Simulated, random: Random) -> bool:
    at = random.choice(told(of, "range_committed"))
    change(of, at, epoch=json.loads(of.lines[at])["epoch"] + 1)
    return True


@mutation("epoch")
def epoch_given_out_twice(of: Simulated, random: Random) -> bool:
    at = told(of, "opened")[-1]
    other = json.loads(of.lines[at])
    of.lines.append(json.dumps({**other, "run": "other"}))
    return True


@mutation("log")
def event_of_another_pipeline(of: Simulated, random: Random) -> bool:
    foreign = line("2026-01-01T00:00:00Z", 1, "x", "draining", {}, "other")
    of.lines.insert(random.randint(0, len(of.lines)), foreign)
    return True


@mutation("log")
def line_cut_in_the_middle(of: Simulated, random: Random) -> bool:
    at = random.randint(0, len(of.lines) - 2)
    of.lines[at] = of.lines[at][: random.randint(1, len(of.lines[at]) - 1)]
    return True


@mutation("position", "missing", "overlap")
def opened_elsewhere(of: Simulated, random: Random) -> bool:
    """A run begins at another position than the one before has reached."""
    later = [at for at in told(of, "opened")[1:] if told_batch_after(of, at)]
    if not later:
        return False
    opened = json.loads(of.lines[later[-1]])
    tp = random.choice(sorted(opened["positions"]["t"]))
    opened["positions"]["t"][tp] += random.choice([-1, 1, 50])
    of.lines[later[-1]] = json.dumps(opened)
    return opened["positions"]["t"][tp] >= 0


def told_batch_after(of: Simulated, at: int) -> bool:
    run = json.loads(of.lines[at])["run"]
    return any(p > at and json.loads(of.lines[p])["run"] == run for p in told(of, "planned"))


@pytest.mark.parametrize("name", sorted(MUTATIONS))
@settings(max_examples=25)
@given(steps, randoms)
def test_a_mutated_history_is_broken(name: str, chosen: list[str], random: Random) -> None:
    do, rules = MUTATIONS[name]
    of = simulated([one for one in chosen if one not in LENIENT.get(name, ())], random)
    before = of.report()
    if not (own(of) and told(of, "range_committed")) or not do(of, random):
        return
    found = of.report()
    assert found.verdict == "broken", (name, before.as_json())
    assert {one.rule for one in found.broken} & rules, found.as_json()
    assert found.broken[0].text


LENIENT: dict[str, tuple[str, ...]] = {
    "range_dropped": ("nothing_opened",),  # a reset may have skipped it
    "range_shortened": ("nothing_opened",),
    "commit_event_missing": ("killed_threads",),  # a thread was killed before it told of its commit
}
"""Steps beside which a mutation is a history that is legal, too."""
