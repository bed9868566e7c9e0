"""The truth test's judgement: what an audit does not name is missed, what it adds is invented."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from oncely.audit import Report
from oncely.audit.report import Finding, Undecided
from tests.unit.audit import reports
from tests.unit.audit.reports import P0, P1
from truth.damage import Damage, Tally


def report(*findings: Finding, undecided: tuple[Undecided, ...] = (), limits: str = "") -> Report:
    found: Counter = Counter(one.kind for one in findings)
    return replace(
        reports.clean(), findings=findings, found=found, undecided=undecided, limits=[limits]
    )


def judged(damages: list[Damage], given: Report) -> Tally:
    tally = Tally()
    tally.compare("sql", damages, given)
    return tally


LOST, ALTERED = Finding(P0, 3, "lost"), Finding(P1, 4, "altered")


def test_each_record_of_a_damage_must_be_named() -> None:
    damage = Damage.at("range removed", [(0, 3), (0, 5)], "lost")
    assert judged([damage], report(LOST, Finding(P0, 5, "lost"))).is_right
    assert judged([damage], report(LOST)).missed == [damage]


def test_a_damage_that_is_named_as_another_kind_is_missed_and_invented() -> None:
    damage = Damage.at("row removed", [(1, 4)], "lost")
    tally = judged([damage], report(ALTERED))
    assert (tally.missed, len(tally.invented)) == ([damage], 1)


def test_what_nobody_has_damaged_is_invented() -> None:
    assert len(judged([], report(LOST)).invented) == 2  # the finding, and the verdict
    tally = judged([Damage.at("row removed", [(0, 3)], "lost")], report(LOST, ALTERED))
    assert (tally.missed, len(tally.invented)) == ([], 1)


def test_an_undamaged_destination_must_be_clean() -> None:
    assert judged([], report()).is_right
    assert judged([Damage.harmless("VACUUM")], report()).is_right
    doubt = report(undecided=(Undecided(P0, None, "no digest"),))
    assert judged([], doubt).invented == ["sql: verdict unknown of no damage"]


def test_a_topic_that_was_made_again_must_be_told_for_each_partition() -> None:
    damage = Damage.unknown("made again", "was made again", [0, 1])
    told = tuple(Undecided(tp, None, "the topic was made again") for tp in (P0, P1))
    assert judged([damage], report(undecided=told)).is_right
    assert judged([damage], report(undecided=told[:1])).missed == [damage]


def test_a_note_must_be_in_the_report() -> None:
    damage = Damage.noted("other bytes", "f.avro: its SHA-256")
    assert judged([damage], report(limits="f.avro: its SHA-256 is another one")).is_right
    assert judged([damage], report(limits="g.avro: its SHA-256")).missed == [damage]


def test_an_audit_that_ends_with_an_error_has_missed_everything() -> None:
    tally, damage = Tally(), Damage.at("row removed", [(0, 3)], "lost")
    tally.failed("sql", [damage], OSError("no such file"))
    assert (tally.thrown_at("sql"), tally.missed) == (1, [damage])
