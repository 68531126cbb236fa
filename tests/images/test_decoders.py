import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import PIL.Image
import pytest

from tests.images.pictures import patch, read, saved
from worker.errors import JobFailure
from worker.images.conversation import Decoders
from worker.images.image import Image
from worker.process import child as module
from worker.process.child import ChildCrashed, ChildFailed, Children
from worker.process.frames import Frame, LimitExceeded

FILE = saved(patch())


TASK: dict[str, Any] = {"is_url": False, "max_bytes": 1_000_000, "max_pixels": 25_000_000, "low": False}


@pytest.fixture
async def decoders() -> AsyncIterator[Decoders]:
    decoders = Decoders()
    yield decoders
    decoders.close()


async def asked(decoders: Decoders, source: bytes = FILE) -> Image | tuple[str, str]:
    try:
        return await decoders.decode(source, **TASK)
    except JobFailure as refusal:
        return refusal.type, refusal.message


def idle(decoders: Decoders) -> list[int]:
    return [child._process.pid for child in decoders._children._idle if child._process]


async def ended(pid: int) -> None:
    with suppress(ProcessLookupError):
        async with asyncio.timeout(10):
            while True:
                os.kill(pid, 0)
                await asyncio.sleep(0.001)


async def test_an_image_is_decoded_in_another_process_as_it_would_be_here(decoders: Decoders) -> None:
    image = await asked(decoders)
    assert image == read(FILE)
    assert isinstance(image, Image)
    assert image.pixels == read(FILE).pixels
    assert os.getpid() not in idle(decoders)


async def test_a_process_stays_for_the_next_image(decoders: Decoders) -> None:
    await asked(decoders)
    before = idle(decoders)
    assert await asked(decoders, b"no image") == (
        "invalid_request", "this is not an image; send PNG, JPEG, WebP or GIF.",
    )  # fmt: skip
    assert await asked(decoders) == read(FILE)
    assert idle(decoders) == before


async def test_many_images_at_once_get_their_own_answers_from_two_processes(decoders: Decoders) -> None:
    files = [saved(patch(side, 8)) for side in range(8, 28)]
    images = await asyncio.gather(*(asked(decoders, file) for file in files))
    assert images == [read(file) for file in files]
    assert len(idle(decoders)) == 2


async def test_the_event_loop_goes_on_while_a_large_image_is_decoded(decoders: Decoders) -> None:
    large = saved(PIL.Image.effect_noise((3000, 2000), 50), compress_level=1)
    decoding = asyncio.create_task(decoders.decode(large, **{**TASK, "max_bytes": 10**8}))
    turns = 0
    while not decoding.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert (await decoding).width == 3000
    assert turns >= 10


async def test_a_process_that_was_killed_while_it_waited_is_replaced(decoders: Decoders) -> None:
    await asked(decoders)
    (pid,) = idle(decoders)
    os.kill(pid, signal.SIGKILL)
    while decoders._children._idle[0].alive:
        await asyncio.sleep(0.001)
    assert await asked(decoders) == read(FILE)
    assert pid not in idle(decoders)


async def stopped(decoders: Decoders) -> int:
    """A process that waits for an image, and will do nothing with it."""
    await asked(decoders)
    (pid,) = idle(decoders)
    os.kill(pid, signal.SIGSTOP)
    return pid


@pytest.fixture
def go_on(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until then no process starts."""
    go_on = threading.Event()

    start = module.start

    def slow(name: str) -> "subprocess.Popen[bytes]":
        assert go_on.wait(30), "the caller waits for it, though it should let it go on"
        return start(name)

    monkeypatch.setattr(module, "start", slow)
    return go_on


async def test_the_event_loop_goes_on_while_a_process_is_started(decoders: Decoders, go_on: threading.Event) -> None:
    decoding = asyncio.create_task(asked(decoders))
    await asyncio.sleep(0.01)
    assert not decoding.done()
    go_on.set()
    assert await decoding == read(FILE)


async def test_an_image_that_its_decoder_dies_on_fails_alone(decoders: Decoders) -> None:
    pid = await stopped(decoders)
    fatal = asyncio.create_task(asked(decoders))
    while idle(decoders):  # until the process has been chosen for it
        await asyncio.sleep(0.001)
    beside = asyncio.create_task(asked(decoders))
    os.kill(pid, signal.SIGKILL)
    assert await fatal == ("internal", "the image's decoder crashed; the worker's log has its process id.")
    assert await beside == await asked(decoders) == read(FILE)


async def test_an_image_that_takes_too_long_is_refused_and_its_process_ended(decoders: Decoders) -> None:
    pid = await stopped(decoders)
    decoders._timeout_s = 0.3
    assert await asked(decoders) == ("too_large", "the image took longer to decode than 0.3 s.")
    await ended(pid)
    decoders._timeout_s = 30
    assert await asked(decoders) == read(FILE)


async def test_a_job_that_is_cancelled_takes_its_process_along(decoders: Decoders) -> None:
    pid = await stopped(decoders)
    cancelled = asyncio.create_task(asked(decoders))
    await asyncio.sleep(0.05)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    await ended(pid)
    assert await asyncio.gather(*(asked(decoders) for _ in range(4))) == [read(FILE)] * 4


async def test_nobody_is_left_after_the_end(decoders: Decoders) -> None:
    await asyncio.gather(*(asked(decoders) for _ in range(4)))
    pids = idle(decoders)
    decoders.close()
    assert len(pids) == 2
    for pid in pids:
        await ended(pid)


async def test_a_process_goes_on_when_the_worker_is_told_to_stop(decoders: Decoders) -> None:
    await asked(decoders)
    before = idle(decoders)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(before[0], number)
    assert await asked(decoders) == read(FILE)
    assert idle(decoders) == before


@pytest.mark.parametrize(
    ("failure", "type"),
    [
        (LimitExceeded("no memory"), "too_large"),
        (ChildCrashed("a fault"), "internal"),
        (ChildFailed("it ended"), "internal"),
    ],
    ids=repr,
)
async def test_an_image_fails_by_the_reason_why_its_process_did(
    decoders: Decoders, failure: Exception, type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failed(*_: Any) -> Frame:
        raise failure

    monkeypatch.setattr(Children, "ask", failed)
    with pytest.raises(JobFailure) as raised:
        await decoders.decode(FILE, **TASK)
    assert (raised.value.type, raised.value.retryable) == (type, False)


async def test_a_decoder_has_the_memory_that_the_largest_image_takes(decoders: Decoders) -> None:
    """A lossless WebP takes most."""
    large = saved(PIL.Image.new("RGB", (5000, 5000), "red"), "WebP", lossless=True, method=0, quality=0)
    assert (await decoders.decode(large, **TASK)).width == 5000
