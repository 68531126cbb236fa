"""Odd images: each is read rightly, or refused by name."""

import struct
import zlib
from collections.abc import Callable
from io import BytesIO

import PIL.Image
import pytest
from PIL import ImageCms

from tests.images.pictures import (
    BLACK,
    BLUE,
    GREEN,
    RED,
    WHITE,
    chunk,
    grid,
    patch,
    png,
    read,
    refused,
    rows_of,
    saved,
    with_chunk,
)
from worker.errors import CannotStart
from worker.images.image import Image
from worker.settings import read_settings

# Pillow's, about what is odd in a file: the process that decodes does not say them either.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::PIL.Image.DecompressionBombWarning")


def shorts(*values: int) -> bytes:
    return struct.pack(f">{len(values)}H", *values)


# Each file is one row of pixels.
ROWS = {
    "1 bit": (png(4, 1, 1, 0, [b"\xa0"]), [WHITE, BLACK, WHITE, BLACK]),
    "gray of 2 bits": (png(4, 1, 2, 0, [b"\x1b"]), [BLACK, (85,) * 3, (170,) * 3, WHITE]),
    "gray of 4 bits": (png(2, 1, 4, 0, [b"\x1f"]), [(17,) * 3, WHITE]),
    "gray of 8 bits": (png(2, 1, 8, 0, [b"\x05\xfa"]), [(5,) * 3, (250,) * 3]),
    "gray of 16 bits": (png(3, 1, 16, 0, [shorts(0x1234, 0xFFFF, 0x00FF)]), [(0x12,) * 3, WHITE, BLACK]),
    "colours of 16 bits": (png(1, 1, 16, 2, [shorts(0x1234, 0x5678, 0xFFFF)]), [(0x12, 0x56, 0xFF)]),
    "gray of 16 bits with alpha": (png(2, 1, 16, 4, [shorts(0, 0xFFFF, 0, 0)]), [BLACK, WHITE]),
    "colours of 16 bits with alpha": (png(2, 1, 16, 6, [shorts(0xFFFF, 0, 0, 0xFFFF, 9, 9, 9, 0)]), [RED, WHITE]),
    "gray with alpha": (png(3, 1, 8, 4, [bytes([0, 255, 0, 0, 0, 128])]), [BLACK, WHITE, (127,) * 3]),
    "colours with alpha": (png(2, 1, 8, 6, [bytes([255, 0, 0, 255, 0, 0, 0, 0])]), [RED, WHITE]),
    "half transparent": (png(1, 1, 8, 6, [bytes([255, 0, 0, 128])]), [(255, 127, 127)]),
    "a transparent bit": (png(4, 1, 1, 0, [b"\xa0"], chunk(b"tRNS", shorts(0))), [WHITE, WHITE, WHITE, WHITE]),
    "a transparent gray of 2 bits": (
        png(4, 1, 2, 0, [b"\x1b"], chunk(b"tRNS", shorts(1))), [BLACK, WHITE, (170,) * 3, WHITE],
    ),
    "a transparent gray of 4 bits": (png(2, 1, 4, 0, [b"\x12"], chunk(b"tRNS", shorts(1))), [WHITE, (34,) * 3]),
    "a transparent gray of 8 bits": (png(2, 1, 8, 0, [b"\5\6"], chunk(b"tRNS", shorts(5))), [WHITE, (6,) * 3]),
    "a transparent colour": (
        png(2, 1, 8, 2, [bytes([1, 2, 3, 4, 5, 6])], chunk(b"tRNS", shorts(1, 2, 3))), [WHITE, (4, 5, 6)],
    ),
    "a palette": (png(2, 1, 8, 3, [b"\1\0"], chunk(b"PLTE", bytes([*RED, *BLUE]))), [BLUE, RED]),
    "a palette with transparency": (
        png(3, 1, 8, 3, [b"\0\1\2"], chunk(b"PLTE", bytes([*RED, *BLUE, *GREEN])), chunk(b"tRNS", b"\0\x80")),
        [WHITE, (127, 127, 255), GREEN],
    ),
    "a palette of 2 bits with one transparent": (
        png(4, 1, 2, 3, [b"\x1b"], chunk(b"PLTE", bytes(range(12))), chunk(b"tRNS", b"\xff\0")),
        [(0, 1, 2), WHITE, (6, 7, 8), (9, 10, 11)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ROWS)
def test_the_pixels_are_upright_opaque_rgb(kind: str) -> None:
    file, row = ROWS[kind]
    assert rows_of(read(file)) == [row]


@pytest.mark.parametrize("file", [png(1, 1, 16, 0, [shorts(1)]), png(1, 1, 16, 2, [shorts(1, 2, 3)])])
def test_a_transparent_colour_of_16_bits_is_refused_by_name(file: bytes) -> None:
    assert refused(with_chunk(file, b"tRNS", shorts(1, 2, 3))) == (
        "unsupported", "the image, a PNG, has 16 bits per sample and a transparent colour; send 8 bits per sample.",
    )  # fmt: skip


SAME: dict[str, Callable[[], bytes]] = {
    "PNG": lambda: saved(patch()),
    "PNG with another compression": lambda: saved(patch(), compress_level=0),
    "PNG with an opaque alpha": lambda: saved(patch().convert("RGBA")),
    "lossless WebP": lambda: saved(patch(), "WEBP", lossless=True),
    "lossless WebP with an opaque alpha": lambda: saved(patch().convert("RGBA"), "WEBP", lossless=True),
}


@pytest.mark.parametrize("kind", SAME)
def test_one_picture_has_one_digest_in_whatever_file_it_comes(kind: str) -> None:
    assert read(SAME[kind]()) == read(saved(patch())) == Image.of(24, 16, patch().tobytes())


def test_one_picture_of_few_colours_has_one_digest_as_a_gif_too() -> None:
    picture = grid([[RED, GREEN, BLUE], [WHITE, BLACK, RED]])
    assert read(saved(picture, "GIF")) == read(saved(picture)) == read(saved(picture.quantize(8)))


def test_pictures_that_differ_in_a_pixel_or_in_their_shape_have_different_digests() -> None:
    pixels = patch().tobytes()
    others = [(24, 16, pixels), (16, 24, pixels), (12, 32, pixels), (24, 16, bytes([pixels[0] ^ 1]) + pixels[1:])]
    assert len({Image.of(*other).digest for other in others}) == 4


def test_an_image_gives_a_picture_of_its_own_each_time() -> None:
    image = read(saved(patch()))
    image.to_pillow().putpixel((0, 0), WHITE)
    assert image.to_pillow().tobytes() == image.pixels == patch().tobytes()


# How a stored image of rows `abc` and `def` is to be seen, by the number in its EXIF.
SEEN = {
    1: "abc def", 2: "cba fed", 3: "fed cba", 4: "def abc",
    5: "ad be cf", 6: "da eb fc", 7: "fc eb da", 8: "cf be ad",
    0: "abc def", 9: "abc def",
}  # fmt: skip
COLOURS = {"a": RED, "b": GREEN, "c": BLUE, "d": WHITE, "e": BLACK, "f": (9, 99, 199)}


def drawn(letters: str) -> list[list[tuple[int, int, int]]]:
    return [[COLOURS[letter] for letter in row] for row in letters.split()]


@pytest.mark.parametrize("number", SEEN)
@pytest.mark.parametrize("format", ["PNG", "WEBP"])
def test_an_image_is_turned_as_the_camera_was_held(format: str, number: int) -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = number
    file = saved(grid(drawn("abc def")), format, lossless=True, exif=exif)
    assert rows_of(read(file)) == drawn(SEEN[number])


def test_a_jpeg_is_turned_too() -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    left_is_white = PIL.Image.new("L", (64, 32))
    left_is_white.paste(255, (0, 0, 32, 32))
    image = read(saved(left_is_white, "JPEG", exif=exif))
    assert (image.width, image.height) == (32, 64)
    assert (rows_of(image)[8][8], rows_of(image)[56][8]) == (WHITE, BLACK)


BROKEN_EXIF = [b"", b"Exif\0\0", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff"]


@pytest.mark.parametrize("exif", BROKEN_EXIF)
def test_broken_exif_leaves_the_picture_as_it_is(exif: bytes) -> None:
    assert read(with_chunk(saved(patch()), b"eXIf", exif)) == read(saved(patch()))
    assert read(saved(patch(), "JPEG", exif=exif)) == read(saved(patch(), "JPEG"))


def test_a_broken_colour_profile_leaves_the_picture_as_it_is() -> None:
    assert read(saved(patch(), icc_profile=b"no profile")) == read(saved(patch()))
    assert read(with_chunk(saved(patch()), b"iCCP", b"x\0\0no zlib")) == read(saved(patch()))


def test_a_colour_profile_is_not_looked_at() -> None:
    lab = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    assert read(saved(patch(), icc_profile=lab)) == read(saved(patch()))


def test_a_cmyk_jpeg_has_its_colours() -> None:
    file = saved(PIL.Image.new("RGB", (16, 16), (200, 30, 60)).convert("CMYK"), "JPEG", quality=100)
    assert all(abs(is_ - was) < 4 for is_, was in zip(rows_of(read(file))[8][8], (200, 30, 60), strict=True))


def test_a_gray_and_a_progressive_jpeg_are_read() -> None:
    assert rows_of(read(saved(PIL.Image.new("L", (8, 8), 77), "JPEG"))) == [[(77,) * 3] * 8] * 8
    assert read(saved(patch(), "JPEG", progressive=True)).width == 24


def test_a_photograph_with_a_preview_in_it_is_the_photograph() -> None:
    file = saved(patch(64, 64), "MPO", save_all=True, append_images=[patch(8, 8)])
    assert PIL.Image.open(BytesIO(file)).format == "MPO"
    assert read(file) == read(saved(patch(64, 64), "JPEG"))


def test_a_gif_is_transparent_over_white() -> None:
    picture = PIL.Image.new("P", (2, 1))
    picture.putpalette([*RED, *BLUE])
    picture.putdata([0, 1])
    assert rows_of(read(saved(picture, "GIF", transparency=1))) == [[RED, WHITE]]


def test_what_the_frame_of_a_gif_leaves_out_is_white() -> None:
    whole = saved(grid([[RED, RED], [RED, RED]]), "GIF")
    wider = whole[:6] + struct.pack("<HH", 3, 2) + whole[10:]
    assert rows_of(read(wider)) == [[RED, RED, WHITE], [RED, RED, WHITE]]


FRAMES = [PIL.Image.new("RGB", (8, 8), color) for color in (RED, GREEN, BLUE)]


@pytest.mark.parametrize(("format", "kind"), [("GIF", "GIF"), ("PNG", "PNG"), ("WEBP", "WebP")])
def test_an_animation_is_refused_by_name(format: str, kind: str) -> None:
    file = saved(FRAMES[0], format, save_all=True, append_images=FRAMES[1:])
    assert refused(file) == ("unsupported", f"the image, a {kind}, is animated; send one of its frames.")


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP"])
def test_an_animation_of_one_frame_is_an_image(format: str) -> None:
    assert read(saved(FRAMES[0], format, save_all=True, lossless=True, loop=0)) == read(saved(FRAMES[0]))


OTHERS = {
    "BMP": saved(patch(), "BMP"),
    "TIFF": saved(patch(), "TIFF"),
    "ICO": saved(patch(), "ICO"),
    "AVIF": b"\0\0\0\x1cftypavif\0\0\0\0",
    "HEIC": b"\0\0\0\x18ftypheic\0\0\0\0",
    "PDF": b"%PDF-1.7\n",
    "SVG": b'\xef\xbb\xbf\n<?xml version="1.0"?>\n<!-- drawn --><SVG xmlns="http://www.w3.org/2000/svg"/>',
}


@pytest.mark.parametrize("kind", OTHERS)
def test_another_kind_of_file_is_refused_by_its_name(kind: str) -> None:
    assert refused(OTHERS[kind]) == ("unsupported", f"{kind} is not supported; send PNG, JPEG, WebP or GIF.")


NO_IMAGES = [b"hello", b"<html></html>", b"<?xml ?><rss/>", b"RIFF\0\0\0\0WAVE", b"\x89PNX", b"\0"]


@pytest.mark.parametrize("file", NO_IMAGES)
def test_what_is_no_image_is_refused(file: bytes) -> None:
    assert refused(file) == ("invalid_request", "this is not an image; send PNG, JPEG, WebP or GIF.")


def test_nothing_is_refused_as_empty() -> None:
    assert refused(b"") == ("invalid_request", "the image is empty.")


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ("image/jpeg", "declares 'image/jpeg'"),
        ("image/svg+xml", "declares 'image/svg+xml'"),
        ("text/plain", "declares 'text/plain'"),
        ("image/*", "declares 'image/*'"),
        ("", "declares no media type"),
    ],
)
def test_a_declared_type_that_the_file_has_not_is_refused(declared: str, said: str) -> None:
    assert refused(saved(patch()), declared=declared) == (
        "invalid_request", f"the data: URL {said}, but contains a PNG; write image/png.",
    )  # fmt: skip


@pytest.mark.parametrize("declared", ["image/jpeg", "image/jpg", "image/pjpeg"])
def test_a_type_may_be_declared_by_the_names_it_has_in_the_wild(declared: str) -> None:
    assert read(saved(patch(), "JPEG"), declared=declared).width == 24


def sized(format: str, width: int, height: int) -> bytes:
    """A small file that says it is so large."""
    if format == "PNG":
        return png(width, height, 8, 2, [b""])
    file = bytearray(saved(PIL.Image.new("RGB", (8, 8)), format, **({"lossless": True} if format == "WEBP" else {})))
    match format:
        case "JPEG":
            at = file.index(b"\xff\xc0") + 5
            file[at : at + 4] = struct.pack(">HH", height, width)
        case "GIF":
            file[6:10] = struct.pack("<HH", width, height)
        case "WEBP":
            file[21:25] = struct.pack("<I", (width - 1) | (height - 1) << 14)
    return bytes(file)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "WEBP"])
def test_100_megapixels_are_refused_from_the_header(format: str) -> None:
    assert refused(sized(format, 10_000, 10_000), max_pixels=25_000_000) == (
        "too_large",
        "the image has 100,000,000 pixels (10,000 × 10,000); this worker accepts 25,000,000.",
    )


@pytest.mark.parametrize(("width", "height"), [(2**31 - 1, 2**31 - 1), (200_000, 200_000)])
def test_more_than_pillow_itself_takes_is_too_large_as_well(width: int, height: int) -> None:
    said = "the image has more pixels than this worker accepts (25,000,000)."
    assert refused(sized("PNG", width, height), max_pixels=25_000_000) == ("too_large", said)


def test_pillow_takes_as_many_pixels_as_a_worker_may_be_set_to_take() -> None:
    limit = 175_000_000
    read_settings(model="tiny", image_max_pixels=limit)
    with pytest.raises(CannotStart, match="SLUICE_IMAGE_MAX_PIXELS=175000001: it must be at most 175000000"):
        read_settings(model="tiny", image_max_pixels=limit + 1)
    damaged = ("invalid_request", "the image, a PNG, is damaged, truncated or empty.")
    assert refused(sized("PNG", 14_000, 12_500), max_pixels=limit) == damaged


def test_as_many_pixels_as_are_allowed_are_read_and_not_one_more() -> None:
    file = saved(patch(20, 10))
    assert read(file, max_pixels=200).width == 20
    assert refused(file, max_pixels=199)[0] == "too_large"


@pytest.mark.parametrize(("width", "height"), [(0, 8), (8, 0), (0, 0)])
@pytest.mark.parametrize("format", ["PNG", "JPEG"])
def test_an_image_without_pixels_is_refused(format: str, width: int, height: int) -> None:
    said = f"the image, a {format}, is damaged, truncated or empty."
    assert refused(sized(format, width, height)) == ("invalid_request", said)


def test_a_strip_is_refused_beyond_200_to_1() -> None:
    assert read(saved(PIL.Image.new("RGB", (200, 1)))).width == 200
    said = "the image is 1 × 201; its sides may differ by a factor of 200."
    assert refused(saved(PIL.Image.new("RGB", (1, 201)))) == ("invalid_request", said)


def test_one_pixel_is_an_image() -> None:
    assert rows_of(read(saved(grid([[RED]])))) == [[RED]]


@pytest.mark.parametrize("type", [b"zTXt", b"iTXt"])
def test_a_text_that_unpacks_to_megabytes_is_refused(type: bytes) -> None:
    text = zlib.compress(b"x" * 10_000_000)
    data = b"k\0\0" + text if type == b"zTXt" else b"k\0\1\0\0\0" + text
    assert refused(with_chunk(saved(patch()), type, data)) == (
        "invalid_request", "the image, a PNG, is damaged, truncated or empty.",
    )  # fmt: skip


def test_a_jpeg_of_a_thousand_scans_is_refused() -> None:
    file = saved(patch(), "JPEG", progressive=True)
    last = file[file.rindex(b"\xff\xda") : -2]
    assert read(file[:-2] + last * 20 + file[-2:]).width == 24
    said = "the image, a JPEG, has more than 100 scans."
    assert refused(file[:-2] + last * 1000 + file[-2:]) == ("too_large", said)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_file_that_was_cut_off_is_refused(format: str, share: float) -> None:
    file = saved(patch(200, 200), format)
    kind = {"WEBP": "WebP"}.get(format, format)
    said = f"the image, a {kind}, is damaged, truncated or empty."
    assert refused(file[: int(len(file) * share)]) == ("invalid_request", said)


def test_low_detail_is_at_most_512_on_a_side() -> None:
    wide = read(saved(PIL.Image.new("RGB", (1600, 400), RED)), low=True)
    assert (wide.width, wide.height) == (512, 128)
    assert rows_of(wide) == [[RED] * 512] * 128


def test_low_detail_leaves_a_small_image_as_it_is() -> None:
    assert read(saved(patch(200, 100)), low=True) == read(saved(patch(200, 100)))
