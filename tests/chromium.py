"""A real browser for tests: Chromium by its DevTools protocol, over a pipe."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def executable() -> str | None:
    """The path of Chromium; None if there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((found for name in names if (found := shutil.which(name))), None)


class Browser:
    """One tab. Calls wait for their answer; events are kept only while they are awaited."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = os.fdopen(reading, "rb", 0), os.fdopen(writing, "wb", 0)
        self._left, self._last, self._session = b"", 0, ""
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method; returns its result."""
        self._last += 1
        asked = {"id": self._last, "method": method, "params": params}
        if self._session:
            asked["sessionId"] = self._session
        self._writing.write(json.dumps(asked).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == self._last:
                assert "error" not in told, told
                return dict(told["result"])

    def size(self, width: int, height: int = 900, *, phone: bool = False) -> None:
        """Set the size of the window."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height,
            deviceScaleFactor=2 if phone else 1, mobile=phone,
        )  # fmt: skip

    def open(self, url: str) -> None:
        """Load a page."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        done = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True,
            userGesture=True,
        )  # fmt: skip
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true; the test's own limit ends it."""
        while not self._is_true(condition):
            pass

    def _is_true(self, condition: str) -> bool:
        try:
            # A page that is still loading lacks elements of the condition: that is no error of it.
            tried = f"try {{ done(!!({condition})) }} catch {{ done(false) }}"
            return bool(self.run(f"new Promise(done => setTimeout(() => {{ {tried} }}, 50))"))
        except AssertionError as error:  # the page has gone meanwhile
            if any(told in str(error) for told in ("navigated", "context", "was collected")):
                return False
            raise

    def press(self, key: str) -> None:
        """Press a key, such as Tab or Enter."""
        code = {"Tab": 9, "Enter": 13}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key,
                windowsVirtualKeyCode=code, **(text if kind == "keyDown" else {}),
            )  # fmt: skip

    def picture(self, path: Path) -> None:
        """Write a PNG of the whole page."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            part = self._reading.read(65_536)
            assert part, "the browser has ended"
            self._left += part
        line, _, self._left = self._left.partition(b"\0")
        told: dict[str, Any] = json.loads(line)
        if told.get("method") == "Log.entryAdded":
            entry = told["params"]["entry"]
            if entry["level"] in ("warning", "error"):
                self.errors.append(str(entry["text"]))
        if told.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(told["params"]))
        return told


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Chromium with an empty profile."""
    path = executable()
    assert path is not None
    to_browser, writing = os.pipe()
    reading, from_browser = os.pipe()
    child = subprocess.Popen(
        ["bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "bash", path,
         "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu",
         "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking",
         "--hide-scrollbars", f"--user-data-dir={profile}", "about:blank"],
        pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Browser(reading, writing)
    finally:
        child.kill()
        child.wait()
