"""Two sides, matched by an id in one pass with one shuffle.

Each side is a DataFrame with the columns that :func:`side` gives. Both are joined by a union and
one aggregation by id, which Spark spills to disk. Ids that match collapse into one line per group
and partition; the others stay single lines. So the result takes memory by groups and partitions,
and disk by differences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from oncely.errors import ConfigError, WrongInput

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

ID, GROUP, PLACE, AT, DELETES = (
    f"_oncely_{name}" for name in ("id", "group", "place", "at", "deletes")
)
"""The columns of a side: id; group; the record's place as a number; its timestamp in ms; whether it
is a tombstone, which deletes the row of its id. Group and tombstones may be missing."""

Match = Literal["equal", "lost", "duplicated", "unexpected", "fewer", "no id", "later"]
"""fewer: the id is more often on the left than on the right, which is correct if rows replace each
other by key. later: found only in records that are not compared."""

MOST_GROUPS = 100_000
_SHOWN = 200  # characters of an id in a report


class Line(NamedTuple):
    """The ids of one match, group and partition.

    Attributes:
        partition: the number in the place; None without places.
        ids, left, right: numbers of ids, of records on the left, of rows on the right.
        first, last: the smallest and largest timestamp in ms.
    """

    match: Match
    group: str | None
    partition: int | None
    ids: int
    left: int
    right: int
    first: int | None
    last: int | None


class Difference(NamedTuple):
    """An id that does not match."""

    id: str
    left: int
    right: int
    place: int | None
    at: int | None


def side(
    frame: DataFrame,
    name: str,
    id_: str | Column,
    *,
    by: str | None = None,
    place: Column | None = None,
    at: Column | None = None,
    deletes: Column | None = None,
) -> DataFrame:
    """A side's columns.

    Args:
        frame: the records or rows.
        name: left or right, for messages.
        id_: the expression of the id.
        by: the expression of the group.
        place: where the record is, as a number that does not repeat.
        at: its timestamp in ms.
        deletes: true for a tombstone.

    Raises:
        ConfigError: Spark does not accept an expression for this side's columns.
    """
    from pyspark.sql import functions as F

    none = F.lit(None)
    return frame.select(
        resolved(frame, f"--id-{name}", id_).alias(ID),
        *([] if by is None else [_group(frame, name, by).alias(GROUP)]),
        (none if place is None else place).cast("bigint").alias(PLACE),
        (none if at is None else at).cast("bigint").alias(AT),
        *([] if deletes is None else [deletes.alias(DELETES)]),
    )


def resolved(frame: DataFrame, option: str, expression: str | Column) -> Column:
    """An expression over a frame's columns.

    Raises:
        ConfigError: Spark does not accept it.
    """
    from pyspark.errors import PySparkException
    from pyspark.sql import functions as F

    try:
        column = F.expr(expression) if isinstance(expression, str) else expression
        frame.select(column)
    except PySparkException as error:
        said = " ".join(str(error).split("\n", 1)[0].split())
        raise ConfigError(
            option,
            f"Spark does not accept {expression!r} for this side: {said}",
            way_out=f"it has the columns {', '.join(frame.columns)}",
        ) from None
    return column


def _group(frame: DataFrame, name: str, by: str) -> Column:
    """The group; ``hour(x)`` and ``day(x)`` are points in time, and not numbers of a clock."""
    from pyspark.sql import functions as F

    unit, inner = _unit(by)
    if unit is None:
        return resolved(frame, f"--by ({name})", by)
    moment = resolved(frame, f"--by ({name})", f"CAST({inner} AS TIMESTAMP)")
    begin = F.date_trunc(unit, moment)
    return F.to_date(begin) if unit == "day" else begin


def _unit(by: str) -> tuple[str | None, str]:
    """``hour`` and ``ts`` for ``hour(ts)``; None for any other expression."""
    head, bracket, rest = by.strip().partition("(")
    inner, depth = rest[:-1], 0
    for c in inner:  # "hour(a) + hour(b)" begins and ends alike
        depth += {"(": 1, ")": -1}.get(c, 0)
        if depth < 0:
            return None, ""
    if bracket and rest.endswith(")") and not depth and head.strip().lower() in ("hour", "day"):
        return head.strip().lower(), inner
    return None, ""


def same_kind(left: DataFrame, right: DataFrame) -> tuple[DataFrame, DataFrame]:
    """Both sides with ids of one type, so that equal ids are equal.

    Raises:
        ConfigError: the types are of different kinds, or Spark can't compare them.
    """
    from pyspark.sql import functions as F

    kinds = [frame.schema[ID].dataType for frame in (left, right)]
    common = _common(*kinds)
    if common is None:
        names = [kind.simpleString() for kind in kinds]
        raise ConfigError(
            "--id",
            f"it is {names[0]} on the left and {names[1]} on the right",
            way_out="cast one of them: --id-left 'CAST(id AS STRING)'",
        )
    done = [frame.withColumn(ID, F.col(ID).cast(common)) for frame in (left, right)]
    if GROUP in left.columns and GROUP in right.columns:
        groups = [frame.schema[GROUP].dataType for frame in done]
        if groups[0] != groups[1]:
            done = [frame.withColumn(GROUP, F.col(GROUP).cast("string")) for frame in done]
    return done[0], done[1]


def _common(left: Any, right: Any) -> Any:
    from pyspark.sql import types as T

    texts = (T.StringType, T.CharType, T.VarcharType)
    if isinstance(left, texts) and isinstance(right, texts):
        return T.StringType()
    if isinstance(left, T.IntegralType) and isinstance(right, T.IntegralType):
        return T.LongType()
    exact = (T.IntegralType, T.DecimalType)
    if isinstance(left, exact) and isinstance(right, exact):
        return _decimal(left, right)
    if isinstance(left, T.FractionalType) and isinstance(right, T.FractionalType):
        floats = not isinstance(left, T.DecimalType) and not isinstance(right, T.DecimalType)
        return T.DoubleType() if floats else None
    if left != right or isinstance(left, T.MapType | T.VariantType):
        return None
    return left


def _decimal(left: Any, right: Any) -> Any:
    from pyspark.sql import types as T

    sizes = [
        (one.precision - one.scale, one.scale) if isinstance(one, T.DecimalType) else (19, 0)
        for one in (left, right)
    ]
    whole, scale = (max(part) for part in zip(*sizes, strict=True))
    return T.DecimalType(whole + scale, scale) if whole + scale <= 38 else None


@dataclass(frozen=True)
class Matched:
    """The result of :func:`matched`, on Spark's disks."""

    frame: DataFrame

    def lines(self) -> list[Line]:
        """The numbers, by match, group and partition.

        Raises:
            WrongInput: there are too many groups.
        """
        from pyspark.sql import functions as F

        keys = ("match", "group", "part")
        sums = (
            F.sum("ids"), F.sum("l"), F.sum("r"), F.min("first"), F.max("last"),
        )  # fmt: skip
        found = self.frame.groupBy(*keys).agg(*sums).limit(MOST_GROUPS + 1).collect()
        if len(found) > MOST_GROUPS:
            raise WrongInput(
                f"--by has more than {MOST_GROUPS:,} values",
                way_out="group by less, such as hour(ts)",
            )
        return [Line(*row) for row in found]

    def differences(self, match: Match, limit: int) -> list[Difference]:
        """The first ids of a match, by place and then by id."""
        from pyspark.sql import functions as F

        shown = F.coalesce(F.substring("offender", 1, _SHOWN), F.lit("null"))
        found = (
            self.frame.where(F.col("match") == match)
            .orderBy(F.col("place").asc_nulls_last(), "offender")
            .limit(limit)
            .select(shown, "l", "r", "place", "first")
        )
        return [Difference(*row) for row in found.collect()]


@contextmanager
def matched(
    left: DataFrame,
    right: DataFrame,
    *,
    keyed: bool = False,
    place_bits: int | None = None,
    excuse: Callable[[DataFrame], DataFrame] | None = None,
) -> Iterator[Matched]:
    """Compare two sides.

    Args:
        left, right: the sides, of :func:`side` and :func:`same_kind`.
        keyed: True if the right side keeps one row of each id.
        place_bits: the number of low bits of a place below its partition; None without places.
        excuse: changes the column ``match`` of ids that are unexpected or duplicated only because
            some records are not compared, such as those that were appended since. Called after
            both sides were read, if there are such ids.
    """
    from pyspark import StorageLevel

    frame = _collapsed(_by_id(left, right), keyed, place_bits).persist(StorageLevel.DISK_ONLY)
    kept = [frame]
    try:
        if excuse is not None and _has(frame, ("unexpected", "duplicated")):
            frame = excuse(frame).persist(StorageLevel.DISK_ONLY)
            kept.append(frame)
        yield Matched(frame)
    finally:
        for one in kept:
            one.unpersist()


def _has(frame: DataFrame, kinds: Sequence[Match]) -> bool:
    from pyspark.sql import functions as F

    # The whole frame is made by this action, and kept: an action on a part would make it twice.
    counted = frame.groupBy("match").count().where(F.col("match").isin(*kinds)).collect()
    return bool(counted)


def _by_id(left: DataFrame, right: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    no, one = F.lit(0).cast("bigint"), F.lit(1).cast("bigint")
    group = _groups(left, right)
    # With tombstones, the newest record of an id decides whether it should have a row.
    lives, dies, record = [], [], one
    if DELETES in left.columns:
        record = F.when(F.col(DELETES), no).otherwise(one)
        place, none = F.col(PLACE), F.lit(None).cast("bigint")
        lives = [F.when(~F.col(DELETES), place).alias("lives"), F.when(F.col(DELETES), place)]
        dies = [none.alias("lives"), none.alias("dies")]
        lives[1] = lives[1].alias("dies")
    both = left.select(
        ID, record.alias("l"), no.alias("r"), PLACE, AT, *group[0], *lives
    ).unionAll(
        right.select(ID, no.alias("l"), one.alias("r"), PLACE, AT, *group[1], *dies)
    )  # fmt: skip
    # Sums and extremes of numbers keep Spark's aggregation by hash: one of texts would sort.
    found = F.coalesce(F.min("lg"), F.min("rg")) if group[0] else F.lit(None)
    ids = both.groupBy(ID).agg(
        F.sum("l").alias("l"),
        F.sum("r").alias("r"),
        found.cast("string").alias("group"),
        F.min(PLACE).alias("place"),
        F.min(AT).alias("first"),
        F.max(AT).alias("last"),
        *([F.max("lives").alias("lives"), F.max("dies").alias("dies")] if lives else []),
    )
    if not lives:
        return ids
    dead = F.coalesce(F.col("dies") > F.coalesce(F.col("lives"), F.lit(-1)), F.lit(False))
    ids = ids.withColumn("l", F.when(dead, 0).otherwise(F.col("l"))).drop("lives", "dies")
    return ids.where((F.col("l") > 0) | (F.col("r") > 0))


def _groups(left: DataFrame, right: DataFrame) -> tuple[list[Column], list[Column]]:
    """The groups of both sides in two columns: the left one counts, if an id is on both."""
    from pyspark.sql import functions as F

    if GROUP not in left.columns:
        return [], []
    none = F.lit(None).cast(left.schema[GROUP].dataType)
    own = F.col(GROUP) if GROUP in right.columns else none
    return [F.col(GROUP).alias("lg"), none.alias("rg")], [none.alias("lg"), own.alias("rg")]


def _match(keyed: bool) -> Column:
    from pyspark.sql import functions as F

    expected = "1" if keyed else "l"
    return F.expr(
        f"""CASE WHEN {ID} IS NULL THEN 'no id' WHEN l = 0 THEN 'unexpected'
        WHEN r = 0 THEN 'lost' WHEN r > {expected} THEN 'duplicated'
        WHEN r < {expected} THEN 'fewer' ELSE 'equal' END"""
    )


def _collapsed(ids: DataFrame, keyed: bool, place_bits: int | None) -> DataFrame:
    from pyspark.sql import functions as F

    none = F.lit(None)
    part = none if place_bits is None else F.shiftright("place", place_bits)
    lines = ids.withColumn("match", _match(keyed)).withColumn("part", part.cast("int"))
    single = F.col("match") != "equal"
    # The id as a key keeps it single; texts of it would be as many bytes for each matching id.
    lines = lines.withColumn("key", F.when(single, F.col(ID)))
    keys = [F.col(name) for name in ("match", "group", "part", "key")]
    return (
        lines.groupBy(*keys)
        .agg(
            F.count(F.lit(1)).alias("ids"), F.sum("l").alias("l"), F.sum("r").alias("r"),
            F.min("place").alias("place"), F.min("first").alias("first"),
            F.max("last").alias("last"),
        )
        .withColumn("offender", _as_text(ids, "key"))
    )  # fmt: skip


def _as_text(ids: DataFrame, column: str) -> Column:
    from pyspark.sql import functions as F
    from pyspark.sql import types as T

    kind = ids.schema[ID].dataType
    if isinstance(kind, T.StructType | T.ArrayType):
        return F.to_json(column)
    return F.hex(column) if isinstance(kind, T.BinaryType) else F.col(column).cast("string")


def excused(frame: DataFrame, others: DataFrame, *, keyed: bool) -> DataFrame:
    """Ids that are unexpected, or too often on the right, but are also in records that are not
    compared (``others``, a side)."""
    from pyspark.sql import functions as F

    count = others.groupBy(F.col(ID).alias("key")).agg(F.count(F.lit(1)).alias("elsewhere"))
    open_ = F.col("match").isin("unexpected", "duplicated")
    enough = F.col("r") <= (F.lit(1) if keyed else F.col("l") + F.col("elsewhere"))
    excused = F.col("elsewhere").isNotNull() & enough
    match = F.when(~(open_ & excused), F.col("match")).when(F.col("l") == 0, "later")
    return (
        frame.join(count, "key", "left")
        .withColumn("match", match.otherwise("equal"))
        .drop("elsewhere")
    )
