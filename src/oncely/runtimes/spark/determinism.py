"""Checks that a plan gives the same rows when a part of it is repeated.

When an executor is lost in the middle of a shuffle, Spark repeats only the lost map tasks. If they
give other rows than before, some rows are duplicated and others lost. So the input of an exchange
must be deterministic.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from oncely.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def refuse_non_deterministic(frame: DataFrame) -> None:
    """Refuse ``rand()``, ``uuid()`` and non-deterministic functions below a shuffle.

    Raises:
        ConfigError: names the operator.
    """
    physical = frame._jdf.queryExecution().executedPlan()
    for node in _nodes(physical):
        if "Exchange" not in node.nodeName():
            continue
        for below in _nodes(node):
            if not _own_expressions_deterministic(below):
                raise ConfigError(
                    "transform.spark",
                    f"{below.nodeName()} is not deterministic and feeds a shuffle",
                    way_out="take rand(), uuid() and the like after the last shuffle,"
                    " or derive the value from the record",
                )


def _nodes(plan: Any) -> Iterator[Any]:
    """The operators of a physical plan, also inside an adaptive one."""
    if plan.getClass().getSimpleName() == "AdaptiveSparkPlanExec":
        plan = plan.initialPlan()  # the plan with exchanges, which its input plan lacks
    yield plan
    children = plan.children()
    for i in range(children.length()):
        yield from _nodes(children.apply(i))


def _own_expressions_deterministic(plan: Any) -> bool:
    expressions = plan.expressions()
    return all(bool(expressions.apply(i).deterministic()) for i in range(expressions.length()))
