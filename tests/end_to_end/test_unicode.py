"""Every kind of code point through Redis: most take several tokens, and no event holds half of one."""

import asyncio
import json
from typing import Any, NamedTuple

import pytest
from transformers import PreTrainedTokenizerFast

from sluice import Client, Delta
from tests.support.stack import TINY_CHAT, WorkerProcess
from worker.engine.tokenizer import MLXTokenizer
from worker.engine.upstream.mlx_lm import load_tokenizer
from worker.text.tokenizer import Vocabulary

REPEATED = {
    "emoji": "😀🚀 🌍🎉🔥 🐙",
    "an emoji of several code points": "👩‍💻 🇯🇵",
    "kanji": "日本語 世界 火山",
    "accents": "é ü ñ ß ø",
    "Cyrillic": "жщ юя д",
    "mixed": "a日é🚀 ж🇯🇵b",
}
FORCED = {
    "a family": "👨‍👩‍👧‍👦👩🏽‍🚀",
    "flags": "🇳🇴🇺🇦🏴󠁧󠁢󠁳󠁣󠁴󠁿",
    "skin tones and variants": "👍🏿✌🏼❤️☺︎",
    "combining marks": "x\u0302 q\u0323\u0303 Z\u0351\u036b\u0350",
    "characters taken apart": "e\u0301 n\u0303 \u1112\u1161\u11ab",
    "CJK beyond the basic plane": "𠮷野家 𪚥",
    "Hangul, composed and in parts": "한국어 \u1113\u1176",
    "right to left": "שלום العربية \u200fא\u200e",
    "Indic conjuncts": "क्षत्रिय தமிழ் ক্ষ",
    "Thai": "สวัสดีครับ",
    "mathematics": "∑∫√ 𝔘𝔫𝔦 ℵ₀",
    "nothing to see": "a\u200b\u2060\u00a0\u3000\ufeffb",
    "private use and the last": "\ue000\uf8ff\U0010fffd",
    "a replacement character of its own": "a\ufffdb",
    "Greek and Cyrillic": "Ωμέγα Привет ӂ",
}
# Drawn from in any order.
BROKEN = {
    "lead bytes": b"\xf0\xe6",
    "continuations": b"\x80\x9f",
    "halves of emoji": b"\xf0\x9f",
    "bytes that UTF-8 does not have": b"\xff\xc0",
    "halves of surrogate pairs": b"\xed\xa0",
}


THINK = "3"  # the token's id: with a bias against it, all that the model says is content


class Heard(NamedTuple):
    pieces: list[str]
    tokens: list[int]
    ending: str


@pytest.fixture(scope="module")
def tiny() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(TINY_CHAT)


async def hear(client: Client, asked: str, **fields: Any) -> Heard:
    request = {"messages": [{"role": "user", "content": asked}], "temperature": 0, "logit_bias": {THINK: -100}}
    job = await client.submit({**request, **fields})
    events = [event async for event in client.stream(job.id)]
    deltas = [event for event in events if isinstance(event, Delta)]
    tokens = [token for delta in deltas for token in delta.token_ids]
    return Heard([delta.content or "" for delta in deltas], tokens, events[-1].type)


def assert_whole(heard: Heard, tiny: PreTrainedTokenizerFast) -> str:
    """The text, which is what the tokens say all at once, and no event of which has half of a code point."""
    text = "".join(heard.pieces)
    assert heard.ending == "finished"
    assert text == tiny.decode(heard.tokens)
    assert all("\ufffd" not in piece for piece in heard.pieces) or "\ufffd" in text
    return text


async def test_the_model_repeats_what_it_knows_and_every_event_is_whole(
    worker: WorkerProcess, client: Client, tiny: PreTrainedTokenizerFast
) -> None:
    answers = [hear(client, f"Repeat after me: {words}") for words in REPEATED.values()]
    told = [assert_whole(heard, tiny) for heard in await asyncio.gather(*answers)]
    assert dict(zip(REPEATED, told, strict=True)) == REPEATED


async def test_what_it_does_not_know_is_whole_too_where_a_schema_makes_it_say_so(
    worker: WorkerProcess, client: Client, tiny: PreTrainedTokenizerFast
) -> None:
    def saying(words: str) -> Any:
        return {"type": "json_schema", "json_schema": {"name": "said", "schema": {"const": words}}}

    answers = [hear(client, "Say it.", response_format=saying(words)) for words in FORCED.values()]
    told = [assert_whole(heard, tiny) for heard in await asyncio.gather(*answers)]
    assert {name: json.loads(said) for name, said in zip(FORCED, told, strict=True)} == FORCED


async def test_bytes_that_are_no_text_come_out_as_they_do_from_the_whole(
    worker: WorkerProcess, client: Client, tiny: PreTrainedTokenizerFast
) -> None:
    vocabulary = Vocabulary(MLXTokenizer(load_tokenizer(TINY_CHAT)))
    token_of = {vocabulary.bytes_of(token): token for token in range(1024)}

    def only(bytes_: bytes) -> Any:
        return {str(token_of[bytes([byte])]): 100 for byte in bytes_}

    answers = [hear(client, "Count to 9.", logit_bias=only(b), max_tokens=9, temperature=2) for b in BROKEN.values()]
    told = [assert_whole(heard, tiny) for heard in await asyncio.gather(*answers)]
    assert [name for name, text in zip(BROKEN, told, strict=True) if "\ufffd" not in text] == []
