"""``oncely web``."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from oncely.cli import screen, verbs
from oncely.cli.opened import importable, refuse_stdin
from oncely.errors import OncelyError, WrongInput
from oncely.extras import require
from oncely.http_server import cannot_listen, parse_address
from oncely.pipeline import Pipeline
from oncely.secrets import Secrets
from oncely.web.access import TOKEN, Access, checked_token, is_loopback
from oncely.web.model import Problem, Subject
from oncely.web.watch import Watched

if TYPE_CHECKING:
    import uvicorn


def opened_subjects(paths: Sequence[Path]) -> list[Subject]:
    """The pipelines; their secrets are redacted in all output from now on."""
    refuse_stdin(paths)
    found = subjects_of(paths)
    hidden = Secrets()
    for one in found:
        if one.pipeline is not None:
            hidden |= one.pipeline.secrets
    screen.hide(hidden)
    return found


def serve(asked: verbs.Web) -> None:
    """Serve the pages until a signal.

    Raises:
        ConfigError: the extra is not installed, or the token can be guessed.
        WrongInput: an address that is none of this machine, or that others reach without a token.
        Unavailable: it is taken.
    """
    require("web", "web", "the site")
    from oncely.web.server import Site, server_of

    found, audits, names = opened_subjects(asked.paths), asked.audits, asked.allow_host or ()
    host, port = parse_address("--listen", asked.listen)
    token = _token(asked.token)
    if token is None and (names or not is_loopback(host)):
        raise WrongInput(
            f"--listen {asked.listen}, --allow-host: other machines would read records without a"
            " token",
            way_out=f"set {TOKEN}, or let --token make one; or use neither of these options",
        )
    if audits is not None and not audits.is_dir():
        raise WrongInput(f"--audits {audits}: there is no such folder")
    for one in found:
        if one.pipeline is not None:
            importable(one.pipeline, one.file)
    with _listening(asked.listen, host, port) as listening:
        port = listening.getsockname()[1]
        access = Access.of(host, port, token, names)
        servers: list[uvicorn.Server] = []
        site = Site(
            [Watched(one, asked.every) for one in found], access, audits,
            ended=lambda: any(one.should_exit for one in servers),
        )  # fmt: skip
        servers.append(server_of(site.app()))
        _announce(host, port, token, made=asked.token and TOKEN not in os.environ)
        try:
            _run(servers[0], listening)
        finally:
            site.close()


def _run(server: uvicorn.Server, listening: socket.socket) -> None:
    """Serve until a signal, which the server raises again when it has ended."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        server.run(sockets=[listening])
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)


def _token(make: bool) -> str | None:
    given = os.environ.get(TOKEN)
    if given is not None:
        return checked_token(given)
    return secrets.token_urlsafe(24) if make else None


def _listening(address: str, host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise cannot_listen("--listen", address, error) from None


def _announce(host: str, port: int, token: str | None, *, made: bool) -> None:
    shown = f"[{host}]" if ":" in host else host
    screen.out.print(f"http://{shown}:{port}/")
    if made:
        screen.err.print(f"token: {token}")
    elif token is None:
        screen.note("read-only; with --token it also replays dead letters and resets positions")


# -- pipelines -----------------------------------------------------------------------------


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
