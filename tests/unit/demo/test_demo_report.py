"""The report: judged without mercy, one page that needs nothing but itself."""

from __future__ import annotations

import copy
import html
import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from demo import audit, lake, report
from demo.faults import KINDS, Fault
from demo.page import page

WORDS = {kind: words for kind, (words, _) in KINDS.items()}
OF_FILES = {kind: words for kind, (words, _, _) in lake.KINDS.items()}


def run(**change: Any) -> dict[str, Any]:
    seen = {"application": "oncely/x/1", "statement": "COPY", "state": "active", "open_ms": 20.5}
    faults = [
        Fault(10.0 + 5 * number, kind, f"<target {number}>", True, seen).shown()
        for number, kind in enumerate(KINDS)
    ]
    told = {
        **{"records": 1005, "good": 1000, "rows": 1000, "rejects": 5},
        **{"lost": 0, "duplicated": 0, "changed": 0, "unexpected": 0, "examples": []},
        **{"faults": faults, "restarts": [], "run_seconds": 60.0},
        "samples": [[0.0, 0, 0, 0], [20.0, 500, 490, 490], [60.0, 1010, 1000, 1000]],
    }
    return {**told, **change}


def into_files(**change: Any) -> dict[str, Any]:
    faults = [
        lake.Fault(20.0, kind, "<pid 7>", frozenset("abc"), 5 * (phase == "publishing"), 2).shown()
        for kind, (_, phase, _) in lake.KINDS.items()
    ]
    told = {
        **{"records": 505, "manifest_rows": 500, "rows": 500, "rejects": 5},
        **{"lost": 0, "duplicated": 0, "changed": 0, "unexpected": 0, "broken_files": 0},
        **{"files": 250, "schemas": 16, "examples": [], "missing": 0},
        **{"orphans_before_vacuum": 6, "orphans_after": 0, "pipeline_code_imported": False},
        "verify": {"ok": True, "files": 250, "rows": 500, "unnamed": 6},
        "vacuum": {"removed": 6, "bytes": 6000, "young": 0, "live": 250},
        **{"waited_seconds": 0.0, "start": "2026-01-01T00:00:00+00:00", "faults": faults},
        **{"restarts": [], "run_seconds": 40.0},
    }
    return {**told, **change}


def audited(**change: Any) -> dict[str, Any]:
    done = sorted(
        ([one.finding, number % 4, 7 + number] for one in audit.STEPS for number in one.ids),
        key=str,
    )
    counts = {"lost": 0, "duplicated": 0, "altered": 0, "unexpected": 0}
    clean = {"verdict": "clean", "records": 1005, "accounted": 1005, "holes": 4, "found": counts}
    clean |= {"findings": [], "seconds": 0.5}
    damaged = clean | {"verdict": "damaged", "accounted": 1002, "findings": done, "exit_code": 1}
    damaged["found"] = {**counts, **{one.finding: len(one.ids) for one in audit.STEPS}}
    told = {"clean": clean, "damaged": damaged, "repaired": dict(clean), "done": done}
    told |= {"page": "/build/demo/audit.html", "seconds": 9.0}
    for path, value in change.items():
        name, _, key = path.partition("__")
        told[name] = told[name] | {key: value} if key else value
    return told


@pytest.fixture
def found() -> dict[str, Any]:
    damaged = run(
        rows=1100,
        rejects=0,
        duplicated=100,
        samples=[[0.0, 0, 0, 0], [20.0, 500, 590, 490], [55.0, 1010, 1100, 1000]],
    )
    published = {"flights": 1000, "broken": 5, "transactions": 2, "aborted": 7, "offsets": 1010}
    told = {"oncely": run(), "control": damaged, "files": into_files(), "published": published}
    return {**told, "audit": audited(), "seconds": 130.0, "problems": []}


def judged(found: dict[str, Any], imported: bool = False) -> list[str]:
    return report.judge(found, {"pipeline_code_imported": imported})


def test_what_came_out_well_has_no_problems(found):
    assert judged(found) == []


@pytest.mark.parametrize("name", ["lost", "duplicated", "changed", "unexpected"])
def test_any_damage_to_ours_is_a_problem(found, name):
    found["oncely"][name] = 1
    assert any(name in problem for problem in judged(found))


def test_rows_and_rejects_must_make_the_records(found):
    found["oncely"]["rejects"] = 4
    assert judged(found)


def test_rows_must_agree_with_positions_at_every_look(found):
    found["oncely"]["samples"][1][2] += 1
    assert any("at 1 looks" in problem for problem in judged(found))


def test_the_reader_must_have_read_all_and_be_alone(found):
    assert judged(found, imported=True)
    found["published"]["flights"] += 1
    assert judged(found)


@pytest.mark.parametrize("name", ["oncely", "control"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_fault_must_have_hit_an_open_transaction(found, name, kind):
    missing = copy.deepcopy(found)
    faults = missing[name]["faults"]
    missing[name]["faults"] = [fault for fault in faults if fault["kind"] != kind]
    assert any(WORDS[kind] in problem for problem in judged(missing))
    into = found[name]["faults"]
    next(fault for fault in into if fault["kind"] == kind)["open_transaction"] = False
    assert any(WORDS[kind] in problem for problem in judged(found))


def test_a_control_without_damage_is_a_problem(found):
    found["control"]["duplicated"] = 0
    assert any("no damage" in problem for problem in judged(found))


@pytest.mark.parametrize(
    "change",
    [
        *({name: 1} for name in ("lost", "duplicated", "changed", "unexpected", "broken_files")),
        *({"rejects": 4}, {"manifest_rows": 501}, {"missing": 1}, {"pipeline_code_imported": True}),
        *({"orphans_after": 1}, {"files": 251}),
        {"verify": {"ok": False, "files": 250, "rows": 500, "unnamed": 6}},
        {"vacuum": {"removed": 5, "bytes": 1, "young": 1, "live": 250}},
        {"records": 0, "rows": 0, "rejects": 0, "manifest_rows": 0},
    ],
)
def test_any_damage_to_files_is_a_problem(found, change):
    found["files"] = into_files(**change)
    assert any(problem.startswith("files: ") for problem in judged(found))


def test_kills_that_have_left_no_orphan_are_a_problem(found):
    vacuum = {"removed": 0, "bytes": 0, "young": 0, "live": 250}
    found["files"] = into_files(orphans_before_vacuum=0, vacuum=vacuum)
    assert any("no orphan" in problem for problem in judged(found))


@pytest.mark.parametrize("kind", lake.KINDS)
@pytest.mark.parametrize("change", [{"target": ""}, {"orphaned": 0}, {"kind": "another"}])
def test_each_kill_of_the_files_pipeline_must_have_left_something(found, kind, change):
    fault = next(one for one in found["files"]["faults"] if one["kind"] == kind)
    fault.update(change)
    assert any(OF_FILES[kind] in problem for problem in judged(found))
    assert "not fired" in page(found, WORDS, OF_FILES) or "kind" not in change


def test_the_kill_while_publishing_must_have_met_an_open_transaction(found):
    found["files"]["faults"][-1]["open_messages"] = 0
    assert any("open transaction" in problem for problem in judged(found))


@pytest.mark.parametrize(
    "change",
    [
        *({f"{name}__verdict": "unknown"} for name in ("clean", "damaged", "repaired")),
        *({f"{name}__records": 1004} for name in ("clean", "repaired")),
        *({f"{name}__accounted": 1004} for name in ("clean", "repaired")),
        {"damaged__exit_code": 0},
        {"damaged__findings": audited()["done"][1:]},
        {"damaged__findings": [["lost", 0, 1], *audited()["done"][1:]]},
        {"damaged__found": audited()["damaged"]["found"] | {"unexpected": 1}},
        {"done": audited()["done"][1:], "damaged__findings": audited()["done"][1:]},
    ],
)
def test_an_audit_that_names_anything_but_the_damage_is_a_problem(found, change):
    found["audit"] = audited(**change)
    assert any(problem.startswith("audit: ") for problem in judged(found))


def test_each_damage_is_on_the_page_with_its_statement_and_its_places(found):
    text = page(found, WORDS, OF_FILES)
    for step in audit.STEPS:
        assert html.escape(step.shown) in text
        assert "%s" not in step.shown
    for _, partition, offset in found["audit"]["done"]:
        assert f"partition {partition} offset {offset}" in text
    assert "audit.html" in text


class Page(HTMLParser):
    """Tags as they come; every one that is opened is closed."""

    VOID = ("meta", "br", "line", "circle")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(found):
    text = page(found, WORDS, OF_FILES)
    read = Page(text)
    assert read.open == []
    loading = {"script", "link", "img", "iframe", "object", "embed", "image", "use"}
    assert not loading & {tag for tag, _ in read.tags}
    assert not any({"src", "href"} & attributes.keys() for _, attributes in read.tags)
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text


def test_the_picture_marks_every_fault_of_both_with_its_number(found):
    svg = re.search(r"<svg.*</svg>", page(found, WORDS, OF_FILES), re.DOTALL)
    picture = ElementTree.fromstring(svg.group())
    name = "{http://www.w3.org/2000/svg}text"
    marks = [text.text for text in picture.iter(name) if text.get("class") == "dot-ink"]
    assert marks == [str(number) for number in range(1, len(KINDS) + 1)] * 2
    paths = [path.get("class") for path in picture.iter("{http://www.w3.org/2000/svg}path")]
    assert paths.count("offsets") == paths.count("ahead") == 2


def test_marks_of_faults_at_one_time_do_not_cover_each_other(found):
    for fault in found["oncely"]["faults"]:
        fault["at"] = 30.0
    svg = re.search(r"<svg.*</svg>", page(found, WORDS, OF_FILES), re.DOTALL).group()
    places = [float(x) for x in re.findall(r'<circle class="dot" cx="([\d.]+)"', svg)][: len(KINDS)]
    assert all(b - a >= 18 for a, b in pairwise(places))


def test_what_is_wrong_stands_on_the_page_escaped(found):
    found["problems"] = ["oncely: <b>1</b> lost"]
    text = page(found, WORDS, OF_FILES)
    assert "&lt;b&gt;1&lt;/b&gt; lost" in text
    assert "<b>" not in text


def test_a_fault_that_was_not_fired_is_said_to_be_missing(found):
    found["oncely"]["faults"].pop()
    assert "not fired" in page(found, WORDS, OF_FILES)


def test_both_files_are_written_and_the_table_is_shown(found, tmp_path):
    report.write(found, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text()) == found
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    console = Console(record=True, width=120)
    report.show(found, console, tmp_path)
    shown = console.export_text()
    words = ("records", "rows", "rejects", "lost", "duplicated", "1,100", "orphans", "manifest")
    words = (*words, "after the damage", "altered", "/build/demo/audit.html")
    for word in words:
        assert word in shown
