"""A process that decodes images, seen from the worker.

Not a thread: one that decodes a large WebP keeps the engine's waiting for the interpreter's lock for tens of
milliseconds, one that takes minutes over a file made for it cannot be stopped, and one that crashes in a decoder's C
takes every job of the worker with it.
"""

import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from worker.errors import Refusal
from worker.images.image import Image

_ROOT = Path(__file__).parents[2]  # where `worker` is found


class DecoderDied(Exception):
    """Killed, or crashed on what it was given."""


@dataclass(frozen=True, slots=True)
class Task:
    length: int  # of what follows, in bytes: a data: URL, or a file
    is_url: bool
    max_bytes: int  # of the file
    max_pixels: int
    low: bool  # the detail


class Decoder:
    def __init__(self) -> None:
        command = [sys.executable, "-m", "worker.images"]
        self._process = subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._tasks, self._answers = self._process.stdin, self._process.stdout

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def decode(self, task: Task, source: bytes) -> Image | Refusal:
        """Takes its time, so in a thread. Raises `DecoderDied`."""
        try:
            self._tasks.write(json.dumps(asdict(task)).encode() + b"\n")
            self._tasks.write(source)
            self._tasks.flush()
            return _answer(self._answers)
        except (OSError, ValueError):  # a pipe that is broken, or was closed under us
            raise DecoderDied from None

    def kill(self) -> None:
        """Also while it decodes: who waits for that is told that it died. To be closed then."""
        self._process.kill()

    def close(self) -> None:
        """Waits until it has gone."""
        self.kill()
        self._process.wait()
        for pipe in (self._tasks, self._answers):
            with suppress(OSError):  # what was not written is not missed
                pipe.close()


def _answer(stdout: IO[bytes]) -> Image | Refusal:
    told = json.loads(stdout.readline())
    if "message" in told:
        return Refusal(told["type"], told["message"])
    width, height = told["width"], told["height"]
    pixels = stdout.read(width * height * 3)
    if len(pixels) < width * height * 3:
        raise DecoderDied
    return Image(width, height, bytes.fromhex(told["digest"]), pixels)
