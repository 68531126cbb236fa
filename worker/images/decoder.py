"""Runs a child process that decodes images.

A thread would not do: decoding a large WebP holds the interpreter's lock for tens of milliseconds, which the engine's
thread needs; a thread that takes minutes for a malicious file cannot be stopped; and a crash in a decoder's C code
would end every job of the worker."""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import IO

from worker.errors import JobFailure
from worker.images.image import Image
from worker.process.child import start


class DecoderDied(Exception):
    """The process was killed, or crashed on its input."""


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """One request to the decoder, sent as JSON; the source follows."""

    length: int  # bytes of the source that follows: a data: URL, or a file
    is_url: bool
    max_bytes: int  # of the file
    max_pixels: int
    low: bool  # reduce to `detail: low`


class Decoder:
    """A child process that decodes one image at a time. Starting it blocks."""

    def __init__(self) -> None:
        self._process = start("worker.images", errors=None)  # what it logs goes where the worker's own log goes
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._tasks, self._answers = self._process.stdin, self._process.stdout

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True if the process has not ended."""
        return self._process.poll() is None

    def decode(self, task: DecodeRequest, source: bytes) -> Image | JobFailure:
        """Decode an image. Returns a `JobFailure` for an invalid one. Blocks for long, so it belongs in a thread.
        Raises `DecoderDied`; the decoder must then be closed."""
        try:
            self._tasks.write(json.dumps(asdict(task)).encode() + b"\n")
            self._tasks.write(source)
            self._tasks.flush()
            return _answer(self._answers)
        except (OSError, ValueError):  # a broken pipe, or one closed by another thread
            raise DecoderDied from None

    def kill(self) -> None:
        """Kill the process, also while it decodes: that call then raises `DecoderDied`. Does not block; call `close`
        afterwards."""
        self._process.kill()

    def close(self) -> None:
        """Kill the process, wait until it has ended, and close the pipes. Blocks."""
        self.kill()
        self._process.wait()
        for pipe in (self._tasks, self._answers):
            with suppress(OSError):  # unwritten input is no longer needed
                pipe.close()


def _answer(stdout: IO[bytes]) -> Image | JobFailure:
    answer = json.loads(stdout.readline())
    if "message" in answer:
        return JobFailure(answer["type"], answer["message"])
    width, height = answer["width"], answer["height"]
    pixels = stdout.read(width * height * 3)
    if len(pixels) < width * height * 3:
        raise DecoderDied
    return Image(width, height, bytes.fromhex(answer["digest"]), pixels)
