"""`oncely torture` finds a handler whose work is not in its transaction, and no other."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from oncely.testing.faults import FUNCTION, LEND
from oncely.testing.servers.kafka import Broker
from oncely.testing.servers.postgres import Postgres
from oncely.testing.torture import trial
from tests.conftest import repository
from tests.scenarios.commands import run
from tests.scenarios.world import produce

pytestmark = pytest.mark.servers
BAD = "tests.scenarios.tortured:app"
SETUP = """
CREATE TABLE bills (id bigserial, of text);
CREATE TABLE total (bills bigint);
INSERT INTO total VALUES (0);
"""


def tortured(
    app: str, folder: Path, setup: Path, tables: Sequence[str], record: Mapping[str, Any]
) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and report, with two records that differ in their id."""
    records = folder / "records.jsonl"
    records.write_text("\n".join(json.dumps({"value": {"id": n, **record}}) for n in range(2)))
    words = [word for table in tables for word in ("--table", table)]
    words += ["--setup", str(setup), "--records", str(records), "--json"]
    if "total" in tables:
        words += ["--ignore", "id"]
    done = run(
        "torture", app, *words, timeout=400, alone=True, env={"BILLING_PASSWORD": "a secret"}
    )
    assert done.returncode in {0, 1}, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.long
@pytest.mark.deep  # every call; two of them: the last test
def test_work_in_the_transaction_is_done_once(tmp_path: Path) -> None:
    """The handler of the examples."""
    setup, tables = repository() / "examples" / "billing.sql", ("bills", "debts")
    record = {"customer": "ann", "total": "0.10"}
    code, found = tortured("examples.billing:worker", tmp_path, setup, tables, record)
    calls = [one["call"] for one in found[::2]]
    assert calls.count("a statement of the function") == 4
    assert calls[-1] == "COMMIT"
    assert sum(one["killed"] is not None for one in found) > len(found) / 2
    for one in found:
        assert one["lost"] == one["surplus"] == {"bills": 0, "debts": 0}
    assert code == 0


@pytest.mark.long
def test_work_outside_of_the_transaction_is_found(tmp_path: Path) -> None:
    setup = tmp_path / "setup.sql"
    setup.write_text(SETUP)
    code, found = tortured(BAD, tmp_path, setup, ("bills", "total"), {"name": "a"})
    assert {one["surplus"]["bills"] for one in found} == {0, 2}
    assert all(one["lost"] == {"bills": 0, "total": 0} for one in found)
    assert code == 1


def test_of_two_steps(
    broker: Broker,
    postgres: Postgres,
    make_topic: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the handler is called, and at its first statement in the transaction."""
    topic = make_topic(partitions=1)
    monkeypatch.setenv("TORTURED_TOPIC", topic)
    produce(broker.bootstrap, topic, ((0, b"k", b'{"id": 1, "name": "a"}') for _ in range(2)))
    made: list[str] = []

    def create(name: str) -> str:
        made.append(f"{topic}_{name}")
        return postgres.create_database(made[-1])

    tables, ignored = ("bills", "total"), ("id",)
    stage = trial.Stage(BAD, broker.bootstrap, create, tmp_path, SETUP, tables, ignored)
    try:
        expected, calls = trial.reference(stage)
        found = trial.run(stage, expected, calls[:2], lambda _: None)
    finally:
        for name in made:
            postgres.drop_database(name)
    assert [(one.call, one.after) for one in found] == [
        (LEND, False),
        (LEND, True),
        (FUNCTION, False),
        (FUNCTION, True),
    ]
    assert all(one.killed for one in found)
    assert [one.surplus["bills"] for one in found] == [0, 0, 2, 2]
    assert not any(sum(one.lost.values()) or one.surplus["total"] for one in found)
