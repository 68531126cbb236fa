from collections.abc import AsyncIterator
from itertools import cycle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.images.internet import Internet, answer
from tests.images.pictures import data_url, patch, png, read, saved
from tests.text import conversations
from tests.text.conversations import Said, assistant, system, text, user
from worker.errors import JobFailure
from worker.images.conversation import ImageLoader, images_of
from worker.images.image import Image
from worker.settings import Settings
from worker.text.prompt.normalize import normalize

FILES = [saved(patch(8 + at, 8)) for at in range(8)]


def shown(file: bytes, media_type: str = "image/png", **fields: Any) -> Said:
    return {"type": "image_url", "image_url": {"url": data_url(file, media_type), **fields}}


def linked(url: str) -> Said:
    return {"type": "image_url", "image_url": {"url": url}}


def images_with(**given: Any) -> ImageLoader:
    return ImageLoader(Settings(model="tiny", _env_file=None, **given))  # type: ignore[call-arg]


@pytest.fixture
async def images() -> AsyncIterator[ImageLoader]:
    images = images_with()
    yield images
    images.close()


async def all_of(images: ImageLoader, *said: Said) -> tuple[Image, ...]:
    return tuple([image async for _, image in images.load(conversations.read([*said]))])


async def refused(images: ImageLoader, *said: Said) -> tuple[str, str]:
    with pytest.raises(JobFailure) as raised:
        await all_of(images, *said)
    return raised.value.type, raised.value.message


async def test_a_conversation_without_images_has_none(images: ImageLoader) -> None:
    assert await all_of(images, system("Be brief."), user("Hello."), user([text("Hi.")])) == ()


async def test_images_come_in_the_order_of_the_conversation(images: ImageLoader) -> None:
    said = [
        system("Look closely."),
        user([shown(FILES[0]), text("and"), shown(FILES[1])]),
        assistant("Two strips."),
        user("And now?"),
        user([text("Here."), shown(FILES[2]), shown(FILES[0])]),
    ]
    assert await all_of(images, *said) == tuple(read(FILES[at]) for at in (0, 1, 2, 0))


def urls_of_prompt(said: list[Said]) -> list[str]:
    contents = [message["content"] for message in normalize(conversations.read(said))]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]


@st.composite
def picture_stories(draw: st.DrawFn) -> list[Said]:
    strips, words = cycle(FILES), conversations.numbered()
    return draw(conversations.conversations(lambda: next(words), lambda: shown(next(strips))))


@given(picture_stories())
def test_the_order_is_that_of_the_prompt_whatever_is_moved_to_its_front(said: list[Said]) -> None:
    found = [image.url for _, image in images_of(conversations.read(said))]
    assert found == urls_of_prompt(said)


async def test_a_bad_image_is_named_by_its_place(images: ImageLoader) -> None:
    good = user([shown(FILES[0])])
    for bad, kind, why in [
        (shown(FILES[0][:60]), "invalid_request", "the image, a PNG, is damaged, truncated or empty."),
        (shown(b""), "invalid_request", "the image is empty."),
        (shown(b"<svg/>", "image/svg+xml"), "unsupported", "SVG is not supported; send PNG, JPEG, WebP or GIF."),
        (
            shown(FILES[0], "image/gif"), "invalid_request",
            "the data: URL declares 'image/gif', but contains a PNG; write image/png.",
        ),
        (linked("data:image/png;base64,*"), "invalid_request", "the data: URL is not valid base64 after its comma."),
        (
            shown(png(10_000, 10_000, 8, 2, [b""])), "too_large",
            "the image has 100,000,000 pixels (10,000 × 10,000); this worker accepts 25,000,000.",
        ),
    ]:  # fmt: skip
        said = [system("Look."), good, user([text("What is this?"), bad, shown(FILES[1])])]
        assert await refused(images, *said) == (kind, f"messages[2].content[1].image_url: {why}")


async def test_a_data_url_may_be_written_in_capitals_and_percent_encoded(images: ImageLoader) -> None:
    url = "DATA:Image/PNG;Base64," + data_url(FILES[0]).partition(",")[2].replace("=", "%3D").replace("+", "%2b")
    assert await all_of(images, user([linked(url)])) == (read(FILES[0]),)


async def test_more_images_than_are_allowed_are_refused_before_any_is_read() -> None:
    images = images_with(max_images=2)
    said = user([shown(b"no image")] * 3)
    assert await refused(images, said) == (
        "too_large", "messages: 3 images are 1 more than this worker accepts (2); leave the oldest out.",
    )  # fmt: skip


async def test_a_file_that_is_longer_than_allowed_is_refused() -> None:
    images = images_with(image_max_bytes=len(FILES[0]))
    assert await all_of(images, user([shown(FILES[0])])) == (read(FILES[0]),)
    longer = saved(patch(64, 64))
    said = f"the image's file is longer than this worker accepts ({len(FILES[0])} bytes)."
    assert await refused(images, user([shown(longer)])) == (
        "too_large", f"messages[0].content[0].image_url: {said}",
    )  # fmt: skip
    images.close()


async def test_all_images_together_have_no_more_than_four_times_the_pixels_of_one() -> None:
    images = images_with(image_max_pixels=64)
    eight = shown(saved(patch(8, 8)))
    assert len(await all_of(images, user([eight] * 4))) == 4
    assert await refused(images, user([eight] * 4), user([eight])) == (
        "too_large",
        "messages[1].content[0].image_url: with this image the request's images have more than 256 pixels; leave the "
        "oldest out, or send smaller ones.",
    )  # fmt: skip
    images.close()


@pytest.mark.parametrize(("detail", "side"), [("low", 512), ("high", 600), ("auto", 600), (None, 600)])
async def test_low_detail_makes_an_image_smaller_and_no_other_does(images: ImageLoader, detail: Any, side: int) -> None:
    (image,) = await all_of(images, user([shown(saved(patch(600, 600)), detail=detail)]))
    assert (image.width, image.height) == (side, side)


@pytest.mark.parametrize("url", ["https://example.org/a.png", "http://127.0.0.1/", "file:///etc/passwd", "a.png"])
async def test_nothing_is_fetched_unless_that_is_allowed(images: ImageLoader, url: str) -> None:
    assert await refused(images, user([linked(url)])) == (
        "unsupported", "messages[0].content[0].image_url: this worker accepts only data: URLs.",
    )  # fmt: skip


async def test_where_urls_are_allowed_those_of_this_machine_are_not() -> None:
    images, internet = images_with(image_urls=True), Internet({"/a.png": answer(FILES[0])})
    async with internet.on():
        assert await refused(images, user([linked(f"http://localhost:{internet.port}/a.png")])) == (
            "invalid_request",
            "messages[0].content[0].image_url: the URL leads to an address that is not public.",
        )
    assert internet.asked == []


class Shelf:
    """Stands in for a fetcher."""

    async def fetch(self, url: str) -> bytes:
        if url.endswith("late.png"):
            raise JobFailure("invalid_request", "the image did not arrive within 10 s.", retryable=True)
        return saved(patch(600, 600), "JPEG")

    def close(self) -> None:
        pass


async def test_a_fetched_image_is_read_as_what_it_is() -> None:
    images = images_with(image_urls=True)
    images._fetcher = Shelf()  # type: ignore[assignment]
    part = {"type": "image_url", "image_url": {"url": "https://example.org/a.png", "detail": "low"}}
    (image,) = await all_of(images, user([part]))
    assert (image.width, image.height) == (512, 512)
    images.close()


async def test_what_may_go_well_later_is_told_as_such() -> None:
    images = images_with(image_urls=True)
    images._fetcher = Shelf()  # type: ignore[assignment]
    with pytest.raises(JobFailure) as raised:
        await all_of(images, user([linked("https://example.org/late.png")]))
    assert raised.value.retryable
    assert raised.value.message == "messages[0].content[0].image_url: the image did not arrive within 10 s."
