"""The application: routes, the guard before them, the event stream, and the folder of audits."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, quote

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from oncely import http_server
from oncely.audit.report import (
    KINDS,
    CompleteUntil,
    Finding,
    Hour,
    PartitionResult,
    Report,
    Undecided,
    redacted,
)
from oncely.core.ranges import OffsetRange, TopicPartition
from oncely.errors import OncelyError, WrongInput
from oncely.html import style_hash
from oncely.kafka.reset import verb_of
from oncely.pipeline import Pipeline
from oncely.pipeline.offsets import Reset
from oncely.pipeline.rejects import Discarded, RejectFilter, filter_of
from oncely.web import page
from oncely.web.access import TOKEN, Access
from oncely.web.changes import RunningChanges
from oncely.web.model import Problem, Subject, Watched
from oncely.web.style import SCRIPT, STYLE

T = TypeVar("T")

_WAIT = 2.0  # seconds that a page waits for a reading
_LONGEST_FORM = 10_000
_LOG_IN = "Log in with the token, and send the form again."
_LISTED = ("q", "state", "sort")  # of the list of pipelines
_ASKED = ("verb", "value", "topic")  # of a reset
_CHOSEN = ("reason", "partition", "since", "before")  # of a discard
_BEAT = 15.0  # seconds between comments in an event stream

HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src {style_hash(STYLE)}; script-src 'self';"
        " connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # Not "no-referrer": a form would then be sent with the origin "null".
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """Refuses foreign hosts, foreign origins and visitors without a session; adds the headers."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        refused = self._refused(Request(scope))
        await (refused or self._app)(scope, receive, sent)

    def _refused(self, request: Request) -> Response | None:
        access, headers = self._access, Headers(scope=request.scope)
        if not access.is_known_host(headers.get("host", "")):
            return _said(421, "Unknown host", "This server is not known by that name; --allow-host"
                         " names others.")  # fmt: skip
        if request.method not in ("GET", "HEAD") and not access.is_same_origin(headers):
            return _said(403, "Refused", "The request was sent by another site.")
        logged_in = access.form_token(request.cookies.get(access.cookie, "")) is not None
        if logged_in or request.url.path == "/login" or not access.is_private(headers):
            return None
        if access.token is None:
            told = "A proxy has passed the request on: reading needs a token, by --token or"
            return _said(403, "Refused", f"{told} {TOKEN}.")
        if request.method in ("GET", "HEAD"):
            return RedirectResponse("/login", 303)
        return _said(403, "Refused", _LOG_IN)


class _Connection(H11Protocol):
    """Is closed unless a whole request comes in time. Of too many, the one that has waited longest
    for its request is closed."""

    _late: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()
        if len(self.connections) > http_server.MOST:
            given = [one for one in self.connections if isinstance(one, _Connection)]
            waiting = (one for one in given if one._waits)
            oldest = min(waiting, key=lambda one: one._late.when())
            self.connections.discard(oldest)
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._late.cancel()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._late.cancel()
        self._expect()

    @property
    def _waits(self) -> bool:
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def _expect(self) -> None:
        self._late = self.loop.call_later(http_server.LONGEST, self._close_late)

    def _close_late(self) -> None:
        if self._waits:
            self.transport.abort()


def server_of(app: ASGIApp) -> uvicorn.Server:
    """The server of the pages."""
    config = uvicorn.Config(
        app, http=_Connection, ws="none", log_config=None, log_level="error", access_log=False,
        server_header=False, lifespan="off", backlog=http_server.MOST, timeout_graceful_shutdown=1,
    )  # fmt: skip
    return uvicorn.Server(config)


@dataclass(frozen=True)
class Site:
    """The pages.

    Attributes:
        watched: the pipelines.
        access: who may do what.
        audits: a folder of audit reports.
        changes: what was asked for.
        ended: true when the server ends, with which the event streams end.
    """

    watched: Sequence[Watched]
    access: Access
    audits: Path | None = None
    changes: RunningChanges = field(default_factory=RunningChanges)
    ended: Callable[[], bool] = lambda: False

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/", self.index),
            Route("/events", self.events),
            Route("/live.js", _script),
            Route("/login", self.login, methods=["GET", "POST"]),
            Route("/logout", self.logout, methods=["POST"]),
            Route("/p/{name}", self.pipeline),
            Route("/p/{name}/events", self.events),
            Route("/p/{name}/reset", self.plan_reset, methods=["GET"]),
            Route("/p/{name}/reset", self.reset, methods=["POST"]),
            Route("/p/{name}/replay", self.replay, methods=["POST"]),
            Route("/p/{name}/discard", self.plan_discard, methods=["GET"]),
            Route("/p/{name}/discard", self.discard, methods=["POST"]),
        ]
        app = Starlette(routes=routes, exception_handlers={404: _unknown})
        app.add_middleware(Guard, access=self.access)
        return app

    def close(self) -> None:
        """End the readings."""
        for one in self.watched:
            one.close()

    # -- reading -------------------------------------------------------------------------------

    def index(self, request: Request) -> Response:
        """All pipelines."""
        until = time.monotonic() + _WAIT
        for one in self.watched:
            one.overview.get()  # all readings begin before one is waited for
        found = [
            (one.subject, one.overview.get(max(0.0, until - time.monotonic())))
            for one in self.watched
        ]
        asked = {name: request.query_params.get(name, "") for name in _LISTED}
        return HTMLResponse(page.pipelines(found, asked, self._form_token(request)))

    def pipeline(self, request: Request) -> Response:
        """One pipeline."""
        one = self._named(request)
        one.overview.get()
        until = time.monotonic() + _WAIT
        detail = one.detail.get(_WAIT)
        overview = one.overview.get(max(0.0, until - time.monotonic()))
        name, report = one.subject.name, None
        if self.audits is not None:
            report = newest(self.audits, name)
        if report is not None and one.subject.pipeline is not None:
            report = redacted(report, one.subject.pipeline.secrets.redact)
        job, form_token = self.changes.of(name), self._form_token(request)
        text = page.pipeline(one.subject, overview, detail, report, job, form_token)
        return HTMLResponse(text)

    async def events(self, request: Request) -> Response:
        """An event when something else was read."""
        details = "name" in request.path_params
        lines = self.changed([self._named(request)] if details else self.watched, details=details)
        return StreamingResponse(lines, media_type="text/event-stream")

    async def changed(self, chosen: Sequence[Watched], *, details: bool) -> AsyncIterator[str]:
        """The lines of the event stream."""
        seen, beat = self._versions(chosen, details=details), time.monotonic()
        yield "retry: 3000\n\n"
        while not self.ended():  # a client that goes away cancels it
            await asyncio.sleep(max(0.5, len(chosen) / 100))  # a page of many is long
            now = await run_in_threadpool(self._versions, chosen, details=details)
            if now != seen:
                seen = now
                yield f"event: changed\ndata: {datetime.now(UTC):%H:%M:%S}\n\n"
            elif time.monotonic() - beat > _BEAT:
                beat = time.monotonic()
                yield ": still here\n\n"

    def _versions(self, chosen: Sequence[Watched], *, details: bool) -> list[object]:
        found: list[object] = []
        for one in chosen:
            one.overview.get()
            found += [one.overview.version, self.changes.of(one.subject.name)]
            if details:
                one.detail.get()
                found.append(one.detail.version)
        return found

    # -- changes -------------------------------------------------------------------------------

    def plan_reset(self, request: Request) -> Response:
        """The dry run of a reset."""

        def planned(pipeline: Pipeline, asked: Mapping[str, str]) -> Reset:
            return pipeline.reset(verb_of(asked["verb"], asked["value"]), _topics(asked))

        return self._dry_run(request, _ASKED, planned, page.reset_plan)

    def plan_discard(self, request: Request) -> Response:
        """The dry run of a discard."""

        def planned(pipeline: Pipeline, asked: Mapping[str, str]) -> Discarded:
            found = pipeline.discard(_filter(asked))
            redact = pipeline.secrets.redact
            reasons = (one._replace(reason=redact(one.reason)) for one in found.reasons)
            return replace(found, reasons=tuple(reasons))

        return self._dry_run(request, _CHOSEN, planned, page.discard_plan)

    def _dry_run(
        self,
        request: Request,
        fields: Sequence[str],
        planned: Callable[[Pipeline, Mapping[str, str]], T],
        shown: Callable[[Subject, Mapping[str, str], T | Problem, str | None], str],
    ) -> Response:
        form_token = self._form_token(request)
        if form_token is None or self.access.is_foreign(request.headers):
            return _said(403, "Refused", _LOG_IN)
        one, pipeline = self._opened(request)
        asked = {name: request.query_params.get(name, "") for name in fields}
        plan: T | Problem
        try:
            plan = planned(pipeline, asked)
        except OncelyError as error:
            plan = Problem.of(error)
        status = 400 if isinstance(plan, Problem) else 200
        return HTMLResponse(shown(one.subject, asked, plan, form_token), status)

    async def reset(self, request: Request) -> Response:
        """Execute a reset."""

        def begin(one: Watched, pipeline: Pipeline, form: Mapping[str, str]) -> bool:
            verb = verb_of(form.get("verb", ""), form.get("value", ""))
            return self.changes.reset(one.subject.name, pipeline, verb, _topics(form), one.hurry)

        return await self._change(request, begin)

    async def replay(self, request: Request) -> Response:
        """Replay the dead letters."""

        def begin(one: Watched, pipeline: Pipeline, _: Mapping[str, str]) -> bool:
            if pipeline.spark_path is not None:
                raise WrongInput("A replay needs Spark: run `oncely rejects replay`.")
            return self.changes.replay(one.subject.name, pipeline, one.hurry)

        return await self._change(request, begin)

    async def discard(self, request: Request) -> Response:
        """Discard the dead letters that a dry run has shown."""

        def begin(one: Watched, pipeline: Pipeline, form: Mapping[str, str]) -> bool:
            which, shown = _filter(form), form.get("shown")
            if not shown:
                raise WrongInput("A discard needs the dead letters of its dry run.")
            return self.changes.discard(one.subject.name, pipeline, which, shown, one.hurry)

        return await self._change(request, begin)

    async def _change(
        self, request: Request, begin: Callable[[Watched, Pipeline, Mapping[str, str]], bool]
    ) -> Response:
        """Begin a change that a form of the session asks for."""
        form = await _form(request)
        session = request.cookies.get(self.access.cookie, "")
        if not self.access.accepts(session, form.get("form_token", "")):
            return _said(403, "Refused", _LOG_IN)
        one, pipeline = self._opened(request)
        try:
            begun = begin(one, pipeline, form)
        except OncelyError as error:
            return _said(400, "Refused", error.message)
        return _back(one.subject.name) if begun else _said(
            409, "Busy", "Another change of this pipeline is going on."
        )  # fmt: skip

    # -- sessions ------------------------------------------------------------------------------

    async def login(self, request: Request) -> Response:
        """Log in with the token."""
        if request.method != "POST":
            return HTMLResponse(page.login(wrong=False))
        session = self.access.log_in((await _form(request)).get("token", ""))
        if session is None:
            await asyncio.sleep(0.5)  # guesses are slow
            return HTMLResponse(page.login(wrong=True), 403)
        done = RedirectResponse("/", 303)
        done.set_cookie(
            self.access.cookie, session, httponly=True, samesite="strict", path="/",
            secure=request.url.scheme == "https", max_age=int(self.access.lifetime),
        )  # fmt: skip
        return done

    async def logout(self, request: Request) -> Response:
        """End the session."""
        session = request.cookies.get(self.access.cookie, "")
        if not self.access.accepts(session, (await _form(request)).get("form_token", "")):
            return _said(403, "Refused", _LOG_IN)
        self.access.log_out(session)
        done = RedirectResponse("/", 303)
        done.delete_cookie(self.access.cookie, path="/", httponly=True, samesite="strict")
        return done

    def _form_token(self, request: Request) -> str | None:
        return self.access.form_token(request.cookies.get(self.access.cookie, ""))

    def _named(self, request: Request) -> Watched:
        for one in self.watched:
            if one.subject.name == request.path_params["name"]:
                return one
        raise HTTPException(404)

    def _opened(self, request: Request) -> tuple[Watched, Pipeline]:
        one = self._named(request)
        if one.subject.pipeline is None:
            raise HTTPException(404)
        return one, one.subject.pipeline


def _topics(asked: Mapping[str, str]) -> list[str]:
    topic = asked.get("topic", "").strip()
    return [topic] if topic else []


def _filter(asked: Mapping[str, str]) -> RejectFilter:
    reason, partition, since, before = (asked.get(name, "").strip() for name in _CHOSEN)
    return filter_of(
        reason, [partition] if partition else [], since or None, before or None, dashes=""
    )


async def _form(request: Request) -> dict[str, str]:
    """The fields of a form; empty if it is too long, or the client has gone."""
    body = b""
    try:
        async for part in request.stream():
            body += part
            if len(body) > _LONGEST_FORM:
                return {}
    except ClientDisconnect:
        return {}
    found = parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True)
    return {name: values[0] for name, values in found.items()}


def _unknown(_: Request, __: Exception) -> Response:
    return _said(404, "Not found", "There is no such page.")


def _script(_: Request) -> Response:
    return Response(SCRIPT, media_type="text/javascript")


def _said(status: int, title: str, text: str) -> Response:
    return HTMLResponse(page.message(title, text), status)


def _back(name: str) -> Response:
    return RedirectResponse(f"/p/{quote(name, safe='')}", 303)


# -- audits ---------------------------------------------------------------------------------

_LARGEST = 64 << 20  # bytes


def newest(folder: Path, pipeline: str) -> Report | None:
    """The newest report of a pipeline; other files, and reports that are invalid, are ignored."""
    found = [one for path in folder.glob("*.json") if (one := _read(path, pipeline)) is not None]
    return max(found, key=lambda one: one.at, default=None)


def _read(path: Path, pipeline: str) -> Report | None:
    """The last report of a file; a watch has written one a line."""
    try:
        if path.stat().st_size > _LARGEST:
            return None
        value = json.loads(path.read_text("utf-8").strip().rpartition("\n")[2])
        return report_of(value) if value["pipeline"] == pipeline else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def report_of(value: Mapping[str, Any]) -> Report:
    """The report from its JSON: the inverse of ``Report.as_json``, without cluster and topic ids.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: it is no report.
    """
    until = value["complete_until"]
    return Report(
        str(value["pipeline"]),
        None,
        value["proof"],
        datetime.fromisoformat(value["at"]),
        float(value["seconds"]),
        int(value["records"]),
        int(value["accounted"]),
        int(value["holes"]),
        [_finding(kind, one) for kind in KINDS for one in value[kind]],
        {kind: int(value["found"][kind]) for kind in KINDS},
        [_undecided(one) for one in value["undecided"]],
        [_partition(one) for one in value["partitions"]],
        [Hour(**one) for one in value["hours"]],
        CompleteUntil(_moment(until["event_time"]), _moment(until["wall_time"])),
        [str(one) for one in value["limits"]],
    )


def _moment(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def _place(one: Mapping[str, Any]) -> TopicPartition | None:
    if one["topic"] is None:
        return None
    return TopicPartition(str(one["topic"]), int(one["partition"]))


def _finding(kind: Any, one: Mapping[str, Any]) -> Finding:
    within = tuple(
        (TopicPartition(topic, number), OffsetRange(start, end))
        for topic, number, start, end in one.get("within", ())
    )
    detail, file = str(one["detail"]), one.get("file", "")
    return Finding(_place(one), one["offset"], kind, detail, within, file)


def _undecided(one: Mapping[str, Any]) -> Undecided:
    whole = one["start"] is None
    return Undecided(
        _place(one), None if whole else OffsetRange(one["start"], one["end"]), str(one["reason"])
    )


def _partition(one: Mapping[str, Any]) -> PartitionResult:
    return PartitionResult(
        TopicPartition(str(one["topic"]), int(one["partition"])),
        OffsetRange(int(one["start"]), int(one["position"])),
        int(one["end"]),
        int(one["ranges"]),
        [OffsetRange(*both) for both in one["differing"]],
        *(int(one[name]) for name in ("records", "accounted", "holes")),
    )
