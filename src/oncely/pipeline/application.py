"""The pipelines of one Spark application (docs/deployment.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import IO, TYPE_CHECKING

from oncely.config.problems import joined
from oncely.config.runtimes import is_of_session
from oncely.errors import ConfigError
from oncely.pipeline.pipeline import Pipeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SHARED = "write the same in both files, or run them by separate commands"


@dataclass(frozen=True)
class Application:
    """A Spark application with a run for each of its pipelines.

    Attributes:
        pipelines: in the order of their files.
    """

    pipelines: Sequence[Pipeline]

    @property
    def name(self) -> str:
        """The name of its only pipeline, or one made from the first."""
        first, *more = (one.settings.name for one in self.pipelines)
        return f"{first}-and-{len(more)}-more" if more else first

    @property
    def on_spark(self) -> bool:
        """True if a pipeline of them needs Spark."""
        return any(one.settings.runtime == "spark" for one in self.pipelines)

    @cached_property
    def shared_conf(self) -> Mapping[str, str]:
        """The settings that all pipelines have."""
        first, *more = (one.settings.spark.spark_conf() for one in self.pipelines)
        return {
            key: value for key, value in first.items() if all(one.get(key) == value for one in more)
        }

    def start_spark(self, log: IO[bytes] | None = None) -> SparkSession:
        """Start Spark with the settings that all pipelines share.

        Args:
            log: the file of Spark's own output; None for stderr.
        """
        from oncely.runtimes.spark import session

        return session.start(
            self.name, self.pipelines[0].settings.spark.master, self.shared_conf, log=log
        )

    def conf_of(self, pipeline: Pipeline) -> dict[str, str]:
        """The settings of a pipeline that others do not share."""
        given = pipeline.settings.spark.spark_conf()
        return {key: value for key, value in given.items() if key not in self.shared_conf}

    def enter(self, spark: SparkSession, pipeline: Pipeline) -> SparkSession:
        """The session of a pipeline that runs in this thread."""
        from oncely.runtimes.spark import session

        return session.enter(
            spark,
            pipeline.settings.name,
            self.conf_of(pipeline),
            alone=len(self.pipelines) == 1,
        )


def read(files: Sequence[Path]) -> Application:
    """Read pipeline files that are to run in one Spark application.

    Raises:
        ConfigError: names the invalid keys of all files, and those in which files contradict each
            other.
    """
    found: dict[Path, Pipeline] = {}
    problems: list[ConfigError] = []
    for file in files:
        try:
            found[file] = Pipeline.from_file(file)
        except ConfigError as error:
            if len(files) == 1:
                raise
            problems.append(_in_file(file, error))
    problems = problems or list(_contradictions(found))
    if problems:
        raise joined(problems, f"{len(files)} files")
    return Application(tuple(found.values()))


def _in_file(file: Path, error: ConfigError) -> ConfigError:
    """The error with the name of its file, unless it is there."""
    text = error.problem.replace("\n", "\n  ")
    key = str(file) if error.key == str(file) else f"{file}: {error.key}"
    return ConfigError(key, text, way_out=error.way_out)


def _contradictions(pipelines: Mapping[Path, Pipeline]) -> Iterator[ConfigError]:
    (first, of_first), *_ = pipelines.items()
    names: dict[str, Path] = {}
    for file, pipeline in pipelines.items():
        name = pipeline.settings.name
        if name in names:
            yield ConfigError(
                f"{file}: name",
                f"{name!r} is the name of {names[name]}, too",
                way_out="give it another one: the name is the key of the pipeline's positions",
            )
        names.setdefault(name, file)
        ours, theirs = _of_application(pipeline), _of_application(of_first)
        for key in sorted(ours.keys() | theirs.keys()):
            if ours.get(key) != theirs.get(key):
                said = f"differs from {first}, and is a setting of the whole Spark application"
                yield ConfigError(f"{file}: {key}", said, way_out=_SHARED)
    yield from _modules(pipelines)


def _of_application(pipeline: Pipeline) -> dict[str, str]:
    """The settings that pipelines of one application share, by key of the file."""
    spark = pipeline.settings.spark
    conf = {f"spark.conf.{key}": value for key, value in spark.spark_conf().items()
            if not is_of_session(key)}  # fmt: skip
    return {"spark.master": spark.master, **conf}


def _modules(pipelines: Mapping[Path, Pipeline]) -> Iterator[ConfigError]:
    """Modules of the same name beside several files: a process imports one of them."""
    transforms = [one.settings.transform for one in pipelines.values()]
    if all(one is None or one.sql is not None for one in transforms):
        return
    folders = sorted({file.resolve().parent for file in pipelines})
    for one, other in combinations(folders, 2):
        for name in sorted(_importable(one) & _importable(other)):
            yield ConfigError(
                f"{other}: module {name!r}",
                f"is in {one}, too, and a process imports one of the two",
                way_out="rename one of them, or run the files by separate commands",
            )


def _importable(folder: Path) -> set[str]:
    """The names of the modules and packages in a folder."""
    packages = {file.parent.name for file in folder.glob("*/__init__.py")}
    return packages | {file.stem for file in folder.glob("*.py")}
