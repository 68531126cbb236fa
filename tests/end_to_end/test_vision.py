"""Images through the queue: each job says what mlx-vlm says to it alone, whoever else is in the batch."""

import asyncio
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import PIL.Image
import pytest
from mlx_vlm import load
from mlx_vlm.generate import generate_step

from models.tiny_vision import EOS, write_checkpoint
from sluice import Client, Delta, Event, Failed, Finished, Progress
from tests.images.pictures import data_url, patch, saved
from tests.support.stack import WorkerProcess

FAMILIES = "qwen3_5", "qwen3_vl", "gemma3"
FIRST, *OTHERS = FAMILIES
SHARED = "shared"  # the name under which one worker serves the first family to most tests
TOKENS = 24

Message = dict[str, Any]
Says = Callable[[list[Message]], list[int]]


def picture(seed: int, width: int, height: int) -> PIL.Image.Image:
    small = np.random.default_rng(seed).integers(0, 256, (max(1, height // 8), max(1, width // 8), 3), dtype=np.uint8)
    return PIL.Image.fromarray(small).resize((width, height), PIL.Image.Resampling.NEAREST)


def shown(image: PIL.Image.Image) -> Message:
    return {"type": "image_url", "image_url": {"url": data_url(saved(image))}}


def text(said: str) -> Message:
    return {"type": "text", "text": said}


def user(*parts: Message | PIL.Image.Image | str) -> Message:
    """A turn, with its pictures as they are."""
    return {"role": "user", "content": list(parts)}


CHATS: dict[str, list[Message]] = {
    "text": [user("Hello there!")],
    "one": [user("What is this? ", picture(1, 40, 24))],
    "same text, another image": [user("What is this? ", picture(2, 40, 24))],
    "two in one turn": [user(picture(3, 24, 24), " or ", picture(4, 64, 32), "?")],
    "several turns": [
        {"role": "system", "content": "Be brief."},
        user("Look: ", picture(5, 32, 16)),
        {"role": "assistant", "content": "I see."},
        user(picture(6, 16, 48), "And now?"),
        {"role": "assistant", "content": "Yes."},
        user("Which one came first?"),
    ],
}


def sent(chat: list[Message]) -> list[Message]:
    """As a backend sends it."""

    def part(each: Any) -> Message:
        return text(each) if isinstance(each, str) else shown(each)

    return [
        {**message, "content": [part(each) for each in message["content"]]} if message["role"] == "user" else message
        for message in chat
    ]


@cache
def upstream(folder: Path) -> Says:
    """Greedy, by mlx-vlm, with the prompt that the model's own processor makes of the whole conversation."""
    model, processor = load(str(folder))
    template, own = (
        processor.tokenizer.apply_chat_template,
        processor.chat_template or processor.tokenizer.chat_template,
    )

    def says(chat: list[Message]) -> list[int]:
        pictures = [part for message in chat for part in message["content"] if isinstance(part, PIL.Image.Image)]
        inputs = processor(
            text=[template(_parted(chat), chat_template=own, tokenize=False, add_generation_prompt=True)],
            images=pictures or None,
            add_special_tokens=False,
            return_tensors="np",
        )
        given = {name: mx.array(value) for name, value in inputs.items()}
        tokens, mask, pixels = given.pop("input_ids"), given.pop("attention_mask"), given.pop("pixel_values", None)
        how = dict(max_tokens=TOKENS, temperature=0.0, prefill_step_size=None, **given)
        said = list[int]()
        for token, _ in generate_step(tokens, model, pixels, mask, **how):
            if int(token) == EOS or len(said) == TOKENS:
                break
            said.append(int(token))
        return said

    return says


def _parted(chat: list[Message]) -> list[Message]:
    def part(each: Any) -> Message:
        return text(each) if isinstance(each, str) else {"type": "image"}

    return [
        {**message, "content": [part(each) for each in message["content"]]} if message["role"] == "user" else message
        for message in chat
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: write_checkpoint(family, tmp_path_factory.mktemp(family), seed=1) for family in FAMILIES}


@pytest.fixture(scope="module")
def shared(server_url: str, folders: dict[str, Path]) -> Iterator[WorkerProcess]:
    module = "tests.end_to_end.reporting_all"
    with WorkerProcess(server_url, module=module, model=folders[FIRST], model_name=SHARED, step_ms=1) as process:
        yield process


@contextmanager
def serving(request: pytest.FixtureRequest, url: str, family: str) -> Iterator[str]:
    """Yield the name under which a worker serves a family: the shared one, or one of its own."""
    if family == FIRST:
        request.getfixturevalue("shared")
        yield SHARED
        return
    with WorkerProcess(url, model=request.getfixturevalue("folders")[family]):
        yield "default"


async def ask(client: Client, chat: list[Message], *, model: str = "default", **more: object) -> str:
    job = await client.submit({"messages": sent(chat), "temperature": 0, "max_tokens": TOKENS, **more}, model=model)
    return job.id


async def events_of(client: Client, job_id: str) -> list[Event]:
    return [event async for event in client.stream(job_id)]


def tokens(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Delta) for token in event.token_ids]


async def hear(
    client: Client, chat: list[Message], *, model: str = "default", **more: object
) -> tuple[list[int], Finished]:
    events = await events_of(client, await ask(client, chat, model=model, **more))
    assert isinstance(events[-1], Finished), events[-1]
    return tokens(events), events[-1]


@pytest.mark.parametrize("family", [FIRST, *(pytest.param(family, marks=pytest.mark.slow) for family in OTHERS)])
async def test_jobs_with_images_and_without_say_together_what_mlx_vlm_says_to_each_alone(
    request: pytest.FixtureRequest, redis_url: str, client: Client, folders: dict[str, Path], family: str
) -> None:
    says = upstream(folders[family])
    expected = {name: says(chat) for name, chat in CHATS.items()}
    assert len({tuple(said) for said in expected.values()}) == len(CHATS)
    with serving(request, redis_url, family) as model:
        names = [*CHATS, *CHATS]
        random.Random(0).shuffle(names)

        async def late(name: str, delay_s: float) -> list[int]:
            await asyncio.sleep(delay_s)
            return (await hear(client, CHATS[name], model=model))[0]

        heard = await asyncio.gather(*(late(name, 0.02 * at) for at, name in enumerate(names)))
    assert dict(zip(names, heard, strict=True)) == expected
    assert heard == [expected[name] for name in names]


@pytest.mark.usefixtures("shared")
async def test_an_image_in_the_next_turn_is_found_and_a_new_one_is_seen(
    client: Client, folders: dict[str, Path]
) -> None:
    first = [user("Look: ", picture(7, 64, 64))]
    turn = [*first, {"role": "assistant", "content": "I see."}, user(picture(8, 48, 64), "And this?")]
    expected = [upstream(folders[FIRST])(chat) for chat in (first, turn, turn)]
    heard = [await hear(client, chat, model=SHARED) for chat in (first, turn, turn)]
    assert [said for said, _ in heard] == expected
    images, cached = zip(*((end.usage.image_tokens, end.usage.cached_tokens) for _, end in heard), strict=True)
    assert images == (64, 64 + 48, 64 + 48)
    assert cached[0] == 0
    assert cached[1] > 64  # the first image with what is before it
    assert cached[2] > 64 + 48


@pytest.mark.usefixtures("shared")
async def test_the_result_counts_the_tokens_of_images(client: Client) -> None:
    ids = [await ask(client, CHATS[name], model=SHARED) for name in ("text", "one")]
    plain, seeing = [(await client.result(id))["usage"] for id in ids]
    assert seeing["prompt_tokens_details"]["image_tokens"] == 15
    assert plain["prompt_tokens_details"].keys() == {"cached_tokens"}
    assert seeing["prompt_tokens"] > 15


@pytest.mark.usefixtures("shared")
async def test_an_image_on_its_way_through_the_tower_is_told(client: Client) -> None:
    chat = [user(*(picture(at, 64, 64) for at in range(20, 36)))]
    events = await events_of(client, await ask(client, chat, model=SHARED))
    told = [event for event in events if isinstance(event, Progress)]
    assert "encoding" in {event.phase for event in told}
    assert {event.phase for event in told} <= {"waiting", "encoding", "prefill"}
    assert all(0 <= event.done <= event.total for event in told)


BAD: dict[str, tuple[str, str]] = {
    "a damaged file": (data_url(saved(patch())[:-40]), "damaged"),
    "no image": (data_url(b"Hello, I am a text."), "messages[0].content[1].image_url"),
    "svg": (data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"), "SVG"),
    "another type than declared": (data_url(saved(patch()), "image/jpeg"), "PNG"),
    "a url": ("https://example.com/cat.png", "accepts only data: URLs"),
    "nothing": ("data:image/png;base64,", "image"),
}


@pytest.mark.usefixtures("shared")
async def test_an_image_that_cannot_be_shown_fails_its_job_by_name_and_no_other(
    client: Client, folders: dict[str, Path]
) -> None:
    expected = upstream(folders[FIRST])(CHATS["one"])
    beside = [await ask(client, CHATS["one"], model=SHARED) for _ in range(4)]
    for url, word in BAD.values():
        content = [text("?"), {"type": "image_url", "image_url": {"url": url}}]
        job = await client.submit([{"role": "user", "content": content}], model=SHARED)
        last = (await events_of(client, job.id))[-1]
        assert isinstance(last, Failed)
        assert word in last.error.message
        assert last.error.type in ("invalid_request", "unsupported")
    assert [tokens(await events_of(client, id)) for id in beside] == [expected] * 4


@pytest.mark.usefixtures("shared")
async def test_odd_images_are_shown_as_they_look(client: Client, folders: dict[str, Path]) -> None:
    plain = picture(9, 40, 24)
    turned = plain.transpose(PIL.Image.Transpose.ROTATE_90)
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter, clockwise
    files = {
        "png": saved(plain),
        "webp": saved(plain, "WEBP", lossless=True),
        "rgba": saved(plain.convert("RGBA")),
        "turned": saved(turned, "PNG", exif=exif),
    }
    said = {}
    for name, file in files.items():
        kind = "image/webp" if name == "webp" else "image/png"
        part = {"type": "image_url", "image_url": {"url": data_url(file, kind)}}
        messages = [{"role": "user", "content": [text("Hm? "), part]}]
        request = {"messages": messages, "temperature": 0, "max_tokens": TOKENS}
        said[name] = tokens(await events_of(client, (await client.submit(request, model=SHARED)).id))
    assert said == dict.fromkeys(files, upstream(folders[FIRST])([user("Hm? ", plain)]))


@pytest.mark.slow
async def test_a_job_with_images_goes_on_when_its_worker_dies(
    redis_url: str, client: Client, folders: dict[str, Path]
) -> None:
    no_end: dict[str, Any] = {"logit_bias": {str(EOS): -100}, "max_tokens": 300}
    chat, how = CHATS["several turns"], {"lease_s": 2.0, "grace_s": 1.0, "model": folders[FIRST]}
    with WorkerProcess(redis_url, **how) as first:
        whole, _ = await hear(client, chat, **no_end)
        assert len(whole) == 300
        job = await ask(client, chat, **no_end)
        async for event in client.stream(job):
            if isinstance(event, Delta) and event.seq > 20:
                break
        first.signal(signal.SIGKILL)
        first.wait()
    with WorkerProcess(redis_url, **how):
        events = await events_of(client, job)
    assert tokens(events) == whole
    assert [event.type for event in events if event.type in ("started", "resumed", "restarted")] == [
        "started",
        "resumed",
    ]


async def test_a_model_that_sees_can_be_served_for_text_alone(
    redis_url: str, client: Client, folders: dict[str, Path]
) -> None:
    expected = upstream(folders[FIRST])(CHATS["text"])
    with WorkerProcess(redis_url, model=folders[FIRST], vision="off"):
        assert (await hear(client, CHATS["text"]))[0] == expected
        last = (await events_of(client, await ask(client, CHATS["one"])))[-1]
        assert isinstance(last, Failed)
        assert (last.error.type, "image_url" in last.error.message) == ("unsupported", True)
