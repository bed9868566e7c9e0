"""A report as JUnit XML, for CI servers."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence

from oncely.audit.report import KINDS, Finding, Report, Undecided
from oncely.audit.wording import MEANINGS, plural, visible
from oncely.core.topics import TopicPartition

_LINES = 50
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(report: Report) -> str:
    """The report as XML: a test case for each kind of damage and for each topic-partition.

    Damage is a failure. What could not be decided is an error, and never a skipped test, which CI
    servers count as success.
    """
    name = f"oncely audit {visible(report.pipeline)}"
    cases = [*_kinds(report), *_partitions(report)]
    counts = {
        "tests": str(len(cases)),
        "failures": str(sum(one.find("failure") is not None for one in cases)),
        "errors": str(sum(one.find("error") is not None for one in cases)),
        "time": f"{report.seconds:.3f}",
    }
    root = ET.Element("testsuites", {"name": name, **counts})
    when = report.at.replace(microsecond=0, tzinfo=None).isoformat()
    own = {"name": name, "timestamp": when, "skipped": "0", **counts}
    suite = ET.SubElement(root, "testsuite", own)
    for case in cases:
        case.set("classname", name)
        case.set("time", "0")
        suite.append(case)
    ET.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def _kinds(report: Report) -> list[ET.Element]:
    """One case for each kind of damage, and one for what belongs to no partition."""
    cases = []
    for kind in KINDS:
        case = _case(f"no record is {kind}")
        if number := report.found.get(kind, 0):
            found = [one for one in report.findings if one.kind == kind]
            _fail(case, f"{number:,} {kind}. {MEANINGS[kind]}", _lines(found, number))
        cases.append(case)
    everywhere = _case("everything could be decided")
    if open_ := [one for one in report.undecided if one.partition is None]:
        _error(everywhere, open_)
    return [*cases, everywhere]


def _partitions(report: Report) -> list[ET.Element]:
    named: dict[TopicPartition, None] = dict.fromkeys(one.partition for one in report.partitions)
    others = [one.partition for one in report.findings]
    others += [one.partition for one in report.undecided]
    named |= dict.fromkeys(one for one in others if one is not None)
    cases = []
    for partition in named:
        case = _case(str(partition))
        found = [one for one in report.findings if one.partition == partition]
        if found:
            _fail(case, f"{plural(len(found), 'finding')} in {partition}", _lines(found))
        if open_ := [one for one in report.undecided if one.partition == partition]:
            _error(case, open_)
        cases.append(case)
    return cases


def _case(name: str) -> ET.Element:
    return ET.Element("testcase", name=_xml(name))


def _fail(case: ET.Element, message: str, lines: str) -> None:
    ET.SubElement(case, "failure", message=_xml(message), type="damaged").text = _xml(lines)


def _error(case: ET.Element, open_: Sequence[Undecided]) -> None:
    lines = [
        f"offsets {one.range.start} to {one.range.end - 1}: {visible(one.reason)}"
        if one.range
        else visible(one.reason)
        for one in open_[:_LINES]
    ]
    text = "\n".join([*lines, *_more(len(open_))])
    ET.SubElement(case, "error", message=_xml(lines[0]), type="unknown").text = _xml(text)


def _lines(found: Sequence[Finding], number: int | None = None) -> str:
    lines = []
    for one in found[:_LINES]:
        where = f"{one.partition} offset {one.offset}" if one.partition else ""
        parts = [one.kind, where, visible(one.detail)]
        lines.append(": ".join(filter(None, parts)))
    return "\n".join([*lines, *_more(len(found) if number is None else number)])


def _more(number: int) -> list[str]:
    return [f"and {number - _LINES:,} more"] if number > _LINES else []


def _xml(text: str) -> str:
    """The text without characters that XML 1.0 does not allow."""
    return _NOT_XML.sub("\ufffd", text)
