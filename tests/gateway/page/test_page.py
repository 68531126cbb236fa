"""The page in a real browser, on a gateway with a worker whose answers the messages dictate."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from sluice.contract import keys
from sluice.gateway import ServeSettings
from sluice.gateway.key_file import key_digest
from tests.gateway.gateways import HttpGateway, gateway_process, serving
from tests.gateway.page.asking import ENDED, WORDS, ObedientChat, ask, do
from tests.gateway.page.browser import Browser
from tests.queue.helpers import listening, settings, working
from tests.support.stack import free_port
from tests.waiting import until

WATCH = """window.shown = []; new MutationObserver(() => window.shown.push(
  ...[...document.querySelectorAll('.facts')].map((line) => line.textContent)
)).observe(document.querySelector('#turns'), { subtree: true, childList: true, characterData: true })"""


async def test_an_answer_is_streamed_and_the_line_below_has_its_figures(page: Browser) -> None:
    await ask(page, "Hello ", "**world**", ".")
    await do(page.wait_for, ENDED)
    assert await do(page.text, ".answer strong") == "world"
    facts = (await do(page.text, ".facts")).replace("\u00a0", " ")
    assert "first token" in facts
    assert "42 tokens/s" in facts
    assert "tokens cached" in facts
    assert "worker mac-1" in facts


async def test_markup_of_a_model_stays_text_and_runs_nothing(page: Browser) -> None:
    evil = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script> [a](javascript:window.hacked=1) ok'
    await ask(page, evil, "\n\n[b](https://example.org/x)")
    await do(page.wait_for, ENDED)
    assert await do(page.evaluate, "document.querySelectorAll('.answer img, .answer script').length") == 0
    assert await do(page.evaluate, "[...document.querySelectorAll('.answer a')].map((a) => a.href)") == [
        "https://example.org/x"
    ]
    assert evil in await do(page.text, ".answer")
    assert await do(page.evaluate, "window.hacked") is None


async def test_markdown_becomes_elements(page: Browser) -> None:
    await ask(
        page, "# Title\n\n- a\n- b\n  - c\n\n1. x\n\n```py\nprint('<b>')\n```\n\n| h | i |\n|---|---|\n| 1 | 2 |\n\n> q"
    )
    await do(page.wait_for, ENDED)
    for selector, text in {
        "h2": "Title",
        "ul ul li": "c",
        "ol li": "x",
        "pre code": "print('<b>')",
        "td": "1|2",
    }.items():
        assert await do(page.text, f".answer {selector}") == text


async def test_quotes_nest_to_a_limit_and_are_plain_beyond(page: Browser) -> None:
    await ask(page, ">" * 4_000 + " deep")
    await do(page.wait_for, ENDED)
    assert (await do(page.text, ".answer")).endswith("> deep")
    assert await do(page.evaluate, "document.querySelectorAll('.answer blockquote').length") == 20


async def test_a_reload_in_the_middle_of_an_answer_continues_it(page: Browser) -> None:
    await ask(page, *WORDS, pace_s=0.05)
    await do(page.wait_for, "document.querySelector('.answer')?.textContent.includes('w8 ')")
    await do(page.reload)
    assert "w7 " in await do(page.text, ".answer")
    await do(page.wait_for, ENDED)
    assert await do(page.text, ".answer") == "".join(WORDS)


async def test_a_gateway_that_dies_is_reconnected_to_and_no_word_is_lost_or_doubled(
    chromium: Browser, fake_worker: None, redis_url: str
) -> None:
    port = free_port()
    with gateway_process(redis_url, port=port) as first:
        await do(chromium.open, first.url)
        await ask(chromium, *WORDS, pace_s=0.1)  # so slowly that it has not ended when the gateway dies
        await do(chromium.wait_for, "document.querySelector('.answer')?.textContent.includes('w8 ')")
    await do(chromium.wait_for, "document.querySelector('.facts').textContent.includes('reconnecting')")
    with gateway_process(redis_url, port=port):
        await do(chromium.wait_for, ENDED)
        assert await do(chromium.text, ".answer") == "".join(WORDS)
    chromium.complaints.clear()  # the failed requests


async def test_reasoning_arrives_folded(page: Browser) -> None:
    await ask(page, "sum", think=["8 and 3 ", "make 11."])
    await do(page.wait_for, ENDED)
    assert await do(page.evaluate, "document.querySelector('details.reasoning').open") is False
    assert await do(page.text, "details.reasoning div") == "8 and 3 make 11."
    assert await do(page.evaluate, "document.querySelector('details.reasoning div').checkVisibility()") is False
    await do(page.evaluate, "document.querySelector('details.reasoning summary').click()")
    assert await do(page.evaluate, "document.querySelector('details.reasoning div').checkVisibility()") is True
    assert await do(page.text, ".answer") == "sum"


async def test_shift_and_enter_make_a_new_line(page: Browser, chat: ObedientChat) -> None:
    await do(page.evaluate, "document.querySelector('#box').focus()")
    await do(page.type, '{"say":')
    await do(page.press, "Enter", shift=True)
    await do(page.type, '["a"]}')
    assert await do(page.evaluate, "document.querySelector('#box').value") == '{"say":\n["a"]}'
    assert chat.asked == []
    await do(page.press, "Enter")
    await do(page.wait_for, ENDED)
    assert chat.asked[0]["messages"] == [{"role": "user", "content": '{"say":\n["a"]}'}]


async def test_a_dark_scheme_makes_the_page_dark(page: Browser) -> None:
    lightness = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    await do(page.prefer, "light")
    assert min(await do(page.evaluate, lightness)) > 200
    await do(page.prefer, "dark")
    assert max(await do(page.evaluate, lightness)) < 60


async def test_escape_stops_the_answer_and_its_job(page: Browser, chat: ObedientChat) -> None:
    await ask(page, "begin", then="hang")
    await do(page.wait_for, "document.querySelector('.answer')?.textContent === 'begin'")
    await do(page.press, "Escape")
    await do(page.wait_for, ENDED)
    assert await do(page.text, ".facts") == "stopped"
    await until(lambda: chat.running == [])


async def test_the_next_message_takes_the_conversation_along(page: Browser, chat: ObedientChat) -> None:
    await ask(page, "first")
    await do(page.wait_for, ENDED)
    await do(page.reload)
    await ask(page, "second")
    await do(page.wait_for, "document.querySelectorAll('.facts:not(.busy)').length === 2")
    assert [message["role"] for message in chat.asked[1]["messages"]] == ["user", "assistant", "user"]
    assert chat.asked[1]["messages"][1]["content"] == "first"


async def test_the_line_below_an_answer_is_never_empty(page: Browser) -> None:
    await do(page.evaluate, WATCH)
    await ask(page, "a", "b")
    await do(page.wait_for, ENDED)
    shown = await do(page.evaluate, "window.shown")
    assert "" not in shown
    assert "tokens/s" in shown[-1]


async def test_new_chat_forgets(page: Browser) -> None:
    await ask(page, "first")
    await do(page.wait_for, ENDED)
    await do(page.evaluate, "document.querySelector('#new').click()")
    await do(page.reload)
    assert await do(page.text, "#turns") == ""


@pytest.fixture
async def guarded(redis_url: str, tmp_path: Path) -> AsyncIterator[HttpGateway]:
    entry = {"id": "k-1", "sha256": key_digest("right"), "tenant": "acme"}
    (tmp_path / "keys.json").write_text(json.dumps({"keys": [entry]}))
    with serving(redis_url, ServeSettings(_env_file=None, keys=tmp_path / "keys.json")) as gateway:
        yield gateway


async def test_a_gateway_with_keys_asks_for_one_and_the_tab_keeps_it(
    chromium: Browser, fake_worker: None, guarded: HttpGateway
) -> None:
    await do(chromium.open, guarded.url)
    for key in ("wrong", "right"):
        await do(chromium.wait_for, "document.querySelector('#login').open")
        await do(chromium.evaluate, "document.querySelector('#key').focus()")
        await do(chromium.type, key)
        await do(chromium.press, "Enter")
    await do(chromium.wait_for, "document.querySelector('#model').options.length === 1")
    await do(chromium.reload)
    await ask(chromium, "in")
    await do(chromium.wait_for, ENDED)
    assert await do(chromium.text, ".answer") == "in"
    assert await do(chromium.evaluate, "localStorage.length") == 0
    chromium.complaints[:] = [each for each in chromium.complaints if "401" not in each]


async def test_a_refusal_is_shown_while_it_is_tried_again_and_escape_ends_that(
    chromium: Browser, gateway: HttpGateway
) -> None:
    await do(chromium.open, gateway.url)
    await ask(chromium, "never")
    await do(chromium.wait_for, "document.querySelector('.facts')?.textContent.includes('Trying again')")
    assert await do(chromium.text, ".facts") == "No worker serves the model 'default' at the moment. Trying again …"
    await do(chromium.press, "Escape")
    await do(chromium.wait_for, ENDED, 5)
    assert await do(chromium.text, ".facts") == "stopped"
    chromium.complaints.clear()  # the failed requests


async def test_the_failure_of_a_job_is_shown_at_once_and_not_asked_for_again(page: Browser, chat: ObedientChat) -> None:
    await ask(page, then="broken")
    await do(page.wait_for, ENDED, 10)
    assert await do(page.text, ".facts.bad") == "The worker failed on this job; its log says why."
    assert len(chat.asked) == 1
    page.complaints.clear()  # the failed request


@pytest.mark.parametrize("has_clipboard", [True, False], ids=["secure", "plain"])
async def test_an_answer_and_its_code_can_be_copied(page: Browser, has_clipboard: bool) -> None:
    answer = "Say **this**:\n\n```py\nprint(1)\n\nprint(2)\n```"
    await ask(page, answer)
    await do(page.wait_for, ENDED)
    await do(page.allow_clipboard)
    await do(page.evaluate, "window.board = navigator.clipboard")
    if not has_clipboard:  # as on a page over HTTP from another machine
        await do(page.evaluate, "Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    for selector, text in ((".code .copy", "print(1)\n\nprint(2)"), (".end .copy", answer)):
        await do(page.click, selector)
        await do(page.wait_for, f"document.querySelector('{selector}').dataset.done === 'Copied'")
        assert await do(page.evaluate, "board.readText()") == text
    assert "Copy" not in await do(page.text, ".answer")


async def test_an_answer_that_was_cut_can_be_continued_and_others_are_not_offered_it(
    page: Browser, chat: ObedientChat
) -> None:
    offered = "[...document.querySelectorAll('.proceed')].map((button) => button.checkVisibility())"
    await ask(page, "whole")
    await do(page.wait_for, ENDED)
    assert await do(page.evaluate, offered) == [False]
    await ask(page, "one two", finish="length")
    await do(page.wait_for, "document.querySelectorAll('.facts:not(.busy)').length === 2")
    assert "cut at the limit" in (await do(page.text, ".facts")).replace("\u00a0", " ")
    assert await do(page.evaluate, offered) == [False, True]
    await do(page.click, ".end:last-child .proceed")
    await do(page.wait_for, "document.querySelectorAll('.facts:not(.busy)').length === 3")
    assert [message["content"] for message in chat.asked[2]["messages"][-2:]] == [
        "one two",
        "Continue where you stopped.",
    ]
    assert (await do(page.evaluate, offered))[:2] == [False, False]


async def test_a_formula_stays_the_text_that_it_is_and_is_marked(page: Browser) -> None:
    inline, block = r"$a*b*c$|\(x_1*y*z\)|$$d$$", "\\[\nx *y* z\n- 1\n\\]"
    await ask(
        page,
        f"{inline.replace('|', ' and ')} cost $5 and $10, or $5-$10, `$e$`.\n\n{block}\n\n$$f$$\n\n\\[ open\n\nend",
    )
    await do(page.wait_for, ENDED)
    assert await do(page.text, ".answer .math") == f"{inline}|{block}|$$f$$|\\[ open"
    assert await do(page.evaluate, "document.querySelectorAll('.answer em, .answer li').length") == 0
    assert await do(page.text, ".answer code") == "$e$"
    assert (await do(page.text, ".answer")).endswith("end")


async def test_the_page_fits_a_phone(chromium: Browser, fake_worker: None, gateway: HttpGateway) -> None:
    for width in (360, 320):
        await do(chromium.open, gateway.url, width, 640)
        await do(chromium.wait_for, "document.querySelector('#model').options.length === 1")
        table = "| a | b | c |\n|---|---|---|\n| " + " | ".join(["Internationalization"] * 3) + " |"
        await ask(chromium, "x" * 300, "\n\n```\n" + "y" * 300 + "\n```\n\n" + table, finish="length")
        await do(chromium.wait_for, ENDED)
        assert await do(chromium.evaluate, "document.documentElement.scrollWidth") <= width
        wider = "((e) => e.scrollWidth > e.clientWidth)(document.querySelector('.answer %s'))"
        assert [await do(chromium.evaluate, wider % each) for each in (".wide", "pre")] == [True, True]
        words = (
            "(e => { const r = document.createRange(); r.selectNodeContents(e); return r.getClientRects().length; })"
        )
        lines = f"[...document.querySelectorAll('h1, button, th, td')].map({words})"
        assert max(await do(chromium.evaluate, lines)) == 1  # nothing is broken into two lines
        fits = "document.querySelector('#model').scrollWidth <= document.querySelector('#model').clientWidth"
        assert await do(chromium.evaluate, fits)


async def test_an_answer_without_a_worker_tells_so(
    chromium: Browser, gateway: HttpGateway, redis_url: str, db: Redis, chat: ObedientChat
) -> None:
    async def serves() -> bool:
        return bool(await db.exists(keys.model("default")))

    async def tells() -> bool:
        return "no worker is running; waiting" in await do(chromium.text, ".facts")

    async with working(settings(redis_url), chat.chat):
        await listening(db)
        await until(serves)
        await do(chromium.open, gateway.url)
        await ask(chromium, "Hello", then="hang")
        await do(chromium.wait_for, "document.querySelector('.answer')?.textContent.includes('Hello')")
    await until(tells)  # the worker has handed the job back and left
