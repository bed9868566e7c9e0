"""Security settings for two clients: librdkafka's properties, and their translation for Java's.

Java's client requires its login as a JAAS entry (KIP-85) and its certificates as PEM (KIP-651).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from oncely.clients.kafka.keys import RENAMED, SAME, SECRET
from oncely.clients.kafka.properties import checked, is_sasl, is_tls
from oncely.errors import ConfigError
from oncely.secrets import Secrets

_LOGIN = "org.apache.kafka.common.security"
_MODULES = {
    "plain": f"{_LOGIN}.plain.PlainLoginModule",
    "scram-sha-256": f"{_LOGIN}.scram.ScramLoginModule",
    "scram-sha-512": f"{_LOGIN}.scram.ScramLoginModule",
    "gssapi": "com.sun.security.auth.module.Krb5LoginModule",
    "oauthbearer": f"{_LOGIN}.oauthbearer.OAuthBearerLoginModule",
}
_OIDC_HANDLER = f"{_LOGIN}.oauthbearer.OAuthBearerLoginCallbackHandler"
_OFF_IS_MINUS_ONE = (
    "connections.max.idle.ms",
    "socket.send.buffer.bytes",
    "socket.receive.buffer.bytes",
)


def librdkafka(kafka: Mapping[str, object]) -> dict[str, str]:
    """The properties of librdkafka's clients, without brokers and settings of single clients.

    Raises:
        ConfigError: the error names ``source.kafka.<key>``.
    """
    values = checked(kafka)
    return {key: value for key, value in values.items() if key != "isolation.level"}


def java(kafka: Mapping[str, object]) -> dict[str, str]:
    """The properties of a Java client, with Java's names, without Spark's ``kafka.`` prefix.

    A key and its certificate in two files become two values, because Java accepts only one file:
    the files are read here, on the driver.

    Raises:
        ConfigError: the error names ``source.kafka.<key>``.
    """
    values = checked(kafka)
    options: dict[str, str] = {}
    for key, value in values.items():
        if key in SAME or key in RENAMED:
            off = key in _OFF_IS_MINUS_ONE and value == "0"
            options[RENAMED.get(key, key)] = "-1" if off else value
    if protocol := values.get("security.protocol"):
        options["security.protocol"] = protocol.upper()
    if is_sasl(values):
        options |= _sasl(values)
    if is_tls(values):
        options |= _truststore(values) | _keystore(values)
    return options


def secrets(kafka: Mapping[str, object]) -> Secrets:
    """The secrets of ``[source.kafka]``, for the error texts of its clients."""
    key_file = kafka.get("ssl.key.location")
    with suppress(OSError, UnicodeDecodeError):
        pem = Path(str(key_file)).read_text("ascii") if key_file else ""
        return Secrets.of([*secret_values(kafka), pem, *_body(pem)])
    return Secrets.of(secret_values(kafka))


def secret_values(kafka: Mapping[str, object]) -> list[str]:
    """Every value that must not be shown, in each spelling that a client receives."""
    found: list[str] = []
    for key in SECRET & kafka.keys():
        value = str(kafka[key])
        found += [value, _quote(value)[1:-1]]
        if key.endswith(".pem"):
            found += _body(value)
    return found


def _sasl(values: Mapping[str, str]) -> dict[str, str]:
    mechanism = values["sasl.mechanism"].lower()
    options = {"sasl.mechanism": mechanism.upper()}
    if mechanism == "gssapi":
        options["sasl.kerberos.service.name"] = values.get("sasl.kerberos.service.name", "kafka")
        if relogin := values.get("sasl.kerberos.min.time.before.relogin"):
            options["sasl.kerberos.min.time.before.relogin"] = relogin
        login = {
            "useKeyTab": "true",
            "storeKey": "true",
            "keyTab": values["sasl.kerberos.keytab"],
            "principal": values["sasl.kerberos.principal"],
        }
    elif mechanism == "oauthbearer":
        options["sasl.login.callback.handler.class"] = _OIDC_HANDLER
        options["sasl.oauthbearer.token.endpoint.url"] = values[
            "sasl.oauthbearer.token.endpoint.url"
        ]
        login = _oidc_login(values)
    else:
        login = {"username": values["sasl.username"], "password": values["sasl.password"]}
    return options | {"sasl.jaas.config": _jaas(_MODULES[mechanism], login)}


def _oidc_login(values: Mapping[str, str]) -> dict[str, str]:
    """Client credentials for OIDC (KIP-768), by the names of Java's login handler."""
    login = {
        "clientId": values["sasl.oauthbearer.client.id"],
        "clientSecret": values["sasl.oauthbearer.client.secret"],
    }
    if scope := values.get("sasl.oauthbearer.scope"):
        login["scope"] = scope
    for pair in filter(None, values.get("sasl.oauthbearer.extensions", "").split(",")):
        name, _, value = pair.partition("=")
        login[f"extension_{name.strip()}"] = value.strip()
    return login


def _jaas(module: str, options: Mapping[str, str]) -> str:
    words = " ".join(f"{name}={_quote(value)}" for name, value in options.items())
    return f"{module} required {words};"


def _quote(value: str) -> str:
    r"""A JAAS value in double quotes, for ``java.io.StreamTokenizer``, which parses it.

    A quote is written as the octal ``\042``, never as ``\"``: Spark redacts passwords in its logs
    up to the next quote, so a quote in the middle would leave the rest readable.
    """
    done = "".join(
        "\\\\" if c == "\\" else f"\\{ord(c):03o}" if c == '"' or ord(c) < 32 else c for c in value
    )
    return f'"{done}"'


def _truststore(values: Mapping[str, str]) -> dict[str, str]:
    options: dict[str, str] = {}
    if location := values.get("ssl.ca.location"):
        options = {"ssl.truststore.type": "PEM", "ssl.truststore.location": location}
    if pem := values.get("ssl.ca.pem"):
        options = {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": pem}
    if (check := values.get("ssl.endpoint.identification.algorithm")) is not None:
        options["ssl.endpoint.identification.algorithm"] = "" if check == "none" else check.lower()
    return options


def _keystore(values: Mapping[str, str]) -> dict[str, str]:
    if store := values.get("ssl.keystore.location"):
        return {
            "ssl.keystore.type": "PKCS12",
            "ssl.keystore.location": store,
            "ssl.keystore.password": values["ssl.keystore.password"],
        }
    if "ssl.key.location" in values:
        key = _read(values, "ssl.key.location")
        chain = _read(values, "ssl.certificate.location")
    elif "ssl.key.pem" in values:
        key, chain = values["ssl.key.pem"], values["ssl.certificate.pem"]
    else:
        return {}
    return {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.key": _pkcs8(key, values),
        "ssl.keystore.certificate.chain": chain,
    }


def _read(values: Mapping[str, str], key: str) -> str:
    try:
        return Path(values[key]).read_text("ascii")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a PEM file"
        raise ConfigError(
            f"source.kafka.{key}",
            f"can't read {values[key]!r}: {reason}",
            way_out="name a PEM file that this user may read",
        ) from None


def _pkcs8(key: str, values: Mapping[str, str]) -> str:
    """The key, if Java can read it: only PKCS#8 (RFC 5958)."""
    name = "ssl.key.location" if "ssl.key.location" in values else "ssl.key.pem"
    if "BEGIN PRIVATE KEY" not in key:
        raise ConfigError(
            f"source.kafka.{name}",
            "not a plain PKCS#8 key; Spark's client reads no other kind of PEM key",
            way_out="openssl pkcs8 -topk8 -nocrypt makes one; for a key with a password, "
            "openssl pkcs12 -export makes a file for ssl.keystore.location",
        )
    return key


def _body(pem: str) -> list[str]:
    """The lines of a PEM with content: a text may quote a single line."""
    return [line for line in pem.splitlines() if line and not line.startswith("-----")]
