"""Runs the checks of a client and prints one line for each, which `tests.support.conformance.results` reads."""

import functools
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

URL = os.environ.get("SLUICE_CONFORMANCE_URL", "")  # of the gateway, without /v1
HOOK = os.environ.get("SLUICE_CONFORMANCE_HOOK", "0 none")  # port and secret of an endpoint for webhooks
SAID: dict[str, Any] = json.loads((Path(__file__).parent / "requests.json").read_text("utf-8"))
MODEL = SAID["model"]
SEEING = SAID["seeing"]  # a model that takes images; its answers are random
WEATHER: dict[str, Any] = SAID["weather"]
IMAGE_URL = f"data:image/png;base64,{SAID['image']}"
IMAGE_PARTS: list[Any] = [
    {"type": "text", "text": SAID["question"]},
    {"type": "image_url", "image_url": {"url": IMAGE_URL}},
]
TOOL = {"type": "function", "function": WEATHER}  # as chat completions take it
CALLED = ("get_weather", {"city": "Oslo"})  # the call that the model makes
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "city", "schema": SAID["schema"], "strict": True}}
_CANCELLED = 499
_CANCEL_S = 10.0  # far less than the unending answer takes to its limit
_BATCH_S = 60.0  # for a run of few lines
_REASON_CHARACTERS = 300

Check = Callable[[], object]


class Checks:
    """The checks of one client, in the order in which they were added."""

    def __init__(self, package: str) -> None:
        """`package`: the distribution whose version is reported."""
        self._package = package
        self._checks = dict[str, Check]()

    def __call__(self, call: str) -> Callable[[Check], Check]:
        """Add the decorated function as the check of a call."""
        return functools.partial(self._add, call)

    def _add(self, call: str, check: Check) -> Check:
        assert call not in self._checks, call
        self._checks[call] = check
        return check

    def run(self) -> None:
        """Run all checks, print a line for each, and exit."""
        write("version", version(self._package))
        for call, check in self._checks.items():
            try:
                check()
            except Exception as error:
                write("fail", call, f"{type(error).__name__}: {error}"[:_REASON_CHARACTERS])
            else:
                write("pass", call)
        sys.stdout.flush()
        os._exit(0)  # some clients keep threads that never end


def write(*parts: str) -> None:
    """Print one line of the report."""
    print("\t".join(" ".join(part.split()) for part in parts), flush=True)


def refused_with(status: int, error: type[Exception], call: Check) -> Any:
    """Return the error that the call raises, which must have this type and this HTTP status."""
    refused = _raised(error, call)
    found = getattr(refused, "status_code", None)
    assert found == status, f"the status is {found}, not {status}: {refused}"
    return refused


def _raised(error: type[Exception], call: Check) -> Exception:
    try:
        call()
    except error as raised:
        return raised
    raise AssertionError(f"no {error.__name__} was raised")


def await_cancelled(job_id: str) -> None:
    """Wait until the job has ended. Raises AssertionError unless it was cancelled, and soon."""
    began = time.monotonic()
    status = _status_of(f"{URL}/v1/chat/completions/{job_id}")
    took = time.monotonic() - began
    assert status == _CANCELLED, f"the job {job_id} was not cancelled: {status}"
    assert took < _CANCEL_S, f"the job was cancelled after {took:.0f} s"


def _status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def equal(found: object, expected: object) -> None:
    """Raise AssertionError, with both values, unless they are equal."""
    assert found == expected, f"{found!r} is not {expected!r}"


def took_tokens(with_image: int, without: int) -> None:
    """Raise AssertionError unless an image made a prompt of `with_image` tokens out of one of `without`."""
    assert with_image > without > 0, f"a prompt with an image has {with_image} tokens, and {without} without"


def batch_lines(count: int = 2, **fields: Any) -> bytes:
    """Return a file of `count` lines that are answered, and a last one that fails. `fields`: of the bodies."""
    body = {"model": MODEL, "messages": user(), "temperature": 0, **fields}
    bodies = {**{f"line-{number}": body for number in range(count)}, "bad": {**body, "temperature": 9}}
    lines = [
        {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
        for custom_id, body in bodies.items()
    ]
    return "".join(f"{json.dumps(line)}\n" for line in lines).encode()


def read_batch(content: bytes) -> dict[str, Any]:
    """Return the lines of an output or error file by their custom_id, each of which must be there once."""
    lines = [json.loads(raw) for raw in content.splitlines()]
    found = {line["custom_id"]: line for line in lines}
    equal(len(found), len(lines))
    return found


def until_ended(retrieve: Callable[[], Any], ended: Callable[[Any], bool]) -> Any:
    """Return the status of a run when it has ended."""
    deadline = time.monotonic() + _BATCH_S
    while not ended(batch := retrieve()):
        assert time.monotonic() < deadline, f"the run did not end: {batch!r}"
        time.sleep(0.2)
    return batch


def user(content: object = SAID["count"]) -> list[Any]:
    """Return the messages of a conversation with one turn of the user."""
    return [{"role": "user", "content": content}]
