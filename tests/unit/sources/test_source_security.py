"""librdkafka's keys, written for a Java client."""

from __future__ import annotations

from pathlib import Path

import pytest

from oncely.clients.kafka import keys, security
from oncely.errors import ConfigError

SCRAM = {
    "security.protocol": "sasl_ssl",
    "sasl.mechanism": "SCRAM-SHA-256",
    "sasl.username": "pat",
    "sasl.password": "opensesame",
}
KEY = "-----BEGIN PRIVATE KEY-----\nTm90IGEgcmVhbCBrZXk=\n-----END PRIVATE KEY-----\n"
CERTIFICATE = "-----BEGIN CERTIFICATE-----\nTm90IHJlYWw=\n-----END CERTIFICATE-----\n"


def unescape(quoted: str) -> str:
    """What java.io.StreamTokenizer makes of a text in double quotes."""
    assert quoted[0] == quoted[-1] == '"'
    text, done = quoted[1:-1], ""
    while text:
        assert text[0] not in '"\n\r', "ends the value"
        if text[0] != "\\":
            done, text = done + text[0], text[1:]
        elif text[1] == "\\":
            done, text = done + "\\", text[2:]
        else:
            done, text = done + chr(int(text[1:4], 8)), text[4:]
    return done


def test_scram() -> None:
    assert security.java({**SCRAM, "ssl.ca.location": "/ca.pem"}) == {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-256",
        "sasl.jaas.config": "org.apache.kafka.common.security.scram.ScramLoginModule required "
        'username="pat" password="opensesame";',
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": "/ca.pem",
    }


@pytest.mark.parametrize(
    "password",
    ['a"b', "a\\b", 'end"', "\\", 'x";y', "a'b", "l1\nl2\rl3", "\t1", "é€", '"0"7', ";="],
)
def test_a_password_survives_the_quoting(password: str) -> None:
    jaas = security.java({**SCRAM, "sasl.password": password})["sasl.jaas.config"]
    value = jaas.split("password=")[1].removesuffix(";")
    assert unescape(value) == password
    assert value.count('"') == 2, "Spark blanks out up to the next quote: there must be no other"


def test_both_clients_get_the_same_numbers() -> None:
    kafka = {
        "client.id": "me",
        "socket.timeout.ms": 5000,
        "fetch.wait.max.ms": 100,
        "fetch.message.max.bytes": 2000,
        "connections.max.idle.ms": 0,
        "socket.send.buffer.bytes": 0,
        "receive.message.max.bytes": 200_000_000,
        "isolation.level": "read_committed",
    }
    assert security.java(kafka) == {
        "client.id": "me",
        "request.timeout.ms": "5000",
        "fetch.max.wait.ms": "100",
        "max.partition.fetch.bytes": "2000",
        "connections.max.idle.ms": "-1",
        "send.buffer.bytes": "-1",
    }
    local = {key: str(value) for key, value in kafka.items() if key != "isolation.level"}
    assert security.librdkafka(kafka) == local


def test_every_accepted_key_goes_somewhere() -> None:
    """No key is accepted and then forgotten on the Java side."""
    only_here = keys.LOCAL | keys.FIXED.keys()
    translated = keys.SAME | keys.RENAMED.keys() | keys.SECURITY
    assert translated | only_here == keys.ACCEPTED
    assert not translated & only_here


def test_kerberos_and_oidc() -> None:
    kerberos = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "GSSAPI",
        "sasl.kerberos.principal": "pat@EXAMPLE.ORG",
        "sasl.kerberos.keytab": "/pat.keytab",
    }
    assert security.java(kerberos) == {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "GSSAPI",
        "sasl.kerberos.service.name": "kafka",
        "sasl.jaas.config": "com.sun.security.auth.module.Krb5LoginModule required "
        'useKeyTab="true" storeKey="true" keyTab="/pat.keytab" principal="pat@EXAMPLE.ORG";',
    }
    oidc = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.client.id": "me",
        "sasl.oauthbearer.client.secret": "opensesame",
        "sasl.oauthbearer.token.endpoint.url": "https://id/token",
        "sasl.oauthbearer.scope": "kafka",
        "sasl.oauthbearer.extensions": "a=b, c=d=e",
    }
    options = security.java(oidc)
    assert options["sasl.jaas.config"].endswith(
        'required clientId="me" clientSecret="opensesame" scope="kafka" '
        'extension_a="b" extension_c="d=e";'
    )
    assert options["sasl.oauthbearer.token.endpoint.url"] == "https://id/token"


def test_certificates(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    key.write_text(KEY)
    certificate.write_text(CERTIFICATE)
    by_value = {
        "security.protocol": "SSL",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.key": KEY,
        "ssl.keystore.certificate.chain": CERTIFICATE,
    }
    files = {"ssl.key.location": str(key), "ssl.certificate.location": str(certificate)}
    values = {"ssl.key.pem": KEY, "ssl.certificate.pem": CERTIFICATE}
    for kafka in (files, values):
        assert security.java({"security.protocol": "ssl", **kafka}) == by_value
    store = {"ssl.keystore.location": "/me.p12", "ssl.keystore.password": "opensesame"}
    assert security.java({"security.protocol": "ssl", **store}) == {
        "security.protocol": "SSL",
        "ssl.keystore.type": "PKCS12",
        **store,
    }
    others = {"ssl.ca.pem": CERTIFICATE, "ssl.endpoint.identification.algorithm": "none"}
    assert security.java({"security.protocol": "ssl", **others}) == {
        "security.protocol": "SSL",
        "ssl.truststore.type": "PEM",
        "ssl.truststore.certificates": CERTIFICATE,
        "ssl.endpoint.identification.algorithm": "",
    }


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (None, "No such file"),
        (KEY.replace("PRIVATE", "RSA PRIVATE"), "pkcs8"),
        (KEY.replace("PRIVATE", "ENCRYPTED PRIVATE"), "pkcs12"),
    ],
)
def test_a_key_that_java_can_not_read_is_refused(
    tmp_path: Path, text: str | None, word: str
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    certificate.write_text(CERTIFICATE)
    if text:
        key.write_text(text)
    kafka = {"ssl.key.location": str(key), "ssl.certificate.location": str(certificate)}
    with pytest.raises(ConfigError, match=r"source\.kafka\.ssl\.key\.location") as caught:
        security.java({"security.protocol": "ssl", **kafka})
    assert word in str(caught.value)
    assert "Tm90IGEg" not in str(caught.value)


def test_every_spelling_of_a_secret_is_known(tmp_path: Path) -> None:
    password = 'qu"ote\\d-canary'
    jaas = security.java({**SCRAM, "sasl.password": password})["sasl.jaas.config"]
    known = security.secrets({**SCRAM, "sasl.password": password})
    assert known.redact(jaas).endswith('password="***";')
    assert known.redact(f"login {password}") == "login ***"
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    key.write_text(KEY)
    certificate.write_text(CERTIFICATE)
    kafka = {"ssl.key.location": str(key), "ssl.certificate.location": str(certificate)}
    assert security.secrets(kafka).redact("at Tm90IGEgcmVhbCBrZXk= in line 2") == "at *** in line 2"
