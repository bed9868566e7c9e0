"""JUnit XML of an audit: a parser accepts it, and CI servers count it correctly."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from oncely.audit.junit import junit
from tests.unit.audit import reports


def cases(text: str) -> dict[str, ET.Element]:
    root = ET.fromstring(text.encode("utf-8"))
    assert root.tag == "testsuites"
    (suite,) = root
    found = {case.get("name") or "": case for case in suite}
    assert suite.get("tests") == str(len(found)) == root.get("tests")
    for tag, count in (("failure", "failures"), ("error", "errors")):
        number = sum(case.find(tag) is not None for case in found.values())
        assert suite.get(count) == str(number) == root.get(count)
    assert all(case.get("classname") for case in found.values())
    return found


def test_clean() -> None:
    found = cases(junit(reports.clean()))
    assert list(found) == [
        "no record is lost", "no record is duplicated", "no record is altered",
        "no record is unexpected", "everything could be decided", "orders-0", "orders-1",
        "orders-2",
    ]  # fmt: skip
    assert not any(len(case) for case in found.values())


def test_damage_is_a_failure_of_its_kind_and_of_its_partition() -> None:
    found = cases(junit(reports.damaged()))
    failed = {name for name, case in found.items() if case.find("failure") is not None}
    assert failed == {
        "no record is lost", "no record is duplicated", "no record is altered",
        "no record is unexpected", "orders-0", "orders-1",
    }  # fmt: skip
    lost = found["no record is lost"].find("failure")
    assert lost is not None
    assert lost.get("message", "").startswith("603 lost")
    assert "orders-1 offset 17000: id 0: 1 record, no row" in (lost.text or "")
    assert "and 553 more" in (lost.text or "")
    assert found["orders-2"].find("error") is not None


def test_what_is_unknown_is_an_error_and_never_skipped() -> None:
    found = cases(junit(reports.unknown()))
    assert "<skipped" not in junit(reports.unknown())
    wrong = {name for name, case in found.items() if case.find("error") is not None}
    assert wrong == {"everything could be decided", "orders-0"}


@pytest.mark.parametrize("make", [reports.damaged, reports.unknown])
def test_any_id_is_valid_xml(make) -> None:
    text = junit(make())
    cases(text)
    assert "\\u202eevil\\u0000" in text
