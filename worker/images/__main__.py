"""Child process that decodes images: see `worker.images.decoder`.

A request on stdin is a line of JSON, followed by `length` bytes. An answer on stdout is a line of JSON, followed by the
pixels of an image."""

import json
import os
import signal
import sys
import warnings
from typing import IO, Any

from worker.errors import JobFailure
from worker.images.data_url import read_data_url
from worker.images.decode import decode
from worker.images.decoder import DecodeRequest
from worker.images.files import too_long
from worker.images.image import Image
from worker.process.rlimits import lower_priority


def main() -> None:
    """Answer the requests on stdin until it ends. All other output of the process goes to stderr."""
    # These signals are for the worker, which may still need this process while it drains. It ends when stdin does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    lower_priority()
    warnings.simplefilter("ignore")  # Pillow's, about irregular files
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # other output must not mix with the answers
    serve(sys.stdin.buffer, answers)


def serve(tasks: IO[bytes], answers: IO[bytes]) -> None:
    """Answer decode requests one after the other until the stream ends or is cut off. Blocks."""
    while line := tasks.readline():
        task = DecodeRequest(**json.loads(line))
        source = tasks.read(task.length)
        if len(source) == task.length:
            _decode_and_write(task, source, answers)


def _decode_and_write(task: DecodeRequest, source: bytes, answers: IO[bytes]) -> None:
    head: dict[str, Any]
    try:
        image = _image(task, source)
        head, pixels = {"width": image.width, "height": image.height, "digest": image.digest.hex()}, image.pixels
    except JobFailure as refusal:
        head, pixels = {"type": refusal.type, "message": refusal.message}, b""
    answers.write(json.dumps(head).encode() + b"\n")
    answers.write(pixels)
    answers.flush()


def _image(task: DecodeRequest, source: bytes) -> Image:
    """Decode the image of a request. Raises `JobFailure`."""
    declared, data = read_data_url(source) if task.is_url else (None, source)
    if len(data) > task.max_bytes:
        raise too_long(task.max_bytes)
    return decode(data, max_pixels=task.max_pixels, declared=declared, low=task.low)


if __name__ == "__main__":
    main()
