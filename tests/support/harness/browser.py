"""A headless Chromium, driven over its pipe (Chrome DevTools Protocol): no driver and no port is needed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars", "--force-device-scale-factor=1"),
)


class Browser:
    """One page of one browser. `problems` are errors of the console, exceptions, and requests to a network."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self.folder = tempfile.TemporaryDirectory(prefix="autopar_chromium_", ignore_cleanup_errors=True)
        (child_in, self._out), (self._in, child_out) = os.pipe(), os.pipe()
        command = 'in=$1 out=$2; shift 2; eval "exec \\"\\$@\\" 3<&$in 4>&$out"'
        words = [CHROMIUM, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={self.folder.name}", "about:blank"]
        self.process = subprocess.Popen(
            ["bash", "-c", command, "bash", str(child_in), str(child_out), *words],
            pass_fds=(child_in, child_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(child_in)
        os.close(child_out)
        self.buffer, self.number, self.session = b"", 0, ""
        self.problems: list[str] = []
        pages = [each for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page"]
        self.session = self.call("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        os.close(self._out)
        os.close(self._in)
        self.process.terminate()
        self.process.wait(timeout=20)
        self.folder.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; what the page says meanwhile is heard."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        os.write(self._out, json.dumps(message | ({"sessionId": self.session} if self.session else {})).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self._hear(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            part = os.read(self._in, 2**20)
            assert part, "the browser ended"
            self.buffer += part
        text, _, self.buffer = self.buffer.partition(b"\0")
        return dict(json.loads(text))

    def _hear(self, event: dict[str, Any]) -> None:
        method, said = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = said["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            self.problems.append(str([each.get("value", each.get("description")) for each in said["args"]]))
        elif method == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.problems.append(said["entry"]["text"])
        elif method == "Network.requestWillBeSent" and not said["request"]["url"].startswith(
            ("file:", "data:", "blob:", "about:")
        ):
            self.problems.append(f"a request to {said['request']['url'][:200]}")

    def value(self, expression: str) -> Any:
        """Return what an expression of JavaScript is (a promise's result)."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, expression: str, seconds: float = 60.0) -> Any:
        """Wait until an expression is true."""
        return until(lambda: self.value(expression), seconds, expression)

    def show(self, path: Path, width: int, dark: bool, height: int = 900) -> None:
        """Open a file at this width, in this colour scheme, and wait until it has drawn."""
        self.value("delete document.documentElement.dataset.ready")  # of the page before
        self.problems = []
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.resolve().as_uri())
        ready = "document.documentElement?.dataset.ready === 'true'"
        until(lambda: self.problems or self.value(ready), 60, f"{path} is drawn")
        assert not self.problems, self.problems

    def mouse(self, kind: str, x: float, y: float, button: str = "none") -> None:
        """Move, press or release (``mouseMoved``, ...)."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=int(button != "none"))

    def key(self, name: str, code: int, text: str = "") -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            typed = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code, **typed)


def until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Ask again until it is true."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"never true: {what}"
        time.sleep(0.05)
    return value
