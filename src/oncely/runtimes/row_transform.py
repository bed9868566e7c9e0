"""Row transforms, in which each row keeps the index of its record.

They run beside the sink, between decode and commit. Because every row keeps its record, a row that
the database refuses can be traced to the record, and a replayed chunk can be trimmed.
"""

from __future__ import annotations

import atexit
import importlib
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncely.core.batch import Formed, IntArray, Rejection, isolated
from oncely.decode.schema import as_json, is_json, refuse_other_capitals, without_json
from oncely.errors import ConfigError, OncelyError
from oncely.stores.sql.cast import cast_values
from oncely.stores.sql.connection import ColumnFit
from oncely.users_function import FunctionEnded, said, users_function, with_pandas

if TYPE_CHECKING:
    import duckdb

ROW = "_oncely_row"
"""The column with a row's record index in a transform."""

_ROW_WISE = {"PROJECTION", "FILTER", "UNNEST", "PYTHON_ARROW_SCAN", "ARROW_SCAN"}


class RowTransform(Protocol):
    """A transform of rows. Picklable."""

    def apply(self, rows: pa.Table, row_record: IntArray) -> Formed[pa.Table]:
        """Transform rows; a row whose transformation fails is a rejection of its record."""

    def output(self, schema: pa.Schema) -> pa.Schema:
        """The columns of the result for rows of ``schema``.

        Raises:
            ConfigError: the transform cannot process such rows.
        """


@dataclass(frozen=True)
class Unchanged:
    """The identity transform."""

    def apply(self, rows: pa.Table, row_record: IntArray) -> Formed[pa.Table]:
        """The rows unchanged."""
        return Formed(rows, row_record)

    def output(self, schema: pa.Schema) -> pa.Schema:
        """The schema unchanged."""
        return schema


@dataclass(frozen=True)
class PlainTexts:
    """Another transform, with columns of type JSON as plain texts: for sinks without such a type.

    Attributes:
        inner: the transform.
    """

    inner: RowTransform

    def apply(self, rows: pa.Table, row_record: IntArray) -> Formed[pa.Table]:
        """The rows of the inner transform; nothing is copied."""
        formed = self.inner.apply(rows, row_record)
        made = formed.rows
        if any(map(is_json, made.schema)):
            made = pa.Table.from_arrays(made.columns, schema=without_json(made.schema))
        return replace(formed, rows=made)

    def output(self, schema: pa.Schema) -> pa.Schema:
        """The columns of the inner transform."""
        return without_json(self.inner.output(schema))


@dataclass(frozen=True)
class KeepsKeys:
    """Another transform, whose rows must have the keys of their records.

    Tombstones bypass it: one whose key it would compute deletes nothing, or another row.

    Attributes:
        inner: the transform.
        keys: the columns of the key.
        setting: the key of the pipeline file that names them.
    """

    inner: RowTransform
    keys: tuple[str, ...]
    setting: str = "sink.keys"

    def apply(self, rows: pa.Table, row_record: IntArray) -> Formed[pa.Table]:
        """The rows of the inner transform; one with another key is a rejection of its record."""
        formed = self.inner.apply(rows, row_record)
        record = formed.row_record
        own = rows.select([name for name in rows.column_names if name in self.keys])
        given = own.take(pa.array(np.searchsorted(row_record, record)))
        bad = self._computed(given, formed.rows)
        by_record = {int(record[row]): bad[row] for row in sorted(bad, reverse=True)}
        return formed.without(
            [Rejection(at, "transform", by_record[at]) for at in sorted(by_record)]
        )

    def output(self, schema: pa.Schema) -> pa.Schema:
        """The columns of the inner transform.

        Raises:
            ConfigError: a query computes a key, as a row of a sample shows.
        """
        made = self.inner.output(schema)
        self._computed(schema.empty_table(), made.empty_table())
        if isinstance(self.inner, SqlTransform):
            count = len(_KEYS[pa.string()])
            sample = pa.table(
                [pa.array(_KEYS[f.type]) if f.name in self.keys and f.type in _KEYS
                 else pa.nulls(count, f.type) for f in schema],
                schema=_nullable(schema),
            )  # fmt: skip
            refused = self.apply(sample, np.arange(count)).rejections
            if computed := [one.reason for one in refused if one.reason.startswith(_COMPUTED)]:
                raise ConfigError(self.setting, computed[0], way_out=_UNCHANGED_KEYS)
        return made

    def _computed(self, given: pa.Table, made: pa.Table) -> dict[int, str]:
        """The rows with another key than their records, and the reason for each."""
        bad: dict[int, str] = {}
        for name in {*self.keys} & {*given.column_names} & {*made.column_names}:
            own = made[name]
            try:
                wanted = cast_values(given[name], ColumnFit(name, own.type), {})
            except (pa.ArrowNotImplementedError, pa.ArrowTypeError):
                problem = f"{_COMPUTED} column {name!r} from {given[name].type} to {own.type}"
                raise ConfigError(self.setting, problem, way_out=_UNCHANGED_KEYS) from None
            same = pc.or_(
                pc.fill_null(pc.equal(own, wanted), False),
                pc.and_(pc.is_null(own), pc.is_null(wanted)),
            )
            for row in pc.indices_nonzero(pc.invert(same)).to_pylist():
                shown = str(given[name][row])[:_SHOWN], str(own[row])[:_SHOWN]
                text = f"{_COMPUTED} column {name!r} from {shown[0]!r} to {shown[1]!r}"
                bad.setdefault(row, text)
        return bad


_SHOWN = 40  # characters
_COMPUTED = "the transform changes a key, which a tombstone keeps:"
_UNCHANGED_KEYS = "let the transform pass the key columns through as they are; a cast is permitted"
_KEYS: dict[pa.DataType, list[Any]] = {
    pa.string(): ["Ab C", " x ", "007"],
    pa.int64(): [-7, 1_234_567, None],
    pa.int32(): [-7, 1_234_567, None],
    pa.int16(): [-7, 1_234, None],
    pa.int8(): [-7, 123, None],
}
"""Keys that a query is tried with."""


@dataclass(frozen=True)
class SqlTransform:
    """Row-wise SQL over ``input``, run by DuckDB: projection, filter and unnest only."""

    sql: str

    def apply(self, rows: pa.Table, row_record: IntArray) -> Formed[pa.Table]:
        """Run the query; a value that it cannot convert rejects its record."""
        import duckdb

        # A query that cannot work at all was detected by `output`, without rows: a later error is
        # caused by a value, unless it is one of these.
        not_the_rows_fault = (
            duckdb.OutOfMemoryException,
            duckdb.IOException,
            duckdb.InternalException,
            duckdb.InterruptException,
        )
        return _isolating(
            self._run, rows, row_record, (duckdb.Error, InfiniteTime), not_the_rows_fault
        )

    def output(self, schema: pa.Schema) -> pa.Schema:
        """The query's columns.

        Raises:
            ConfigError: not a query, unknown columns, or more than row-wise operators.
        """
        import duckdb

        refuse_other_capitals(schema, "transform.sql")
        empty = schema.empty_table()
        try:
            self._refuse_other_operators(empty)
            return self._run(_with_row(empty, np.array([], dtype=np.int64)))[0].schema
        except duckdb.Error as error:
            text = str(error).splitlines()[0]
            if ROW in text:  # DuckDB's message is about our column, which the user has not written
                text = "is not row-wise: a row of the result comes from no single row of `input`"
            raise ConfigError(
                "transform.sql",
                text,
                way_out="one row-wise SELECT FROM input, whose columns are "
                + ", ".join(schema.names),
            ) from None

    def _run(self, rows: pa.Table) -> tuple[pa.Table, IntArray]:
        session = _duckdb()
        session.register("input", _with_json(rows))
        try:
            query = session.sql(_carrying_row(self.sql))
            types = query.types
            found = query.to_arrow_table()
        finally:
            session.unregister("input")
        _refuse_changed(found, types)
        if any(map(is_json, rows.schema)):
            found = _marked(found, types)
        carried = found.column(found.num_columns - 1).to_numpy()
        kept = [i for i, name in enumerate(found.column_names[:-1]) if name != ROW]
        return found.select(kept), carried

    def _refuse_other_operators(self, empty: pa.Table) -> None:
        session = _duckdb()
        # The optimizer folds a query over no rows into EMPTY_RESULT, so one row of nulls is used.
        one = pa.table([pa.nulls(1, f.type) for f in empty.schema], schema=_nullable(empty.schema))
        session.register("input", _with_json(_with_row(one, np.array([0], dtype=np.int64))))
        try:
            session.execute("PRAGMA disable_optimizer")
            plan = session.sql(f"EXPLAIN (FORMAT json) {_carrying_row(self.sql)}").fetchall()
        finally:
            session.execute("PRAGMA enable_optimizer")
            session.unregister("input")
        other = sorted({name for name in _operators(json.loads(plan[0][1]))} - _ROW_WISE)
        if other:
            raise ConfigError(
                "transform.sql",
                f"is not row-wise: it needs {', '.join(other)}",
                way_out="for joins, aggregates and the like use transform.spark",
            )


def _operators(plan: Any) -> list[str]:
    nodes = plan if isinstance(plan, list) else [plan]
    names = []
    for node in nodes:
        names.append(str(node.get("name", "")).strip())
        names += _operators(node.get("children", []))
    return [name for name in names if name]


@cache
def _carrying_row(sql: str) -> str:
    """The query with the record index as an additional last column of its select list.

    Raises:
        ConfigError: the text is not a single SELECT.
    """
    session = _duckdb()
    tree = json.loads(session.execute("SELECT json_serialize_sql(?)", [sql]).fetchall()[0][0])
    statements = tree.get("statements", [])
    if tree.get("error") or len(statements) != 1:
        problem = tree.get("error_message") or "one statement is needed"
        raise ConfigError("transform.sql", str(problem), way_out="one SELECT over `input`")
    node = statements[0]["node"]
    if node.get("type") != "SELECT_NODE":
        raise ConfigError(
            "transform.sql", "is not a plain SELECT", way_out="no UNION and the like; one SELECT"
        )
    column = session.execute("SELECT json_serialize_sql(?)", [f"SELECT {ROW}"]).fetchall()[0][0]
    row = json.loads(column)["statements"][0]["node"]["select_list"]
    node["select_list"] += row
    _carry_inside(node, row)
    text = session.execute("SELECT json_deserialize_sql(?::JSON)", [json.dumps(tree)]).fetchall()
    return str(text[0][0])


def _carry_inside(node: dict[str, Any], row: list[Any]) -> None:
    """Add the record index to a subquery in FROM, unless its star includes it."""
    inner = (node["from_table"].get("subquery") or {}).get("node", {})
    if inner.get("type") != "SELECT_NODE":
        return
    if not any(one["class"] == "STAR" for one in inner["select_list"]):
        inner["select_list"] += row
    _carry_inside(inner, row)


def _with_json(rows: pa.Table) -> pa.Table:
    """The rows with columns of type JSON in the form in which DuckDB knows the type."""
    for at, field in enumerate(rows.schema):
        if is_json(field):
            texts = rows.column(at).combine_chunks()
            typed = pa.ExtensionArray.from_storage(pa.json_(), texts)
            rows = rows.set_column(at, field.name, typed)
    return rows


def _marked(rows: pa.Table, types: Sequence[Any]) -> pa.Table:
    """The rows of a query with the columns of DuckDB's type JSON marked as such."""
    fields = [
        as_json(field) if str(kind) == "JSON" else field
        for field, kind in zip(rows.schema, types, strict=True)
    ]
    return pa.Table.from_arrays(rows.columns, schema=pa.schema(fields))


class InfiniteTime(Exception):
    """A query has made an infinite time, which no column of Arrow holds."""


_CHANGED = {
    "time with time zone": "without its offset",
    "bit": "as bytes of its own form",
    "bignum": "as bytes of its own form",
    "uhugeint": "as another number, if it is large",
}
"""Types of DuckDB whose values become others in Arrow, by their ids."""
_NESTED = ("struct", "list", "array", "map", "union")


def _refuse_changed(rows: pa.Table, types: Sequence[Any]) -> None:
    """Refuse what would be another value in Arrow.

    Raises:
        ConfigError: the type of a column.
        InfiniteTime: DuckDB's infinity, which is an ordinary number in Arrow.
    """
    for name, kind, column in zip(rows.column_names, types, rows.columns, strict=True):
        if other := [one for one in _leaves(kind) if one.id in _CHANGED]:
            raise ConfigError(
                "transform.sql",
                f"column {name!r} is {kind}: {other[0]} would be passed on {_CHANGED[other[0].id]}",
                way_out="cast it, for example to VARCHAR",
            )
        if any(map(_infinite, column.chunks)):
            raise InfiniteTime(f"column {name!r}: infinity is no time of a row")


def _leaves(kind: Any) -> Iterator[Any]:
    if kind.id not in _NESTED:
        yield kind
        return
    for _, child in kind.children:
        if hasattr(child, "id"):  # an array's length is an int
            yield from _leaves(child)


def _infinite(array: pa.Array) -> bool:
    """True if a date or timestamp, also within other values, is infinite in DuckDB."""
    type_ = array.type
    if pa.types.is_date32(type_) or pa.types.is_timestamp(type_):
        end = (1 << (type_.bit_width - 1)) - 1
        numbers = np.asarray(array.cast(f"int{type_.bit_width}").drop_null())
        return bool(((numbers == end) | (numbers == -end)).any())
    if pa.types.is_map(type_):
        return _infinite(array.keys) or _infinite(array.items)
    if pa.types.is_nested(type_) and not pa.types.is_union(type_):
        inner = array.flatten()
        return any(map(_infinite, inner if pa.types.is_struct(type_) else [inner]))
    return False


def _nullable(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_nullable(True) for field in schema])


_making = threading.Lock()
_own = threading.local()  # a session a thread: it has the view `input`, and runs one query


def _duckdb() -> duckdb.DuckDBPyConnection:
    """The thread's session in the one DuckDB of the process."""
    with _making:
        database = _database()
        if getattr(_own, "of", None) is not database:
            session = database.cursor()
            session.execute("SET TimeZone = 'UTC'")
            session.execute("SET python_enable_replacements = false")
            _own.of, _own.session = database, session
    found: duckdb.DuckDBPyConnection = _own.session
    return found


@cache
def _database() -> duckdb.DuckDBPyConnection:
    """One DuckDB for the process, without access to files or other external data."""
    import duckdb

    database = duckdb.connect(":memory:", config={"threads": "1"})
    database.execute("SET enable_external_access = false")
    # At the interpreter's exit, DuckDB's bindings would report leaks on stderr.
    atexit.register(_close_duckdb)
    return database


def _close_duckdb() -> None:
    _own.__dict__.clear()
    _database().close()
    _database.cache_clear()


@dataclass(frozen=True)
class PythonTransform:
    """A Python function, Arrow batch to Arrow batch.

    Row ``i`` of the result belongs to row ``i`` of the input. A function that drops or multiplies
    rows keeps the column ``_oncely_row``, which contains the record of each row.
    """

    path: str

    def apply(self, rows: pa.Table, row_record: IntArray) -> Formed[pa.Table]:
        """Call the function; a row on which it raises is a rejection of its record."""
        return _isolating(self._run, rows, row_record, (Exception,), (MemoryError,))

    def output(self, schema: pa.Schema) -> pa.Schema:
        """The columns of the function's result for an empty batch.

        Raises:
            ConfigError: there is no such function, or it fails on a batch without rows.
        """
        try:
            empty = _with_row(schema.empty_table(), np.array([], dtype=np.int64))
            return self._run(empty)[0].schema
        except OncelyError:
            raise
        except Exception as error:
            raise ConfigError(
                "transform.python",
                f"{self.path} fails on a batch without rows: {said(error)}",
                way_out="it must take any batch, also an empty one",
            ) from None

    def _run(self, rows: pa.Table) -> tuple[pa.Table, IntArray]:
        batch = rows.combine_chunks().to_batches()
        given = batch[0] if batch else pa.RecordBatch.from_pylist([], schema=rows.schema)
        made = load_function("transform.python", self.path)(given)
        found = pa.Table.from_batches([made]) if isinstance(made, pa.RecordBatch) else made
        if not isinstance(found, pa.Table):
            raise ConfigError(
                "transform.python",
                f"{self.path} returned {type(made).__name__}",
                way_out="return a pyarrow.RecordBatch",
            )
        if ROW in found.column_names:
            self._check_origin(found.column(ROW), rows.column(ROW))
            return found.drop_columns([ROW]), found.column(ROW).to_numpy()
        if found.num_rows != rows.num_rows:
            raise ConfigError(
                "transform.python",
                f"{self.path} made {found.num_rows} rows of {rows.num_rows} and dropped {ROW}",
                way_out=f"keep the column {ROW}: it contains the record of each row",
            )
        return found, rows.column(ROW).to_numpy()

    def _check_origin(self, made: pa.ChunkedArray, given: pa.ChunkedArray) -> None:
        """Refuse rows without a valid record index, which could neither be rejected nor trimmed.

        Raises:
            ConfigError: the function has changed the column.
        """
        whole = pa.types.is_integer(made.type) and not made.null_count
        if not (whole and pc.all(pc.is_in(made, given.cast(made.type)), min_count=0).as_py()):
            raise ConfigError(
                "transform.python",
                f"{self.path} changed {ROW}",
                way_out="move its values with their rows; never compute or convert them",
            )


@cache
def load_function(key: str, path: str) -> Callable[..., Any]:
    """Import ``package.module:function``; calls of the result are contained, too.

    Raises:
        ConfigError: it does not exist; the error names ``key``.
    """
    module, _, name = path.partition(":")
    try:
        with _contained(key, path):
            function = getattr(importlib.import_module(module), name)
        with_pandas()
    except OncelyError:
        raise
    except Exception as error:  # the module may raise any exception
        raise ConfigError(
            key,
            f"{path} can't be imported: {error}",
            way_out="put the module on PYTHONPATH, on every executor too",
        ) from None

    @wraps(function)
    def contained(*arguments: Any) -> Any:
        with _contained(key, path):
            return function(*arguments)

    return contained


@contextmanager
def _contained(key: str, path: str) -> Iterator[None]:
    """Run user code: it can neither end the process nor write to our standard output.

    Raises:
        ConfigError: it called ``sys.exit``.
    """
    try:
        with redirect_stdout(sys.stderr), users_function():
            yield
    except FunctionEnded as error:
        if not isinstance(error.__cause__, SystemExit):
            raise
        code = error.__cause__.code
        raise ConfigError(
            key,
            f"{path} called sys.exit({'' if code is None else repr(code)})",
            way_out="raise an exception instead",
        ) from None


def _with_row(rows: pa.Table, row_record: IntArray) -> pa.Table:
    return rows.append_column(ROW, pa.array(row_record, pa.int64()))


def _isolating(
    run: Callable[[pa.Table], tuple[pa.Table, IntArray]],
    rows: pa.Table,
    row_record: IntArray,
    bad_data: tuple[type[Exception], ...],
    others: tuple[type[Exception], ...],
) -> Formed[pa.Table]:
    """Run a transform; a row on which it fails is a rejection of its record."""
    carrying = _with_row(rows, row_record)
    parts, bad = isolated(
        lambda start, stop: run(carrying.slice(start, stop - start)),
        rows.num_rows, bad_data, others,
    )  # fmt: skip
    rejections = [
        Rejection(int(row_record[row]), "transform", said(bad[row]).splitlines()[0])
        for row in sorted(bad)
    ]
    tables, records = [made for _, (made, _) in parts], [record for _, (_, record) in parts]
    if not tables:
        made, record = run(carrying.slice(0, 0))
        tables, records = [made], [record]
    # For a column of nulls only, a function that infers its types returns another type.
    whole = pa.concat_tables(tables, promote_options="default")
    return Formed(whole, np.concatenate(records), rejections)
