"""A real browser, told what to do over its debugging pipe (Chrome DevTools Protocol)."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

_OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
    "--remote-debugging-pipe",
)


_CODES = {"Tab": 9, "Enter": 13}


class Browser:
    """One page of a headless browser."""

    def __init__(self, out: int, into: int) -> None:
        self._out, self._into, self._rest, self._number = out, into, b"", 0
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session: str | None = attached["sessionId"]

    _session = None

    def _call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        request = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            request["sessionId"] = self._session
        os.write(self._out, json.dumps(request).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                read = os.read(self._into, 1 << 16)
                assert read, "the browser ended"
                self._rest += read
            message, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(message)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, address: str) -> None:
        self._call("Page.navigate", url=address)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        found = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 120) -> Any:
        """The expression's value once it is true."""
        end = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < end, (script, self.run("document.body.innerText"))
            time.sleep(0.1)
        return found

    def resize(self, width: int, height: int, *, mobile: bool = False) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )

    def prefer(self, scheme: str) -> None:
        """The user's setting: "light" or "dark"."""
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self._call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=_CODES[key]
            )

    def picture(self, file: Path, *, first_screen: bool = False) -> None:
        """The page, or what shows of it without scrolling, in the format of the file's suffix."""
        options = {"captureBeyondViewport": not first_screen, "format": file.suffix[1:]}
        if file.suffix == ".webp":
            options["quality"] = 80
        shot = self._call("Page.captureScreenshot", **options)
        file.write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Chromium with an empty profile in `folder`, and no way to any other machine."""
    assert CHROMIUM, "install chromium"
    commands, answers = os.pipe(), os.pipe()
    with contextlib.ExitStack() as stack:
        for end in (commands[1], answers[0]):
            stack.callback(os.close, end)

        # it reads commands from descriptor 3 and answers on 4
        pipes = f"3<&{commands[0]} 4>&{answers[1]}"
        process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" {pipes}', "", CHROMIUM, *_OPTIONS, f"--user-data-dir={folder}"],
            pass_fds=(commands[0], answers[1]),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(commands[0])
        os.close(answers[1])
        try:
            yield Browser(commands[1], answers[0])
        finally:
            process.terminate()
            process.wait(30)
