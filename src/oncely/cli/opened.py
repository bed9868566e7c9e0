"""The pipelines of a command, and its durations."""

from __future__ import annotations

import grp
import os
import pwd
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from oncely.cli import screen
from oncely.config import loads
from oncely.config.base import parse_seconds
from oncely.errors import WrongInput
from oncely.extras import WITHOUT_SPARK, require
from oncely.pipeline import Pipeline

if TYPE_CHECKING:
    from oncely.pipeline.application import Application

STDIN = Path("-")
"""Standard input, as the name of a pipeline file."""


def opened_app(path: str) -> Pipeline:
    """The pipeline of a worker's handlers, as :func:`opened`.

    Raises:
        ConfigError: it can't be imported, or names every invalid key.
    """
    from oncely.pipeline.handling import worker_of

    _add(Path.cwd())
    pipeline = worker_of(path).pipeline
    screen.hide(pipeline.secrets)
    pipeline.require_packages()
    screen.named(pipeline.settings.name)
    return pipeline


def opened(file: Path, *, imports: bool = False) -> Pipeline:
    """The pipeline of a file, or of standard input; its secrets are redacted in all output from
    now on.

    With ``imports`` the modules beside the file can be imported: the command runs its functions.

    Raises:
        ConfigError: names every invalid key, and the way out.
        WrongInput: as of :func:`importable`.
    """
    pipeline = _from_stdin() if file == STDIN else Pipeline.from_file(file)
    screen.hide(pipeline.secrets)
    pipeline.require_packages()
    screen.named(pipeline.settings.name)
    if imports:
        importable(pipeline, file)
    return pipeline


def opened_together(files: Sequence[Path]) -> Application:
    """The pipelines of files that run in one Spark application, as :func:`opened`.

    Raises:
        ConfigError: names every invalid key of every file, and the way out.
        WrongInput: as of :func:`importable`.
    """
    from oncely.pipeline.application import Application, read

    found = Application((_from_stdin(),)) if list(files) == [STDIN] else read(files)
    screen.hide(*(one.secrets for one in found.pipelines))
    if any(one.settings.runtime == "spark" for one in found.pipelines):
        require("spark", "spark", "a run on Spark", WITHOUT_SPARK)
    for one, file in zip(found.pipelines, dict.fromkeys(files), strict=True):
        one.require_packages()
        importable(one, file)
    if len(found.pipelines) == 1:
        screen.named(found.name)
    return found


def importable(pipeline: Pipeline, file: Path) -> None:
    """Let the driver and local workers import the modules beside the pipeline file, if it names a
    function; never in place of a module of Python or of an installed package.

    Raises:
        WrongInput: other users may write to the folder.
    """
    transform = pipeline.settings.transform
    if transform is not None and transform.sql is None:
        _add(file.resolve().parent)


def _add(folder: Path) -> None:
    for path in (folder, *folder.parents, *folder.glob("*.py")):
        if _others_write(path, shared=path in folder.parents):
            raise WrongInput(
                f"{path}: other users may write to it, and code in {folder} is executed",
                way_out="make it yours or root's, and chmod go-w; or install the module, or put it"
                " on PYTHONPATH",
            )
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _others_write(path: Path, *, shared: bool) -> bool:
    """True if neither this user nor root owns the path, or others may write to it.

    Args:
        path: a file or directory.
        shared: in the directory with the sticky bit, such as ``/tmp``, other users can't replace
            what is not theirs.
    """
    found = path.stat()
    if os.statvfs(path).f_flag & os.ST_RDONLY:  # as Kubernetes mounts a ConfigMap, with mode 0777
        return False
    others = stat.S_IWOTH | (0 if _is_private(found.st_gid) else stat.S_IWGRP)
    sticky = shared and found.st_mode & stat.S_ISVTX
    return found.st_uid not in (0, os.getuid()) or bool(found.st_mode & others and not sticky)


def _is_private(number: int) -> bool:
    """True for the group of this user alone, with which many systems create all files."""
    try:
        group, name = grp.getgrgid(number), pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return False
    return group.gr_name == name and set(group.gr_mem) <= {name}


def refuse_stdin(paths: Sequence[Path]) -> None:
    """Refuse standard input where a command shows or runs several pipelines.

    Raises:
        WrongInput: it is one of the paths.
    """
    if STDIN in paths:
        raise WrongInput(
            "- (standard input) has one pipeline, and this command is for several",
            way_out="save it as a file, and name that",
        )


def _from_stdin() -> Pipeline:
    if sys.stdin.isatty():
        screen.note("the pipeline file is read from standard input; Ctrl-D ends it")
    return Pipeline(loads(sys.stdin.buffer.read(), base=Path(), of="standard input"))


def files_of(paths: Sequence[Path]) -> list[Path]:
    """The pipeline files: those that are given, and all of the folders that are given.

    Raises:
        WrongInput: a folder has no pipeline file, or standard input is one of several.
    """
    if len(paths) > 1:
        refuse_stdin(paths)
    found: list[Path] = []
    for path in paths:
        inside = sorted(path.glob("*.toml")) if path.is_dir() else [path]
        if not inside:
            raise WrongInput(
                f"{path}: no pipeline file", way_out="its pipelines are the files *.toml in it"
            )
        found += inside
    return found


def seconds(option: str, text: str) -> float:
    """A duration of the command line: ``30``, or ``"5 minutes"``.

    Raises:
        WrongInput: it is no duration.
    """
    try:
        return float(text) if text.replace(".", "", 1).isdecimal() else parse_seconds(text)
    except ValueError:
        raise WrongInput(
            f"{option}: {text!r} is no duration", way_out='write 30, or "5 minutes"'
        ) from None
