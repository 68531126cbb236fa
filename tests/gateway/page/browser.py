"""A headless Chromium, driven over its debugging pipe. One page at a time."""

import json
import os
import shutil
import subprocess
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

BROWSERS = [found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))][:1]
_OPTIONS = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --remote-debugging-pipe"
_CLOSE_S = 20.0
_COMPLAINTS = {"Runtime.exceptionThrown", "Log.entryAdded"}


class Browser:
    """Its methods block."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = os.fdopen(commands, "wb", 0), os.fdopen(answers, "rb", 0)
        self._number, self._read = 0, b""
        self._session: str | None = None
        self.complaints: list[str] = []  # uncaught errors and violations of the policy

    def open(self, url: str, width: int = 900, height: int = 800) -> Self:
        """Open a page in a new tab."""
        self._session = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **metrics)
        self.send("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")
        return self

    def reload(self) -> None:
        self.evaluate("window.isOld = true")
        self.send("Page.reload")
        self.wait_for("!window.isOld && document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str, timeout_s: float = 60.0) -> Any:
        """Wait until the expression is true, and return its value."""
        deadline = time.monotonic() + timeout_s
        while not (found := self.evaluate(expression)):
            shown = self.evaluate("document.body.innerText") if time.monotonic() > deadline else ""
            assert time.monotonic() < deadline, f"never true: {expression}; the page: {shown}; {self.complaints}"
            time.sleep(0.03)
        return found

    def text(self, selector: str) -> str:
        """Return the text of all elements that match."""
        return str(self.evaluate(f"[...document.querySelectorAll({selector!r})].map((e) => e.textContent).join('|')"))

    def type(self, text: str) -> None:
        """Type into the focused element."""
        self.send("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key such as Enter or Escape."""
        how: dict[str, Any] = {"windowsVirtualKeyCode": {"Enter": 13, "Escape": 27}[key], "modifiers": 8 * shift}
        if key == "Enter":
            how["text"] = "\r"
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, **how)

    def click(self, selector: str) -> None:
        """Click on an element, as a user does: pages may use the clipboard after that."""
        expression = f"document.querySelector({selector!r}).click()"
        answer = self.send("Runtime.evaluate", expression=expression, userGesture=True)
        assert "exceptionDetails" not in answer, answer

    def allow_clipboard(self) -> None:
        """Let pages read and write the clipboard."""
        self.send("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])

    def choose_files(self, selector: str, *files: Path) -> None:
        """Choose files in an input of the page, as its user does in the dialog."""
        found = self.send("Runtime.evaluate", expression=f"document.querySelector({selector!r})")["result"]
        self.send("DOM.setFileInputFiles", files=[str(file) for file in files], objectId=found["objectId"])

    def prefer(self, scheme: str) -> None:
        """Show the page as to a user who prefers this colour scheme, `light` or `dark`."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, file: Path) -> None:
        file.write_bytes(b64decode(self.send("Page.captureScreenshot")["data"]))

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command, and return its answer."""
        self._write(method, params)
        while True:
            message = self._next()
            if message.get("id") == self._number:
                assert "error" not in message, (method, message["error"])
                result: dict[str, Any] = message["result"]
                return result
            is_note = (
                message.get("params", {}).get("entry", {}).get("level") == "info"
            )  # such as autofocus that comes late
            if message.get("method") in _COMPLAINTS and not is_note:
                self.complaints.append(json.dumps(message["params"]))

    def close(self) -> None:
        """Let the browser end, and delete its temporary files. Does not wait for that."""
        self._session = None
        self._write("Browser.close", {})

    def _write(self, method: str, params: dict[str, Any]) -> None:
        self._number += 1
        command = {"id": self._number, "method": method, "params": params}
        if self._session:
            command["sessionId"] = self._session
        self._commands.write(json.dumps(command).encode() + b"\0")

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            part = self._answers.read(65_536)
            assert part, "the browser has ended"
            self._read += part
        raw, _, self._read = self._read.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        return message


@contextmanager
def browser(path: str, profile: Path) -> Iterator[Browser]:
    """Run a browser until the end of the block."""
    their_in, our_out = os.pipe()
    our_in, their_out = os.pipe()
    command = f"exec {path} {_OPTIONS} --user-data-dir={profile} 3<&{their_in} 4>&{their_out}"
    process = subprocess.Popen(
        ["bash", "-c", command], pass_fds=(their_in, their_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(their_in)
    os.close(their_out)
    started = Browser(our_out, our_in)
    try:
        yield started
        started.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_CLOSE_S)
    finally:
        process.kill()
        process.wait()
