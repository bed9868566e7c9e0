"""What a repair has removed is put back by the statement of docs/repair.md, whatever its type."""

from __future__ import annotations

import pytest

from tests.conftest import repository
from tests.contracts.test_sink_rewrite import damage, made, repaired
from tests.sinktools import Place, at_t0, commit_all, ready, sink_to

VALUES = {
    "int4range": "'[1,5)'",
    "numrange": "'empty'",
    "tstzrange": "'[2020-01-01 00:00:00+00,infinity)'",
    "datemultirange": "'{[-infinity,2020-01-01),[2021-01-01,)}'",
    "timestamp[]": "'{infinity,-infinity,NULL,2020-01-01 00:00:00.5}'",
    "date[]": "'{{infinity,0044-03-15 BC},{2020-01-01,5000000-01-01}}'",
    "time": "'24:00'",
    "timetz": "'24:00:00+15:59'",
    "timestamptz": "'-infinity'",
    "timestamp": "'0044-03-15 01:02:03.456789 BC'",
    "date": "'5000000-01-01'",
    "interval": "'-1 year +3 days -04:05:06.7'",
    "interval[]": "'{178000000 years,1 us}'",
    "int[]": "'[0:1]={1,NULL}'",
    "text[]": '\'{NULL,"NULL","a, b","\\"\\\\"}\'',
    "bytea[]": "'{\"\\\\x00ff\"}'",
    "jsonb": '\'{"a": [1.00000000000000000000000000001, "5", null]}\'',
    "json": '\'{"a": 1e400, "a": 2, "b": {}}\'',
    "json[]": '\'{"{\\"a\\": null}",null}\'',
    "numeric": "'1.00000000000000000000000000000000010'",
    "numeric[]": "'{NaN,Infinity}'",
    "float8": "'-Infinity'",
    "real": "0.1",
    "bigint": "9223372036854775807",
    "boolean": "false",
    "bytea": "'\\x00ff'",
    "bit varying": "B'0101'",
    "char(4)": "'a '",
    "text": "E'[1] {} \\\\ \"%s %%\" \\u2028\\n'",
    "uuid": "'6b0f6a3e-0000-4000-8000-000000000000'",
    "inet": "'10.0.0.1/8'",
    "point": "'(0.1,-2)'",
    "tsvector": "'a:1A b'",
    "mood": "'so \"so\"'",
    "mood[]": '\'{"so \\"so\\""}\'',
    "pair": '\'("[1,2)","{infinity}")\'',
    "pair ": "'(,)'",  # IS NULL, and another value
    "pair[]": "'{\"(,)\",NULL}'",
    "settings": '\'{"a": "1"}\'',
    "days": "'[2020-01-01,infinity)'",
}


def test_a_value_of_each_type_of_postgres(on_postgres: Place) -> None:
    place = on_postgres
    for statement in (
        "CREATE TYPE mood AS ENUM ('so \"so\"')",
        "CREATE TYPE pair AS (ints int4range, dates date[])",
        "CREATE DOMAIN settings AS jsonb",
        "CREATE DOMAIN days AS daterange",
    ):
        place.sql(statement)
    names = [f'"%{number} ""{kind}"' for number, kind in enumerate(VALUES)]
    columns = ", ".join(f"{n} {kind}" for n, kind in zip(names, VALUES, strict=True))
    place.sql(
        "CREATE TABLE rows (id bigint, name text, kafka_topic text, kafka_partition int,"
        f" kafka_offset bigint, {columns})"
    )
    bound, fence = ready(sink_to(place, keep_source=True))
    commit_all(bound, at_t0(0, [made(one) for one in range(10)]), fence)
    for offset, values in ((10, VALUES.values()), (11, ["NULL"] * len(VALUES))):
        place.sql(f"INSERT INTO rows VALUES (0, 'x', 't', 0, {offset}, {', '.join(values)})")
    looked = f"SELECT {', '.join(f'CAST({one} AS text)' for one in names)} FROM rows"
    looked += " WHERE kafka_offset >= 10 ORDER BY kafka_offset"
    before = place.sql(looked)
    assert len(before) == 2
    assert repaired(bound, damage(10, 11, surplus=(10, 11))).removed_rows == 2
    assert place.sql(looked) == []
    place.sql(put_back(*place.sql("SELECT DISTINCT repair FROM oncely_removed")[0]))
    after = place.sql(looked)
    for kind, was, is_ in zip(VALUES, before[0], after[0], strict=True):
        assert (kind, is_) == (kind, was)
    assert after[1] == before[1] == (None,) * len(VALUES)


def put_back(repair: str) -> str:
    """The statement of the documentation, for a table of these tests."""
    page = (repository() / "docs" / "repair.md").read_text()
    (given,) = [one for one in page.split("```") if "json_populate_record" in one]
    return given.removeprefix("sql").replace("flights", "rows").replace("'…'", f"'{repair}'")


def test_dead_letters_are_put_back(on_postgres: Place) -> None:
    place = on_postgres
    bound, fence = ready(sink_to(place, keep_source=True))
    commit_all(bound, at_t0(0, [made(one) for one in range(10)]), fence)
    place.sql("UPDATE oncely_rejects SET \"offset\" = 10, key = '\\x00ff'")
    before = place.sql("SELECT CAST(oncely_rejects AS text) FROM oncely_rejects")
    repaired(bound, damage(10, surplus=(10,)))
    assert place.sql("SELECT * FROM oncely_rejects") == []
    ((repair,),) = place.sql("SELECT DISTINCT repair FROM oncely_removed")
    said = put_back(repair).replace("'row'", "'dead letter'").replace("rows", "oncely_rejects")
    place.sql(said)
    assert place.sql("SELECT CAST(oncely_rejects AS text) FROM oncely_rejects") == before


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("9e999", '"inf"'), ("0.1", '"0.1"'), ("7", "7"), ("x'00FF'", '"\\\\x00ff"'),
        ("NULL", "null"), ("'2020-01-01 \u2028\"'", '"2020-01-01 \\u2028\\""'),
    ],
)  # fmt: skip
def test_a_value_of_each_type_of_sqlite(on_sqlite: Place, value: str, kept: str) -> None:
    place = on_sqlite
    bound, fence = ready(sink_to(place, keep_source=True))
    commit_all(bound, at_t0(0, [made(one) for one in range(10)]), fence)
    place.sql('ALTER TABLE rows ADD COLUMN "%s ""more" ANY')
    place.sql(f"INSERT INTO rows VALUES (0, 'x', 't', 0, 10, {value})")
    repaired(bound, damage(10, surplus=(10,)))
    ((content,),) = place.sql("SELECT content FROM oncely_removed")
    assert content == (
        '{"id": 0, "name": "x", "kafka_topic": "t", "kafka_partition": 0, "kafka_offset": 10,'
        f' "%s \\"more": {kept}}}'
    )
