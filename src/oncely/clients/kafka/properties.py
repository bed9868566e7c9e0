"""The properties of ``[source.kafka]``: checked, as librdkafka gets them, and their secrets.

A property that would be ignored, or that the clients set themselves, is refused: silence would be
worse than an error. librdkafka itself refuses unknown names only. Beside the properties that are
allowed here it takes twice as many others: those of groups, positions and single kinds of clients,
callbacks and plugins. So the allowed ones are listed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from oncely.clients.kafka.keys import (
    ACCEPTED,
    CHOICES,
    JAVA_NAMES,
    MECHANISM_NEEDS,
    OWNED,
    SECRET,
)
from oncely.errors import ConfigError
from oncely.secrets import Secrets, redact


def plain(kafka: Mapping[str, object]) -> dict[str, str]:
    """The values as texts, and ``sasl.mechanisms`` by its shorter name.

    Raises:
        ConfigError: a value is not a text, a number or true/false.
    """
    done: dict[str, str] = {}
    for name, value in kafka.items():
        key = name
        if isinstance(value, bool):
            text = str(value).lower()
        elif isinstance(value, str | int | float):
            text = str(value)
        else:
            raise _error(
                key, f"found {type(value).__name__}; allowed: a text, a number, true/false"
            )
        if key in ("sasl.mechanism", "sasl.mechanisms"):
            key, text = "sasl.mechanism", text.upper()  # librdkafka requires capitals
        done[key] = text
    return done


def problems(kafka: Mapping[str, object]) -> list[ConfigError]:
    """All problems of ``[source.kafka]``; empty if it is accepted."""
    found = [error for key in kafka for error in _unknown(key)]
    if {"sasl.mechanism", "sasl.mechanisms"} <= kafka.keys():
        found.append(_error("sasl.mechanisms", "the same key as sasl.mechanism", "keep one"))
    try:
        values = plain({key: value for key, value in kafka.items() if key in ACCEPTED})
    except ConfigError as error:
        return [*found, error]
    found += [error for key, value in values.items() for error in _value(key, value)]
    # Missing properties are reported only if each given property is valid.
    return found or [*_sasl(values), *_ssl(values)]


def checked(kafka: Mapping[str, object]) -> dict[str, str]:
    """``kafka`` as :func:`plain` texts.

    Raises:
        ConfigError: the error names ``source.kafka.<key>``; the first of :func:`problems`.
    """
    for problem in problems(kafka):
        raise problem
    return plain(kafka)


def librdkafka(kafka: Mapping[str, object]) -> dict[str, str]:
    """The properties of the clients, without brokers and settings of single clients.

    Raises:
        ConfigError: the error names ``source.kafka.<key>``.
    """
    values = checked(kafka)
    return {key: value for key, value in values.items() if key != "isolation.level"}


def secrets(kafka: Mapping[str, object]) -> Secrets:
    """The secrets of ``[source.kafka]``, for the error texts of its clients."""
    key_file = kafka.get("ssl.key.location")
    with suppress(OSError, UnicodeDecodeError):
        pem = Path(str(key_file)).read_text("ascii") if key_file else ""
        return Secrets.of([*secret_values(kafka), pem, *_body(pem)])
    return Secrets.of(secret_values(kafka))


def secret_values(kafka: Mapping[str, object]) -> list[str]:
    """Every value that must not be shown; of a PEM each line, too."""
    values = {key: str(kafka[key]) for key in SECRET & kafka.keys()}
    lines = [line for key, pem in values.items() if key.endswith(".pem") for line in _body(pem)]
    return [*values.values(), *lines]


def is_sasl(values: Mapping[str, str]) -> bool:
    """True if the connection authenticates by SASL."""
    return values.get("security.protocol", "plaintext").lower().startswith("sasl")


def is_tls(values: Mapping[str, str]) -> bool:
    """True if the connection is encrypted."""
    return values.get("security.protocol", "plaintext").lower().endswith("ssl")


def _error(key: str, problem: str, way_out: str = "") -> ConfigError:
    return ConfigError(f"source.kafka.{key}", problem, way_out=way_out)


def _unknown(key: str) -> Iterator[ConfigError]:
    """The reason why a property is not accepted, if it is not."""
    if key in ACCEPTED:
        return
    if key in OWNED:
        reason, way_out = OWNED[key]
        yield _error(key, f"refused: {reason}", way_out)
    elif key in JAVA_NAMES:
        yield _error(key, "this is the Java client's name", f"write {JAVA_NAMES[key]}")
    elif key.startswith("kafka."):
        yield _error(key, "the prefix is Spark's", f"write {key.removeprefix('kafka.')}")
    else:
        near = difflib.get_close_matches(key, sorted(ACCEPTED), 1, 0.75)
        way_out = f"did you mean {near[0]}?" if near else "remove it"
        yield _error(key, "is unknown, or set by the clients themselves", way_out)


def _value(key: str, value: str) -> Iterator[ConfigError]:
    """The reason why a value is not accepted, if it is not."""
    if key in CHOICES and value.lower() not in CHOICES[key]:
        allowed = ", ".join(CHOICES[key])
        yield _error(key, f"found {redact(value)!r}; allowed: {allowed}", "use one of these")
    if not value.strip() and key not in SECRET:
        yield _error(key, "is empty", "give it a value or remove it")


def _sasl(values: Mapping[str, str]) -> Iterator[ConfigError]:
    """SASL properties that require each other, or that would be ignored."""
    given = [key for key in values if key.startswith("sasl.")]
    if not is_sasl(values):
        for key in given:
            yield _error(
                key,
                "would be ignored: security.protocol names no SASL",
                'write security.protocol = "SASL_SSL"',
            )
        return
    mechanism = values.get("sasl.mechanism", "").lower()
    if not mechanism:
        yield _error("sasl.mechanism", "is missing", f"one of {', '.join(MECHANISM_NEEDS)}")
        return
    for key in MECHANISM_NEEDS[mechanism]:
        if not values.get(key):
            yield _error(key, f"is missing; {mechanism.upper()} needs it", "give it a value")


def _ssl(values: Mapping[str, str]) -> Iterator[ConfigError]:
    """TLS properties that require or exclude each other, or that would be ignored."""
    given = {key for key in values if key.startswith("ssl.")}
    if not is_tls(values):
        for key in sorted(given):
            yield _error(
                key,
                "would be ignored: security.protocol names no SSL",
                'write security.protocol = "SSL" or "SASL_SSL"',
            )
        return
    if {"ssl.ca.location", "ssl.ca.pem"} <= given:
        yield _error("ssl.ca.pem", "excludes ssl.ca.location", "keep one of the two")
    pairs = (
        ("ssl.certificate.location", "ssl.key.location"),
        ("ssl.certificate.pem", "ssl.key.pem"),
        ("ssl.keystore.location", "ssl.keystore.password"),
    )
    for pair in pairs:
        missing = [key for key in pair if key not in given]
        if len(missing) == 1:
            yield _error(missing[0], f"is missing; {', '.join(set(pair) & given)} needs it")
    stores = [pair[0] for pair in pairs if given & set(pair)]
    if len(stores) > 1:
        yield _error(stores[1], f"excludes {stores[0]}: give one client key", "keep one pair")


def _body(pem: str) -> list[str]:
    """The lines of a PEM with content: a text may quote a single line."""
    return [line for line in pem.splitlines() if line and not line.startswith("-----")]
