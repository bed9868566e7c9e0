"""Secrets belong to what brought them, and are looked for where they can stand."""

from __future__ import annotations

import pickle
import threading
from base64 import b64encode
from types import SimpleNamespace
from typing import Any

import pytest

from oncely.config import parse
from oncely.errors import Fenced, Unavailable
from oncely.kafka import properties
from oncely.pipeline import Pipeline, planning
from oncely.secrets import Secrets, carried, redact, scope


@pytest.mark.parametrize(
    ("value", "text", "expected"),
    [
        ("s3cr3t!", "x s3cr3t! y", "x *** y"),
        ("s3cr3t!", "xs3cr3t!y", "x***y"),
        ("another", "another process holds it", "another process holds it"),
        ("another", "anotherone", "anotherone"),
        ("another", "another", "***"),
        ("another", "no host \"another\" or 'another'", "no host \"***\" or '***'"),
        ("another", "password=another", "password=***"),
        ("another", "postgresql://u:another@h/d", "postgresql://u:***@h/d"),
        ("another", "failed to resolve another@h", "failed to resolve ***@h"),
        ("4711", "at offset 4711", "at offset 4711"),
        ("4711", "redis://:4711@h", "redis://:***@h"),
        ("averylongwordwithoutasign", "xaverylongwordwithoutasigny", "x***y"),
        ("pw", "upward, password=pw, u:pw@h", "upward, password=***, u:***@h"),
        ("p@ss", "p%40ss or p@ss", "*** or ***"),
        ("a/b ?", "a%2Fb%20%3F a%2fb%20%3f a/b%20%3F a%2Fb+%3F", "*** *** *** ***"),
        ("a\\\"ß\n'", r"""{"x":"a\\\"ß\n'"}, {"x":"a\\\"\u00df\n'"}""", '{"x":"***"}, {"x":"***"}'),
        ("a\\\nß", r"'a\\\nß'; 'a\\\n\xdf'", "'***'; '***'"),
        ("user:pa55w0rd", "Authorization: Basic dXNlcjpwYTU1dzByZA==", "Authorization: Basic ***"),
        ("", "nothing", "nothing"),
    ],
)
def test_a_value_is_replaced_where_it_can_stand(value: str, text: str, expected: str) -> None:
    assert Secrets.of([value]).redact(text) == expected


KAFKA = {"sasl.mechanism": "PLAIN", "sasl.username": "u", "sasl.password": "s3cr3t!"}
PLAIN, TLS = ({**KAFKA, "security.protocol": f"SASL_{one}"} for one in ("PLAINTEXT", "SSL"))
OAUTH = {
    "security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER",
    "sasl.oauthbearer.method": "oidc", "sasl.oauthbearer.client.id": "me",
    "sasl.oauthbearer.client.secret": "cl1ent!",
    "sasl.oauthbearer.token.endpoint.url": "http://login:pa55!@idp/x?scope=a&token=t0k3n!",
}  # fmt: skip
AVRO = {"format": "avro", "schema_registry": "http://r:8081", "schema_registry_user_info": "u:p!"}
PG = {"kind": "sql", "table": "t", "url": "postgresql://u:p!@h:5432/d"}


def settings(
    kafka: dict[str, Any] | None = None, brokers: str = "b:1", decode: Any = None,
    sink: Any = None, **more: Any,
) -> Any:  # fmt: skip
    return {
        "name": "p",
        "source": {"brokers": brokers, "topics": ["t"], "kafka": kafka or {}},
        "decode": decode or {"format": "json", "schema": "id INT"},
        "sink": sink or {"kind": "sql", "url": "sqlite:///f.db", "table": "t"},
        **more,
    }


def silent() -> None:
    raise Unavailable("no answer")


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (settings(), []),
        (settings(PLAIN), ["source.kafka"]),
        (settings(PLAIN | {"sasl.mechanism": "SCRAM-SHA-256"}), ["source.kafka"]),
        (settings(PLAIN, "127.0.0.1:1,localhost:2,[::1]:3"), []),
        (settings(PLAIN, "127.0.0.1:1,b:2"), ["source.kafka"]),
        (settings(TLS), []),
        (settings(TLS | {"enable.ssl.certificate.verification": "false"}), ["source.kafka"]),
        (settings(TLS | {"ssl.endpoint.identification.algorithm": "none"}), ["source.kafka"]),
        (settings(OAUTH), ["source.kafka.sasl.oauthbearer.token.endpoint.url"]),
        (settings(decode=AVRO), ["decode.schema_registry"]),
        (settings(decode=AVRO | {"schema_registry": "https://r"}), []),
        (settings(decode=AVRO | {"schema_registry": "http://127.0.0.1"}), []),
        (settings(sink=PG), ["sink.url"]),
        (settings(sink=PG | {"url": f"{PG['url']}?sslmode=prefer"}), ["sink.url"]),
        (settings(sink=PG | {"url": f"{PG['url']}?sslmode=verify-full"}), []),
        (settings(sink=PG | {"url": "postgresql://u:p!@localhost:1,h:2/d"}), ["sink.url"]),
        (settings(sink=PG | {"url": "postgresql:///d?host=/run/postgresql"}), []),
        (settings(delivery="at_least_once", offsets={"store": "redis", "url": "redis://:p!@h"}),
         ["offsets.url"]),
    ],
)  # fmt: skip
def test_logins_without_tls_are_named(
    raw: Any, named: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PGSSLMODE", raising=False)
    monkeypatch.setattr(planning._Planner, "_source_is_silent", True)
    monkeypatch.setattr(Pipeline, "destination", SimpleNamespace(look=silent, sink=lambda _: None))
    monkeypatch.setattr(planning, "needed_acls", lambda *_: ())
    notes = Pipeline(parse(raw)).plan(use_spark=False).notes
    assert [one.partition(": ")[0] for one in notes if "others" in one] == named
    assert "!" not in "".join(notes)


def test_what_the_endpoint_of_oauth_is_given_is_a_secret() -> None:
    secrets = properties.secrets(OAUTH)
    basic = b64encode(b"me:cl1ent!").decode()
    for hidden in (secrets, parse(settings(OAUTH)).secrets):
        assert (
            hidden.redact(f"pa55! t0k3n! cl1ent! {basic} idp scope") == "*** *** *** *** idp scope"
        )


def test_the_longest_first() -> None:
    assert Secrets.of(["one-two", "one-two-three"]).redact("one-two-three") == "***"


def test_what_is_shown_as_a_name_is_hidden_in_logins_only() -> None:
    secrets = Secrets.of(["oncely-1"], public=["oncely-1"])
    assert secrets.redact("user oncely-1 at x://oncely-1:oncely-1@h password='oncely-1'") == (
        "user oncely-1 at x://oncely-1:***@h password='***'"
    )


def test_nothing_of_a_secret_is_in_its_repr_and_it_travels() -> None:
    secrets = Secrets.of(["canary-1"])
    assert "canary" not in repr(secrets)
    assert pickle.loads(pickle.dumps(secrets)) == secrets


def test_an_error_is_redacted_by_the_scope_in_which_it_is_made() -> None:
    with scope(Secrets.of(["canary-1"])):
        inside = Unavailable("says canary-1", way_out="not canary-1")
        copy = pickle.loads(pickle.dumps(Fenced("canary-1", 1, 2)))
    assert (inside.message, inside.way_out, str(copy)[:14]) == (
        "says ***",
        "not ***",
        "pipeline '***'",
    )
    assert str(Unavailable("says canary-1")) == "says canary-1"


def test_an_error_from_elsewhere_is_redacted_when_it_arrives() -> None:
    error = Unavailable("says canary-1", way_out="not canary-1")
    error.hide(Secrets.of(["canary-1"]))
    assert (error.message, error.way_out, *error.args) == ("says ***", "not ***", "says ***")


def test_a_scope_is_its_threads_own() -> None:
    seen: list[str] = []
    with scope(Secrets.of(["canary-1"])):
        thread = threading.Thread(target=lambda: seen.append(redact("canary-1")))
        thread.start()
        thread.join()
        with scope(Secrets.of(["canary-2"])):
            assert redact("canary-1 canary-2") == "canary-1 ***"
        assert redact("canary-1 canary-2") == "*** canary-2"
    assert seen == ["canary-1"]


def test_a_task_takes_the_scope_with_it() -> None:
    with scope(Secrets.of(["canary-1"])):
        task = carried(_redacted)
    assert list(pickle.loads(pickle.dumps(task))(iter(["canary-1", "x"]))) == ["***", "x"]
    assert redact("canary-1") == "canary-1"


def _redacted(texts):  # type: ignore[no-untyped-def]
    for text in texts:
        yield redact(text)
