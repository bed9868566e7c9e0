"""``${NAME}``, ``${NAME:-default}`` and ``${file:/path}`` inside the strings of a pipeline file,
and its secret values, determined by their fields.

``$$`` is a plain dollar; a dollar before any other character than a brace is kept.

Passwords, tokens and key material are secret; names, addresses and sizes are not, regardless of
their origin. A value of ``${...}`` in a text of unknown meaning (SQL, an unknown key, one of
Spark's settings) is secret, unless its key names an address."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from pydantic import SecretStr

from oncely.config.base import passwords, without_password
from oncely.config.problems import is_secret_field, known_keys
from oncely.config.runtimes import is_secret
from oncely.errors import ConfigError
from oncely.kafka.properties import ACCEPTED, SECRET, is_sasl, is_tls, secret_values

if TYPE_CHECKING:
    from oncely.config.pipeline import PipelineSettings

_URL = re.compile(r"\s*[A-Za-z][\w+.-]*://")
_ADDRESS = re.compile(r"(?:endpoint|hosts?|address|port|region|master)$", re.IGNORECASE)
_FREE_TEXT = frozenset({"transform.sql"})
_SHOWN = re.compile(r"name|source\.topics|sink\.(table|topic)|source\.kafka\.sasl\.username")


class Filled(NamedTuple):
    """A ``${...}`` of the file.

    Attributes:
        token: its text in the file.
        name: the name of the variable, or ``file:`` and a path.
        value: the value that has replaced it.
    """

    token: str
    name: str
    value: str


def hidden(key: str, template: str, done: str, filled: Sequence[Filled]) -> set[str]:
    """The values filled into one text that must not be shown.

    Args:
        key: the dotted key of the text.
        template: the text before filling.
        done: the text after filling.
        filled: the values in their order.
    """
    every = {one.value for one in filled}
    key = key.partition("[")[0]
    if _holds_secret(key):
        return every
    named = {one.value for one in filled if is_secret(one.name)}
    if _URL.match(done):
        return named | _in_url(template, filled)
    return named if _is_public(key) else every


def written(raw: Any, key: str = "") -> Iterator[str]:
    """The secrets of a filled file: values of secret fields, and the password of every URL."""
    match raw:
        case Mapping():
            if key == "source.kafka":
                yield from secret_values(raw)
            for name, inner in raw.items():
                yield from written(inner, f"{key}.{name}" if key else str(name))
        case list() | tuple():
            for inner in raw:
                yield from written(inner, key)
        case str() | int() | float():
            text = str(raw)
            yield from passwords(text)
            if _holds_secret(key):
                yield text
                if key.endswith("user_info"):
                    yield text.partition(":")[2]


def unprotected(settings: PipelineSettings) -> Iterator[str]:
    """One sentence for each login that others on the network can read, or answer.

    SCRAM sends no password, but without TLS what it sends lets a password be guessed, and others
    can read and continue the session. Kerberos has a protection of its own.
    """
    source, sink = settings.source, settings.sink
    kafka = {key: str(value).lower() for key, value in source.kafka.items()}
    if _leaves(f"{source.brokers},{getattr(sink, 'brokers', None) or ''}"):
        if is_sasl(kafka) and not is_tls(kafka) and "gssapi" not in kafka.values():
            yield f"source.kafka: the login goes to the brokers {_OPEN}: SASL_SSL protects it"
        if {kafka.get(one) for one in _VERIFICATION} & {"false", "none"}:
            yield "source.kafka: brokers are not verified, and others can answer in their place"
    endpoint = str(source.kafka.get("sasl.oauthbearer.token.endpoint.url", ""))
    logins = [("source.kafka.sasl.oauthbearer.token.endpoint.url", endpoint)]
    for key, one in (("decode", settings.decode), ("decode.key", settings.decode.key)):
        if getattr(one, "schema_registry_user_info", None):
            logins.append((f"{key}.schema_registry", getattr(one, "schema_registry", "")))
    for key, section in (("sink.url", sink), ("offsets.url", settings.offsets)):
        if isinstance(url := getattr(section, "url", None), SecretStr):
            logins.append((key, url.get_secret_value()))
    yield from (f"{key}: the login goes to it {_OPEN}" for key, url in logins if _is_open(url))


_OPEN = "without TLS, where others on the network can read or guess it"
_VERIFICATION = ("enable.ssl.certificate.verification", "ssl.endpoint.identification.algorithm")


def _is_open(url: str) -> bool:
    """True if a login goes to another machine, and nothing demands TLS."""
    to = urlsplit(url)
    query = dict(parse_qsl(to.query))
    hosts = query.get("host") or to.netloc.rpartition("@")[2]
    mode = query.get("sslmode") or os.environ.get("PGSSLMODE", "")
    encrypted = to.scheme.startswith("postgres") and mode in ("require", "verify-ca", "verify-full")
    known = to.scheme in ("http", "redis", "postgres", "postgresql")
    return known and not encrypted and _leaves(hosts)


def _leaves(hosts: str) -> bool:
    """True if one of the hosts, with commas between and perhaps with ports, is another machine."""
    names = {re.sub(r":\d*$", "", one.strip()).strip("[]") for one in hosts.split(",")}
    return any(one and not re.match(r"/|127\.|localhost$|::1$", one) for one in names)


def public(raw: Any, key: str = "") -> Iterator[str]:
    """Values that messages show: they cannot be distinguished from an equal password."""
    match raw:
        case Mapping():
            for name, inner in raw.items():
                yield from public(inner, f"{key}.{name}" if key else str(name))
        case list():
            for inner in raw:
                yield from public(inner, key)
        case str() if _SHOWN.fullmatch(key):
            yield raw
        case str() if key in ("sink.url", "offsets.url"):
            yield from re.split(r"[/:@,]+", without_password(raw).partition("?")[0])


def _holds_secret(key: str) -> bool:
    """True if the whole value of a key is secret."""
    if key.startswith("source.kafka."):
        name = key.removeprefix("source.kafka.")
        return name in SECRET or (name not in ACCEPTED and is_secret(name))
    return is_secret_field(key) or is_secret(key)


def _is_public(key: str) -> bool:
    """True if no value of a key is secret."""
    table, _, name = key.rpartition(".")
    if key.startswith("source.kafka."):
        return key.removeprefix("source.kafka.") in ACCEPTED
    if key.startswith("spark.conf."):
        return _ADDRESS.search(name) is not None
    return key not in _FREE_TEXT and name in known_keys(table)


def _in_url(template: str, filled: Sequence[Filled]) -> set[str]:
    """The values in a URL's password or query."""
    marked = template
    for at, one in enumerate(filled):
        marked = marked.replace(one.token, f"filled-{at}-", 1)
    query = marked.partition("?")[2]
    places = [*passwords(marked), query]
    return {
        one.value
        for at, one in enumerate(filled)
        if any(f"filled-{at}-" in place for place in places)
    }


# -- references in texts --------------------------------------------------------------------

_TOKEN = re.compile(r"\$\$|\$\{([^{}]*)\}|\$\{")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass
class Filling:
    """Fills in the values of one pipeline file.

    Attributes:
        base: the base of relative paths of secret files.
        environment: the environment variables.
        problems: values that could not be filled in.
        secrets: values that were filled in and must not be shown.
    """

    base: Path
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)
    problems: list[ConfigError] = field(default_factory=list)
    secrets: set[str] = field(default_factory=set, repr=False)

    def fill(self, value: Any, key: str = "") -> Any:
        """A copy of ``value`` with every string filled in; ``key`` is its dotted name."""
        match value:
            case str():
                return self._text(value, key)
            case Mapping():
                return {
                    name: self.fill(inner, f"{key}.{name}" if key else str(name))
                    for name, inner in value.items()
                }
            case list() | tuple():
                return [self.fill(inner, f"{key}[{at}]") for at, inner in enumerate(value)]
            case _:
                return value

    def _text(self, text: str, key: str) -> str:
        filled: list[Filled] = []

        def one(match: re.Match[str]) -> str:
            if match[0] == "$$":
                return "$"
            try:
                value = self._value(match[1], key)
            except ConfigError as error:
                self.problems.append(error)
                return match[0]
            name, _, default = match[1].partition(":-")
            if value != default or is_secret(name):  # the file shows its default to all
                filled.append(Filled(match[0], name, value))
            return value

        done = _TOKEN.sub(one, text)
        self.secrets.update(hidden(key, text, done, filled))
        return done

    def _value(self, name: str | None, key: str) -> str:
        if name is not None and name.startswith("file:"):
            return self._file(name.removeprefix("file:").strip(), key)
        name, given, default = (name or "").partition(":-")
        if not _NAME.fullmatch(name):
            raise ConfigError(
                key,
                "${ without a variable's name and a closing brace",
                way_out="write ${NAME}, ${NAME:-default} or ${file:/path}; a plain dollar before a"
                " brace is $$",
            )
        if given:
            return self.environment.get(name) or default
        if name not in self.environment:
            raise ConfigError(
                key,
                f"the environment has no variable {name}",
                way_out=f"export {name}=..., or write $${{{name}}} if it is no variable",
            )
        return self.environment[name]

    def _file(self, name: str, key: str) -> str:
        try:
            text = (self.base / name).read_text("utf-8")
        except (OSError, UnicodeDecodeError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise ConfigError(
                key,
                f"can't read the secret file {name!r}: {reason}",
                way_out="name a text file that this user may read",
            ) from None
        # Editors and `echo` end a file with a line break that does not belong to the secret.
        return text.removesuffix("\n").removesuffix("\r")
