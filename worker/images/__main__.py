"""The process that `worker.images.decoder` starts: tasks come in on stdin, images and refusals go out on stdout.

A task is a line of JSON and as many bytes as it says; an answer is a line of JSON and, of an image, its pixels.
"""

import json
import os
import signal
import sys
import warnings
from typing import IO, Any

from worker.errors import Refusal
from worker.images.data_url import read_data_url
from worker.images.decode import decode
from worker.images.decoder import Task
from worker.images.files import too_long
from worker.images.image import Image


def main() -> None:
    # These are for the worker, which may go on for a while. Its end is the end of what there is to read.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    warnings.simplefilter("ignore")  # Pillow's, about what is odd in a file
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else is printed is no answer
    serve(sys.stdin.buffer, answers)


def serve(tasks: IO[bytes], answers: IO[bytes]) -> None:
    while line := tasks.readline():
        task = Task(**json.loads(line))
        source = tasks.read(task.length)
        if len(source) == task.length:
            _answer(task, source, answers)


def _answer(task: Task, source: bytes, answers: IO[bytes]) -> None:
    told: dict[str, Any]
    try:
        image = _image(task, source)
        told, pixels = {"width": image.width, "height": image.height, "digest": image.digest.hex()}, image.pixels
    except Refusal as refusal:
        told, pixels = {"type": refusal.type, "message": refusal.message}, b""
    answers.write(json.dumps(told).encode() + b"\n")
    answers.write(pixels)
    answers.flush()


def _image(task: Task, source: bytes) -> Image:
    """Raises `Refusal`."""
    declared, data = read_data_url(source) if task.is_url else (None, source)
    if len(data) > task.max_bytes:
        raise too_long(task.max_bytes)
    return decode(data, max_pixels=task.max_pixels, declared=declared, low=task.low)


if __name__ == "__main__":
    main()
