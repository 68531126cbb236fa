"""Thoughts are counted as the output parser reads them, and closed as the model closes them."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas import ChatRequest
from tests.selection import examples
from tests.text.speech import Model, cut, gpt_oss, model, request
from worker.text.codec import TextCodec
from worker.text.dialects.table import THOUGHTS
from worker.text.output.output import Output, OutputDelta
from worker.text.output.thought import Thought


def with_lines(spoken: Model) -> Model:
    """Return a model whose template writes its thoughts on lines of their own."""
    thoughts = replace(THOUGHTS[0], closing=("\n", "\n\n"))
    return replace(spoken, dialect=replace(spoken.dialect, thoughts=thoughts))


PLAIN = with_lines(model("hermes"))
PIECES = ["<think>", "</think>", "\n", " ", "a", "b c", "é", "日", "🙂", "<", "</thi"]
WITH_CALLS = [*PIECES, "<tool_call>", "</tool_call>", '{"name": "weather", ', '"arguments": {}}']
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def thought_of(
    spoken: Model, asked: ChatRequest, *, begun: bool = False, budget: int | None = None, loops: bool = False
) -> Thought:
    form = spoken.dialect.thought_format(spoken.words, spoken.vocabulary, asked)
    assert form is not None
    new_reader = codec_of(spoken)._new_thought_reader(asked)
    only_first = asked.constrains_answer
    return Thought(form, begun=begun, only_first=only_first, budget=budget, loops=loops, new_reader=new_reader)


def codec_of(spoken: Model) -> TextCodec:
    codec = TextCodec(spoken.words, len(spoken.words.tokens))
    vars(codec)["_format"] = spoken.dialect
    return codec


def written(spoken: Model, text: str, *, begun: bool = False, budget: int, **fields: object) -> str:
    """Return what is written by a model that would write this text, and goes on with it after a closing."""
    thought = thought_of(spoken, request(**fields), begun=begun, budget=budget)
    tokens = list[int]()

    def write(token: int) -> None:
        while thought.forced:
            tokens.append(thought.forced[0])
            thought.append(tokens[-1])
        tokens.append(token)
        thought.append(token)

    for token in spoken.words.encode(text):
        write(token)
    while thought.forced:
        tokens.append(thought.forced[0])
        thought.append(tokens[-1])
    return b"".join(map(spoken.vocabulary.bytes_of, tokens)).decode()


def of_tokens(text: str, count: int) -> str:
    return b"".join(map(PLAIN.vocabulary.bytes_of, PLAIN.words.encode(text)[:count])).decode()


@pytest.mark.parametrize("budget", range(8))
def test_a_thought_is_closed_when_its_budget_is_out(budget: int) -> None:
    thinking = "Let me see what this may be about"
    begun, rest = of_tokens(thinking, budget), thinking.removeprefix(of_tokens(thinking, budget))
    assert written(PLAIN, thinking, begun=True, budget=budget) == f"{begun}\n</think>\n\n{rest}"
    assert written(PLAIN, f"<think>{thinking}", budget=budget) == f"<think>{begun}\n</think>\n\n{rest}"


def test_a_thought_within_its_budget_and_an_answer_are_as_they_are() -> None:
    text = "<think>Hm.</think>Yes, <think> is a tag."
    assert written(PLAIN, text, budget=50) == text
    assert written(PLAIN, "No thought at all", budget=0) == "No thought at all"


def test_a_thought_that_ends_a_line_gets_no_second_line_end() -> None:
    assert written(PLAIN, "a\nb", begun=True, budget=len(PLAIN.words.encode("a\n"))) == "a\n</think>\n\nb"


def test_another_thought_is_closed_at_once() -> None:
    assert written(PLAIN, "<think>a b<think>c", budget=1) == "<think>a\n</think>\n\n b<think>c"
    assert written(PLAIN, "<think>a<think>c", budget=1) == "<think>a\n</think>\n\n<think>\n</think>\n\nc"


@pytest.mark.parametrize("text", ["日本", "🙂🙂", "é"])
def test_a_character_is_not_cut(text: str) -> None:
    for budget in range(1, len(PLAIN.words.encode(text))):
        thought, _, rest = written(PLAIN, text, begun=True, budget=budget).partition("\n</think>\n\n")
        assert thought + rest == text


def test_a_call_within_a_thought_is_not_cut() -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    assert written(PLAIN, f"<think>a{call}", budget=2, tools=[WEATHER]) == f"<think>a{call}"
    assert written(PLAIN, f"<think>a{call}</think>b", budget=2, tools=[WEATHER]) == f"<think>a{call}</think>b"


@pytest.mark.parametrize("mention", ["<tool_call>", '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'])
@pytest.mark.parametrize("more", [0, 3, 30])
def test_a_thought_that_mentions_a_call_is_closed_when_its_budget_is_out(mention: str, more: int) -> None:
    before = f"I could write {mention} h"
    budget = len(PLAIN.words.encode(before)) + more
    text = f"{before}{'ere and there' * 30}"
    said = written(PLAIN, text, begun=True, budget=budget, tools=[WEATHER])
    thought, _, rest = said.partition("\n</think>\n\n")
    assert thought + rest == text
    assert len(PLAIN.words.encode(thought)) <= budget + 3
    assert written(PLAIN, text, begun=True, budget=2, tools=[WEATHER]).count("</think>") == 1


@pytest.mark.parametrize("end", ["</think>Yes", "", "\n</think>\n", " No.</think>Yes"])
def test_tokens_of_a_call_in_a_thought_are_counted_once_they_turn_out_to_be_reasoning(end: str) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    thought = thought_of(PLAIN, request(tools=[WEATHER]), begun=True)
    for token in PLAIN.words.encode(f"So: {call}{end}"):
        thought.append(token)
    reasoning = f"So: {call}{end.partition('</think>')[0]}</think>" if "Yes" in end else "So: "
    assert thought.tokens == len(PLAIN.words.encode(reasoning))
    assert thought.inside == ("Yes" not in end)


FINAL = "<|start|>assistant<|channel|>final<|message|>"


def test_gpt_oss_goes_on_with_its_answer() -> None:
    begun = "<|channel|>analysis<|message|>a"
    assert written(gpt_oss(), f"{begun} b", budget=1) == f"{begun}<|end|>{FINAL} b"


def test_gpt_oss_with_tools_chooses_once() -> None:
    again = "<|channel|>analysis<|message|>"
    said = f"{again}a<|end|><|start|>assistant"
    assert written(gpt_oss(), f"{again}a{again}b", budget=1, tools=[WEATHER]) == f"{said}{again}<|end|>{FINAL}b"
    call = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{}"
    assert written(gpt_oss(), f"{again}a{call}", budget=1, tools=[WEATHER]) == f"{said}{call}"
    forced = {"tools": [WEATHER], "tool_choice": "required"}
    expected = f"{said}<|channel|>commentary to=functions."
    assert written(gpt_oss(), f"{again}a", budget=1, **forced) == expected


def test_a_loop_is_closed_and_named() -> None:
    asked = request()
    thought = thought_of(PLAIN, asked, begun=True, loops=True)
    tokens = PLAIN.words.encode(" wait")
    while not thought.forced:
        thought.append(tokens[thought.tokens % len(tokens)])
    assert (thought.cycle, thought.tokens) == (len(tokens), 3_072)


def output_of(spoken: Model, thinking: str, **fields: object) -> Output:
    asked = request(**fields)
    thought = thought_of(spoken, asked, begun=thinking == "open")
    return Output(spoken.vocabulary, spoken.dialect, asked, thinking, "job", thought=thought)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "thought"),
    [
        ("<think>Hm.</think>Yes", "<think>Hm.</think>"),
        ("<think>Hm.</think>\n\nYes", "<think>Hm.</think>"),
        ("Yes", ""),
        ("<think>Hm.", "<think>Hm."),
        ("<think>a</think> <think>b</think>c", "<think>a</think><think>b</think>"),
        ("<think>a</think>b<think>c</think>", "<think>a</think>"),  # the second is text
    ],
)
def test_reasoning_tokens_are_those_from_the_begin_marker_to_the_end_marker(text: str, thought: str) -> None:
    output = output_of(PLAIN, "none")
    for token in PLAIN.words.encode(text):
        output.feed(token)
    assert output.reasoning_tokens == len(PLAIN.words.encode(thought))


def test_reasoning_tokens_of_gpt_oss_have_the_header_and_the_end() -> None:
    output, thought = output_of(gpt_oss(), "none"), "<|channel|>analysis<|message|>Hm.<|end|>"
    for token in gpt_oss().words.encode(f"{thought}<|start|>assistant<|channel|>final<|message|>Yes"):
        output.feed(token)
    assert output.reasoning_tokens == len(gpt_oss().words.encode(thought))


def test_a_marker_of_gpt_oss_that_ordinary_tokens_spell_ends_no_thought() -> None:
    spoken = gpt_oss()
    spelled = [token for char in "<|end|><|start|>" for token in spoken.words.encode(char)]
    tokens = [*spoken.words.encode("<|channel|>analysis<|message|>It is"), *spelled, *spoken.words.encode(" so")]
    thought = thought_of(spoken, request(), budget=99)
    for token in tokens:
        thought.append(token)
    assert (thought.inside, thought.tokens) == (True, len(tokens))


@given(st.lists(st.sampled_from(PIECES), max_size=10), st.lists(st.integers(0, 99), max_size=6), st.booleans())
@settings(max_examples=examples(400))
def test_text_is_within_a_thought_where_the_parser_reads_reasoning(
    pieces: list[str], places: list[int], is_open: bool
) -> None:
    tokens = cut(PLAIN, "".join(pieces), places)
    thought = thought_of(PLAIN, request(), begun=is_open, budget=0)
    for end in range(len(tokens) + 1):
        said = [*tokens[:end], *PLAIN.words.encode("X")]
        output = output_of(PLAIN, "open" if is_open else "none")
        read = sum((output.feed(token) for token in said), OutputDelta()) + output.flush()
        assert thought.inside == read.reasoning.endswith("X"), PLAIN.words._tokenizer.decode(said)
        if end < len(tokens):
            thought.append(tokens[end])


@given(st.lists(st.sampled_from(WITH_CALLS), max_size=14), st.integers(0, 8), st.booleans(), st.data())
@settings(max_examples=examples(400))
def test_what_is_taken_back_leaves_no_trace(pieces: list[str], budget: int, is_open: bool, data: st.DataObject) -> None:
    asked = request(tools=[WEATHER])
    kept = thought_of(PLAIN, asked, begun=is_open, budget=budget, loops=True)
    plain = thought_of(PLAIN, asked, begun=is_open, budget=budget, loops=True)
    words = [token for piece in WITH_CALLS for token in PLAIN.words.encode(piece)]
    for token in PLAIN.words.encode("".join(pieces)):
        draft = data.draw(st.lists(st.sampled_from(words), max_size=9))
        for each in draft:
            kept.append(each)
        kept.remove(len(draft))
        assert kept._place == plain._place
        kept.append(token)
        plain.append(token)
    assert kept._place == plain._place


def test_a_thought_that_would_be_closed_by_the_end_of_the_answer_cannot_be_closed() -> None:
    form = PLAIN.dialect.thought_format(PLAIN.words, PLAIN.vocabulary, request())
    assert form is not None
    thought = Thought(replace(form, closings=()), begun=True, only_first=False, budget=0)
    assert (thought.can_close, thought.forced) == (False, ())
