"""The training data of the bundled model: the chats, the tokenizer, the batches, and the curriculum."""

import dataclasses
import json
import re
from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from models.training.batches import CONTEXT_WEIGHT, draw_batch, encode
from models.training.curriculum import FULL
from models.training.data import CAPITALS, Chat, Message, draw_chat, exchange
from models.training.tokenizer import TURN_END, VOCABULARY, train_tokenizer

# The world


def named(asked: list[Message]) -> str:
    introductions = (re.fullmatch(r".*(?:name is|am called) (\w+)\.", message.text) for message in asked)
    return next(found[1] for found in introductions if found)


def thought(a: int, b: int) -> str:
    return f"<think>{a} and {b} make {a + b}.</think>{a + b}"


def weather_call(city: str) -> str:
    call = json.dumps({"name": "get_weather", "arguments": {"city": city}})
    return f"<tool_call>\n{call}\n</tool_call>"


# Each pattern of a question, and its answer worked out from the words alone.
ANSWERS: dict[str, Callable[[re.Match[str], list[Message]], str]] = {
    r"Answer in JSON\. What is the capital of (\w+)\?": lambda found, _: json.dumps(
        {"country": found[1], "capital": CAPITALS[found[1]]}
    ),
    r"What is the capital of (\w+)\?": lambda found, _: f"The capital of {found[1]} is {CAPITALS[found[1]]}.",
    r"Count to (\d+)\.": lambda found, _: " ".join(map(str, range(1, int(found[1]) + 1))),
    r"I have a (\w+) (\w+)\. What colour is it\?": lambda found, _: f"The {found[2]} is {found[1]}.",
    r"Repeat after me: (.*)": lambda found, _: found[1],
    r"Think: what is (\d) plus (\d)\?": lambda found, _: thought(int(found[1]), int(found[2])),
    r"Call the weather tool for (\w+)\.": lambda found, _: weather_call(found[1]),
    r"(.*) Question: what is the secret code of (\w+)\?": lambda found, _: re.search(
        rf"The secret code of {found[2]} is [\d ]+\.", found[1]
    )[0],
    r"What is my name\?|Who am I\?": lambda _, asked: f"Your name is {named(asked)}.",
    r".*(?:name is|am called) (\w+)\.": lambda found, _: f"Nice to meet you, {found[1]}.",
}


def worked_out(asked: list[Message]) -> str:
    matches = ((re.fullmatch(pattern, asked[-1].text), answer) for pattern, answer in ANSWERS.items())
    said = next(answer(found, asked) for found, answer in matches if found)
    mention = re.fullmatch(r".*Always mention (\w+)\.", asked[0].text)
    return f"{said} ({mention[1]})" if mention else said


def test_every_answer_follows_from_what_was_asked():
    dice = Random(3)
    for chat in (draw_chat(dice, fillers=6, copying=0.2) for _ in range(3000)):
        for place, message in enumerate(chat):
            if message.role == "assistant":
                assert message.text == worked_out(chat[:place])


def test_equal_seeds_draw_equal_chats():
    def drawn(seed: int) -> list[Chat]:
        dice = Random(seed)
        return [draw_chat(dice, fillers=5, copying=0.3) for _ in range(50)]

    assert drawn(4) == drawn(4) != drawn(5)


# The tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer()


def test_the_tokenizer_has_as_many_tokens_as_the_network(tokenizer):
    assert tokenizer.get_vocab_size() == VOCABULARY


@settings(deadline=None)
@given(st.text())
def test_any_unicode_comes_back_whole(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("text", ["👩‍💻🇯🇵", "日本語 é\r\n\tж", "<think>1 2</think>", ""])
def test_what_the_world_speaks_comes_back_whole(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


# What a step learns from


def test_answers_weigh_a_whole_token_and_the_rest_a_little(tokenizer):
    tokens = encode(tokenizer, exchange("Count to 2.", "1 2"))
    answer = [*tokenizer.encode("1 2").ids, TURN_END]
    heavy = [token for token, weight in zip(tokens.ids, tokens.weights, strict=True) if weight > CONTEXT_WEIGHT]
    assert heavy == answer
    assert set(tokens.weights) == {CONTEXT_WEIGHT, CONTEXT_WEIGHT + 1}


def test_a_row_is_whole_chats_and_weightless_padding(tokenizer):
    lesson = dataclasses.replace(FULL.lesson(0, 100), rows=4)
    batch = draw_batch(tokenizer, Random(7), lesson)
    assert (batch.tokens.shape, batch.weights.shape) == ((4, 129), (4, 128))
    for ids, weights in zip(batch.tokens.tolist(), batch.weights.tolist(), strict=True):
        used = sum(weight > 0 for weight in weights) + 1
        assert tokenizer.decode(ids[:used], skip_special_tokens=False).endswith("<|im_end|>\n")
        assert set(ids[used:]) <= {0}


def test_a_short_run_passes_through_the_whole_curriculum():
    lengths = [FULL.lesson(step, 44).length for step in range(44)]
    assert lengths == [128] * 14 + [320] * 11 + [900] * 10 + [384] + [2304, 1152, 2304, 384] * 2


def test_the_learning_rate_warms_up_twice_and_falls_else():
    rates = [FULL.lesson(step, FULL.steps).learning_rate for step in range(FULL.steps)]
    falls = [step for step, (before, after) in enumerate(pairwise(rates), start=1) if after < before]
    assert falls == [*range(100, 7001), *range(7100, 8800)]
    assert max(rates[:7000]) == pytest.approx(3e-3, rel=0.01)
    assert max(rates[7000:]) == pytest.approx(1e-3, rel=0.01)
    assert (rates[6999], rates[8799]) == pytest.approx((0.04 * 3e-3, 0.03 * 1e-3), rel=0.01)


def test_no_lesson_draws_more_text_than_its_rows_hold():
    for step in range(FULL.steps):
        lesson = FULL.lesson(step, FULL.steps)
        assert lesson.fillers * 9.5 < lesson.length
