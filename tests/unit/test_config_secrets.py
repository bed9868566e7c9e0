"""A secret in every field of the file appears in no text."""

from __future__ import annotations

import json
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oncely import secrets
from oncely.config import PipelineSettings, parse
from oncely.config.fill import Filling
from oncely.errors import ConfigError, Unavailable
from oncely.secrets import redact

FILE = """
name = "orders"
[source]
brokers = "h:1"
topics = ["orders"]
[source.kafka]
security.protocol = "SASL_SSL"
sasl.mechanism = "PLAIN"
sasl.username = "pat"
sasl.password = "@"
ssl.keystore.location = "/me.p12"
ssl.keystore.password = "@"
[decode]
format = "avro"
schema_registry = "https://registry"
schema_registry_user_info = "pat:@"
[sink]
kind = "sql"
url = "postgresql://pat:@@h/db?sslpassword=@"
table = "orders"
[spark.conf]
"spark.hadoop.fs.s3a.secret.key" = "@"
"spark.ssl.keyPassword" = "@"
"spark.my.url" = "https://pat:@@h/"
"""


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What these tests call a secret is an ordinary word to all others."""
    monkeypatch.setattr(secrets, "_known", set())


@pytest.fixture
def canary() -> str:
    """Nobody has used it before, so that only this test can make it known as a secret."""
    return f"canary-{uuid.uuid4().hex}"


def texts(settings: PipelineSettings) -> Iterator[str]:
    """Every way in which settings become a text without anybody asking for a secret."""
    parts: list[Any] = [settings, settings.source, settings.decode, settings.sink, settings.spark]
    for part in parts:
        yield repr(part)
        yield str(part)
        yield part.model_dump_json()
        yield json.dumps(part.model_dump(mode="json"))
    yield json.dumps(settings.describe())
    yield settings.sink.url_for_display


def test_written_out(canary: str) -> None:
    settings = parse(tomllib.loads(FILE.replace("@@", f"{canary}@").replace('@"', f'{canary}"')))
    assert settings.source.kafka_properties()["sasl.password"] == canary, "the canary is there"
    assert canary in settings.sink.url.get_secret_value()
    assert canary in settings.spark.spark_conf()["spark.my.url"]
    for text in texts(settings):
        assert canary not in text
    assert redact(f"driver says: {canary}") == "driver says: ***"
    assert canary not in str(Unavailable(f"driver says: {canary}"))


FIELDS = [
    ("h:1", "{}:1"),
    ('["orders"]', '["{}"]'),
    ('= "pat"', '= "{}"'),
    ("/me.p12", "{}"),
    ("https://registry", "https://{}"),
    ("h/db", "{}/db"),
    ('table = "orders"', 'table = "{}"'),
    ('"spark.ssl.keyPassword" = "@"', '"spark.any" = "{}"'),
    ("[sink]", "[transform]\nsql = \"SELECT '{}' AS x\"\n[sink]"),
]


@pytest.mark.parametrize(("old", "new"), FIELDS)
def test_filled_in_anywhere(
    old: str, new: str, canary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert old in FILE
    value = canary.replace("-", "_")
    monkeypatch.setenv("CANARY", value)
    text = FILE.replace(old, new.replace("{}", "${CANARY}"), 1)
    settings = parse(tomllib.loads(text.replace("@@", "pw@").replace('@"', 'pw"')))
    for text in texts(settings):
        assert value not in text


@pytest.mark.parametrize("at", FIELDS)
def test_nor_in_what_is_said_about_a_wrong_file(
    at: tuple[str, str], canary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The value itself is what is wrong, or something beside it. A text that was cut or quoted
    would hide it from whoever looks for the whole of it.
    """
    monkeypatch.setenv("CANARY", f"{canary} not a fine value: 'quote\" \\n {'long' * 50}")
    text = FILE.replace(at[0], at[1].replace("{}", "${CANARY}"), 1)
    text = text.replace("@@", "pw@").replace('@"', 'pw"')
    with pytest.raises(ConfigError) as caught:
        parse(tomllib.loads(text.replace('name = "orders"', 'name = "my orders"\nfoo = 1')))
    assert "name" in str(caught.value)
    assert canary not in str(caught.value)
    assert canary not in repr(caught.value)


def test_a_password_with_signs_is_known_as_written_and_as_meant(canary: str) -> None:
    text = FILE.replace("@@", f"p%40ss{canary}@").replace('@"', 'pw"')
    parse(tomllib.loads(text))
    assert canary not in redact(f"p%40ss{canary} and p@ss{canary}")


class TestFilling:
    """``${...}``, by itself."""

    def filled(self, value: Any, tmp_path: Path, **environment: str) -> Any:
        filling = Filling(tmp_path, environment)
        done = filling.fill({"a": {"b": value}})["a"]["b"]
        if filling.problems:
            raise filling.problems[0]
        return done

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("plain", "plain"),
            ("${FILL_ONE}", "first-value"),
            ("x${FILL_ONE}y${FILL_TWO}z", "xfirst-valueysecond-${FILL_ONE}z"),
            ("$${FILL_ONE}", "${FILL_ONE}"),
            ("$$$$", "$$"),
            ("a$b$", "a$b$"),
            ("${file:secret.txt}", "file-value"),
            (["${FILL_ONE}", 5], ["first-value", 5]),
            (5, 5),
        ],
    )
    def test_fills(self, text: Any, expected: Any, tmp_path: Path) -> None:
        (tmp_path / "secret.txt").write_text("file-value\r\n")
        env = {"FILL_ONE": "first-value", "FILL_TWO": "second-${FILL_ONE}"}
        assert self.filled(text, tmp_path, **env) == expected

    @pytest.mark.parametrize(
        ("text", "word"),
        [
            ("${NO_SUCH}", "no variable NO_SUCH"),
            ("${", "closing brace"),
            ("${A", "closing brace"),
            ("${}", "without a variable's name"),
            ("${A-B}", "without a variable's name"),
            ("${file:none.txt}", "can't read the secret file 'none.txt': No such file"),
            ("${file:binary}", "not UTF-8"),
            ("${file:}", "can't read"),
        ],
    )
    def test_says_what_is_missing(self, text: str, word: str, tmp_path: Path) -> None:
        (tmp_path / "binary").write_bytes(b"\xff")
        with pytest.raises(ConfigError, match=r"a\.b") as caught:
            self.filled(text, tmp_path)
        assert word in str(caught.value)

    def test_every_missing_variable_is_told(self) -> None:
        with pytest.raises(ConfigError) as caught:
            parse(tomllib.loads(FILE.replace('"@"', '"${NO_SUCH}"')))
        assert "4 problems" in str(caught.value)
        assert "source.kafka.sasl.password" in str(caught.value)
        assert "spark.conf.spark.ssl.keyPassword" in str(caught.value)
