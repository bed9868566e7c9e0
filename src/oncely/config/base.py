"""The base of all sections: strict, frozen, no unknown keys, secrets hidden;
and what a check says of a value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    PrivateAttr,
    SecretStr,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from oncely.config.written import PATH, written
from oncely.secrets import Secrets, redact

KIND = "oncely"


class Problem(NamedTuple):
    """A problem at or below the key that is being checked.

    Attributes:
        below: the rest of the dotted key; empty for the key itself.
        text: the value and the allowed values; never a secret.
        way_out: the recommended action.
    """

    below: str
    text: str
    way_out: str = ""


def invalid(text: str, way_out: str = "", *, below: str = "") -> PydanticCustomError:
    """The error that a pydantic validator raises for one problem."""
    return all_invalid([Problem(below, text, way_out)])


def all_invalid(problems: Iterable[Problem]) -> PydanticCustomError:
    """The error that a pydantic validator raises for several problems at once."""
    found = tuple(problems)
    text = "; ".join(problem.text for problem in found)
    return PydanticCustomError(KIND, "{text}", {"text": text, "problems": found})


def shown(value: object) -> str:
    """A value as shown in a sentence: short, and with the plain name of its type."""
    match value:
        case bool():
            return str(value).lower()
        case str():
            text = redact(value)  # before it is cut or quoted, which changes the text
            return repr(text if len(text) <= 80 else text[:77] + "...")
        case dict():
            return "a table"
        case list() | tuple():
            return "a list"
        case _:
            return str(value)


class Section(BaseModel):
    """One table of the pipeline file.

    Secrets have a type of their own, which hides them. A value from ``${...}``, or a URL's
    password, may occur in any other field as well, so a repr and a JSON dump also redact all
    secrets of the file.
    """

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
    )

    _secrets: Secrets = PrivateAttr(default=Secrets())

    @model_validator(mode="after")
    def _take_secrets(self, info: ValidationInfo) -> Self:
        self._secrets = (info.context or {}).get("secrets", Secrets())
        return self

    @property
    def secrets(self) -> Secrets:
        """The secrets of the pipeline file that contains this section."""
        return self._secrets

    def __eq__(self, other: object) -> bool:
        """True if the settings are equal, regardless of their files."""
        return type(self) is type(other) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]  # some of them are tables

    def __repr__(self) -> str:
        return self._secrets.redact(super().__repr__())

    def __str__(self) -> str:
        return self._secrets.redact(super().__str__())

    @model_serializer(mode="wrap")
    def _serialize(
        self, handler: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> dict[str, Any]:
        done: dict[str, Any] = handler(self)
        return _redacted(done, self._secrets) if info.mode == "json" else done


def as_tuple(value: object) -> object:
    """TOML has lists, but no tuples."""
    return tuple(value) if isinstance(value, list) else value


@written(PATH)
def file_name(value: object, info: ValidationInfo) -> object:
    """A path; a relative one is relative to the folder of the pipeline file."""
    if not isinstance(value, str) or not value.strip():
        return value
    base = (info.context or {}).get("base", Path())
    return Path(base, value)


def _flat(value: object, found: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Keys with dots, which TOML parses into nested tables, joined again."""
    if not isinstance(value, Mapping):
        raise invalid(f"found {shown(value)}; allowed: a table")
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            _flat(inner, found, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = inner
    return found


def plain_table(value: object) -> dict[str, Any]:
    """A table of settings with dotted names, flat, secrets as plain texts.

    Raises a problem if the value is no table.
    """
    return {
        key: inner.get_secret_value() if isinstance(inner, SecretStr) else inner
        for key, inner in _flat(value, {}).items()
    }


def revealed(values: Mapping[str, str | SecretStr]) -> dict[str, str]:
    """The unredacted values, for the client that needs them. Not to be shown."""
    return {
        key: value.get_secret_value() if isinstance(value, SecretStr) else value
        for key, value in values.items()
    }


def _redacted(value: Any, secrets: Secrets) -> Any:
    match value:
        case str():
            return secrets.redact(value)
        case dict():
            return {key: _redacted(inner, secrets) for key, inner in value.items()}
        case list():
            return [_redacted(inner, secrets) for inner in value]
        case _:
            return value
