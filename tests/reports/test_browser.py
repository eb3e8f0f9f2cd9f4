"""Opens the pages in Chromium, which the tests control over its DevTools protocol."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import compare_runs
import evaluate_generations

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
    pytest.mark.skipif(sys.platform == "win32", reason="the pipe of the DevTools has fixed file descriptors"),
]
MESSAGES = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")


class Browser:
    """A headless Chromium with one tab. `events` has what it reported since the last page was opened."""

    def __init__(self, profile: Path):
        words = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={profile}",
            "--remote-debugging-pipe",
        ]
        (theirs, self.to), (self.back, other) = os.pipe(), os.pipe()

        def connect() -> None:  # Chromium reads file 3 and writes file 4
            first, second = os.dup(theirs), os.dup(other)
            os.dup2(first, 3)
            os.dup2(second, 4)

        self.process = subprocess.Popen(
            [CHROMIUM, *words, f"--user-data-dir={profile}"],
            close_fds=False,
            preexec_fn=connect,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(other)
        self.read = b""
        self.number = 0
        self.session: dict[str, str] = {}
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def receive(self) -> dict[str, Any]:
        while b"\0" not in self.read:
            self.read += os.read(self.back, 2**16)
        line, _, self.read = self.read.partition(b"\0")
        return json.loads(line)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the result of a method. Events that arrive before it are stored."""
        self.number += 1
        request = {"id": self.number, "method": method, "params": parameters, **self.session}
        os.write(self.to, json.dumps(request).encode() + b"\0")
        while (answer := self.receive()).get("id") != self.number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, page: Path, width: int) -> None:
        """Open a page in a window of this width, and wait until it is loaded."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self.receive())

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page; None if it has none."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def press_enter(self) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r"
            )


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    made = Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.process.kill()
    made.process.wait()


@pytest.fixture(scope="module")
def pages(runs, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    sizes = ["--num-prompts", "4", "--completions", "2", "--output", str(folder)]
    compare_runs.main([*map(str, runs.values()), "--limit-minutes", "0", "--arm", "best-of-2", *sizes])
    evaluate_generations.main(["--model-path", str(runs["ppo", 1]), *sizes])
    evaluate_generations.main(["--tokens", str(runs["ppo", 1]), "--output", str(folder)])
    return {name: folder / f"{name}.html" for name in ("comparison", "evaluation", "tokens")}


@pytest.mark.parametrize("width", [400, 1200])
@pytest.mark.parametrize("name", ["comparison", "evaluation", "tokens"])
def test_a_page_loads_alone_and_fits_the_window(browser, pages, name, width):
    browser.open(pages[name], width)
    assert [event for event in browser.events if event.get("method") in MESSAGES] == [], "no console message"
    sent = [event["params"]["request"]["url"] for event in browser.events
            if event.get("method") == "Network.requestWillBeSent"]  # fmt: skip
    assert [url for url in sent if not url.startswith("data:")] == [pages[name].as_uri()], "nothing is fetched"
    pictures = browser.value("[...document.images].map(image => image.complete && image.naturalWidth > 0)")
    assert all(pictures) and (len(pictures) == 2) == (name == "comparison")
    assert browser.value("document.documentElement.scrollWidth") <= width, "no sideways scrolling"


def test_folds_open_by_keyboard(browser, pages):
    browser.open(pages["comparison"], 1200)
    count = browser.value("document.querySelectorAll('details').length")
    assert count >= 5 and browser.value("document.querySelectorAll('details[open]').length") == 0
    for number in range(count):
        browser.value(f"document.querySelectorAll('summary')[{number}].focus()")
        browser.press_enter()
    assert browser.value("document.querySelectorAll('details[open]').length") == count
    for width in (400, 1200):
        browser.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        assert browser.value("document.documentElement.scrollWidth") <= width, "also with all folds open"
