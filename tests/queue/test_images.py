"""Jobs that show images, through the real chat and the real decoders, with eyes that see little."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from typing import Any

from redis.asyncio import Redis

from tests.fakes import ByteTokenizer, FakeEngine, worker_context
from tests.images.pictures import data_url, patch, saved
from tests.queue.helpers import ask, ended, log, settings, types, until_it_has_said, words, working
from worker.images.conversation import ImageInputs
from worker.jobs import chat
from worker.outcomes import PromptProgress, StepReport
from worker.request import GenerationRequest as Asked
from worker.request import ProcessedImage, PromptImage

ANSWER = "I see them: a cat, a dog and a bird"
SIGN = "<image>"


class DimEyes:
    def __init__(self, salt: bytes = b"") -> None:
        self._salt = salt

    def preprocess(self, image: Any, digest: bytes) -> ProcessedImage:
        if image.width > 100:
            raise ValueError("it is too wide for this model")
        return ProcessedImage(digest + self._salt, SIGN, len(SIGN), len(SIGN), {"size": image.size}, 1_000)

    def prompt_images(self, prompt: tuple[int, ...], sights: Sequence[ProcessedImage]) -> tuple[PromptImage, ...]:
        text = bytes(prompt).decode()
        if text.count(SIGN) != len(sights):
            raise ValueError(f"a text has {SIGN} in it")
        starts = [at for at in range(len(text)) if text.startswith(SIGN, at)]
        return tuple(
            PromptImage(s.digest, (at, at + s.tokens), s.pixel_inputs) for at, s in zip(starts, sights, strict=True)
        )


class SlowTower(FakeEngine):
    """Its images are half way through when half a second has passed."""

    def submit(self, sequence: Asked, listener: Any) -> None:
        half = StepReport((PromptProgress("encoding", sequence.id, 7, 14),), 0)
        asyncio.get_running_loop().call_later(0.5, self._deliver, half)
        super().submit(sequence, listener)


@asynccontextmanager
async def seeing(
    url: str, *, salt: bytes = b"", step_s: float = 0.001, engine: type[FakeEngine] = FakeEngine, **given: Any
) -> AsyncIterator[FakeEngine]:
    tokenizer, known = ByteTokenizer(), settings(url, **given)
    fake = engine(lambda sequence: tokenizer.encode(ANSWER), step_s=step_s)
    with closing(ImageInputs(known, DimEyes(salt))) as sights:
        async with fake, working(known, chat, context=worker_context(known, fake, tokenizer, images=sights)):
            yield fake


def image(width: int = 24) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(saved(patch(width)))}}


def asking(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "What? "}, *parts]}]}


async def test_the_engine_gets_each_image_where_it_is_and_the_usage_counts_them(redis_url: str, db: Redis) -> None:
    async with seeing(redis_url) as engine:
        await ask(db, "a", asking(image(24), {"type": "text", "text": " or "}, image(30)))
        said = await ended(db, "a")
    (asked,) = engine.sequences
    prompt = bytes(asked.prompt).decode()
    assert [prompt[slice(*picture.span)] for picture in asked.images] == [SIGN, SIGN]
    assert [picture.pixel_inputs["size"] for picture in asked.images] == [(24, 16), (30, 16)]
    assert said[-1]["usage"]["image_tokens"] == 2 * len(SIGN)
    assert words(said) == ANSWER


async def test_images_wait_for_those_of_others_until_the_engine_has_them_or_their_job_is_over(
    redis_url: str, db: Redis
) -> None:
    """The pixel budget holds one largest image, and each job's images take more than half of it."""
    async with seeing(redis_url, step_s=60, image_max_pixels=200 * 16) as engine:
        await ask(db, "over", asking(*[image(100)] * 3, image(200)))
        assert types(await ended(db, "over")) == ["failed"]
        for id in "first", "second":
            await ask(db, id, asking(*[image(100)] * 3))
        async with asyncio.timeout(10):
            while len(engine.sequences) < 2:
                await asyncio.sleep(0.01)


async def test_an_image_that_the_model_does_not_take_fails_its_job_with_its_place(redis_url: str, db: Redis) -> None:
    async with seeing(redis_url) as engine:
        await ask(db, "a", asking(image(24), image(200)))
        (said,) = await ended(db, "a")
    assert said["error"]["type"] == "invalid_request"
    assert said["error"]["message"].startswith("messages[0].content[2].image_url: ")
    assert said["error"]["message"].endswith("it is too wide for this model")
    assert engine.sequences == []


async def test_a_text_with_the_model_s_sign_for_an_image_in_it_is_refused(redis_url: str, db: Redis) -> None:
    async with seeing(redis_url):
        await ask(db, "a", asking(image(), {"type": "text", "text": SIGN}))
        (said,) = await ended(db, "a")
    assert said["error"]["type"] == "invalid_request"
    assert SIGN in said["error"]["message"]


async def test_a_new_attempt_that_is_shown_the_same_goes_on(redis_url: str, db: Redis) -> None:
    async with seeing(redis_url, step_s=0.02):
        await ask(db, "a", asking(image()))
        await until_it_has_said(db, "a", 6)
    delivered = words(await log(db, "a"))
    async with seeing(redis_url) as engine:
        said = await ended(db, "a")
    assert bytes(engine.sequences[0].resume_tokens).decode() == delivered
    assert [kind for kind in types(said) if kind != "delta"] == ["started", "resumed", "finished"]
    assert said[-1]["usage"]["image_tokens"] == len(SIGN)


async def test_a_new_attempt_that_is_shown_something_else_starts_over(redis_url: str, db: Redis) -> None:
    """The image behind a URL may have changed."""
    async with seeing(redis_url, step_s=0.02):
        await ask(db, "a", asking(image()))
        await until_it_has_said(db, "a", 6)
    for salt, kind in ((b"another", "restarted"), (b"another", "resumed")):
        async with seeing(redis_url, step_s=0.02, salt=salt) as engine:
            events = len(await log(db, "a"))
            await until_it_has_said(db, "a", events + 4)
        assert types((await log(db, "a"))[events:])[0] == kind
        assert bool(engine.sequences[0].resume_tokens) is (kind == "resumed")


async def test_it_is_told_how_far_the_images_are_through_the_tower(redis_url: str, db: Redis) -> None:
    async with seeing(redis_url, engine=SlowTower, step_s=0.03):
        await ask(db, "a", asking(image()))
        said = await ended(db, "a")
    told = [event for event in said if event["type"] == "progress"]
    assert [(event["phase"], event["done"], event["total"]) for event in told] == [("encoding", 7, 14)]
