"""A headless Chromium, driven over its DevTools protocol: opens pages, clicks, types, and remembers what went wrong."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

PROGRAM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    *("--remote-debugging-port=0", "--force-color-profile=srgb", "--lang=en-US"),
)
KEYS = {"Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, ""), " ": (32, " ")}


class Page:
    """One tab.

    Attributes:
        errors: exceptions, messages of the level "error", and violations of the security policy, as texts.
        requests: method, address and body of every request.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._last = socket, 0
        self.errors: list[str] = []
        self.requests: list[tuple[str, str, str]] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; what happens meanwhile is remembered."""
        self._last += 1
        number = self._last
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            said = json.loads(self._socket.recv(timeout=30))
            if said.get("id") == number:
                assert "error" not in said, said["error"]
                return said["result"]
            self._notice(said.get("method"), said.get("params", {}))

    def _notice(self, method: str, told: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.errors.append(str(details.get("exception", {}).get("description") or details["text"]))
        elif method == "Runtime.consoleAPICalled" and told["type"] == "error":
            self.errors.append(" ".join(str(part.get("value")) for part in told["args"]))
        elif method == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.errors.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            request = told["request"]
            self.requests.append((request["method"], request["url"], request.get("postData", "")))

    def close(self) -> None:
        self.call("Page.close")
        self._socket.close()

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 30.0) -> Any:
        """Wait until an expression is true."""
        deadline = time.monotonic() + seconds
        while True:
            with suppress(AssertionError):  # a page that is being left
                if value := self.run(condition):
                    return value
            assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {condition}\n{self.errors}"
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText")).replace("\xa0", " ")

    def click(self, selector: str) -> None:
        """As a mouse does: at the middle of the element, wherever that is."""
        box = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'center'}});"
            " const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        """A key by its name; modifiers: 8 is Shift."""
        code, text = KEYS[key]
        common = {
            "key": key,
            "code": "Space" if key == " " else key,
            "windowsVirtualKeyCode": code,
            "modifiers": modifiers,
        }
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def size(self, width: int, height: int, scale: float = 1.0) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )

    def media(self, **features: str) -> None:
        """Media features such as prefers_color_scheme="dark"."""
        asked = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=asked)

    def shoot(self, path: Path, full: bool = False) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def chromium() -> Iterator[Callable[[], Page]]:
    """A browser with a profile of its own; call what it yields for a new tab."""
    assert PROGRAM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [PROGRAM, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        sockets: list[ClientConnection] = []
        try:
            port = _port(Path(profile) / "DevToolsActivePort", process)

            def tab() -> Page:
                asking = urllib.request.Request(f"http://127.0.0.1:{port}/json/new?about:blank", method="PUT")
                with urllib.request.urlopen(asking, timeout=30) as answer:
                    address = json.load(answer)["webSocketDebuggerUrl"]
                sockets.append(connect(address, max_size=None, open_timeout=30, ping_interval=None))
                return Page(sockets[-1])

            yield tab
        finally:
            for socket in sockets:
                with suppress(Exception):
                    socket.close()
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)


def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, f"{PROGRAM} has ended with {process.returncode}"
        if file.exists() and (lines := file.read_text().split()):
            return int(lines[0])
        time.sleep(0.05)
    raise AssertionError(f"{PROGRAM} has not opened its port")
