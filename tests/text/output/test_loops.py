"""Answers that repeat themselves for ever are found, and answers that people ask for are not."""

import base64
import json
import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.selection import examples
from tests.text.guided import WEATHER, model, request
from worker.text.output.output import Output, OutputDelta
from worker.text.output.thought import ANSWER_LOOP, THOUGHT_LOOP, LoopDetector
from worker.text.tokenizer import Vocabulary

WORDS = (
    "the a of to and in that it is was for on are as with his they at be this from have or by one had not but".split()
)
BUDGET = 16_384  # tokens of a long conversation's answer
BOUNDS = pytest.mark.parametrize("bound", [THOUGHT_LOOP, ANSWER_LOOP], ids=["thought", "answer"])


def first_loop(tokens: Sequence[int], bound: int) -> tuple[int, int] | None:
    """Return where a loop is found, and the length of its cycle."""
    detector = LoopDetector(bound)
    found = ((place, detector.append(token)) for place, token in enumerate(tokens, start=1))
    return next(((place, cycle) for place, cycle in found if cycle), None)


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


def normal(rng: random.Random) -> str:
    """Return an answer that somebody wants, though much of it may be the same."""
    count, line = rng.randrange(3, 101), words(rng, rng.randrange(1, 9))
    kinds = [
        lambda: words(rng, rng.randrange(20, 600)),
        lambda: f"{line}\n" * 100,  # "write this line a hundred times"
        lambda: "| a | b |\n|---|---|\n" + f"| {line} | 0 |\n" * count,
        lambda: json.dumps([{"name": line, "value": 0, "tags": []}] * count),
        lambda: json.dumps([{"id": number, "value": 0} for number in range(count)], indent=2),
        lambda: "def f():\n" + f"    print('{line}')\n" * count,
        lambda: base64.b64encode(bytes(rng.randrange(10, 1_000))).decode(),
        lambda: "ha " * rng.randrange(3, 300),
        lambda: "A" + "h" * rng.randrange(3, 900),
        lambda: "name,x,y,z\n" + "0,0,0,0\n" * count,
        lambda: "\n".join("0" * 32 for _ in range(32)),
        lambda: "\n".join("#" * width + " " * (40 - width) for width in range(40)),
        lambda: "=" * 80 + f"\n{line}\n" + "=" * 80,
        lambda: "\n".join(f"{number}. {line}" for number in range(1, count)),
        lambda: f"{line}\n\n" + f"- [ ] {line}\n" * count,
        lambda: "<tr><td></td><td></td></tr>\n" * count,
    ]
    return rng.choice(kinds)()


@BOUNDS
def test_none_of_a_thousand_normal_answers_is_a_loop(bound: int) -> None:
    rng, encode = random.Random(1), model().tokenizer.encode
    found = [text for text in (normal(rng) for _ in range(1_000)) if first_loop(encode(text), bound)]
    assert [text[:80] for text in found] == []


def loops(rng: random.Random) -> Iterator[tuple[int, list[int]]]:
    """Yield twenty answers that begin well and end in a cycle, and its length."""
    for period in (1, 2, 3, 5, 7, 8, 11, 13, 16, 20, 27, 40, 64, 90, 128, 150, 200, 300, 400, 512):
        cycle = [rng.randrange(1_000) for _ in range(period)]
        # Repetitions within the cycle, as of words that occur in each of its sentences.
        cycle = [cycle[place - period // 3] if place % 5 else token for place, token in enumerate(cycle)]
        beginning = [rng.randrange(1_000) for _ in range(rng.randrange(700))]
        yield period, (beginning + cycle * BUDGET)[:BUDGET]


@BOUNDS
def test_twenty_loops_end_within_the_budget(bound: int) -> None:
    for period, tokens in loops(random.Random(2)):
        found = first_loop(tokens, bound)
        assert found is not None
        place, cycle = found
        assert period % cycle == 0
        assert place <= 700 + bound + 2 * 16


@given(
    st.lists(st.integers(0, 2), max_size=40),
    st.lists(st.integers(0, 2), min_size=1, max_size=12),
    st.integers(0, 40),
    st.data(),
)
@settings(max_examples=examples(300))
def test_a_loop_is_a_cycle_and_a_cycle_that_goes_on_is_found(
    beginning: list[int], cycle: list[int], times: int, data: st.DataObject
) -> None:
    bound = 32
    tokens = beginning + cycle * times
    detector = LoopDetector(bound)
    for place, token in enumerate(tokens, start=1):
        for _ in range(data.draw(st.integers(0, 1)) * 3):  # a draft that is taken back
            detector.append(data.draw(st.integers(0, 2)))
            detector.remove()
        period = detector.append(token)
        if period:
            assert place >= bound
            last = tokens[place - bound : place]
            assert last[period:] == last[:-period]
        elif place % 16 == 0 and place - len(beginning) >= bound:
            raise AssertionError(f"{cycle} was not found at {place}")


def test_the_tokens_that_are_kept_do_not_grow_with_the_answer() -> None:
    detector = LoopDetector(ANSWER_LOOP)
    rng = random.Random(3)
    for _ in range(100_000):
        detector.append(rng.randrange(150_000))
    assert len(detector._tokens) < 20_000


def looping(**fields: object) -> tuple[Output, OutputDelta, int]:
    """Return the output of an answer that begins well and then repeats itself, and how many tokens were read."""
    spoken, asked = model(), request(**fields)
    output = Output(Vocabulary(spoken.tokenizer), spoken.dialect, asked, "none", "job", loop_guard=True)
    cycle, read, delta = spoken.tokenizer.encode(" and so on"), 0, OutputDelta()
    begun = spoken.tokenizer.encode(BEGUN if fields else "Well,")
    while not output.stopped:
        token = begun[read] if read < len(begun) else cycle[(read - len(begun)) % len(cycle)]
        delta += output.feed(token)
        read += 1
    return output, delta, read


BEGUN = '<tool_call>\n{"name": "weather", "arguments": {"city": "'


def test_an_answer_in_a_loop_ends_as_if_its_length_were_out_and_says_so() -> None:
    output, delta, read = looping()
    assert output.finish_reason("stop") == "length"
    assert delta.content.startswith("Well, and so on and so on")
    assert ANSWER_LOOP <= read <= ANSWER_LOOP + 40
    (warning,) = output.warnings
    assert "the answer was ended, since it repeated the same" in warning
    assert output.feed(5) == OutputDelta()


def test_a_call_in_a_loop_stays_incomplete() -> None:
    output, delta, _ = looping(tools=[WEATHER])
    assert output.finish_reason("stop") == "length"
    (call,) = delta.tool_calls
    assert call["function"]["arguments"].startswith('{"city": " and so on')


def test_without_the_guard_an_answer_goes_on() -> None:
    spoken = model()
    output = Output(Vocabulary(spoken.tokenizer), spoken.dialect, request(), "none", "job")
    for _ in range(2 * ANSWER_LOOP):
        output.feed(21)
    assert (output.stopped, output.warnings) == (False, [])
