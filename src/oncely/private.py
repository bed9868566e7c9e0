"""Directories that are this user's alone, also where everybody may make some."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from oncely.errors import ConfigError


def is_private(folder: Path) -> bool:
    """True for a directory that this user has made and nobody else can read or write."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    # A directory inherits the set-group-ID bit, which is of no matter.
    private = stat.S_IMODE(found.st_mode) & 0o777 == stat.S_IRWXU
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and private


def make_private(folder: Path, key: str, way_out: str) -> None:
    """Make a directory, or take the one that is there if it is private.

    Args:
        folder: the directory, in one that is there.
        key: of the pipeline file, or the option, that an error is about.
        way_out: what to do instead.

    Raises:
        ConfigError: as :func:`check_private`, or it can't be made.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        pass  # a file, or a link that leads nowhere
    except OSError as error:
        raise ConfigError(key, f"{folder}: {error.strerror}", way_out=way_out) from None
    check_private(folder, key, way_out)


def check_private(folder: Path, key: str, way_out: str) -> None:
    """Refuse a directory that another user has made, or may read or write.

    Where anybody may make directories, one of a name that is known beforehand may be a trap.

    Args:
        folder: the directory; one that is missing is fine.
        key, way_out: as for :func:`make_private`.

    Raises:
        ConfigError: it is a link or no directory, belongs to another user, or is open to others.
    """
    if os.path.lexists(folder) and not is_private(folder):
        raise ConfigError(
            key,
            f"{folder} is not a directory that this user alone has access to: it must be no link,"
            f" belong to user id {os.getuid()} and have mode 0700",
            way_out=f"remove it if it is yours; {way_out}",
        )
