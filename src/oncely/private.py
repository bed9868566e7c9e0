"""Directories with access for the current user only, also below world-writable directories."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from oncely.errors import ConfigError


def is_private(folder: Path) -> bool:
    """True if the directory belongs to this user and other users can neither read nor write it."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    # A directory inherits the set-group-ID bit, which is ignored here.
    private = stat.S_IMODE(found.st_mode) & 0o777 == stat.S_IRWXU
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and private


def make_private(folder: Path, key: str, way_out: str) -> None:
    """Create a directory, or accept an existing one if it is private.

    In a world-writable directory, another user could create a directory of a predictable name.

    Args:
        folder: the directory; its parent exists.
        key: the key of the pipeline file, or the option, for errors.
        way_out: the error's ``way_out``.

    Raises:
        ConfigError: it is a link or no directory, belongs to another user, or is open to others; or
            it cannot be created.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        pass  # a file, or a dangling link
    except OSError as error:
        raise ConfigError(key, f"{folder}: {error.strerror}", way_out=way_out) from None
    if not is_private(folder):
        raise ConfigError(
            key,
            f"{folder} is not a directory that this user alone has access to: it must be no link,"
            f" belong to user id {os.getuid()} and have mode 0700",
            way_out=f"remove it if it is yours; {way_out}",
        )
