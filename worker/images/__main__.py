"""Child process that decodes images: see `worker.images.conversation`."""

import warnings
from typing import Any

from worker.images.decode import decode, read_data_url
from worker.images.image import Image, too_long
from worker.process.frames import Send, handle_frames


def send_pixels(task: dict[str, Any], source: bytes, send: Send) -> None:
    """Decode an image, and send its pixels. `task`: the arguments of `Decoders.decode`. Raises `JobFailure`."""
    image = _image(source, **task)
    send({"width": image.width, "height": image.height, "digest": image.digest.hex()}, image.pixels)


def _image(source: bytes, *, is_url: bool, max_bytes: int, max_pixels: int, low: bool) -> Image:
    declared, data = read_data_url(source) if is_url else (None, source)
    if len(data) > max_bytes:
        raise too_long(max_bytes)
    return decode(data, max_pixels=max_pixels, declared=declared, low=low)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # Pillow's, about irregular files
    handle_frames(send_pixels)
