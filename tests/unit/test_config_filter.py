"""``[filter]`` of the pipeline file."""

from __future__ import annotations

from typing import Any

import pytest

from oncely.config import FilterSettings, parse
from oncely.config.source import Rate
from oncely.errors import ConfigError
from tests.configtools import SQL

MINIMAL = {
    "name": "p",
    "source": {"brokers": "h:1", "topics": ["t"]},
    "decode": {"format": "raw"},
    "sink": SQL,
}


def parsed(**given: Any) -> FilterSettings:
    return parse({**MINIMAL, "filter": given}).filter


def test_values() -> None:
    assert parse(MINIMAL).filter == FilterSettings()
    assert not parse(MINIMAL).filter.drops
    given = parsed(drop="a", expire="1 hour", delay="2 minutes", throttle="1_000 per 10 seconds")
    assert (given.drop, given.expire, given.delay) == ("a", 3600, 120)
    assert given.throttle == Rate(1_000, 10)
    assert str(given.throttle) == "1000 in 10 seconds"
    assert parsed(expire="1 second").drops
    assert [parsed().waits, parsed(delay="1 s").waits, given.waits] == [None, "delay", "delay"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("drop", " "),
        ("drop", 3),
        ("expire", "0 seconds"),
        ("delay", "soon"),
        ("throttle", "many in 1 second"),
        ("throttle", "0 in 1 second"),
        ("throttle", "5 in 0 seconds"),
        ("throttle", 5),
        ("dorp", "a"),
    ],
)
def test_what_is_wrong_is_named(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"filter\.{key}"):
        parsed(**{key: value})


def test_a_spark_transform_drops_rows_by_itself() -> None:
    with pytest.raises(ConfigError, match="filter: drops records before"):
        parse({**MINIMAL, "filter": {"drop": "a"}, "transform": {"spark": "m:f"}})
