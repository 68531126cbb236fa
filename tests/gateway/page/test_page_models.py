"""The page with several models, with images, and with a real model whose worker dies."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import PIL.Image
import pytest
from redis.asyncio import Redis

from sluice.contract import keys
from sluice.gateway import ServeSettings
from tests.gateway.gateways import HttpGateway, serving
from tests.gateway.page.asking import ENDED, ObedientChat, ask, do, send
from tests.gateway.page.browser import Browser
from tests.queue.helpers import listening, settings, types, working
from tests.queue.helpers import log as log_of
from tests.support.stack import WorkerProcess
from tests.waiting import until
from worker.queue.presence import abilities

KILLED = "tests.end_to_end.killed_in_answers"
CHOSEN = "document.querySelector('#model').value"
PASTE = """(() => {
  const data = new DataTransfer();
  data.items.add(new File(["any"], "a.png", { type: "image/png" }));
  document.querySelector("#box").dispatchEvent(new ClipboardEvent("paste", { clipboardData: data }));
})()"""
ATTACH_IS_SHOWN = "document.querySelector('#attach').checkVisibility()"


@pytest.fixture
async def two_models(
    chromium: Browser, fake_worker: None, redis_url: str, db: Redis, chat: ObedientChat, gateway: HttpGateway
) -> AsyncIterator[Browser]:
    """The page, with the model `default` for text alone and the model `seeing` for images."""
    known = settings(redis_url, model_name="seeing", worker_name="bob")
    async with working(known, chat.chat, abilities=abilities(images=True)):
        await listening(db, workers=2)
        await until(lambda: _is_known(db, known.worker_name))
        await do(chromium.open, gateway.url)
        await do(chromium.wait_for, "document.querySelector('#model').options.length === 2")
        yield chromium


async def _is_known(db: Redis, worker: str) -> bool:
    return bool(await db.exists(keys.worker(worker)))


async def choose(page: Browser, model: str) -> None:
    await do(
        page.evaluate, f"{CHOSEN} = {model!r}; document.querySelector('#model').dispatchEvent(new Event('change'))"
    )


async def test_the_chosen_model_is_in_the_request_and_survives_a_reload(
    two_models: Browser, chat: ObedientChat
) -> None:
    assert await do(two_models.evaluate, CHOSEN) == "default"
    await choose(two_models, "seeing")
    await do(two_models.reload)
    await do(two_models.wait_for, f"{CHOSEN} === 'seeing'")
    await ask(two_models, "a")
    await do(two_models.wait_for, ENDED)
    assert [request["model"] for request in chat.asked] == ["seeing"]


async def test_an_image_is_sent_to_a_model_that_sees_and_no_other_model_is_offered_one(
    two_models: Browser, chat: ObedientChat, tmp_path: Path
) -> None:
    assert not await do(two_models.evaluate, ATTACH_IS_SHOWN)
    await do(two_models.evaluate, PASTE)
    await do(two_models.wait_for, "document.querySelector('#notice').textContent === 'This model takes no images.'")
    await choose(two_models, "seeing")
    assert await do(two_models.evaluate, ATTACH_IS_SHOWN)
    file = tmp_path / "red.png"
    PIL.Image.new("RGB", (2_000, 500), "red").save(file)
    await do(two_models.choose_files, "#file", file)
    await do(two_models.wait_for, "document.querySelector('#images img')?.naturalWidth === 1024")
    await ask(two_models, "red")
    await do(two_models.wait_for, ENDED)
    image, text = chat.asked[0]["messages"][0]["content"]
    assert (image["type"], text["type"]) == ("image_url", "text")
    assert image["image_url"]["url"].startswith("data:image/jpeg;base64,")
    assert await do(two_models.text, "#notice, #images") == "|"
    assert await do(two_models.evaluate, "document.querySelector('.user img').naturalHeight") == 256


async def test_the_text_on_the_page_is_whole_though_a_worker_is_killed_in_the_middle(
    chromium: Browser, redis_url: str, db: Redis
) -> None:
    with (
        serving(redis_url, ServeSettings(_env_file=None)) as gateway,
        WorkerProcess(redis_url, module=KILLED, lease_s=2) as killed,
    ):
        await do(chromium.open, gateway.url)
        await send(chromium, "Count to 40.")
        await do(killed.wait)
        assert not await do(chromium.evaluate, ENDED)
        with WorkerProcess(redis_url, lease_s=2):
            await do(chromium.wait_for, ENDED)
            job = await do(chromium.evaluate, "JSON.parse(sessionStorage['sluice.chat']).turns[0].answer.id")
            async with httpx.AsyncClient(base_url=gateway.url) as http:
                answer = (await http.get(f"/v1/chat/completions/{job}")).json()
    assert "resumed" in types(await log_of(db, job))
    assert await do(chromium.text, ".answer") == answer["choices"][0]["message"]["content"]
