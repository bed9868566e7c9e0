"""Row transforms: rows in, rows out, each still knowing its record."""

from __future__ import annotations

import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from oncely.config import parse
from oncely.core.batch import Formed, Rejection
from oncely.decode.schema import is_json, parse_schema
from oncely.errors import ConfigError
from oncely.pipeline.pipeline import Pipeline
from oncely.runtimes.row_transform import (
    ROW,
    KeepsKeys,
    PlainTexts,
    PythonTransform,
    SqlTransform,
    Unchanged,
)

SCHEMA = pa.schema(
    [("n", pa.int64()), ("text", pa.string()), ("many", pa.list_(pa.int32()))]
)  # fmt: skip
ROWS = pa.Table.from_pylist(
    [
        {"n": 1, "text": "10", "many": [1, 2]},
        {"n": 2, "text": "x", "many": []},
        {"n": 3, "text": None, "many": None},
        {"n": 4, "text": "40", "many": [7]},
    ],
    schema=SCHEMA,
)
RECORDS = np.array([5, 7, 8, 11], dtype=np.int64)


def unpacked(formed: Formed[Any]) -> tuple[Any, Any, list[Rejection]]:
    return formed.rows, formed.row_record, list(formed.rejections)


def apply(sql: str, rows: pa.Table = ROWS, records: Any = RECORDS) -> Any:
    made, record, refused = unpacked(SqlTransform(sql).apply(rows, records))
    return made.to_pylist(), record.tolist(), refused


def test_unchanged() -> None:
    rows, records, refused = unpacked(Unchanged().apply(ROWS, RECORDS))
    assert rows is ROWS
    assert records is RECORDS
    assert refused == []
    assert Unchanged().output(SCHEMA) == SCHEMA


# -- SQL -----------------------------------------------------------------------------------


def test_projection_and_filter() -> None:
    rows, records, refused = apply("SELECT n * 2 AS twice FROM input WHERE n <> 3")
    assert rows == [{"twice": 2}, {"twice": 4}, {"twice": 8}]
    assert records == [5, 7, 11]
    assert refused == []


def test_threads_of_two_pipelines_do_not_share_a_session() -> None:
    """A view `input` belongs to one session."""
    start = threading.Barrier(2)

    def work(at: int) -> int:
        schema = pa.schema([(f"c{at}", pa.timestamp("us", "UTC"))])
        rows = pa.Table.from_pylist([{f"c{at}": at * 1_000_000}] * 100, schema=schema)
        transform = SqlTransform(f"SELECT c{at}::TEXT AS t FROM input")
        start.wait()
        for _ in range(60):
            transform.output(schema)
            made, record, refused = unpacked(transform.apply(rows, np.arange(100)))
            assert made["t"].to_pylist() == [f"1970-01-01 00:00:0{at}+00"] * 100
            assert (len(record), refused) == (100, [])
        return at

    with ThreadPoolExecutor(2) as threads:
        assert sorted(threads.map(work, (1, 2))) == [1, 2]


def test_star_does_not_show_the_record_column() -> None:
    rows, records, _ = apply("SELECT *, n > 2 AS late FROM input")
    assert list(rows[0]) == ["n", "text", "many", "late"]
    assert records == RECORDS.tolist()


def test_unnest_gives_several_rows_to_a_record() -> None:
    rows, records, _ = apply("SELECT n, UNNEST(many) AS one FROM input")
    assert [row["one"] for row in rows] == [1, 2, 7]
    assert records == [5, 5, 11]


@pytest.mark.parametrize(
    ("sql", "bad"),
    [
        ("SELECT CAST(text AS INT) AS a FROM input", {7}),
        ("SELECT n FROM input WHERE CAST(text AS INT) > 0", {7}),
        ("SELECT strptime(text, '%d') AS a FROM input", {7, 11}),
        ("SELECT CASE WHEN n = 4 THEN error('no fours') END AS a FROM input", {11}),
        ("SELECT json_extract(CASE WHEN n = 1 THEN '{' END, '$.a') AS a FROM input", {5}),
        ("SELECT 9223372036854775804 + n AS a FROM input", {11}),
        ("SELECT n // (n - 2) AS a FROM input", {7}),
        ("SELECT CASE n WHEN 2 THEN DATE 'infinity' END AS a FROM input", {7}),
        ("SELECT {'t': [CASE n WHEN 2 THEN TIMESTAMPTZ '-infinity' END]} AS a FROM input", {7}),
        ("SELECT CASE WHEN n = 1 THEN error('x') END AS a, UNNEST(many) AS b FROM input", {5}),
    ],
)
def test_a_row_that_can_t_be_computed_rejects_its_record(sql: str, bad: set[int]) -> None:
    _, records, refused = apply(sql)
    assert {one.record for one in refused} == bad
    assert all(one.stage == "transform" and one.reason for one in refused)
    assert not set(records) & bad


def test_the_reason_is_one_line_without_the_whole_query() -> None:
    _, _, [refused] = apply("SELECT CAST(text AS INT) AS a FROM input")
    assert refused.reason.startswith(
        "ConversionException: Conversion Error: Could not convert string 'x' to INT32"
    )
    assert "\n" not in refused.reason


def test_one_bad_row_among_many() -> None:
    many = pa.table({"text": ["bad" if n == 6_000 else str(n) for n in range(10_000)]})
    made, records, refused = unpacked(
        SqlTransform("SELECT CAST(text AS INT) AS n FROM input").apply(many, np.arange(10_000))
    )
    assert refused == [Rejection(6_000, "transform", refused[0].reason)]
    assert made.column("n").to_pylist() == [n for n in range(10_000) if n != 6_000]
    assert records.tolist() == made.column("n").to_pylist()


def test_all_rows_bad_and_no_rows() -> None:
    bad = pa.table({"text": ["a", "b"]})
    made, records, refused = unpacked(
        SqlTransform("SELECT CAST(text AS INT) AS n FROM input").apply(bad, np.array([0, 1]))
    )
    assert made.schema == pa.schema([("n", pa.int32())])
    assert made.num_rows == len(records) == 0
    assert [one.record for one in refused] == [0, 1]
    rows, records, refused = apply("SELECT n FROM input", ROWS.slice(0, 0), RECORDS[:0])
    assert (rows, records, refused) == ([], [], [])


def test_the_order_of_rows_is_kept() -> None:
    many = pa.table({"n": list(range(50_000))})
    made = SqlTransform("SELECT n FROM input WHERE n % 3 = 0").apply(many, np.arange(50_000)).rows
    assert made.column("n").to_pylist() == list(range(0, 50_000, 3))


def test_names_that_differ_in_capitals_only_are_refused() -> None:
    """DuckDB would give the second one another name, and its column would stay empty."""
    both = pa.schema([("job", pa.string()), ("JOB", pa.string())])
    with pytest.raises(ConfigError, match=r"'job' and 'JOB' .*transform\.sql takes them for one"):
        SqlTransform("SELECT * FROM input").output(both)


def test_output_tells_the_columns_and_agrees_with_apply() -> None:
    sql = SqlTransform("SELECT n + 1 AS m, text || '!' AS t, many[1] AS first FROM input AS i")
    schema = sql.output(SCHEMA)
    assert schema == pa.schema([("m", pa.int64()), ("t", pa.string()), ("first", pa.int32())])
    assert sql.apply(ROWS, RECORDS).rows.schema == schema


@pytest.mark.parametrize(
    ("sql", "problem"),
    [
        ("SELECT COUNT(*) FROM input", "row-wise|must appear"),
        ("SELECT n, COUNT(*) FROM input GROUP BY ALL", "row-wise"),
        ("SELECT DISTINCT n FROM input", "row-wise"),
        ("SELECT n FROM input ORDER BY n", "row-wise"),
        ("SELECT n FROM input LIMIT 5", "row-wise"),
        ("SELECT n FROM input LIMIT 0", "row-wise"),
        ("SELECT n, ROW_NUMBER() OVER () FROM input", "row-wise"),
        ("SELECT a.n FROM input a, input b", "row-wise|mbiguous"),
        ("SELECT n FROM input a JOIN input b USING (n)", "row-wise"),
        ("SELECT n, (SELECT MAX(n) FROM input) FROM input", "row-wise"),
        ("SELECT n FROM input USING SAMPLE 10%", "row-wise"),
        ("SELECT n FROM input WHERE n IN (SELECT 1)", "row-wise"),
        ("SELECT n FROM input UNION ALL SELECT n FROM input", "UNION"),
        ("SELECT 1 AS a", "_oncely_row|input"),
        ("SELECT missing FROM input", "missing"),
        ("SELECT n FROM other", "other"),
        ("SELECT n FROM read_csv('/etc/passwd')", "."),
        ("SELECT n FROM '/etc/passwd'", "."),
        ("SELECT FROM", "."),
        ("", "."),
        ("SELECT n FROM input; SELECT n FROM input", "one statement"),
        ("DELETE FROM input", "."),
        ("COPY input TO '/tmp/x'", "."),
        ("SET threads = 8", "."),
        ("SELECT [TIMETZ '12:00:00+02'] AS a FROM input", "without its offset"),
        ("SELECT '101'::BIT AS a FROM input", "'a' is BIT"),
        ("SELECT n::UHUGEINT AS a FROM input", "'a' is UHUGEINT"),
    ],
)
def test_what_is_not_row_wise_is_refused(sql: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        SqlTransform(sql).output(SCHEMA)
    assert caught.value.key == "transform.sql"
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("sql", "problem"),
    [
        ("SELECT n, lower(text) AS text FROM input", "column 'text' from 'Ab C' to 'ab c'"),
        ("SELECT * REPLACE (trim(text) AS text) FROM input", "column 'text' from ' x ' to 'x'"),
        ("SELECT * FROM (SELECT n + 1 AS n, text FROM input)", "column 'n' from '-7' to '-6'"),
        ("SELECT text, n > 1 AS n FROM input", "column 'n' from"),
        ("SELECT n, [text] AS text FROM input", "column 'text' from string to list"),
        ("SELECT n::VARCHAR AS n, TRY_CAST(text AS BIGINT) AS text, UNNEST(many) FROM input", ""),
        ("SELECT * FROM input WHERE n > 1", ""),
    ],
)
def test_a_query_that_computes_a_key_is_refused(sql: str, problem: str) -> None:
    transform = KeepsKeys(SqlTransform(sql), ("n", "text"))
    if not problem:
        assert transform.output(SCHEMA).names == SqlTransform(sql).output(SCHEMA).names
        return
    with pytest.raises(ConfigError, match="a tombstone keeps: " + problem) as caught:
        transform.output(SCHEMA)
    assert caught.value.key == "sink.keys"


def test_a_query_that_computes_the_key_of_messages_is_refused() -> None:
    raw: dict[str, Any] = {
        "name": "p",
        "source": {"brokers": "b:1", "topics": ["t"]},
        "decode": {"format": "json", "schema": "id BIGINT"},
        "transform": {"sql": "SELECT id + 1 AS id FROM input"},
        "sink": {"kind": "kafka", "topic": "o", "key": "id"},
    }
    assert Pipeline(parse(raw)).transformed_schema().names == ["id"]
    raw["decode"]["key"] = {"format": "string", "column": "id", "type": "BIGINT"}
    with pytest.raises(ConfigError, match="which a tombstone keeps") as caught:
        Pipeline(parse(raw)).transformed_schema()
    assert caught.value.key == "sink.key"


def test_a_record_whose_key_is_changed_is_rejected() -> None:
    sql = SqlTransform("SELECT replace(text, '10', '11') AS text, n FROM input")
    keys = KeepsKeys(sql, ("text",))
    assert keys.output(SCHEMA).names == ["text", "n"]
    made, record, [refused] = unpacked(keys.apply(ROWS, RECORDS))
    assert made["n"].to_pylist() == [2, 3, 4]
    assert record.tolist() == [7, 8, 11]
    assert (refused.record, refused.stage) == (5, "transform")
    assert "from '10' to '11'" in refused.reason


def test_an_unknown_column_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="missing") as caught:
        SqlTransform("SELECT missing FROM input").output(SCHEMA)
    assert caught.value.way_out.endswith("whose columns are n, text, many")


@pytest.mark.parametrize(
    ("sql", "rows"),
    [
        ("SELECT a + 1 AS b FROM (SELECT x AS a FROM input) WHERE a > 0",
         [(1, {"b": 2}), (2, {"b": 3})]),
        ("SELECT * FROM (SELECT *, x * 2 AS y FROM input) t WHERE y > 2", [(2, {"x": 2, "y": 4})]),
        ("SELECT c FROM (SELECT b AS c FROM (SELECT x AS b FROM input WHERE x = 1))",
         [(1, {"c": 1})]),
        ("SELECT t.* EXCLUDE (x) FROM (SELECT x, unnest([x]) AS u FROM input) t WHERE u < 1",
         [(0, {"u": 0})]),
    ],
)  # fmt: skip
def test_a_projection_over_a_subquery_of_input(sql: str, rows: list[Any]) -> None:
    given = pa.table({"x": [0, 1, 2]})
    made, record, refused = unpacked(SqlTransform(sql).apply(given, np.arange(3)))
    assert list(zip(record.tolist(), made.to_pylist(), strict=True)) == rows
    assert refused == []
    assert SqlTransform(sql).output(given.schema).names == made.column_names


@pytest.mark.parametrize(
    "inner",
    ["SELECT count(*) AS x FROM input", "SELECT DISTINCT x FROM input",
     "SELECT x FROM input LIMIT 1", "SELECT x FROM input UNION ALL SELECT x FROM input",
     "SELECT x FROM input ORDER BY x", "SELECT 1 AS x",
     "SELECT x, row_number() OVER () FROM input"],
)  # fmt: skip
def test_a_subquery_must_be_row_wise_too(inner: str) -> None:
    with pytest.raises(ConfigError, match="not row-wise"):
        SqlTransform(f"SELECT x FROM ({inner})").output(pa.schema({"x": pa.int64()}))


def test_columns_of_json_stay_columns_of_json() -> None:
    schema = parse_schema("p JSON, t STRING")
    rows = pa.Table.from_arrays(
        [pa.array(['{"a":[1, 2]}', None]), pa.array(["{}", "x"])], schema=schema
    )
    sql = SqlTransform("SELECT *, p->'$.a' AS a, p->>'$.a' AS b FROM input")
    out = sql.output(schema)
    assert {one.name: is_json(one) for one in out} == {"p": True, "t": False, "a": True, "b": False}
    made = sql.apply(rows, np.arange(2)).rows
    assert made.schema.types == [pa.string()] * 4
    assert made.to_pylist()[0] == {"p": '{"a":[1, 2]}', "t": "{}", "a": "[1,2]", "b": "[1,2]"}
    plain = PlainTexts(sql)
    assert not any(map(is_json, plain.output(schema)))
    assert not any(map(is_json, plain.apply(rows, np.arange(2)).rows.schema))


def test_json_of_a_query_is_a_text_where_no_column_is_json() -> None:
    out = SqlTransform("SELECT to_json(x) AS j FROM input").output(pa.schema({"x": pa.int64()}))
    assert not any(map(is_json, out))


def test_a_filter_that_is_never_true_is_still_row_wise() -> None:
    assert SqlTransform("SELECT n FROM input WHERE false").output(SCHEMA).names == ["n"]
    assert apply("SELECT n FROM input WHERE false") == ([], [], [])


def test_it_is_shipped_to_executors() -> None:
    import pickle

    sql = SqlTransform("SELECT n FROM input")
    sql.output(SCHEMA)
    assert pickle.loads(pickle.dumps(sql)) == sql


# -- Python --------------------------------------------------------------------------------

Function = Callable[[pa.RecordBatch], Any]


@pytest.fixture
def python() -> Iterator[Callable[[Function], PythonTransform]]:
    """Make a transform of a function; each in a module of its own."""
    made: list[str] = []

    def transform(function: Function) -> PythonTransform:
        module = types.ModuleType(f"transform_of_a_test_{id(function)}")
        module.function = function  # type: ignore[attr-defined]
        sys.modules[module.__name__] = module
        made.append(module.__name__)
        return PythonTransform(f"{module.__name__}:function")

    yield transform
    for name in made:
        del sys.modules[name]


Make = Callable[[Function], PythonTransform]


def test_a_function_of_as_many_rows(python: Make) -> None:
    def twice(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.RecordBatch.from_pydict({"twice": [v.as_py() * 2 for v in batch["n"]]})

    rows, records, refused = unpacked(python(twice).apply(ROWS, RECORDS))
    assert rows.column("twice").to_pylist() == [2, 4, 6, 8]
    assert records.tolist() == RECORDS.tolist()
    assert refused == []


def test_a_function_that_drops_and_multiplies_keeps_the_row_column(python: Make) -> None:
    def some(batch: pa.RecordBatch) -> pa.Table:
        return pa.Table.from_batches([batch]).filter(pa.compute.field("n") != 2).select(["n", ROW])

    rows, records, _ = unpacked(python(some).apply(ROWS, RECORDS))
    assert rows.column_names == ["n"]
    assert records.tolist() == [5, 8, 11]


def test_a_row_on_which_it_raises_is_rejected(python: Make) -> None:
    def fussy(batch: pa.RecordBatch) -> pa.RecordBatch:
        if 2 in batch["n"].to_pylist():
            raise ValueError("no twos\nand a second line")
        return batch

    rows, records, refused = unpacked(python(fussy).apply(ROWS, RECORDS))
    assert rows.column("n").to_pylist() == [1, 3, 4]
    assert records.tolist() == [5, 8, 11]
    assert refused == [Rejection(7, "transform", "ValueError: no twos")]


def test_columns_that_are_null_in_one_part_only(python: Make) -> None:
    """A function that infers its types gives an all-null part another type."""

    def inferring(batch: pa.RecordBatch) -> pa.RecordBatch:
        if 4 in batch["n"].to_pylist():
            raise ValueError("no fours")
        return pa.RecordBatch.from_pydict({"text": batch["text"].to_pylist()})

    rows, records, refused = unpacked(python(inferring).apply(ROWS, RECORDS))
    assert rows.column("text").to_pylist() == ["10", "x", None]
    assert records.tolist() == [5, 7, 8]
    assert len(refused) == 1


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda batch: batch.to_pandas(), "returned DataFrame"),
        (lambda batch: None, "returned NoneType"),
        (lambda batch: batch.slice(1).drop_columns([ROW]), "made 3 rows of 4"),
        (lambda batch: batch.set_column(3, ROW, pa.array([0.5] * len(batch))), ROW),
        (lambda batch: batch.set_column(3, ROW, pa.nulls(len(batch), pa.int64())), ROW),
        (lambda batch: batch.set_column(3, ROW, pa.array([99] * len(batch))), ROW),
    ],
)
def test_a_result_that_can_t_be_used_is_a_wrong_transform(
    python: Make, function: Function, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        python(function).apply(ROWS, RECORDS)
    assert caught.value.key == "transform.python"


def test_output_asks_the_function_with_no_rows(python: Make) -> None:
    def typed(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch({"n": batch["n"].cast(pa.int32())})

    assert python(typed).output(SCHEMA) == pa.schema([("n", pa.int32())])


def test_a_function_that_fails_without_rows(python: Make) -> None:
    with pytest.raises(ConfigError, match="fails on a batch without rows: IndexError"):
        python(lambda batch: [].pop()).output(SCHEMA)


@pytest.mark.parametrize(
    "path", ["no_such_module:f", "json:no_such_function", "json", "json.no:f", ":f", ""]
)
def test_a_function_that_is_not_there(path: str) -> None:
    with pytest.raises(ConfigError, match=r"transform.python: .* can't be imported"):
        PythonTransform(path).output(SCHEMA)


@pytest.mark.parametrize("code", [3, 0, None, "bye"])
def test_a_function_that_exits_is_a_wrong_input(python: Make, code: Any) -> None:
    def exits(_: pa.RecordBatch) -> pa.RecordBatch:
        sys.exit(code)

    transform = python(exits)
    with pytest.raises(ConfigError, match=r"transform.python: .*:function called sys\.exit"):
        transform.output(SCHEMA)
    with pytest.raises(ConfigError, match=r"transform.python: .*:function called sys\.exit"):
        transform.apply(ROWS, RECORDS)


def test_a_row_for_which_a_function_would_leave_is_refused(python: Make) -> None:
    class Leaves(BaseException):
        """A library's way to leave."""

    def leaves(batch: pa.RecordBatch) -> pa.RecordBatch:
        if 3 in batch.column("n").to_pylist():
            raise Leaves("bye")
        return batch

    made, _, rejections = unpacked(python(leaves).apply(ROWS, RECORDS))
    assert 3 not in made.column("n").to_pylist()
    assert [one.reason for one in rejections] == ["Leaves: bye"]


def test_a_child_that_a_function_forks_ends_with_its_call(python: Make) -> None:
    codes, in_child = [], []

    def forks(given: pa.RecordBatch) -> pa.RecordBatch:
        if not in_child and (pid := os.fork()):
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            return given
        in_child.append(True)
        signal.alarm(20)
        sys.exit(3)

    python(forks).apply(ROWS, RECORDS)
    assert codes == [3]


def test_a_module_that_exits_when_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "exits_at_import.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"exits_at_import:f called sys\.exit\(3\)"):
        PythonTransform("exits_at_import:f").output(SCHEMA)


def test_what_a_function_prints_goes_to_stderr(
    python: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    def prints(batch: pa.RecordBatch) -> pa.RecordBatch:
        print("rows:", batch.num_rows)
        return batch

    python(prints).apply(ROWS, RECORDS)
    assert capsys.readouterr() == ("", "rows: 4\n")
