"""Prompts that diverge at a boundary begin with the same tokens up to it."""

import json
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from unicodedata import is_normalized, normalize

import pytest
from hypothesis import HealthCheck, assume, given, reject, settings
from hypothesis import strategies as st

from tests.fakes import ByteTokenizer
from tests.selection import examples
from tests.support.stack import TINY_CHAT
from tests.text.conversations import Said, assistant, call, calling, conversations, developer, result, system, user
from tests.text.templated import TEMPLATES, prompts, request, words
from worker.errors import JobFailure
from worker.text.codec import TextCodec
from worker.text.prompt.boundaries import common_prefix
from worker.text.prompt.prompt import Prompt, Prompts
from worker.text.tokenizer import Vocabulary

OWN = json.loads((Path(TINY_CHAT) / "tokenizer_config.json").read_text())["chat_template"]
ALL = {**TEMPLATES, "tiny_chat": OWN}
TAKE_TOOLS = sorted(ALL.keys() - {"forgetful", "gemma"})
SPOKEN, VOCABULARY = words(OWN)._tokenizer, Vocabulary(words(OWN))
LOOK: Said = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "title": "Subject"}}}
RULES = system("Be brief, be kind. Answer in English.")


@cache
def worker(template: str) -> Prompts:
    return prompts(ALL.get(template, template), boundaries=True)


async def planned(template: str, *said: Said, **rest: Any) -> Prompt:
    return await worker(template).render(request(*said, **rest))


def alike(one: Prompt, other: Prompt) -> int:
    """Tokens that both begin with."""
    return common(one.tokens, other.tokens)


def common(one: Sequence[Any], other: Sequence[Any]) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def before(prompt: Prompt, count: int) -> str:
    return str(SPOKEN.decode(prompt.tokens[:count]))


def reached(prompt: Prompt, other: Prompt, *, among: slice = slice(None)) -> bool:
    """True if a boundary is at the divergence, up to space and one token that may merge with the next."""
    end = alike(prompt, other)
    between = (prompt.tokens[count:end] for count in (0, *prompt.boundaries[among]) if count <= end)
    return any(sum(bool(SPOKEN.decode([token]).strip()) for token in tokens) < 2 for tokens in between)


def turns(said: list[Said]) -> Iterator[tuple[list[Said], list[Said]]]:
    """A prompt's messages, and the next one's."""
    ends = [place + 1 for place, message in enumerate(said) if message["role"] == "user"]
    yield from ((said[:end], said[:further]) for end, further in pairwise(ends))


CHATS = {
    "plain": [user("Hi"), assistant("Hello!"), user("Which city?"), assistant("Oslo."), user("Thanks")],
    "with rules": [RULES, user("What is it?"), assistant("A test."), user("Why?"), assistant("So."), user("I see")],
    "with thoughts": [
        RULES, user("2+2?"), assistant("4", reasoning="Easy."), user("And 3+3?"), assistant("6"), user("Thanks"),
    ],
    "with space around": [
        system("\n Be brief. \n"), user("\n\nHi "), assistant("\n Hello!\n"), user("  x\n"), assistant("y"), user("z"),
    ],
    "with the same again": [user("no"), assistant("no"), user("no"), assistant("no"), user("yes"), assistant("no")],
    "with tools": [
        RULES, user("Weather?"), calling(call("1", '{"about": "rain"}'), reasoning="Look."), result("1", "Rain."),
        assistant("It rains."), user("And now?"), calling(call("2")), result("2", "Sun."), assistant("Sun."),
        user("Ok"),
    ],
    "with other letters": [
        system("Sei höflich 👍"), user("Grüße, 世界!"), assistant("Γειά 👋"), user("और?"), assistant("ü"), user("👍"),
    ],
    "with letters in two parts": [
        system("Sei ho\u0308flich"), user("Gru\u0308\u00dfe!"), assistant("\u0958"), user("e\u0301"),
        assistant("u\u0308"), user("Ok"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("said", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("template", ALL)
async def test_the_first_boundary_is_where_the_next_turn_parts(template: str, said: list[Said]) -> None:
    for now, later in turns(said):
        prompt, after = await planned(template, *now), await planned(template, *later)
        assert prompt.boundaries[0] <= alike(prompt, after)
        assert reached(prompt, after, among=slice(1))


@pytest.mark.parametrize(
    ("begun", "answer"),
    [
        (assistant("It is Os"), "It is Oslo."),
        (assistant("Os"), "Oslo."),
        (assistant("It is Oslo"), "It is Oslo, I think."),
        (assistant("日本の首"), "日本の首都です。"),
        (assistant(" "), "It is Oslo."),
        (assistant("<think>\nWell, Os"), "<think>\nWell, Oslo.</think>It is Oslo."),
        (assistant("", reasoning="Well."), "It is Oslo."),
    ],
)
@pytest.mark.parametrize("template", ALL)
async def test_an_answer_that_goes_on_may_go_on_within_its_last_word(template: str, begun: Said, answer: str) -> None:
    asked = [user("What is the capital?")]
    prompt = await planned(template, *asked, begun)
    after = await planned(template, *asked, assistant(answer), user("Thanks"))
    assert prompt.boundaries[0] <= alike(prompt, after)
    assert "capital?" in before(prompt, prompt.boundaries[0])
    assert reached(prompt, await planned(template, *asked, assistant("Another one."), user("Thanks")))


QUESTIONS = ["Hi", "What is it?", "<document>x</document>", "\n\n  Hi", "42", "(a)", "Γειά", "…"]


@pytest.mark.parametrize("rules", [RULES, developer(RULES["content"] + "\n"), system("Sei ho\u0308flich")])
@pytest.mark.parametrize("template", ALL)
async def test_other_questions_share_the_system_prompt(template: str, rules: Said) -> None:
    asked = [await planned(template, rules, user(question)) for question in QUESTIONS]
    for prompt in asked:
        shared = prompt.boundaries[1]
        assert normalize("NFC", rules["content"].strip()) in before(prompt, shared)
        assert all(shared <= alike(prompt, other) for other in asked)


@pytest.mark.parametrize("rules", [[], [RULES]])
@pytest.mark.parametrize("template", TAKE_TOOLS)
async def test_other_questions_share_the_tools(template: str, rules: list[Said]) -> None:
    asked = [await planned(template, *rules, user(question), tools=[LOOK]) for question in QUESTIONS]
    for prompt in asked:
        shown = ["Subject", *(each["content"] for each in rules)]
        whole = [count for count in prompt.boundaries[:3] if all(text in before(prompt, count) for text in shown)]
        assert any(all(count <= alike(prompt, other) for other in asked) for count in whole)


@pytest.mark.parametrize("said", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("template", ALL)
async def test_a_message_that_is_edited_begins_at_a_boundary(template: str, said: list[Said]) -> None:
    tools = {"tools": [LOOK]} if template in TAKE_TOOLS else {}
    prompt = await planned(template, *said, **tools)
    for place, message in enumerate(said):
        edited = await planned(template, *said[:place], {**message, "content": "Zebras!"}, *said[place + 1 :], **tools)
        if message["content"]:
            assert reached(prompt, edited), message


def steps() -> list[Said]:
    return [
        RULES, user("Weather?"), calling(call("1", '{"about": "rain"}'), reasoning="Look."), result("1", "Rain."),
        calling(call("2"), reasoning="Again."), result("2", "Sun."), calling(call("3")), result("3", "Snow."),
    ]  # fmt: skip


@pytest.mark.parametrize("rest", [{}, {"chat_template_kwargs": {"enable_thinking": False}}], ids=["thinks", "does not"])
@pytest.mark.parametrize("template", TAKE_TOOLS)
async def test_in_a_tool_loop_the_next_call_is_a_boundary(template: str, rest: Said) -> None:
    loop = steps()
    if rest:
        loop = [{field: value for field, value in each.items() if field != "reasoning"} for each in loop]
    for end in (2, 4, 6):
        prompt = await planned(template, *loop[:end], tools=[LOOK], **rest)
        after = await planned(template, *loop[: end + 2], tools=[LOOK], **rest)
        assert reached(prompt, after, among=slice(2))


async def test_thoughts_that_a_tool_loop_keeps_and_the_next_question_drops_are_two_boundaries() -> None:
    prompt = await planned("qwen", *steps(), tools=[LOOK])
    asked, called, *_ = prompt.boundaries
    assert before(prompt, asked).endswith("Weather?<|im_end|>\n<|im_start|>assistant")
    assert called == len(prompt.tokens) - 1
    without_tools = await planned("qwen", *steps())
    assert before(without_tools, without_tools.boundaries[0]).endswith("Weather?<|im_end|>\n<|im_start|>assistant")
    assert len(without_tools.tokens) - 1 not in without_tools.boundaries


@pytest.mark.parametrize("arguments", ["string", "mapping"])
async def test_the_next_call_is_of_a_tool_that_is_offered_as_the_template_takes_it(arguments: str) -> None:
    template = (
        "{{ tools }}{% for m in messages %}<{{ m.role }}>{% for call in m.tool_calls or [] %}to {{ call.function if "
        "call.function.name in tools | map(attribute='function.name') else raise_exception('No such tool.') }}"
        f"{{{{ raise_exception('Not so.') if call.function.arguments is not {arguments} }}}}"
        "{% endfor %}{{ m.content }}{% endfor %}<assistant>to whom?"
    )
    prompt = await planned(template, user("Weather?"), tools=[LOOK | {"function": {"name": "weather"}}])
    assert [before(prompt, count)[-10:] for count in prompt.boundaries[:2]] == ["assistant>", "sistant>to"]


async def test_the_contents_follow_from_the_newest_to_the_oldest() -> None:
    prompt = await planned("tiny_chat", RULES, user("One"), assistant("Two"), user("Three"))
    assert [before(prompt, count).split("\n")[-1] for count in prompt.boundaries] == [
        "<|im_start|>assistant", "<|im_start|>user", "<|im_start|>user", "<|im_start|>assistant", "<|im_start|>system",
    ]  # fmt: skip
    assert list(prompt.boundaries[2:]) == sorted(prompt.boundaries[2:], reverse=True)


@pytest.mark.parametrize(
    "fails",
    ["raise_exception('No.')", "1 // 0", "messages[0].content.nothing.more", "'x'.index('y')", "[].pop()"],
)
async def test_a_turn_that_the_template_does_not_take_leaves_the_boundaries_before_it(fails: str) -> None:
    template = (
        f"{{{{ {fails} if messages | length > 2 }}}}<s>{{{{ messages[0].content }}}}</s>{{{{ messages[1].content }}}}"
    )
    prompt = await planned(template, RULES, user("Hi"))
    assert [before(prompt, count) for count in prompt.boundaries] == [f"<s>{RULES['content']}</s>", "<s>"]


async def test_a_template_that_takes_nothing_imagined_leaves_no_boundaries() -> None:
    template = "{{ raise_exception('No.') if messages[0].content != 'Hi' or messages | length > 1 }}Hi"
    prompt = await planned(template, user("Hi"))
    assert (prompt.tokens, prompt.boundaries) == (tuple(words(OWN).encode("Hi")), ())


async def test_a_prompt_of_nothing_has_none() -> None:
    assert await planned("{{ '' }}", user("Hi")) == Prompt((), "none")


EVERY_MARK = "".join(map(chr, range(0xE000, 0xF900)))


@pytest.mark.parametrize(("text", "count"), [("\ue000", 3), ("\ue001\ue000 or \ue002", 3), (EVERY_MARK, 0)])
async def test_a_text_may_have_the_marks_itself(text: str, count: int) -> None:
    prompt = await planned("tiny_chat", user(text), assistant("Well."), user("What?"))
    assert len(prompt.boundaries) == (count and count + 1)


# What templates look for, what they trim, and what grows together.
TEXTS = st.text(max_size=6) | st.sampled_from(
    ["", " ", "\n", "<think>", "</think>", "<think>a</think>b", '"', "<tool_response>x</tool_response>", "{}", "[INST]",
     "\x00", "\ue000", "e\u0301", "\u0958", "👍🏽", "\n\n  x  "]
)  # fmt: skip


@st.composite
def of_any_text(draw: st.DrawFn) -> list[Said]:
    return draw(conversations(lambda: draw(TEXTS)))


@pytest.mark.parametrize("template", ALL)
@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(said=of_any_text(), tools=st.booleans())
async def test_boundaries_change_no_prompt_and_lie_within_it(template: str, said: list[Said], tools: bool) -> None:
    asked = request(*said, **({"tools": [LOOK]} if tools and template in TAKE_TOOLS else {}))
    try:
        plain = await prompts(ALL[template]).render(asked)
    except JobFailure:
        reject()
    prompt = await prompts(ALL[template], boundaries=True).render(asked)
    assert Prompt(prompt.tokens, prompt.thinking) == plain
    assert all(0 < count < len(prompt.tokens) for count in prompt.boundaries)
    assert len(set(prompt.boundaries)) == len(prompt.boundaries)


@settings(max_examples=examples(100), deadline=None)
@given(contents=st.lists(TEXTS.filter(str.strip), min_size=1, max_size=6))
async def test_a_boundary_is_the_last_token_before_a_content_space_aside(contents: list[str]) -> None:
    assume(is_normalized("NFC", "".join(contents)))  # else the tokenizer's own places are not the text's
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    prompt = await planned(template, *((user, assistant)[place % 2](each) for place, each in enumerate(contents)))
    text = "".join(contents).encode()
    ends = list(accumulate(len(VOCABULARY.bytes_of(token)) for token in prompt.tokens))
    before = ["".join(contents[:place]) + each[: len(each) - len(each.lstrip())] for place, each in enumerate(contents)]
    starts = [len(characters.encode()) for characters in before]
    for count in prompt.boundaries[1:]:
        assert any(
            ends[count - 1] <= start and (ends[count] > start or not text[ends[count - 1] : start].strip())
            for start in starts
        )


async def renders(monkeypatch: pytest.MonkeyPatch, template: str, boundaries: bool, **rest: Any) -> int:
    count = 0
    told = words(ALL[template])
    render = type(told).render

    def counted(*args: Any, **how: Any) -> str:
        nonlocal count
        count += 1
        return render(*args, **how)

    with monkeypatch.context() as patch:
        patch.setattr(type(told), "render", counted)
        await prompts(ALL[template], boundaries=boundaries).render(request(RULES, user("Hi"), **rest))
    return count


@pytest.mark.parametrize(
    ("template", "rest", "more"), [("qwen", {}, 1), ("qwen", {"tools": [LOOK]}, 2), ("mistral", {}, 2)]
)
async def test_boundaries_take_one_more_render_for_each_turn_that_may_come(
    monkeypatch: pytest.MonkeyPatch, template: str, rest: Said, more: int
) -> None:
    without = await renders(monkeypatch, template, False, **rest)
    assert await renders(monkeypatch, template, True, **rest) == without + more


async def test_a_short_prompt_with_boundaries_stays_on_the_loop() -> None:
    tokenizer = ByteTokenizer()
    codec = TextCodec(tokenizer, 256, boundaries=True)
    await codec.prepare()
    tokenizer.threads.clear()
    prompt = await codec.prompt(request(RULES, user("Hi")))
    assert tokenizer.threads == {threading.current_thread()}
    assert len(prompt.boundaries) == 3


async def test_a_model_whose_prefixes_end_anywhere_gets_none() -> None:
    asked = request(RULES, user("Hi"))
    assert (await TextCodec(ByteTokenizer(), 256).prompt(asked)).boundaries == ()


async def test_where_the_vocabulary_does_not_spell_the_text_the_best_boundaries_are_the_same() -> None:
    class Secret(ByteTokenizer):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = ["?" * 5] * len(self.tokens)

    asked = request(RULES, user("\n Hi"), assistant("Yes?"), user("Well ..."), assistant("Yes?"), user("No."))
    plain, secret = [await TextCodec(kind(), 256, boundaries=True).prompt(asked) for kind in (ByteTokenizer, Secret)]
    assert secret.boundaries == plain.boundaries[:3]


@given(one=st.text("ab", max_size=30), other=st.text("ab", max_size=30), start=st.text(max_size=30))
def test_what_two_texts_begin_with_alike_is_found_by_halves(one: str, other: str, start: str) -> None:
    assert common_prefix(start + one, start + other) == common(start + one, start + other)
