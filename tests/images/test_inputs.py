"""Images on their way from a request to the engine."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from sluice.contract.keys import Lane
from tests.images.pictures import data_url, patch, saved
from tests.text import conversations
from tests.text.conversations import Said, user
from worker.byte_lru import ByteLRU
from worker.errors import JobFailure
from worker.images.conversation import ImageInputs, PixelBudget
from worker.request import ProcessedImage, PromptImage
from worker.settings import Settings


class Watched:
    """Eyes that do with each image what the test says."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        self._meanwhile, self.looking = meanwhile, 0
        self.seen, self.most = list[tuple[int, int]](), 0  # sizes; and at once

    def preprocess(self, image: Any, digest: bytes) -> ProcessedImage:
        self.looking += 1
        self.most = max(self.most, self.looking)
        self._meanwhile()
        self.seen.append(image.size)
        self.looking -= 1
        return ProcessedImage(digest, "<image>", 1, 1, {}, 100)

    def prompt_images(self, prompt: tuple[int, ...], sights: Sequence[ProcessedImage]) -> tuple[PromptImage, ...]:
        return ()


@asynccontextmanager
async def seeing(eyes: Watched, **given: Any) -> AsyncIterator[ImageInputs]:
    sights = ImageInputs(Settings(model="tiny", _env_file=None, **given), eyes)  # type: ignore[call-arg]
    yield sights
    sights.close()


def image(width: int) -> Said:
    return {"type": "image_url", "image_url": {"url": data_url(saved(patch(width)))}}


async def show(
    sights: ImageInputs, *widths: int, id: str = "job", lane: Lane = "interactive", space: str = ""
) -> tuple[ProcessedImage, ...]:
    messages: Any = conversations.read([user([image(width) for width in widths])])
    return await sights.process(messages, id, lane, space)


async def test_one_image_is_looked_at_at_a_time_whoever_shows_it_and_whoever_leaves() -> None:
    eyes = Watched(lambda: time.sleep(0.01))
    async with seeing(eyes) as sights:
        jobs = [asyncio.create_task(show(sights, width, width + 8, id=str(width))) for width in range(24, 32)]
        await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
        for job in jobs[::2]:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
    assert eyes.most == 1
    assert len(eyes.seen) > 1


async def test_a_look_that_takes_long_keeps_no_thread_from_others() -> None:
    go_on = threading.Event()
    eyes = Watched(go_on.wait)
    async with seeing(eyes) as sights:
        jobs = [asyncio.create_task(show(sights, width, id=str(width))) for width in range(24, 64)]
        while not eyes.looking:
            await asyncio.sleep(0.01)
        async with asyncio.timeout(5):
            assert await asyncio.to_thread(lambda: "here") == "here"
        go_on.set()
        await asyncio.gather(*jobs)


async def test_an_image_that_is_shown_again_is_not_looked_at_again() -> None:
    eyes = Watched(lambda: None)
    async with seeing(eyes) as sights:
        first = await show(sights, 24, 30, 24, id="first")
        (new,) = await show(sights, 32, id="new")
        assert await show(sights, 30, 32, 24, id="next") == (first[1], new, first[0])
    assert eyes.seen == [(24, 16), (30, 16), (32, 16)]


async def test_an_image_that_another_tenant_has_shown_is_looked_at_again() -> None:
    eyes = Watched(lambda: None)
    async with seeing(eyes) as sights:
        for space in "a", "b", "a":
            await show(sights, 24, space=space)
    assert len(eyes.seen) == 2


async def test_a_long_session_of_an_agent_has_hundreds_of_images() -> None:
    eyes = Watched(lambda: None)
    async with seeing(eyes) as sights:
        widths = [8 + number % 50 for number in range(300)]
        assert len(await show(sights, *widths)) == 300


async def test_small_images_that_the_model_enlarges_are_limited_by_what_they_become() -> None:
    class Enlarging(Watched):
        def preprocess(self, image: Any, digest: bytes) -> ProcessedImage:
            return replace(super().preprocess(image, digest), nbytes=12 * 1_000)

    async with seeing(Enlarging(lambda: None), image_max_pixels=2_000) as sights:
        assert len(await show(sights, *range(8, 16))) == 8
        with pytest.raises(JobFailure) as refused:
            await show(sights, *range(8, 17))
        assert (refused.value.type, refused.value.param) == ("too_large", "messages[0].content[8].image_url")
        assert "8,000 pixels" in refused.value.message
        sights.release("job")
        # Beside an older job whose images wait for the engine, only the budget of one image is prepared.
        await show(sights, 8, 9, id="first")
        waiting = asyncio.create_task(show(sights, 10, id="second"))
        done, _ = await asyncio.wait({waiting}, timeout=0.2)
        assert not done
        sights.release("first")
        assert len(await waiting) == 1


async def test_what_is_prepared_ahead_of_the_engine_has_no_more_than_so_many_pixels_but_for_the_first_job() -> None:
    sizes: list[tuple[str, int]] = [("first", 40), ("second", 50), ("third", 20), ("first", 90), ("fourth", 1)]
    ahead, inside, jobs = PixelBudget(100), list[str](), list[asyncio.Task[None]]()

    async def enters(id: str, pixels: int) -> None:
        await ahead.acquire(id, pixels)
        inside.append(id)

    async def turn(*leaving: str) -> list[str]:
        for id in leaving:
            ahead.release(id)
        for _ in range(5):
            await asyncio.sleep(0)
        came = inside.copy()
        inside.clear()
        return came

    jobs += [asyncio.create_task(enters(*each)) for each in sizes]
    assert await turn() == ["first", "second", "first"]
    assert await turn("second") == []
    assert await turn("first", "first") == ["third", "fourth"]
    await asyncio.gather(*jobs)


async def test_a_job_waits_until_the_engine_has_taken_in_the_images_of_another_of_its_lane() -> None:
    async with seeing(Watched(lambda: None), image_max_pixels=24 * 16) as sights:
        await show(sights, 24, 24, id="first")
        waiting = asyncio.create_task(show(sights, 24, id="second"))
        done, _ = await asyncio.wait([waiting], timeout=0.2)
        assert not done
        assert len(await show(sights, 24, id="offline", lane="batch")) == 1
        sights.release("first")
        assert len(await waiting) == 1


def test_what_was_seen_is_forgotten_when_it_takes_too_much_memory_that_used_last_goes_last() -> None:
    known, sights = (
        ByteLRU[ProcessedImage](250),
        {name: ProcessedImage(name, "", 1, 1, {}, 100) for name in (b"a", b"b", b"c")},
    )
    for name in (b"a", b"b"):
        known.put("", name, sights[name])
    assert known.get("", b"a") is sights[b"a"]
    known.put("", b"c", sights[b"c"])
    known.put("", b"d", ProcessedImage(b"d", "", 1, 1, {}, 251))
    assert [known.get("", name) for name in (b"a", b"b", b"c", b"d")] == [sights[b"a"], None, sights[b"c"], None]
