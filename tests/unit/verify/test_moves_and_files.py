"""Ledgers that are a log of moves (topics, Delta tables), and the files of a table."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from oncely.core import events
from oncely.core.claim import Counts
from oncely.core.ranges import TopicPartition
from oncely.verify.check import check
from oncely.verify.reading import DATA, RESET, TAKEN, Entry, Files, Held, Ledger, NamedFile
from oncely.verify.report import Report
from tests.verifytools import Run, Simulated, log_of

T0 = TopicPartition("t", 0)
TEN = Counts(10, 10, 0, 0)


def taken(at: int, epoch: int) -> Entry:
    return Entry(T0, at, at, epoch, TAKEN)


def data(start: int, epoch: int) -> Entry:
    return Entry(T0, start, start + 10, epoch, DATA, TEN)


STEPS = [
    taken(0, 1), data(0, 1), data(10, 1), taken(20, 2), data(20, 2),
    taken(30, 3), taken(15, 4), data(15, 4), data(25, 4),
]  # fmt: skip
"""Two runs, a reset of epochs 3 and 4 to offset 15, which then runs on."""
LEDGER = Ledger(
    "p", 4, {T0: Held(35, 4)}, STEPS, moves=True, complete=True, resets={T0: {3: 15}}
)  # fmt: skip


def rules(found: Report) -> list[str]:
    return [one.rule for one in found.broken]


def test_a_log_of_moves_holds() -> None:
    assert check(LEDGER).verdict == "holds"


def test_the_oldest_moves_may_be_missing_which_is_unknown() -> None:
    for dropped in range(2, len(STEPS)):
        found = check(replace(LEDGER, history=STEPS[dropped:], complete=False))
        assert found.verdict == "unknown"
        assert "no longer contains" in found.unknown[0].text
        assert "if there were any" in found.unknown[0].text


@pytest.mark.parametrize("at", range(1, len(STEPS) - 1))
def test_a_move_that_is_missing_between_others(at: int) -> None:
    left = [*STEPS[:at], *STEPS[at + 1 :]]
    found = check(replace(LEDGER, history=left))
    if STEPS[at].kind == TAKEN and STEPS[at + 1].kind == TAKEN:
        assert found.verdict == "holds"  # another takeover has followed it
        return
    assert rules(found)[0] in ("missing", "epoch", "position")
    some = check(replace(LEDGER, history=left, complete=False))
    assert some.verdict != "holds"


def test_a_reset_that_is_not_stored() -> None:
    found = check(replace(LEDGER, resets={}))
    assert rules(found) == ["position"]
    assert "went back from 30 to 15" in found.broken[0].text
    marked = [replace(one, kind=RESET) if one == taken(15, 4) else one for one in STEPS]
    assert check(replace(LEDGER, history=marked, resets={})).verdict == "holds"


@pytest.mark.parametrize(
    ("entry", "rule"),
    [
        (data(30, 3), "epoch"),  # of a run that was fenced
        (data(30, 4), "overlap"),
        (data(40, 4), "missing"),
        (data(35, 5), "entry"),  # an epoch that nobody has
        (Entry(T0, 35, 30, 4), "entry"),
        (Entry(T0, 35, 45, 4, DATA, Counts(11, 11, 0, 0)), "entry"),
        (Entry(T0, 35, 45, 4, "odd", TEN), "entry"),
    ],
)
def test_a_move_that_does_not_follow(entry: Entry, rule: str) -> None:
    held = Held(max(entry.end, 0), 4)
    found = check(replace(LEDGER, history=[*STEPS, entry], positions={T0: held}))
    assert rule in rules(found)


@pytest.mark.parametrize("held", [Held(34, 4), Held(36, 4), Held(35, 5)])
def test_a_position_that_no_move_has_led_to(held: Held) -> None:
    assert rules(check(replace(LEDGER, epoch=5, positions={T0: held}))) == ["position"]


def test_a_commit_by_an_epoch_that_took_nothing() -> None:
    found = check(
        replace(LEDGER, epoch=5, history=[*STEPS, data(35, 5)], positions={T0: Held(45, 5)})
    )
    assert rules(found) == ["epoch"]


@pytest.mark.parametrize(
    ("first", "verdict"), [(taken(0, 1), "holds"), (taken(0, 4), "holds"), (taken(500, 1), "holds"),
                           (taken(500, 2), "unknown"), (data(0, 1), "holds")],
)  # fmt: skip
def test_the_first_move_of_a_new_pipeline(first: Entry, verdict: str) -> None:
    """Before an offset 0 or an epoch 1 there is none."""
    held = {T0: Held(first.end, first.epoch)}
    found = check(Ledger("p", 4, held, [first], moves=True, complete=False))
    assert found.verdict == verdict, found.as_json()


def test_after_a_reset_to_the_first_offset_earlier_moves_are_unknown() -> None:
    of = Ledger("p", 4, {T0: Held(0, 4)}, [taken(0, 4)], moves=True, complete=False)
    assert check(replace(of, resets={T0: {3: 0}})).verdict == "unknown"


@pytest.mark.parametrize("told", [True, False])
def test_of_members_that_start_together_another_may_have_registered_the_pipeline(
    *, told: bool
) -> None:
    """Its event has the first start, and the event of the one that takes a partition begins it."""
    of = Simulated(Random(1))
    registrar, other, member = Run("registrar"), Run("other"), Run("member")
    for epoch, run in enumerate((registrar, other, member), 1):
        of.tell(run, "started", {"version": 1, "cut": 0})
        run.epoch = epoch
        first = run is registrar
        if run is not member:
            of.hear(run, events.PipelineOpened("p", epoch, {}, first, every=False))
    of.hear(member, events.PartitionsChanged("assigned", frozenset({T0})))
    begun = frozenset({T0}) if told else frozenset()
    opened = events.PipelineOpened("p", 3, {T0: 500}, False, every=False, begun=begun)
    of.hear(member, opened)
    moves = [taken(500, 3)]
    ledger = Ledger("p", 3, {T0: Held(500, 3)}, moves, moves=True, complete=False)
    assert check(ledger, log_of(of.lines)).verdict == ("holds" if told else "unknown")


# -- files -----------------------------------------------------------------------------------------


def named(path: str, start: int, end: int, *, epoch: int = 4, batch: int = 0) -> NamedFile:
    return NamedFile(path, 100, {T0: (start, end)}, epoch, batch, batched=True)


FILES = Files(
    [named("a", 15, 25), named("b", 15, 25), named("c", 25, 35, batch=1),
     named("old", 20, 90, epoch=2)],
    {"a": 100, "b": 100, "c": 100, "old": 100, "orphan": 7},
)  # fmt: skip


def with_files(files: Files) -> Report:
    return check(replace(LEDGER, files=files))


def test_files_hold_and_orphans_are_counted() -> None:
    found = with_files(FILES)
    assert found.verdict == "holds", found.as_json()
    assert (found.checked["files"], found.checked["orphans"]) == (4, 1)


def test_a_file_that_is_not_stored() -> None:
    stored = {path: size for path, size in FILES.stored.items() if path != "b"}
    assert rules(with_files(replace(FILES, stored=stored))) == ["file"]


def test_a_file_of_another_size() -> None:
    assert rules(with_files(replace(FILES, stored={**FILES.stored, "b": 99}))) == ["file"]


def test_a_file_that_is_named_twice() -> None:
    assert rules(with_files(replace(FILES, again=["a"]))) == ["file"]


@pytest.mark.parametrize("end", [36, 90])
def test_a_file_of_a_batch_beyond_the_position(end: int) -> None:
    beyond = replace(FILES, named=[*FILES.named, named("a", 35, end, batch=2)])
    assert rules(with_files(beyond)) == ["file"]


def test_a_file_of_an_epoch_that_was_never_given_out() -> None:
    assert "file" in rules(with_files(replace(FILES, named=[named("a", 0, 5, epoch=9)])))


def test_offsets_that_two_batches_have_published() -> None:
    twice = replace(FILES, named=[*FILES.named, named("b", 20, 30, batch=2)])
    assert rules(with_files(twice)) == ["overlap"]


def test_dead_letters_that_were_replayed_are_no_batch() -> None:
    replayed = replace(named("a", 15, 35, batch=-1), batched=False)
    assert with_files(replace(FILES, named=[*FILES.named, replayed])).verdict == "holds"
