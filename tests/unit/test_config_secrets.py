"""A secret in every field of the file appears in no text."""

from __future__ import annotations

import json
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oncely.config import PipelineSettings, parse
from oncely.config.secrecy import Filling, written
from oncely.errors import ConfigError, Unavailable
from oncely.secrets import scope

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


def test_written_out(canary: str) -> None:
    settings = parse(tomllib.loads(FILE.replace("@@", f"{canary}@").replace('@"', f'{canary}"')))
    assert settings.source.kafka_properties()["sasl.password"] == canary, "the canary is there"
    assert canary in settings.sink.url.get_secret_value()
    assert canary in settings.spark.spark_conf()["spark.my.url"]
    for text in texts(settings):
        assert canary not in text
    assert settings.secrets.redact(f"driver says: {canary}") == "driver says: ***"
    with scope(settings.secrets):
        assert canary not in str(Unavailable(f"driver says: {canary}"))


ADDRESSES = [
    ("h:1", "{}:1"),
    ('["orders"]', '["{}"]'),
    ('= "pat"', '= "{}"'),
    ("/me.p12", "{}"),
    ("https://registry", "https://{}"),
    ("h/db", "{}/db"),
    ('table = "orders"', 'table = "{}"'),
    ('"spark.ssl.keyPassword" = "@"', '"spark.hadoop.fs.s3a.endpoint" = "{}"'),
]
SECRETS = [
    ('sasl.password = "@"', 'sasl.password = "{}"'),
    ('ssl.keystore.password = "@"', 'ssl.keystore.password = "{}"'),
    ('"pat:@"', '"pat:{}"'),
    ("pat:@@h/db", "pat:{}@h/db"),
    ("?sslpassword=@", "?sslpassword={}"),
    ("?sslpassword=@", "?of_unknown_meaning={}"),
    ('"spark.hadoop.fs.s3a.secret.key" = "@"', '"spark.hadoop.fs.s3a.secret.key" = "{}"'),
    ('"spark.ssl.keyPassword" = "@"', '"spark.of.unknown.meaning" = "{}"'),
    ("https://pat:@@h/", "https://pat:{}@h/"),
    ("[sink]", "[transform]\nsql = \"SELECT '{}' AS x\"\n[sink]"),
]


def filled_in(at: tuple[str, str], name: str = "CANARY") -> PipelineSettings:
    old, new = at
    assert old in FILE
    text = FILE.replace(old, new.replace("{}", f"${{{name}}}"), 1)
    return parse(tomllib.loads(text.replace("@@", "pw@").replace('@"', 'pw"')))


@pytest.mark.parametrize("value", ["canary_4711_x", "canaryword", "47114711"])
@pytest.mark.parametrize("at", SECRETS)
def test_a_secret_that_was_filled_in_is_hidden(
    at: tuple[str, str], value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY", value)
    settings = filled_in(at)
    for text in texts(settings):
        assert value not in text
    assert value not in settings.secrets.redact(f'no such host "x@{value}": tried {value}@h')


@pytest.mark.parametrize("at", ADDRESSES)
def test_an_address_or_name_that_was_filled_in_is_shown(
    at: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY", "broker_4711")
    settings = filled_in(at)
    assert settings.secrets.redact("no answer from broker_4711:1") == "no answer from broker_4711:1"
    # User, host and database of a URL are shown, key stores only as paths.
    assert "broker_4711" in json.dumps(settings.describe())


def test_a_variable_that_is_named_after_a_secret_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK_TOKEN", "canary_4711")
    settings = filled_in(("https://pat:@@h/", "https://h/{}"), "HOOK_TOKEN")
    assert settings.spark.spark_conf()["spark.my.url"] == "https://h/canary_4711"
    for text in texts(settings):
        assert "canary_4711" not in text


def test_one_pipelines_secret_is_an_ordinary_word_to_all_others() -> None:
    text = FILE.replace("@@", "{}@").replace('@"', '{}"')
    first = parse(tomllib.loads(text.replace("{}", "another-1")))
    second = parse(tomllib.loads(text.replace("{}", "hidden-2")))
    said = "another-1 and hidden-2"
    assert first.secrets.redact(said) == "*** and hidden-2"
    assert second.secrets.redact(said) == "another-1 and ***"
    assert str(Unavailable(said)) == said
    assert second.secrets == parse(tomllib.loads(text.replace("{}", "hidden-2"))).secrets


def test_a_password_that_is_also_the_users_name() -> None:
    """As in many a test environment: what is shown as a name can't be hidden as a password."""
    settings = parse(
        tomllib.loads(
            FILE.replace("pat:@@h/db?sslpassword=@", "postgres:postgres@db/postgres").replace(
                '@"', 'pw"'
            )
        )
    )
    assert settings.describe()["sink"]["url"] == "postgresql://postgres:***@db/postgres"
    said = 'PostgreSQL: password authentication failed for user "postgres"'
    assert settings.secrets.redact(said) == said
    assert "postgres:postgres" not in repr(settings)


@pytest.mark.parametrize("at", SECRETS)
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
    settings = parse(tomllib.loads(text))
    assert canary not in settings.secrets.redact(f"p%40ss{canary} and p@ss{canary}")


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


def test_the_name_of_a_missing_variable_in_a_url_is_shown() -> None:
    url = "postgresql://pat:${SHOP_PASSWORD}@db/shop"
    with pytest.raises(ConfigError) as caught:
        parse({"sink": {"kind": "sql", "url": url}})
    assert "export SHOP_PASSWORD=" in str(caught.value.way_out)
    assert "$${SHOP_PASSWORD}" in str(caught.value.way_out)


def test_a_default_is_used_without_a_variable_and_hidden_where_a_secret_stands() -> None:
    raw = {"name": "${N:-orders}", "source": {"kafka": {"sasl.password": "${P:-of-the-file}"}},
           "transform": {"sql": "SELECT ${A:-plain}, ${A_TOKEN:-hushed}, '${E:-}'"}}  # fmt: skip
    filling = Filling(Path(), {"E": "", "N": ""})
    done = filling.fill(raw)
    assert done["name"] == "orders", "an empty variable counts as none, as in a shell"
    assert done["source"]["kafka"]["sasl.password"] == "of-the-file"
    assert done["transform"]["sql"] == "SELECT plain, hushed, ''"
    assert filling.secrets == {"hushed"}, "others may be words of every message"
    assert "of-the-file" in set(written(done))
    filling = Filling(Path(), {"A": "given", "P": "canary"})
    assert filling.fill(raw)["transform"]["sql"].startswith("SELECT given, ")
    assert filling.secrets == {"given", "canary", "hushed"}
    assert filling.problems == []
    for text in ("${:-x}", "${A B:-x}", "${A:-${B}}"):
        filling = Filling(Path(), {})
        filling.fill(text, "name")
        assert "${NAME:-default}" in filling.problems[0].way_out
