"""Headless Chromium for tests of pages, driven by its DevTools protocol over two pipes."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATH = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TIMEOUT = 60.0


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """Starts Chromium without network access. `folder` gets its profile."""
    assert PATH is not None
    to_read, to_write = os.pipe(), os.pipe()  # Chromium reads commands from 3 and answers on 4
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--no-first-run",
        "--remote-debugging-pipe",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={folder}",
    ]
    # A shell moves the pipes: Popen passes descriptors only under their own numbers.
    script = f'exec "$0" "$@" 3<&{to_read[0]} 4>&{to_write[1]}'
    process = subprocess.Popen(
        ["bash", "-c", script, PATH, *flags, "about:blank"],
        pass_fds=(to_read[0], to_write[1]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read[0])
    os.close(to_write[1])
    try:
        yield Browser(to_read[1], to_write[0])
    finally:
        process.kill()
        process.wait()
        os.close(to_read[1])
        os.close(to_write[0])


class Browser:
    """One tab of a browser.

    Attributes:
        problems: Console messages, exceptions and requests of other files since `open`.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._buffer = b""
        self._number = 0
        self._session = ""
        self._events: list[dict[str, Any]] = []
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol and returns its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])

    def open(self, path: Path, width: int = 1280, height: int = 900, dark: bool = False) -> float:
        """Opens a file and returns the seconds until its load event and two drawn frames."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.problems.clear()
        self._events.clear()
        begin = time.monotonic()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._read()
        self.frames()
        return time.monotonic() - begin

    def run(self, expression: str) -> Any:
        """Evaluates JavaScript, waits for its promise and returns the JSON value."""
        done = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def frames(self) -> None:
        """Waits until two frames are drawn."""
        self.run("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(() => r())))")

    def move(self, x: float, y: float) -> None:
        """Moves the mouse."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str, code: int) -> None:
        """Presses a key, such as Tab with code 9."""
        text = {"Enter": "\r", " ": " "}.get(key, "")
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code="Space" if key == " " else key,
                windowsVirtualKeyCode=code,
                text=text if kind == "keyDown" else "",
            )

    def screenshot(self, path: Path, full: bool = False) -> None:
        """Writes a PNG of the window, or of the full page with all figures drawn."""
        if full:
            self.run("figures.filter(f => !f.closest('[hidden]') && !drawn.has(f)).forEach(draw)")
            self.frames()
        done = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        path.write_bytes(base64.b64decode(done["data"]))

    def pdf(self, path: Path) -> None:
        """Prints the page."""
        done = self.call("Page.printToPDF", printBackground=True)
        path.write_bytes(base64.b64decode(done["data"]))

    def _read(self) -> dict[str, Any]:
        """Returns the next message. Keeps events and problems."""
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], TIMEOUT)
            assert ready, f"no answer of Chromium in {TIMEOUT:.0f} s"
            data = os.read(self._answers, 1 << 20)
            assert data, "Chromium has ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self._events.append(message)
            self._note(message["method"], message["params"])
        return message

    def _note(self, method: str, parameters: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.problems.append(f"console: {parameters['args']}")
        elif method == "Log.entryAdded":
            self.problems.append(f"log: {parameters['entry']['text']}")
        elif method == "Network.requestWillBeSent":
            url = parameters["request"]["url"]
            if parameters.get("type") != "Document" and not url.startswith(("data:", "blob:")):
                self.problems.append(f"request: {url}")
