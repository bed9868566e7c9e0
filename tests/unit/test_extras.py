"""Optional dependencies: a pipeline needs those of its own sink, and the error names the extra."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest

from oncely import extras
from oncely.cli.opened import opened_together
from oncely.errors import ConfigError
from oncely.extras import NEEDED, PACKAGES, is_installed
from oncely.runtimes.spark import session
from tests.conftest import repository
from tests.extras import IN_THE_BASE, OPTIONAL, PIPELINE, not_imported, refusals, validated
from tests.scenarios.world import toml

SINKS: dict[str, dict[str, Any]] = {
    "sql": {"kind": "sql", "url": "postgresql://u:s3cret@127.0.0.1:8/x", "table": "t"},
    "files": {"kind": "files", "url": "file:///tmp/none", "manifest_topic": "m"},
    "delta": {"kind": "delta", "url": "file:///tmp/none"},
}
ONLY_WITH = {
    "oncely.stores.sql.postgres",
    "oncely.stores.sql.postgres_session",
    "oncely.stores.sql.postgres_lent",
    "oncely.runtimes.spark.daemon",
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


@pytest.mark.parametrize("runtime", ["processes", "spark"])
def test_oncely_run_needs_spark_where_it_runs_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str
) -> None:
    file = tmp_path / "p.toml"
    source = {**PIPELINE["source"], "topics": ["t"]}
    file.write_text(toml({**PIPELINE, "source": source, "runtime": runtime, "sink": SINKS["sql"]}))
    monkeypatch.setattr(extras, "is_installed", lambda package: package not in PACKAGES["spark"])
    if runtime == "processes":
        assert len(opened_together([file]).pipelines) == 1
        return
    with pytest.raises(ConfigError, match="a run on Spark needs the package pyspark"):
        opened_together([file])


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
            assert f"way out: pip install 'oncely[{other}]'" in error
            assert "s3cret" not in error


def commands(file: Path) -> list[list[str]]:
    """Of one pipeline: those that ask servers."""
    more = {"run": ["--until", "latest"], "repair": ["--execute"]}
    more |= {"backfill": ["--from", "2026-01-01T00:00:00Z"]}
    names_ = ["run", "work", "plan", "status", "audit", "repair", "backfill", "verify"]
    nested = [["offsets", "show"], ["offsets", "reset"], ["rejects", "list"], ["rejects", "replay"]]
    reset = {"reset": ["--to-earliest"]}
    return [[name, str(file), *more.get(name, [])] for name in names_] + [
        [*two, str(file), *reset.get(two[1], [])] for two in nested
    ]


def test_each_command_names_the_extra_before_it_asks_a_broker(tmp_path: Path) -> None:
    """Nothing listens at the broker's address, so whoever asks it says something else."""
    stored = {"delivery": "at_least_once", "offsets": {"store": "redis", "url": "redis://h"}}
    given = {name: {**PIPELINE, "sink": sink} for name, sink in SINKS.items()}
    avro = {"format": "avro", "schema_registry": "http://127.0.0.1:9"}
    given["registry"] = {**PIPELINE, "decode": avro, "sink": IN_THE_BASE[0]}
    given["redis"] = {**PIPELINE, **stored, "sink": IN_THE_BASE[0]}
    asked = []
    for name, pipeline in given.items():
        file = tmp_path / f"{name}.toml"
        file.write_text(toml(pipeline))
        asked += [(name, words) for words in commands(file)]
    places = {"sql": SINKS["sql"]["url"], "files": "./folder", "delta": "delta:./folder"}
    for name, where in places.items():
        to = ["--brokers", "127.0.0.1:9", "--topic", "t", "--to", where, "--out", "-"]
        asked.append((name, ["init", *to]))
    plain = tmp_path / "plain.toml"
    plain.write_text(toml({**PIPELINE, "sink": IN_THE_BASE[0]}))
    asked.append(("spark", ["run", str(plain)]))
    found = refusals(OPTIONAL, [words for _, words in asked])
    for (extra, words), error in zip(asked, found, strict=True):
        wanted = "spark" if words[0] == "run" else extra
        assert f"way out: pip install 'oncely[{wanted}]'" in error, (words, error)
        assert ('runtime = "processes"' in error) == (wanted == "spark")


def test_neither_files_nor_delta_bring_spark() -> None:
    extras = pyproject()["optional-dependencies"]
    with_spark = {name for name, needed in extras.items() if "oncely[spark]" in needed}
    assert with_spark == {"local", "all"}
    assert "oncely[native]" not in extras["all"], "no registry has it"
    assert extras["native"] == [f"oncely-native=={NEEDED}"]


def test_a_run_on_spark_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(ConfigError, match="needs the package pyspark") as caught:
        session.existing()
    assert caught.value.way_out == "pip install 'oncely[spark]'"


def test_the_extras_are_those_of_the_distribution() -> None:
    project = pyproject()
    extras, of = project["optional-dependencies"], packages_distributions()
    client = [one for one in requires("confluent-kafka") or () if "schemaregistry" in one]
    more = {"delta": extras["files"], "registry": client}
    for extra, packages in PACKAGES.items():
        assert f"oncely[{extra}]" in extras["all"]
        here = names([*extras[extra], *more.get(extra, [])]) - {"confluent-kafka"}
        for one in filter(is_installed, packages):
            assert here & {name.lower() for name in of[one.partition(".")[0]]}, one
        assert not here & names(project["dependencies"]), "they are optional"
