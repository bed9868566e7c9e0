"""Finding and aborting incomplete multipart uploads.

pyarrow has no call for it. Two requests suffice, so they are signed here (AWS Signature Version 4)
and sent by the standard library: boto3 would add 15 MB. The limitation: keys are read from
``[sink.s3]``, the environment and the shared credentials file, but not from a machine's role. In
that case a lifecycle rule of the bucket (AbortIncompleteMultipartUpload) has the same effect, and
the error recommends it.
"""

from __future__ import annotations

import configparser
import hashlib
import hmac
import http.client
import os
import re
import ssl
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit
from xml.etree import ElementTree

from oncely.clients.files.s3_options import S3Options
from oncely.errors import ConfigError, OncelyError, Unavailable
from oncely.secrets import Secrets

_EMPTY = hashlib.sha256(b"").hexdigest()
_TRIES = 3
_BUSY = (408, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class Keys:
    """Credentials."""

    access: str
    secret: str = field(repr=False)
    token: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Upload:
    """An upload that is not completed."""

    key: str
    id: str
    begun: datetime


def abort(
    url: str,
    options: S3Options,
    older_than: datetime,
    ours: Callable[[str], bool],
    *,
    dry_run: bool = False,
) -> int:
    """Abort old uploads below ``s3://bucket/prefix``, and return their number.

    Args:
        ours: returns True if the upload of a path below the prefix may be aborted.

    Raises:
        ConfigError: no keys are configured, or the server refuses them.
        Unavailable: no answer.
    """
    parts = urlsplit(url)
    root = unquote(parts.path).strip("/")
    prefix = f"{root}/" if root else ""
    bucket = _Bucket(parts.netloc, options)
    # All are listed first: a listing from which entries vanish is not reliable.
    found = [one for one in bucket.uploads(prefix) if ours(one.key.removeprefix(prefix))]
    old = [upload for upload in found if upload.begun < older_than]
    if not dry_run:
        for upload in old:
            bucket.abort(upload)
    return len(old)


def require_conditional_writes(url: str, options: S3Options | None) -> None:
    """Refuse a server that lets two writers create the same object: it cannot contain a log.

    Amazon S3 is not checked: it supports ``If-None-Match`` since 2024.

    Raises:
        ConfigError: the server does not refuse the second writer.
        Unavailable: no answer.
    """
    if options is None or options.endpoint is None:
        return
    parts = urlsplit(url)
    bucket = _Bucket(parts.netloc, options)
    key = f"/{quote(unquote(parts.path).strip('/'))}/.oncely-probe-{uuid.uuid4().hex}"
    answers = [bucket.create(key), bucket.create(key)]
    bucket.send("DELETE", key, {}, (404,))
    if answers != [True, False]:
        raise ConfigError(
            "sink.s3.endpoint",
            "the server has no conditional writes (If-None-Match): two writers could both commit"
            " the same version of the table",
            way_out="use a server that has them, or a file system",
        )


def signed(
    method: str,
    host: str,
    path: str,
    query: Mapping[str, str],
    keys: Keys,
    region: str,
    at: datetime,
) -> tuple[str, dict[str, str]]:
    """A request's target and headers, signed by Signature Version 4 for a body of no bytes.

    Args:
        path: the path of the request, percent-encoded.
        at: the present time, UTC.
    """
    stamp = at.strftime("%Y%m%dT%H%M%SZ")
    headers = {"host": host, "x-amz-content-sha256": _EMPTY, "x-amz-date": stamp}
    if keys.token:
        headers["x-amz-security-token"] = keys.token
    names = ";".join(sorted(headers))
    text = "&".join(f"{_quoted(k)}={_quoted(v)}" for k, v in sorted(query.items()))
    lines = [method, path, text]
    lines += [f"{name}:{headers[name]}" for name in sorted(headers)]
    request = "\n".join([*lines, "", names, _EMPTY])
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    digest = hashlib.sha256(request.encode()).hexdigest()
    to_sign = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{digest}"
    key = f"AWS4{keys.secret}".encode()
    for word in scope.split("/"):
        key = hmac.digest(key, word.encode(), "sha256")
    signature = hmac.digest(key, to_sign.encode(), "sha256").hex()
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={keys.access}/{scope}, "
        f"SignedHeaders={names}, Signature={signature}"
    )
    return f"{path}?{text}" if text else path, headers


def find_keys(options: S3Options, environment: Mapping[str, str] | None = None) -> Keys:
    """The keys of ``[sink.s3]``, else of the environment, else of the credentials file.

    Raises:
        ConfigError: there are no keys.
    """
    around = os.environ if environment is None else environment
    found: tuple[str | None, str | None, str | None]
    found = (options.access_key, options.secret_key, options.session_token)
    if found[0] is None:
        names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
        found = (around.get(names[0]), around.get(names[1]), around.get(names[2]))
    if found[0] is None:
        file = Path(around.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials").expanduser()
        profiles = configparser.RawConfigParser()
        profiles.read(file)
        profile = around.get("AWS_PROFILE") or "default"
        if profiles.has_section(profile):
            its = profiles[profile]
            names = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
            found = (its.get(names[0]), its.get(names[1]), its.get(names[2]))
    if not found[0] or not found[1]:
        raise ConfigError(
            "sink.s3.access_key",
            "there are no keys to list incomplete multipart uploads",
            way_out="give the keys in [sink.s3] or in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; "
            "or let a lifecycle rule of the bucket (AbortIncompleteMultipartUpload) remove them",
        )
    return Keys(found[0], found[1], found[2])


class _Bucket:
    def __init__(self, name: str, options: S3Options) -> None:
        self._keys = find_keys(options)
        self._timeout = options.request_timeout
        self._scheme = options.scheme
        self._region = _region(name, options)
        host = options.address or f"s3.{self._region}.amazonaws.com"
        inside = options.endpoint is not None and options.path_style
        self._host, self._path = (host, f"/{name}") if inside else (f"{name}.{host}", "")

    def uploads(self, prefix: str) -> Iterator[Upload]:
        query = {"uploads": "", "prefix": prefix}
        while True:
            page = self._xml("GET", "", query)
            for one in _each(page, "Upload"):
                begun = datetime.fromisoformat(_text(one, "Initiated").replace("Z", "+00:00"))
                key = _text(one, "Key")
                # A server may treat prefixes as whole folders only; other uploads are not touched.
                if key.startswith(prefix):
                    yield Upload(key, _text(one, "UploadId"), begun.astimezone(UTC))
            if _text(page, "IsTruncated").lower() != "true":
                return
            markers = (_text(page, "NextKeyMarker"), _text(page, "NextUploadIdMarker"))
            following = {**query, "key-marker": markers[0], "upload-id-marker": markers[1]}
            if following == query:
                return  # a server that repeats the same page
            query = following

    def abort(self, upload: Upload) -> None:
        # Completed or aborted by another program in the meantime: 404.
        self.send("DELETE", f"/{quote(upload.key, safe='/-_.~')}", {"uploadId": upload.id}, (404,))

    def create(self, key: str) -> bool:
        """Create an empty object; False if it exists."""
        once = {"if-none-match": "*"}
        return self.send("PUT", key, {}, (409, 412, 501), once) is not None

    def _xml(self, method: str, path: str, query: Mapping[str, str]) -> ElementTree.Element:
        body = self.send(method, path or ("" if self._path else "/"), query)
        try:
            return ElementTree.fromstring(body or b"")  # noqa: S314
        except ElementTree.ParseError:
            raise ConfigError(
                "sink.s3.endpoint", "its response is not that of an S3 server"
            ) from None

    def send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        fine: tuple[int, ...] = (),
        more: Mapping[str, str] | None = None,
    ) -> bytes | None:
        """The body of the response; None for a status in ``fine``."""
        reason = ""
        for _ in range(_TRIES):
            target, headers = signed(
                method, self._host, self._path + path, query, self._keys, self._region,
                datetime.now(UTC),
            )  # fmt: skip
            try:
                status, body = self._ask(method, target, headers | dict(more or {}))
            except (OSError, http.client.HTTPException) as error:
                reason = self._shown(str(error)) or type(error).__name__
                continue
            if status < 300 or status in fine:
                return body if status < 300 else None
            reason = f"HTTP status {status}: {self._shown(_reason(body))}"
            if status not in _BUSY:
                raise _refused(reason)
        raise Unavailable(f"{self._host}: multipart uploads: {reason}")

    def _shown(self, text: str) -> str:
        return Secrets.of([self._keys.secret, self._keys.token]).redact(text)

    def _ask(self, method: str, target: str, headers: dict[str, str]) -> tuple[int, bytes]:
        connection: http.client.HTTPConnection
        if self._scheme == "https":
            tls = ssl.create_default_context()
            connection = http.client.HTTPSConnection(self._host, timeout=self._timeout, context=tls)
        else:
            connection = http.client.HTTPConnection(self._host, timeout=self._timeout)
        try:
            connection.request(method, target, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


def _region(bucket: str, options: S3Options) -> str:
    named = options.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if named:
        return named
    if options.endpoint:
        return "us-east-1"
    from pyarrow.fs import resolve_s3_region

    try:
        region: str = resolve_s3_region(bucket)
    except OSError as error:
        raise ConfigError("sink.s3.region", f"can't be looked up: {error}") from None
    return region


def _refused(reason: str) -> OncelyError:
    if "NoSuchBucket" in reason:
        return ConfigError("sink.url", f"no such bucket: {reason}")
    return ConfigError(
        "sink.s3.access_key",
        f"multipart uploads: {reason}",
        way_out="grant s3:ListBucketMultipartUploads and s3:AbortMultipartUpload",
    )


def _quoted(text: str) -> str:
    return quote(text, safe="-_.~")


def _each(page: ElementTree.Element, name: str) -> Iterator[ElementTree.Element]:
    return (one for one in page.iter() if _bare(one) == name)


def _text(inside: ElementTree.Element, name: str) -> str:
    return next((one.text or "" for one in inside if _bare(one) == name), "")


def _bare(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]  # with or without the namespace


def _reason(body: bytes) -> str:
    text = body.decode(errors="replace")
    found = re.search(r"<Code>([^<]*)</Code>(?:.*?<Message>([^<]*)</Message>)?", text, re.S)
    return " ".join(filter(None, found.groups())) if found else text[:200]
