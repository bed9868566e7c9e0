"""Optional dependencies: a pipeline needs those of its own sink, and the error names the extra."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from typing import Any

import pytest

from oncely.errors import ConfigError
from oncely.extras import PACKAGES, is_installed
from oncely.runtimes.spark import session
from tests.conftest import repository
from tests.extras import IN_THE_BASE, OPTIONAL, PIPELINE, not_imported, validated

SINKS: dict[str, dict[str, Any]] = {
    "sql": {"kind": "sql", "url": "postgresql://u:s3cret@127.0.0.1:9/x", "table": "t"},
    "files": {"kind": "files", "url": "file:///tmp/none", "manifest_topic": "m"},
    "delta": {"kind": "delta", "url": "file:///tmp/none"},
}
ONLY_WITH = {
    "oncely.clients.sql.postgres",
    "oncely.clients.sql.postgres_lent",
    "oncely.clients.sql.postgres_session",
    "oncely.web.server",
}


def pyproject() -> dict[str, Any]:
    return tomllib.loads((repository() / "pyproject.toml").read_text())["project"]


def names(requirements: list[str]) -> set[str]:
    found = {re.split(r"[><=\[ ]", one)[0] for one in requirements}
    return found - {"oncely"}


def test_without_any_extra_every_module_can_be_imported_but_those_of_a_driver() -> None:
    failed = {one for one in not_imported(OPTIONAL) if not one.startswith("oncely.testing.")}
    assert failed == ONLY_WITH


@pytest.mark.parametrize("extra", SINKS)
def test_a_sink_needs_its_own_extra_alone_and_the_error_names_it(extra: str) -> None:
    given = [{**PIPELINE, "sink": one} for one in (*SINKS.values(), *IN_THE_BASE)]
    found = validated(OPTIONAL - set(PACKAGES[extra]), given)
    assert found[len(SINKS) :] == [None, None]
    for other, error in zip(SINKS, found, strict=False):
        if other == extra or (other, extra) == ("files", "delta"):
            assert error is None
        else:
            assert error is not None
            assert re.search(r"sink\.\w+: .* needs the package \w+, which is not", error)
            assert error.endswith(f"way out: pip install 'oncely[{other}]'")
            assert "s3cret" not in error


def test_a_run_on_spark_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(ConfigError, match="needs the package pyspark") as caught:
        session.existing()
    assert caught.value.way_out == "pip install 'oncely[spark]'"


def test_the_extras_are_those_of_the_distribution() -> None:
    project = pyproject()
    extras, of = project["optional-dependencies"], packages_distributions()
    for extra, packages in PACKAGES.items():
        assert f"oncely[{extra}]" in extras["all"]
        here = names(extras[extra]) | (names(extras["files"]) if extra == "delta" else set())
        for one in filter(is_installed, packages):
            assert here & {name.lower() for name in of[one.partition(".")[0]]}, one
        assert not here & names(project["dependencies"]), "they are optional"
