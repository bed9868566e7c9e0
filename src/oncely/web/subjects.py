"""The pipelines of ``oncely web`` and ``oncely top``: files, or the pipeline files of a folder."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

from oncely.errors import OncelyError, WrongInput
from oncely.pipeline import Pipeline
from oncely.web.model import Problem, Subject


def subjects_of(paths: Sequence[Path]) -> list[Subject]:
    """The pipelines, by name.

    A file of a folder that can't be read is shown as such; files without ``[source]`` and
    ``[sink]`` are no pipeline files.

    Raises:
        WrongInput: a file that was named can't be read, there is none, or two have one name.
    """
    found: dict[str, Subject] = {}
    for path in paths:
        inner = sorted(path.glob("*.toml")) if path.is_dir() else []
        listed = [_of_folder(one) for one in inner if _is_pipeline(one)] if path.is_dir() else [
            _named(Pipeline.from_file(path), path)
        ]  # fmt: skip
        for one in listed:
            if one.name in found:
                raise WrongInput(
                    f"{one.file} and {found[one.name].file} are both named {one.name!r}",
                    way_out="name one of the two",
                )
            found[one.name] = one
    if not found:
        shown = ", ".join(map(str, paths))
        raise WrongInput(
            f"there is no pipeline file in {shown}",
            way_out="name a pipeline file, or a folder with *.toml that have [source] and [sink]",
        )
    return [found[name] for name in sorted(found)]


def _named(pipeline: Pipeline, file: Path) -> Subject:
    return Subject(pipeline.settings.name, file, pipeline)


def _of_folder(file: Path) -> Subject:
    try:
        return _named(Pipeline.from_file(file), file)
    except OncelyError as error:
        return Subject(file.name, file, None, Problem.of(error))


def _is_pipeline(file: Path) -> bool:
    """True also for a file that is no TOML: its error is shown."""
    try:
        keys = tomllib.loads(file.read_text("utf-8")).keys()
    except (OSError, ValueError):
        return True
    return {"source", "sink"} <= keys
