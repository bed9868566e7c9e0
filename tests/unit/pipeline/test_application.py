"""Pipeline files of one Spark application: what they may not contradict each other in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from oncely.errors import ConfigError
from oncely.pipeline.application import read
from tests.scenarios.world import toml


def file_in(folder: Path, name: str, **sections: Mapping[str, Any]) -> Path:
    """A valid pipeline file, with keys added to its sections."""
    base: dict[str, Any] = {
        "name": name,
        "source": {"brokers": "b:1", "topics": ["t"]},
        "decode": {"format": "json", "schema": "id BIGINT"},
        "sink": {"kind": "sql", "url": f"postgresql://u:of-{name}!@h/d", "table": "t"},
        "spark": {"master": "local[2,4]"},
    }
    for section, more in sections.items():
        base[section] = {**base.get(section, {}), **more}
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.toml"
    path.write_text(toml(base))
    return path


def refused(*files: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read(files)
    return str(caught.value)


def test_the_errors_of_all_files_are_told_with_their_files(tmp_path: Path) -> None:
    good = file_in(tmp_path, "good")
    table = file_in(tmp_path, "table", sink={"table": 5})
    both = file_in(tmp_path, "both", sink={"table": 5, "colour": "red"})
    broken = tmp_path / "broken.toml"
    broken.write_text("name = ")
    said = refused(good, table, both, broken)
    assert said.startswith("4 files: 3 problems\n")
    assert f"\n  {table}: sink.table: found 5" in said
    assert f"\n  {both}: 2 problems\n" in said
    assert "\n    sink.colour: " in said
    assert f"\n  {broken}: not TOML" in said
    assert str(good) not in said


def test_the_error_of_the_only_file_is_as_it_was(tmp_path: Path) -> None:
    assert refused(file_in(tmp_path, "a", sink={"table": 5})).startswith("sink.table: found 5")


def test_two_pipelines_of_a_name_are_refused(tmp_path: Path) -> None:
    one, other = file_in(tmp_path / "x", "a"), file_in(tmp_path / "y", "a")
    assert f"{other}: name: 'a' is the name of {one}, too" in refused(one, other)


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"master": "local[1]"}, "spark.master"),
        ({"conf": {"spark.jars": "x.jar"}}, "spark.conf.spark.jars"),
        ({"conf": {"spark.sql.extensions": "x.Y"}}, "spark.conf.spark.sql.extensions"),
    ],
)
def test_settings_of_the_application_must_be_the_same(
    tmp_path: Path, section: dict[str, Any], key: str
) -> None:
    one, other = file_in(tmp_path, "a"), file_in(tmp_path, "b", spark=section)
    assert f"{other}: {key}: differs from {one}" in refused(one, other)
    assert f"{one}: {key}: differs from {other}" in refused(other, one)
    same = file_in(tmp_path, "c", spark=section)
    assert read([other, same]).name == "b-and-1-more"


def test_values_of_settings_are_not_told(tmp_path: Path) -> None:
    key = "spark.hadoop.fs.s3a.secret.key"
    one = file_in(tmp_path, "a", spark={"conf": {key: "s3cret-1"}})
    other = file_in(tmp_path, "b", spark={"conf": {key: "s3cret-2"}})
    said = refused(one, other)
    assert key in said
    assert "s3cret" not in said


def test_settings_of_a_session_may_differ(tmp_path: Path) -> None:
    one = file_in(tmp_path, "a", spark={"conf": {"spark.sql.shuffle.partitions": "3",
                                                 "spark.sql.ansi.enabled": "false"}})  # fmt: skip
    other = file_in(tmp_path, "b", spark={"conf": {"spark.sql.ansi.enabled": "false"}})
    application = read([one, other])
    assert application.shared_conf == {"spark.sql.ansi.enabled": "false"}
    of_one, of_other = map(application.conf_of, application.pipelines)
    assert of_one == {"spark.sql.shuffle.partitions": "3"}
    assert of_other == {}


def test_modules_of_the_same_name_beside_two_files_are_refused(tmp_path: Path) -> None:
    python = {"python": "rules:clean"}
    one = file_in(tmp_path / "x", "a", transform=python)
    other = file_in(tmp_path / "y", "b", transform=python)
    (one.parent / "rules.py").touch()
    assert len(read([one, other]).pipelines) == 2
    (other.parent / "rules.py").touch()
    assert f"{other.parent}: module 'rules': is in {one.parent}, too" in refused(one, other)
    plain = [file_in(file.parent, file.stem) for file in (one, other)]
    assert len(read(plain).pipelines) == 2  # no code is imported
