"""The pages in a real browser: by keyboard, on a phone, and while something changes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from oncely.web.access import Access
from oncely.web.model import Watched
from oncely.web.server import Site, server_of
from tests import chromium
from tests.webtools import Topics, filled, pipeline_file, subject

pytestmark = pytest.mark.long
TOKEN = "a-token-of-this-test"


@contextmanager
def served(folder: Path) -> Iterator[tuple[Site, str]]:
    """A site, and its URL."""
    url = "postgresql://app:secret-of-the-test@127.0.0.1:2/db"
    found = [filled(folder), pipeline_file(folder, "billing", url)]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        watched = [Watched(subject(one, Topics()), every=0.5) for one in found]
        site = Site(watched, Access.of("127.0.0.1", port, TOKEN))
        server = server_of(site.app())
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield site, f"http://127.0.0.1:{port}"
        finally:
            site.close()
            server.should_exit = True
            thread.join()


NAMED = "(e => e.id || e.name || e.getAttribute('href') || e.ariaLabel || e.textContent.trim())"


@pytest.mark.skipif(chromium.executable() is None, reason="there is no Chromium on this machine")
def test_pages_in_a_browser(tmp_path: Path) -> None:
    with served(tmp_path) as (site, url), chromium.browser(tmp_path / "profile") as tab:
        tab.size(1200)
        log_in(tab, url)
        tab.wait("document.querySelectorAll('.pipelines .bad').length === 1")
        tab.wait("document.documentElement.dataset.live === 'yes'")

        # A change appears without a reload, is spoken, and leaves open what is open.
        tab.open(f"{url}/p/shop")
        tab.wait("document.querySelector('#reason-0') && !window.loaded && (window.loaded = true)")
        tab.run("document.querySelector('#reason-0 summary').focus()")
        tab.press("Enter")
        assert tab.run("document.querySelector('#reason-0').open")
        pipeline = site.watched[0].subject.pipeline
        assert pipeline is not None
        topics = pipeline.__dict__["source"]
        topics.ends = {tp: end + 7 for tp, end in topics.ends.items()}
        tab.wait("document.querySelector('.verdict').textContent.includes('Behind by 44 offsets')")
        assert tab.run("window.loaded")
        assert tab.run("document.getElementById('said').textContent.includes('Behind by 44')")
        assert tab.run("document.querySelector('#reason-0').open")
        assert tab.run("document.activeElement.closest('details').id") == "reason-0"
        assert tab.run("document.querySelector('main script, main img')") is None
        renewed(tab, url, topics)

        search(tab, url)
        keyboard(tab, url, site)
        phone(tab, url)
        assert tab.errors == []


def renewed(tab: chromium.Browser, url: str, topics: Topics) -> None:
    """A change leaves the focus on a link or a table, and the table where it was scrolled to."""

    def change() -> None:
        topics.ends = {tp: end + 1 for tp, end in topics.ends.items()}
        lag = sum(topics.ends.values()) - 140
        tab.wait(f"document.getElementById('live').textContent.includes('Behind by {lag} offsets')")

    tab.size(390, 844, phone=True)
    tab.run("document.querySelector('[aria-label=Takeovers]').focus()")
    tab.run("document.activeElement.scrollLeft = 70")
    change()
    assert tab.run("document.activeElement.ariaLabel") == "Takeovers"
    assert tab.run("document.activeElement.scrollLeft") == 70
    tab.size(1200)
    tab.open(f"{url}/")
    tab.wait("document.documentElement.dataset.live === 'yes'")
    tab.run("document.querySelector('.pipelines a[href=\"/p/shop\"]').focus()")
    change()
    assert tab.run("document.activeElement.getAttribute('href')") == "/p/shop"


def search(tab: chromium.Browser, url: str) -> None:
    """The list follows the text while it is typed, and the focus stays; a reload shows the same."""
    rows = "[...document.querySelectorAll('tbody a')].map(a => a.textContent).join()"
    tab.open(f"{url}/?sort=name")
    tab.wait(f"{rows} === 'billing,shop'")
    tab.run("document.querySelector('[name=q]').focus(); window.loaded = true")
    tab.call("Input.insertText", text="dead let")
    tab.wait(f"{rows} === 'shop' && window.loaded")
    assert tab.run("document.activeElement.name + location.search") == "q?sort=name&q=dead+let"
    tab.open(tab.run("location.href"))
    tab.wait(f"{rows} === 'shop' && document.querySelector('[name=q]').value === 'dead let'")
    tab.run("document.getElementById('state-').focus()")
    tab.press("Enter")
    tab.wait(f"{rows} === 'shop'")
    assert tab.run("getComputedStyle(document.querySelector('[aria-current]')).fontWeight") == "700"
    line = "document.querySelector('.line path').getTotalLength() > 0"
    tab.open(f"{url}/p/shop")
    tab.wait(line)


def log_in(tab: chromium.Browser, url: str) -> None:
    """Log in, by keyboard alone."""
    tab.open(f"{url}/")
    tab.wait("location.pathname === '/login'")
    seen = []
    for _ in range(4):
        tab.press("Tab")
        seen.append(tab.run(f"{NAMED}(document.activeElement)"))
    assert seen == ["#live", "/", "token", "Log in"]
    tab.run("document.querySelector('[name=token]').focus()")
    tab.call("Input.insertText", text=TOKEN)
    tab.press("Enter")
    tab.wait("location.pathname === '/' && document.querySelector('.top button')")


def keyboard(tab: chromium.Browser, url: str, site: Site) -> None:
    """Replay, by keyboard alone."""
    tab.open(f"{url}/p/shop")
    tab.wait("document.getElementById('replay')")
    order = []
    for _ in range(40):
        tab.press("Tab")
        order.append(tab.run(f"{NAMED}(document.activeElement)"))
        if order[-1] == "replay":
            break
    assert order[:3] == ["#live", "/", "Log out"]
    assert order.index("Positions") < order.index("Takeovers") < order.index("replay")
    assert tab.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    tab.press("Enter")
    tab.wait("document.body.textContent.includes('written: 1 dead letter; kept: 2')")
    site.changes.wait("shop", 60)
    discard(tab)


def discard(tab: chromium.Browser) -> None:
    """Discard one of two dead letters, by keyboard alone: first the dry run of both."""
    tab.run("document.getElementById('to-discard').focus()")
    tab.press("Enter")
    tab.wait("document.getElementById('discard')")
    assert tab.run("document.getElementById('discard').textContent") == "Discard 2 for good"
    tab.run("document.querySelector('[name=reason]:not([type=hidden])').focus()")
    tab.call("Input.insertText", text="DELIMITER")
    tab.press("Enter")
    tab.wait("document.getElementById('discard')?.textContent === 'Discard 1 for good'")
    assert "Expecting … delimiter" in tab.run("document.querySelector('tbody').textContent")
    for _ in range(40):
        if tab.run("document.activeElement.id") == "discard":
            break
        tab.press("Tab")
    assert tab.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    tab.press("Enter")
    tab.wait("document.body.textContent.includes('discarded: 1 dead letter')")
    tab.wait("document.querySelector('.verdict').textContent.includes('1 dead letter')")


def phone(tab: chromium.Browser, url: str) -> None:
    """Nothing is wider than a phone, and what is touched is large enough."""
    tab.size(390, 844, phone=True)
    for path in (
        "/", "/?q=shop&state=warn&sort=-lag", "/p/shop", "/p/billing",
        "/p/shop/reset?verb=to-earliest&value=&topic=",
        "/p/shop/discard?reason=&partition=t:0&since=&before=",
    ):  # fmt: skip
        tab.open(f"{url}{path}")
        tab.run("document.querySelectorAll('details').forEach(one => one.open = true)")
        assert tab.run("document.documentElement.scrollWidth") == 390, path
    heights = "[...document.querySelectorAll('form.ask button')].map(b => b.offsetHeight)"
    assert all(one >= 44 for one in tab.run(heights))
