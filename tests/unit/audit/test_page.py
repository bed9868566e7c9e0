"""The HTML page of an audit: complete, of one piece, and harmless whatever the ids are."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from oncely.audit.of_pipeline import with_records
from oncely.audit.page import page
from oncely.audit.report import (
    Finding,
    Hour,
    PartitionResult,
    Report,
    Undecided,
    redacted,
    verdict_sentence,
)
from oncely.config import load
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.secrets import Secrets
from tests.unit.audit import reports
from tests.webtools import pipeline_file

_VOID = {"meta", "br", "rect"}


class Parsed(HTMLParser):
    """A page's tags and texts; fails on tags that are not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID or (self.open and self.open[-1] == tag):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def parsed(report: Report) -> Parsed:
    text = page(report)
    text.encode("utf-8")  # no lone surrogates
    return Parsed(text)


ALL = (reports.clean, reports.damaged, reports.unknown)


@pytest.mark.parametrize("make", ALL)
def test_one_file_without_scripts_and_resources(make) -> None:
    found = parsed(make())
    assert not found.tags.keys() & {"script", "link", "img", "iframe", "object", "form", "base"}
    for tag, name, value in found.attributes:
        assert not name.startswith("on"), (tag, name)
        assert name not in ("src", "href", "action"), (tag, name)
        assert "//" not in (value or ""), (tag, name, value)
    style = page(make()).partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style


@pytest.mark.parametrize("make", ALL)
def test_every_text_of_others_is_harmless(make) -> None:
    hostile = reports.HOSTILE
    report = make()
    report = replace(
        report,
        pipeline=hostile,
        findings=[*report.findings, Finding(TopicPartition(hostile, 0), 1, "lost", hostile)],
        found=Counter(lost=1),
        undecided=[Undecided(TopicPartition(hostile, 1), OffsetRange(0, 1), hostile)],
        hours=[Hour(hostile, 2, 1, 1, 0, 0)],
        partitions=[replace(reports.partition(TopicPartition(hostile, 0)))],
    )
    found = parsed(report)
    assert "script" not in found.tags
    text = "".join(found.texts)
    assert "alert(1)" in text
    assert not re.search("[\u202e\x00\ud800\ufffe]", page(report))
    assert "\\u202eevil\\x00\\ud800\\ufffe" in text


def test_the_verdict_in_words() -> None:
    assert verdict_sentence(reports.clean()) == "All 118,800 records have arrived, each once"
    assert verdict_sentence(reports.damaged()) == (
        "Damage was found: 603 lost, 1 duplicated, 1 altered and 1 unexpected"
    )
    assert "not everything could be proved" in verdict_sentence(reports.unknown())
    one = replace(reports.clean(), records=1)
    assert verdict_sentence(one) == "The one record has arrived, once"
    counted = replace(reports.clean(), proof="counts")
    assert verdict_sentence(counted) == "All 118,800 records have arrived"
    assert verdict_sentence(replace(one, records=0)) == "There are no records to compare"
    for make in ALL:
        assert verdict_sentence(make()) in "".join(parsed(make()).texts)


def test_findings_hours_partitions_and_reasons_are_on_the_page() -> None:
    text = "".join(parsed(reports.damaged()).texts)
    for told in (
        "17000", "id 39: 1 record, no row", "31007", "orders-2 offsets 100 to 4,999",
        "records were deleted by retention", "Show 40 of 603", "1 range differed",
        "1,200 offsets not committed yet", "Groups with damage", "Complete until",
    ):  # fmt: skip
        assert told in text, told


def test_a_screen_reader_gets_the_pictures_in_words() -> None:
    found = parsed(reports.damaged())
    labels = [
        value for tag, name, value in found.attributes if (tag, name) == ("svg", "aria-label")
    ]
    assert "orders-1: damaged" in labels
    assert "orders-0: damaged" in labels
    assert "orders-2: undecided" in labels
    assert any("48 groups of ids; 5 groups with damage" in (one or "") for one in labels)
    regions = [v for t, n, v in found.attributes if (t, n) == ("div", "tabindex")]
    assert regions  # tables that scroll can be reached by keyboard


def test_much_damage_stays_a_small_page() -> None:
    many = [
        PartitionResult(
            TopicPartition("t", n), OffsetRange(0, 10**9), 10**9,
            1, [OffsetRange(i * 10, i * 10 + 5) for i in range(300)], 10**9, 0, 0,
        )
        for n in range(520)
    ]  # fmt: skip
    findings = [Finding(TopicPartition("t", 519), n * 3, "lost", "x" * 900) for n in range(5_000)]
    groups = [Hour(f"{n:06}", 10, 9, 1, 0, 0) for n in range(9_000)]
    report = replace(
        reports.damaged(), partitions=many, findings=findings, hours=groups,
        found=Counter(lost=10**7),
    )  # fmt: skip
    found = parsed(report)
    assert found.tags["tr"] < 2_000
    text = "".join(found.texts)
    assert "Show 500 of 10,000,000" in text
    assert "8,500 more are not listed" in text
    assert "t-519" in text  # partitions with damage come first
    assert "9,000 groups of ids" in page(report)


def test_secrets_are_redacted() -> None:
    secret = "s3cr&t<pw>"
    report = replace(
        reports.unknown(),
        pipeline=f"kafka and {secret}",
        findings=[Finding(None, None, "lost", f"id {secret}")],
        undecided=[Undecided(None, None, f"no answer: {secret}")],
        hours=[Hour(secret, 1, 0, 1, 0, 0)],
    )
    shown = redacted(report, Secrets.of([secret]).redact)
    assert "s3cr" not in page(shown)
    assert "s3cr" in page(report)


class Topics:
    """A log that has two of the records; it is asked for no others."""

    asked: ClassVar[list[tuple[TopicPartition, list[int]]]] = []

    def messages(self, tp: TopicPartition, offsets: Sequence[int]) -> Mapping[int, Any]:
        self.asked.append((tp, list(offsets)))
        records = {17_000: (b"k-1", b'{"pw": "s3cr&t<pw>"}'), 17_001: (None, b"\xff" + b"x" * 900)}
        return {
            at: SimpleNamespace(key=lambda one=one: one[0], value=lambda one=one: one[1])
            for at, one in records.items()
        }


def test_a_finding_names_its_record_and_the_command_that_repairs_it(tmp_path: Path) -> None:
    beyond = Finding(reports.P1, 41_200, "unexpected", "beyond the end")
    settings = load(pipeline_file(tmp_path))
    report = replace(reports.damaged(), findings=[*reports.damaged().findings[:2], beyond])
    shown = with_records(report, settings, Topics())  # type: ignore[arg-type]
    assert Topics.asked == [(reports.P1, [17_000, 17_001])]
    text = page(redacted(shown, Secrets.of(["s3cr&t<pw>"]).redact), "my pipelines/<b>.toml")
    assert "in <strong><bdi>sql rows</bdi></strong>" in text
    assert "<td><bdi>k-1</bdi></td><td><bdi>{&quot;pw&quot;: &quot;***&quot;}</bdi></td>" in text
    base64 = "/3h4eHh4"
    assert f"<td>null</td><td><bdi>base64: {base64}" in text
    assert max(len(one) for one in re.findall(r"base64: [\w+/=]*", text)) < 200
    assert "<td><bdi>beyond the end</bdi></td><td>–</td><td>–</td>" in text
    command = "oncely repair <bdi>&#x27;my pipelines/&lt;b&gt;.toml&#x27;</bdi>"
    assert f"<code>{command}</code>" in text
    Parsed(text)

    no_damage = replace(reports.unknown(), destination="sql rows")
    for other in (reports.damaged(), no_damage):  # two datasets, and nothing to repair
        assert "oncely repair" not in page(other, "p.toml")
