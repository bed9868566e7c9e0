"""The pages: what they show, what they refuse, and what they change with the token."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any, NoReturn

import pytest
from starlette.testclient import TestClient

from oncely.audit.report import Report
from oncely.errors import ConfigError, Unavailable
from oncely.html import style_hash
from oncely.kafka.source import GroupMember
from oncely.pipeline.status import NOBODY, Judgement
from oncely.testing.processes import await_that
from oncely.web import page
from oncely.web.access import Access, checked_token
from oncely.web.model import Overview, Point, Subject, Watched, detail, overview
from oncely.web.server import Site, newest, report_of
from oncely.web.style import SCRIPT, STYLE
from tests.sinktools import T0, T1, Place, Rec, chunk, commit_all, open_sink, sink_to
from tests.unit.audit import reports
from tests.webtools import PASSWORD, Topics, filled, pipeline_file, subject

TOKEN = "a-token-of-this-test"
BASE = "http://127.0.0.1:8484"


def site_of(folder: Path, token: str | None = TOKEN, host: str = "127.0.0.1") -> Site:
    """A site of three pipelines: one that has run, one that never has, one without a database."""
    billing = pipeline_file(folder, "billing", f"postgresql://app:{PASSWORD}@127.0.0.1:2/db")
    found = [filled(folder), pipeline_file(folder, "clicks"), billing]
    watched = [Watched(subject(one, Topics()), every=3600) for one in found]
    return Site(watched, Access.of(host, 8484, token), folder)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = site_of(tmp_path_factory.mktemp("site"))
    for one in made.watched:
        one.overview.get(60)
        one.detail.get(60)
    yield made
    made.close()


@pytest.fixture
def client(site: Site) -> TestClient:
    return logged_in(site)[0]


def client_of(site: Site, base: str = BASE) -> TestClient:
    return TestClient(site.app(), base_url=base, follow_redirects=False)


def logged_in(site: Site) -> tuple[TestClient, str]:
    """A client with a session, and the token of its forms."""
    client = client_of(site)
    done = client.post("/login", data={"token": TOKEN}, headers={"origin": BASE})
    assert done.status_code == 303
    cookie = done.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert {"path=/", "max-age=43200"} <= set(cookie.split("; "))
    found = re.search(r'name="form_token" value="([^"]+)"', client.get("/p/shop").text)
    assert found is not None
    return client, found[1]


# -- reading -------------------------------------------------------------------------------------


def test_all_pipelines_are_listed_beside_one_that_is_down(client: TestClient) -> None:
    text = client.get("/").text
    assert "3 pipelines: 1 with a problem, 1 behind, or with dead letters, 1 not known" in text
    assert "Behind by 30 offsets" in text
    assert "It has never run" in text
    assert "no connection to PostgreSQL" in text
    assert "t → sql rows" in text


def test_many_pipelines_are_searched_filtered_and_sorted_without_a_script(
    client: TestClient,
) -> None:
    def names(**asked: str) -> list[str]:
        text = client.get("/", params=asked).text
        assert "3 pipelines: 1 with a problem" in text  # of all, whatever is shown
        return re.findall(r'<th scope="row"><a href="/p/(\w+)"', text)

    assert names() == ["billing", "shop", "clicks"]  # the worst first
    assert names(sort="-state") == ["clicks", "shop", "billing"]
    assert names(sort="name") == ["billing", "clicks", "shop"]
    assert names(sort="-name") == ["shop", "clicks", "billing"]
    assert names(sort="lag") == ["clicks", "shop", "billing"]  # not known: at the end
    assert names(sort="letters") == ["shop", "clicks", "billing"]
    assert names(sort="-letters") == ["clicks", "shop", "billing"]
    assert names(sort="none") == names(sort="") == names()
    assert names(state="warn") == ["shop"]
    assert names(q="SQL never") == ["clicks"]  # the route and the verdict
    assert names(q="postgresql") == ["billing"]
    assert names(q="sql", state="fine") == []
    text = client.get("/", params={"q": "sql never", "sort": "lag"}).text
    assert 'href="/?q=sql+never&amp;state=unknown&amp;sort=lag">Unknown 1<' in text
    assert 'href="/?q=sql+never&amp;sort=-lag" aria-current="true">Lag ↓<' in text
    assert 'name="q" value="sql never"' in text
    assert '<input type="hidden" name="sort" value="lag">' in text
    hostile = client.get("/", params=dict.fromkeys(("q", "state", "sort"), '"><script>alert(1)'))
    assert "<script>alert" not in hostile.text


def test_the_headline_counts_what_stands_still(tmp_path: Path) -> None:
    """Dead letters, records that nothing reads, and pipelines that never ran are no peace."""

    class Unattended(Topics):
        def members(self, group: str) -> list[GroupMember]:
            return []

    done = {T0: 100, T1: 40}
    watched = [
        Watched(subject(filled(tmp_path, "letters"), Topics(done)), every=3600),
        Watched(subject(filled(tmp_path, "behind"), Unattended()), every=3600),
        Watched(subject(pipeline_file(tmp_path, "never"), Unattended()), every=3600),
    ]
    found = [(one.subject, one.overview.get(60)) for one in watched]
    asked = {"q": "", "state": "", "sort": ""}
    assert [one.verdict.kind for _, one in found if one] == ["dead letters", "behind", "never ran"]
    told = "3 pipelines: 2 behind, or with dead letters, 1 not known or never started"
    assert told in page.pipelines(found, asked, None)
    assert NOBODY in page.pipelines(found[1:2], asked, None)
    calm = replace(found[0][1], verdict=Judgement("current")) if found[0][1] else None
    told = "1 pipeline, none of them with a problem"
    assert told in page.pipelines([(found[0][0], calm)], asked, None)
    for one in watched:
        one.close()


def test_a_database_that_is_down_is_told_once_beside_what_was_read_before(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = client.get("/p/billing").text
    assert text.count("no connection to PostgreSQL") == text.count("Way out:") == 1
    shop = subject(filled(tmp_path), Topics())
    assert shop.pipeline is not None
    before, parts = overview(shop), detail(shop)

    def fail(*_: object) -> NoReturn:
        raise Unavailable("the database does not answer", way_out="start it")

    monkeypatch.setattr(type(shop.pipeline.destination), "look", fail)
    monkeypatch.setattr(type(shop.pipeline.destination), "rejects", fail)
    monkeypatch.setattr("oncely.web.model.read_ledger", fail)
    now = overview(shop, before), detail(shop, parts)
    text = page.pipeline(shop, *now, None, None, None)
    assert text.count("the database does not answer") == text.count("Way out:") == 1
    read = r"<p class='note'>As it was \d[^<]* ago, at <time[^>]*>"
    assert len(re.findall(read, text)) == 3
    for told in ("<dt>lag, in offsets</dt><dd>30</dd>", "holds 2 partitions", "t-0@59"):
        assert told in text, told
    listed = page.pipelines([(shop, now[0])], dict.fromkeys(("q", "state", "sort"), ""), None)
    assert re.search(rf"{read}{before.at:%H:%M:%S}", listed)
    assert '<td class="n">30<' in listed


def test_lag_and_speed_over_time() -> None:
    shop = Subject("shop", Path("shop.toml"))
    lags = (10, 40, None, 20)
    points = [Point(1_700_000_000.0 + 60 * n, lag, 2.0 * n) for n, lag in enumerate(lags)]
    now = Overview(Judgement("running"), points=points)
    text = page.pipeline(shop, now, None, None, None, None)
    assert 'aria-label="lag: at most 40, last 20 offsets"' in text
    assert '<path d="M0.0 75.0L333.3 0.0M1000.0 50.0"/>' in text  # a hole where it was not read
    assert 'aria-label="speed: at most 6, last 6 offsets/s"' in text
    assert ">22:13:20 UTC</time></span>" in text
    for few in (points[:1], [Point(one.at, None) for one in points]):
        text = page.pipeline(shop, replace(now, points=few), None, None, None, None)
        assert "<path" not in text


def test_the_page_of_a_pipeline(client: TestClient) -> None:
    text = client.get("/p/shop").text
    for told in (
        "holds 2 partitions", "undone by a reset", "Takeovers", "Dead letters",
        "name: not a string", "t-0@59", "Reset of positions", "Guarantee: exactly once",
        "Each task writes rows, rejects and the new position",
        "oncely-work/shop/&lt;b&gt; at 10.0.0.7: 2 partitions",
    ):  # fmt: skip
        assert told in text, told
    told = "<title>epoch ([124]): offsets [0-9,]+ to [0-9,]+ committed"
    colours = dict(re.findall(rf'<rect class="(e.)"[^>]*>{told}', text))
    assert sorted(colours.values()) == ["1", "2", "4"]  # three epochs, three colours
    assert client.get("/p/billing").status_code == 200
    unknown = client.get("/none")
    assert unknown.status_code == 404
    assert "There is no such page." in unknown.text
    assert "viewport" in unknown.text
    assert client.get("/p/none").status_code == client.get("/p/none/events").status_code == 404


def test_records_are_escaped_and_secrets_are_hidden(client: TestClient) -> None:
    text = client.get("/p/shop").text
    assert "<script>alert" not in text
    assert "<img" not in text
    assert "&lt;script&gt;alert" in text
    assert "<b>57</b>" not in text
    assert "\u202e" not in text
    for path in (
        "/", "/p/shop", "/p/billing", "/p/shop/reset?verb=to-latest", "/p/shop/discard",
        "/p/billing/discard?reason=%22%3E%3Cscript%3Ealert",
    ):  # fmt: skip
        assert "<script>alert" not in client.get(path).text
        assert PASSWORD not in unescape(client.get(path).text), path


def test_nothing_is_loaded_from_elsewhere_and_scripts_only_from_here(client: TestClient) -> None:
    for path in ("/", "/p/shop", "/login", "/none", "/live.js"):
        answer = client.get(path)
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'")
        assert "unsafe" not in policy
        assert style_hash(STYLE) in policy
        assert "//" not in policy
        assert answer.headers["x-frame-options"] == "DENY"
        links = re.findall(r'(?:src|href|action)="([^"]+)"', answer.text)
        assert all(one.startswith(("/", "#")) and "//" not in one for one in links)
    assert "style=" not in client.get("/p/shop").text  # the policy would drop it
    assert client.get("/live.js").text == SCRIPT


def test_the_last_audit(site: Site) -> None:
    assert site.audits is not None
    client = logged_in(site)[0]
    assert "Last audit" not in client.get("/p/shop").text
    shop = replace(reports.damaged(), pipeline="shop")
    later = replace(shop, at=shop.at.replace(year=2027), found={"lost": 7})
    other = replace(later, pipeline="other", at=shop.at.replace(year=2028))
    for at, one in enumerate((shop, later, other)):
        (site.audits / f"{at}.json").write_text(json.dumps(one.as_json()))
    (site.audits / "torn.json").write_text('{"pipeline": "shop"')
    (site.audits / "list.json").write_text("[1]")
    text = client.get("/p/shop").text
    assert "Damage was found: 7 lost. The audit was made at" in text
    assert "By partition" in text
    assert "2027-11-22" in text


@pytest.mark.parametrize("report", [reports.clean(), reports.damaged(), reports.unknown()])
def test_a_report_is_read_as_it_was_written(report: Report) -> None:
    assert report_of(json.loads(json.dumps(report.as_json()))).as_json() == report.as_json()


def test_of_a_watch_the_last_line_counts(tmp_path: Path) -> None:
    lines = [json.dumps(one.as_json()) for one in (reports.damaged(), reports.clean())]
    (tmp_path / "watch.json").write_text("\n".join(lines) + "\n")
    found = newest(tmp_path, "orders")
    assert found is not None
    assert found.verdict == "clean"


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8484", "127.0.0.1.evil.example", "", "[::1", "8484"]
)
def test_a_foreign_host_name_is_refused(client: TestClient, host: str) -> None:
    """A foreign site that resolves to 127.0.0.1 must not read the pages (DNS rebinding)."""
    for path in ("/", "/p/shop", "/events", "/live.js"):
        answer = client.get(path, headers={"host": host})
        assert answer.status_code == 421
        assert "shop" not in answer.text


def test_known_host_names() -> None:
    access = Access.of("127.0.0.1", 8484, None, ["Ops.example"])
    for host in ("127.0.0.1:8484", "localhost", "[::1]:8484", "ops.example:80", "OPS.EXAMPLE"):
        assert access.is_known_host(host), host
    everywhere = Access.of("0.0.0.0", 8484, TOKEN)
    assert everywhere.is_known_host("10.0.0.7:8484")
    assert not everywhere.is_known_host("ops.example")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "null"},
        {"origin": "http://evil.example"},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": BASE, "sec-fetch-site": "cross-site"},
        {"origin": BASE, "sec-fetch-site": "same-site"},
    ],
)
def test_a_request_of_another_site_changes_nothing(site: Site, headers: dict[str, str]) -> None:
    client, form_token = logged_in(site)
    for path in ("/p/shop/replay", "/p/shop/reset", "/p/shop/discard", "/login", "/logout"):
        form = {"form_token": form_token, "token": TOKEN, "verb": "to-earliest", "shown": "3"}
        assert client.post(path, data=form, headers=headers).status_code == 403
    assert site.changes.of("shop") is None


def test_changes_need_the_session_and_its_form(site: Site) -> None:
    client, form_token = logged_in(site)
    stranger = client_of(site)
    origin = {"origin": BASE}
    for path in ("/p/shop/replay", "/p/shop/reset", "/p/shop/discard"):
        for one, form in (
            (stranger, {}),
            (stranger, {"form_token": form_token}),
            (client, {}),
            (client, {"form_token": "other"}),
            (client, {"form_token": form_token, "more": "x" * 20_000}),
        ):
            assert one.post(path, data=form, headers=origin).status_code == 403
    assert client.get("/p/shop/replay").status_code == 405
    assert site.changes.of("shop") is None
    assert stranger.get("/p/shop").headers["location"] == "/login"


def test_a_wrong_token_and_a_server_without_one(site: Site, tmp_path: Path) -> None:
    client = client_of(site)
    wrong = client.post("/login", data={"token": "wrong"}, headers={"origin": BASE})
    assert wrong.status_code == 403
    assert "set-cookie" not in wrong.headers
    without = Site([], Access.of("127.0.0.1", 8484, None))
    refused = client_of(without).post("/login", data={"token": ""}, headers={"origin": BASE})
    assert refused.status_code == 403
    assert client_of(without).get("/").status_code == 200
    with pytest.raises(ConfigError, match="can be guessed"):
        checked_token("short")


def test_a_session_ends(site: Site) -> None:
    client, form_token = logged_in(site)
    form, origin = {"form_token": form_token}, {"origin": BASE}
    assert client.post("/logout", data=form, headers=origin).status_code == 303
    assert client.post("/p/shop/replay", data=form, headers=origin).status_code == 403

    brief = replace(site.access, lifetime=0.0)
    assert brief.form_token(brief.log_in(TOKEN) or "") is None


PATHS = "/", "/p/shop", "/p/shop/events", "/p/shop/reset?verb=to-latest", "/p/shop/discard"


@pytest.mark.parametrize(
    ("listen", "names", "base"),
    [
        ("10.0.0.7", [], "http://10.0.0.7:8484"),
        ("127.0.0.1", ["ops.example"], "http://ops.example"),  # a proxy
        ("127.0.0.1", [], BASE),
    ],
)
def test_other_machines_read_with_the_token_only(
    site: Site, listen: str, names: list[str], base: str
) -> None:
    """A token that was given is asked for everywhere: what listens on loopback may have a proxy."""
    client = client_of(replace(site, access=Access.of(listen, 8484, TOKEN, names)), base)
    for path in PATHS:
        answer = client.get(path)
        assert (answer.status_code, answer.headers["location"]) == (303, "/login")
    done = client.post("/login", data={"token": TOKEN}, headers={"origin": base})
    assert done.status_code == 303
    assert client.get("/p/shop").status_code == 200


@pytest.mark.parametrize("header", ["Forwarded", "X-Forwarded-For", "X-Forwarded-Proto", "Via"])
def test_what_a_proxy_passes_on_is_not_read_without_a_token(site: Site, header: str) -> None:
    client = client_of(replace(site, access=Access.of("127.0.0.1", 8484, None)))
    assert client.get("/p/shop").status_code == 200
    for path in PATHS:
        answer = client.get(path, headers={header: "for=10.0.0.9"})
        assert answer.status_code == 403
        assert "A proxy has passed the request on" in answer.text
        assert "dead letters" not in answer.text


def test_a_dry_run_needs_a_session_and_a_page_of_this_server(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = site.watched[0].subject.pipeline
    assert pipeline is not None
    for verb in ("reset", "discard"):
        monkeypatch.setattr(type(pipeline), verb, lambda *_, **__: pytest.fail("it was planned"))
    reader = client_of(replace(site, access=Access.of("127.0.0.1", 8484, None)))
    assert "Dry run" not in reader.get("/p/shop").text
    client = logged_in(site)[0]
    assert "Dry run" in client.get("/p/shop").text
    foreign = [{"sec-fetch-site": one} for one in ("cross-site", "same-site")]
    for path in PATHS[-2:]:
        assert reader.get(path).status_code == 403
        for headers in (*foreign, {"origin": "http://evil.example"}, {"origin": "null"}):
            assert client.get(path, headers=headers).status_code == 403, headers


# -- changes -------------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Site]:
    """A site that a test may change."""
    made = site_of(tmp_path)
    yield made
    made.close()


def test_a_reset_and_its_dry_run(own: Site) -> None:
    client, form_token = logged_in(own)
    plan = client.get("/p/shop/reset?verb=to-offset&value=50&topic=t:0").text
    assert "This is a dry run" in plan
    assert "50 are read again" in plan
    assert "an append table contains their" in plan
    assert "is fenced, and ends with exit code 3" in plan
    unit = (Path(__file__).parents[3] / "packaging" / "oncely@.service").read_text()
    assert (told := "RestartPreventExitStatus=2 3") in plan
    assert told in unit
    assert client.get("/p/shop/reset?verb=to-offset&value=x").status_code == 400
    assert client.get("/p/shop/reset?verb=sideways").status_code == 400
    assert client.get("/p/shop/reset?verb=to-latest&topic=other").status_code == 400
    form = {"form_token": form_token, "verb": "to-offset", "value": "50", "topic": "t:0"}
    done = client.post("/p/shop/reset", data=form, headers={"origin": BASE})
    assert (done.status_code, done.headers["location"]) == (303, "/p/shop")
    own.changes.wait("shop", 60)
    job = own.changes.of("shop")
    assert job is not None
    assert job.text == "positions were reset with epoch 5; a running pipeline is fenced"
    pipeline = own.watched[0].subject.pipeline
    assert pipeline is not None
    assert [one.position for one in pipeline.status().partitions] == [50, 40]
    assert "positions were reset with epoch 5" in client.get("/p/shop").text


def test_a_replay_writes_what_is_valid_now(own: Site) -> None:
    client, form_token = logged_in(own)
    pipeline = own.watched[0].subject.pipeline
    assert pipeline is not None
    assert len(pipeline.rejects().listed) == 3
    form, origin = {"form_token": form_token}, {"origin": BASE}
    assert client.post("/p/shop/replay", data=form, headers=origin).status_code == 303
    own.changes.wait("shop", 60)
    job = own.changes.of("shop")
    assert job is not None
    assert (job.state, job.text) == ("done", "written: 1 dead letter; kept: 2")
    assert [one.offset for one in pipeline.rejects().listed] == [57, 58]


def test_a_discard_and_its_dry_run(own: Site) -> None:
    client, form_token = logged_in(own)
    pipeline = own.watched[0].subject.pipeline
    assert pipeline is not None
    assert 'action="/p/shop/discard"' in client.get("/p/shop").text
    plan = client.get("/p/shop/discard").text
    assert "This is a dry run: nothing was written. 3 dead letters would be discarded" in plan
    chosen = {"reason": "NOT A STRING", "partition": "t:0", "since": "2023-01-01", "before": "1h"}
    plan = client.get("/p/shop/discard", params=chosen).text
    assert "2 dead letters would be discarded" in plan
    assert "name: not a string" in plan
    assert "Discard 2 for good" in plan
    dry_run = shown(plan)
    for none in ({"reason": "x" * 9}, {"partition": "t:1"}, {"since": "1h"}):
        assert "No dead letter is chosen" in client.get("/p/shop/discard", params=none).text
    assert len(pipeline.rejects().listed) == 3

    assert discarded(own, client, {**chosen, "form_token": form_token, "shown": dry_run}) == (
        "discarded: 2 dead letters"
    )
    assert [one.offset for one in pipeline.rejects().listed] == [57]
    gone = pipeline.rejects(discarded=True).listed
    assert [(one.offset, one.key, one.value) for one in gone] == [
        (58, None, None),
        (59, None, None),
    ]
    assert "discarded: 2 dead letters" in client.get("/p/shop").text


def shown(plan: str) -> str:
    """What identifies the dead letters of a dry run."""
    found = re.search(r'name="shown" value="(\w+)"', plan)
    assert found is not None
    return found[1]


def discarded(site: Site, client: TestClient, form: dict[str, str]) -> str:
    """The result of a discard."""
    answer = client.post("/p/shop/discard", data=form, headers={"origin": BASE})
    assert (answer.status_code, answer.headers["location"]) == (303, "/p/shop")
    site.changes.wait("shop", 60)
    job = site.changes.of("shop")
    assert job is not None
    return job.text or str(job.problem)


def test_only_a_discard_whose_dry_run_was_seen_is_executed(own: Site) -> None:
    client, form_token = logged_in(own)
    form, origin = {"form_token": form_token}, {"origin": BASE}
    for wrong in ({}, {"shown": ""}, {"shown": "1", "before": "yesterday"}):
        answer = client.post("/p/shop/discard", data={**form, **wrong}, headers=origin)
        assert answer.status_code == 400, wrong
    assert client.get("/p/shop/discard?before=yesterday").status_code == 400
    assert "before: &#x27;yesterday&#x27; is no time" in (
        client.get("/p/shop/discard?before=yesterday").text
    )
    pipeline = own.watched[0].subject.pipeline
    assert pipeline is not None
    dry_run, only = shown(client.get("/p/shop/discard").text), {"reason": "script"}
    one = shown(client.get("/p/shop/discard", params=only).text)
    discarded(own, client, {**form, **only, "shown": one})
    sink = sink_to(Place(f"sqlite:///{own.audits}/shop.db"), pipeline="shop")
    fence = open_sink(sink, {T0: 0, T1: 0}).fence
    commit_all(sink.bind(), chunk({T0: (100, [Rec(100, bad="as many as before")])}), fence)
    for was in (dry_run, one):
        told = discarded(own, client, {**form, "shown": was})
        assert "are not those that the dry run has shown: they stay" in told
    assert [one.offset for one in pipeline.rejects().listed] == [58, 59, 100]


def test_a_change_that_is_impossible_has_no_button(own: Site, monkeypatch: Any) -> None:
    pipeline = own.watched[0].subject.pipeline
    assert pipeline is not None

    def refuse(*_: object) -> NoReturn:
        raise ConfigError("sink.kind", "that is impossible", way_out="use another sink")

    client, _ = logged_in(own)
    for name, button in (("check_replay", 'id="replay"'), ("discarding", 'id="to-discard"')):
        assert button in client.get("/p/shop").text
        monkeypatch.setattr(type(pipeline.destination), name, refuse)
        own.watched[0].hurry()
        await_that(lambda gone=button: gone not in client.get("/p/shop").text, "a new reading")
    text = client.get("/p/shop").text
    for verb in ("replayed", "discarded"):
        assert f"They can't be {verb} here: <bdi>sink.kind: that is impossible</bdi>." in text
    assert "<bdi>use another sink</bdi>" in text


def test_a_change_that_fails_is_told_without_secrets(own: Site) -> None:
    client, form_token = logged_in(own)
    form, origin = {"form_token": form_token}, {"origin": BASE}
    assert client.post("/p/billing/replay", data=form, headers=origin).status_code == 303
    own.changes.wait("billing", 60)
    text = unescape(client.get("/p/billing").text)
    assert "Replay of dead letters</strong> has failed" in text
    assert PASSWORD not in text


# -- events --------------------------------------------------------------------------------------


def test_an_event_tells_of_a_change(own: Site) -> None:
    shop = own.watched[0]
    shop.overview.get(60)
    topics = shop.subject.pipeline.__dict__["source"] if shop.subject.pipeline else None
    assert isinstance(topics, Topics)

    lines: list[str] = []

    async def first() -> None:
        stream = replace(own, ended=lambda: len(lines) > 1)
        async for line in stream.changed([shop], details=False):
            lines.append(line)
            if len(lines) == 1:
                topics.ends = {tp: end + 1 for tp, end in topics.ends.items()}
                shop.hurry()

    asyncio.run(first())
    assert lines[0] == "retry: 3000\n\n"
    assert lines[1].startswith("event: changed\n")
