"""The state of a watch, as Prometheus scrapes it."""

from __future__ import annotations

import importlib.metadata
import urllib.error
import urllib.request
from dataclasses import replace

import pytest

from oncely.audit.report import CompleteUntil
from oncely.audit.watch import Gauges
from oncely.errors import Unavailable, WrongInput
from tests.prometheus import samples
from tests.unit.audit import reports


def test_values() -> None:
    gauges = Gauges('a"\\\nb')
    mine = 'pipeline="a\\"\\\\\\nb"'
    version = f'version="{importlib.metadata.version("oncely")}"'
    assert samples(gauges.text()) == {
        ("oncely_audit_audits_total", mine): 0, ("oncely_audit_failures_total", mine): 0,
        ("oncely_build_info", version): 1,
    }  # fmt: skip
    gauges.audited(reports.damaged())
    gauges.failed(Unavailable("x"))
    found = samples(gauges.text())
    assert found["oncely_audit_failures_total", mine] == 1
    assert found["oncely_audit_findings", f'{mine},kind="lost"'] == 603
    assert found["oncely_audit_verdict", f'{mine},verdict="damaged"'] == 1
    assert found["oncely_audit_verdict", f'{mine},verdict="clean"'] == 0
    until = reports.damaged().complete_until.wall_time
    assert until is not None
    assert found["oncely_complete_until_timestamp_seconds", mine] == until.timestamp()
    gauges.audited(replace(reports.clean(), complete_until=CompleteUntil()))
    assert "oncely_complete_until" not in gauges.text()  # a stale value would be a lie


def test_it_is_served_over_http() -> None:
    gauges = Gauges("orders")
    with gauges.server("127.0.0.1:0", ["Ops.example"]) as server:
        gauges.audited(reports.clean())
        url = f"http://127.0.0.1:{server.port}/metrics"
        with urllib.request.urlopen(url, timeout=60) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert samples(answer.read().decode()) == samples(gauges.text())
        for host in (f"10.0.0.7:{server.port}", "localhost", "[::1]:1", "ops.example:9187"):
            own = urllib.request.Request(url, headers={"Host": host})
            assert urllib.request.urlopen(own, timeout=60).status == 200
        for host in ("evil.example", "127.0.0.1.evil.example", "ops.example.org"):
            foreign = urllib.request.Request(url, headers={"Host": host})
            with pytest.raises(urllib.error.HTTPError, match="421"):
                urllib.request.urlopen(foreign, timeout=60)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{url}/other", timeout=60)
        with pytest.raises(Unavailable, match="can't listen"):
            gauges.server(f":{server.port}")


@pytest.mark.parametrize("address", ["nowhere", "1.2.3.4", "host:99999", "host:x"])
def test_wrong_addresses(address: str) -> None:
    with pytest.raises(WrongInput, match="no address"):
        Gauges("x").server(address)
