"""However a file is damaged, what comes of it is an image or a refusal, soon and without much memory."""

import re
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import PIL.Image
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.images.pictures import Picture, patch, png, read, saved
from tests.selection import examples
from tests.support.stack import ROOT
from worker.errors import JobFailure
from worker.images.decode import decode
from worker.images.image import Image

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::PIL.Image.DecompressionBombWarning")

LONGEST_S = 1.0
MOST_PIXELS = 1_000_000


def held() -> PIL.Image.Exif:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    exif.get_ifd(0x8769)[0x9003] = "2026:11:21 10:00:00"
    return exif


def frames() -> list[Picture]:
    return [patch().rotate(90 * turns) for turns in range(3)]


WHOLE = {
    "PNG": saved(patch(40, 30), exif=held(), icc_profile=b"no profile"),
    "PNG with alpha": saved(patch(40, 30).convert("RGBA")),
    "PNG with a palette": saved(patch(40, 30).quantize(16), transparency=3),
    "PNG of 16 bits": png(2, 2, 16, 0, [b"\1\2\3\4", b"\5\6\7\x08"]),
    "APNG": saved(frames()[0], save_all=True, append_images=frames()[1:]),
    "JPEG": saved(patch(40, 30), "JPEG", exif=held(), xmp=b'<x tiff:Orientation="6"/>'),
    "progressive JPEG": saved(patch(40, 30), "JPEG", progressive=True),
    "CMYK JPEG": saved(patch(40, 30).convert("CMYK"), "JPEG"),
    "MPO": saved(patch(40, 30), "MPO", save_all=True, append_images=[patch(8, 8)]),
    "WebP": saved(patch(40, 30), "WEBP", exif=held()),
    "lossless WebP": saved(patch(40, 30).convert("RGBA"), "WEBP", lossless=True),
    "animated WebP": saved(frames()[0], "WEBP", save_all=True, append_images=frames()[1:]),
    "GIF": saved(patch(40, 30), "GIF", transparency=3, comment=b"by hand"),
    "animated GIF": saved(frames()[0], "GIF", save_all=True, append_images=frames()[1:]),
}


def with_checksums(file: bytes) -> bytes:
    """A PNG whose chunks are said to be whole, so that what is in them is looked at."""
    fixed, at = bytearray(file[:8]), 8
    while at + 12 <= len(file):
        length = int.from_bytes(file[at : at + 4])
        body = file[at + 4 : at + 8 + length]
        fixed += file[at : at + 4] + body + zlib.crc32(body).to_bytes(4)
        at += 12 + length
    return bytes(fixed)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    file = bytearray(WHOLE[draw(st.sampled_from(sorted(WHOLE)))])
    places = st.integers(0, len(file) - 1) | st.integers(0, min(len(file) - 1, 120))
    for at, value in draw(st.lists(st.tuples(places, st.integers(0, 255)), max_size=8)):
        file[at] = value
    for at in draw(st.lists(places, max_size=2)):
        file[at : at + 4] = draw(st.sampled_from([b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff", b""]))
    if draw(st.booleans()):
        del file[draw(places) :]
    broken = bytes(file)
    return with_checksums(broken) if broken.startswith(b"\x89PNG") and draw(st.booleans()) else broken


def outcome(file: bytes) -> Image | JobFailure:
    try:
        return read(file, max_pixels=MOST_PIXELS)
    except JobFailure as refusal:
        return refusal


@pytest.mark.parametrize("kind", WHOLE)
def test_what_is_damaged_below_is_whole_here(kind: str) -> None:
    came = outcome(WHOLE[kind])
    assert isinstance(came, Image) or "animated" in came.message


@settings(max_examples=examples(600), deadline=None)
@given(damaged())
@example(png(4, 1, 2, 3, [b"\x1b"]))  # a palette is promised, and there is none
@example(b"\xff\xd8\xff")
@example(b"GIF89a")
@example(b"RIFF\0\0\0\0WEBP")
@example(b"\x89PNG\r\n\x1a\n")
def test_a_damaged_file_is_an_image_or_a_refusal_within_a_second(file: bytes) -> None:
    begun = time.thread_time()
    came = outcome(file)
    assert time.thread_time() - begun < LONGEST_S
    if isinstance(came, JobFailure):
        assert came.type in ("invalid_request", "unsupported", "too_large")
    else:
        assert len(came.pixels) == 3 * came.width * came.height <= 3 * MOST_PIXELS


@settings(max_examples=examples(200), deadline=None)
@given(st.binary(max_size=200))
def test_bytes_that_were_never_an_image_are_refused(data: bytes) -> None:
    assert isinstance(outcome(data), JobFailure)


def bombs() -> dict[str, bytes]:
    """Small files that ask for much."""
    text = b"k\0\0" + zlib.compress(b"x" * 1_000_000)
    texts = struct.pack(">I", len(text)) + b"zTXt" + text + zlib.crc32(b"zTXt" + text).to_bytes(4)
    one, webp = saved(patch()), bytearray(saved(patch(), "WEBP", lossless=True))
    webp[21:25] = struct.pack("<I", 16_000 | 16_000 << 14)
    return {
        "a PNG of 100 megapixels": png(10_000, 10_000, 8, 2, [b"\0" * 30_000] * 100),
        "a PNG of terapixels": png(2**30, 2**30, 8, 2, [b""]),
        "a WebP of 256 megapixels": bytes(webp),
        "a PNG of 1,000 texts": one[:33] + texts * 1000 + one[33:],
    }


_MEASURED = """
import resource, sys
from pathlib import Path
from worker.errors import JobFailure
from worker.images.decode import decode

def peak():
    status = Path("/proc/self/status")  # Linux hands a parent's ru_maxrss down
    if status.exists():
        return 1024 * int(status.read_text().split("VmHWM:")[1].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

before = peak()
try:
    decode(Path(sys.argv[1]).read_bytes(), max_pixels=25_000_000)
    print("read", end=" ")
except JobFailure as refusal:
    print(refusal.type, end=" ")
print(peak() - before)
"""


@pytest.mark.parametrize("kind", bombs())
def test_a_bomb_is_refused_with_less_than_16_megabytes(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "bomb"
    file.write_bytes(bombs()[kind])
    command = [sys.executable, "-W", "ignore", "-c", _MEASURED, str(file)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    came, grown = re.fullmatch(r"(\w+) (\d+)\n", ran.stdout).groups()  # type: ignore[union-attr]
    assert came in ("too_large", "invalid_request")
    assert int(grown) < 16_000_000


def test_a_refused_bomb_takes_no_time() -> None:
    begun = time.thread_time()
    for file in bombs().values():
        with pytest.raises(JobFailure):
            decode(file, max_pixels=25_000_000)
    assert time.thread_time() - begun < LONGEST_S
