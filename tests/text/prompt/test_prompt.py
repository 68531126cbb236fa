import asyncio
import threading
import time
from contextlib import suppress
from typing import Any

import pytest

from tests.fakes import ByteTokenizer
from tests.text.conversations import Said, assistant, call, calling, developer, image, result, text, user
from tests.text.templated import TEMPLATES, prompt, rendered, request
from worker.errors import CannotStart, JobFailure
from worker.text.codec import TextCodec
from worker.text.prompt.prompt import Prompts
from worker.text.tokenizer import TemplateMessages

HELLO = user("Hello")
LOOK: Said = {"type": "function", "function": {"name": "look"}}


async def plain(*messages: Said, **rest: Any) -> str:
    """Through a template that takes anything."""
    return bytes((await Prompts(ByteTokenizer(), None).render(request(*messages, **rest))).tokens).decode()


async def refusal(template: str, *messages: Said, **rest: Any) -> tuple[str, str]:
    with pytest.raises(JobFailure) as raised:
        await prompt(template, *messages, **rest)
    return raised.value.type, raised.value.message


async def test_messages_go_through_the_template_in_order() -> None:
    said = [developer("Be brief."), user("Hi"), assistant("Hello!"), user("Bye")]
    assert await plain(*said) == "<system>Be brief.<user>Hi<assistant>Hello!<user>Bye<assistant>"


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        (["one", "two", "three"], "one\ntwo\nthree"),
        (["one", "\n\n", "two"], "one\n\ntwo"),
        (["one", " ", "two"], "one two"),
        (["one ", "two"], "one \ntwo"),
        (["", "one"], "one"),
    ],
)
async def test_text_parts_are_lines_unless_space_keeps_them_apart(parts: list[str], line: str) -> None:
    assert await plain(user([text(part) for part in parts])) == f"<user>{line}<assistant>"


async def test_parts_of_different_messages_are_paragraphs() -> None:
    assert await plain(user("one"), user([text("two"), text("three")])) == "<user>one\n\ntwo\nthree<assistant>"


async def test_an_image_is_refused_by_name() -> None:
    assert await refusal("qwen", user([text("What is this?"), image("AA==")])) == (
        "unsupported", "messages: this model does not support images; leave out the image_url parts.",
    )  # fmt: skip


SHOWN = user([text("What is this?"), image("AA==")])


@pytest.mark.parametrize(
    "said",
    [
        [SHOWN, assistant("A cat."), user("And its name?")],
        [
            user("Look."),
            calling(call("call_1")),
            result("call_1", "Here."),
            SHOWN,
        ],  # as the gateway puts what a tool shows
    ],
)
async def test_an_image_that_its_client_cannot_take_back_is_a_text_for_a_model_without_vision(said: list[Said]) -> None:
    written = await rendered("qwen", *said)
    assert "What is this?\n[image: this model has no vision]" in written


async def test_a_new_image_is_refused_behind_older_ones() -> None:
    kind, message = await refusal("qwen", SHOWN, assistant("A cat."), SHOWN)
    assert (kind, "does not support images" in message) == ("unsupported", True)


async def test_whatever_characters_a_text_has_images_are_where_they_were_shown() -> None:
    private = "".join(map(chr, range(0x100000, 0x100010)))
    shown = [text(private), image("AA=="), text("and"), image("AA==")]
    asked = request(user(private), assistant("I see."), user(shown))
    said = (await Prompts(ByteTokenizer(), None).render(asked, ["[one]", "[two]"])).tokens
    assert bytes(said).decode() == f"<user>{private}<assistant>I see.<user>{private}[one]and[two]<assistant>"


async def test_a_request_with_a_large_image_in_it_is_not_rendered_on_the_event_loop() -> None:
    tokenizer = ByteTokenizer()
    await Prompts(tokenizer, None).render(request(user([image("A" * 100_000)])), ["[one]"])
    assert threading.main_thread() not in tokenizer.threads


async def test_the_template_s_own_words_reach_the_client() -> None:
    assert await refusal("{{ raise_exception('Not today.') }}", HELLO) == (
        "invalid_request", "The model's chat template refuses these messages: Not today.",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ messages[0].name.first }}", "has no attribute 'name'"),
        ("{{ 1 + messages[0].content }}", "unsupported operand"),
        ("{{ 'Hello'.index('x') }}", "substring not found"),
    ],
)
async def test_a_template_s_slip_is_a_refusal(template: str, words: str) -> None:
    type, message = await refusal(template, HELLO)
    assert type == "invalid_request"
    assert message.startswith("The model's chat template ")
    assert words in message


async def test_a_refusal_does_not_hold_the_whole_conversation() -> None:
    template = "{{ raise_exception(messages[0].content) }}"
    assert len((await refusal(template, user("no " * 1_000)))[1]) < 600


async def test_what_the_client_sets_for_the_template_arrives_there() -> None:
    template = "{{ 'deep' if enable_thinking else 'quick' if enable_thinking is defined else 'unset' }}"
    assert await rendered(template, HELLO) == "unset"
    for thinks, said in ((True, "deep"), (False, "quick")):
        assert await rendered(template, HELLO, chat_template_kwargs={"enable_thinking": thinks}) == said


async def test_tools_reach_the_template_as_they_were_sent() -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string", "default": None}}}
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters, "description": None}}
    expected = '[{"type": "function", "function": {"name": "look", "parameters": '
    expected += '{"type": "object", "properties": {"city": {"type": "string", "default": null}}}}}]'
    assert await rendered("{{ tools | tojson }}", HELLO, tools=[tool]) == expected


@pytest.mark.parametrize("rest", [{}, {"tools": []}, {"tools": [LOOK], "tool_choice": "none"}])
async def test_without_tools_the_template_hears_of_none(rest: Said) -> None:
    assert await rendered("{{ tools is none }}", HELLO, **rest) == "True"


@pytest.mark.parametrize("template", ["gemma", "forgetful"])
@pytest.mark.parametrize("messages", [[HELLO], [user("look"), calling(call("1")), result("1", "Rain.")]])
async def test_tools_are_refused_where_the_template_has_no_place_for_them(template: str, messages: list[Said]) -> None:
    assert await refusal(template, *messages, tools=[LOOK]) == (
        "unsupported", "tools: the model's chat template does not support them; leave them out.",
    )  # fmt: skip


async def test_an_assistant_s_message_at_the_end_is_gone_on_with() -> None:
    assert (await rendered("qwen", HELLO, assistant("Hel"))).endswith("assistant\n<think>\n\n</think>\n\nHel")
    assert (await rendered("gemma", HELLO, assistant("Hel"))).endswith("<start_of_turn>model\nHel")


async def test_an_answer_that_was_only_thought_of_is_gone_on_with() -> None:
    said = await prompt("qwen", HELLO, assistant("", reasoning="Greet."))
    assert said.thinking == "closed"
    assert (await rendered("qwen", HELLO, assistant("", reasoning="Greet."))).endswith("Greet.\n</think>")


@pytest.mark.parametrize("template", sorted(TEMPLATES.keys() - {"qwen"}))
async def test_where_a_template_shows_no_thoughts_a_turn_of_nothing_else_is_a_whole_new_one(template: str) -> None:
    assert await rendered(template, HELLO, assistant("", reasoning="Greet.")) == await rendered(template, HELLO)


@pytest.mark.parametrize("template", sorted(TEMPLATES))
@pytest.mark.parametrize("last", [assistant(" \n"), assistant(None, reasoning=" \n")], ids=["said", "thought"])
async def test_an_answer_of_nothing_but_space_is_a_whole_new_one(template: str, last: Said) -> None:
    assert await rendered(template, HELLO, last) == await rendered(template, HELLO)


@pytest.mark.parametrize("template", ["qwen", "gemma"])
async def test_an_empty_answer_at_the_end_is_none(template: str) -> None:
    assert await prompt(template, HELLO, assistant(None)) == await prompt(template, HELLO)


@pytest.mark.parametrize("last", [calling(call("1")), result("1", "Rain.")])
async def test_behind_calls_and_results_comes_a_new_answer(last: Said) -> None:
    assert (await rendered("qwen", HELLO, calling(call("1")), last)).endswith("<|im_start|>assistant\n<think>\n")


@pytest.mark.parametrize(
    ("begun", "end", "thinking"),
    [
        ("<think>\nWell", "assistant\n<think>\nWell", "open"),
        ("\n<think>Well", "assistant\n\n<think>Well", "open"),
        ("<think>Well.</think>So", "assistant\n<think>Well.</think>So", "closed"),
        ("Well.</think>So", "assistant\n<think>\nWell.</think>So", "closed"),
        ("<think>One.</think>Two. <think>Three", "<think>One.</think>Two. <think>Three", "open"),
        ("So", "</think>\n\nSo", "none"),
    ],
)
async def test_an_answer_goes_on_after_its_own_thoughts(begun: str, end: str, thinking: str) -> None:
    assert (await rendered("qwen", HELLO, assistant(begun))).endswith(end)
    assert (await prompt("qwen", HELLO, assistant(begun))).thinking == thinking


async def thinking(template: str, *messages: Said, **variables: Any) -> str:
    return (await prompt(template, *messages, chat_template_kwargs=variables)).thinking


async def test_a_prompt_may_open_a_think_block_or_close_it() -> None:
    assert await thinking("qwen", HELLO) == "open"
    assert await thinking("qwen", HELLO, enable_thinking=False) == "closed"
    assert await thinking("gemma", HELLO) == "none"


@pytest.mark.parametrize("marker", ["<think>", "</think>", "<think>\n\n</think>"])
async def test_a_user_s_own_think_block_does_not_count(marker: str) -> None:
    assert await thinking("gemma", user(marker)) == "none"
    assert await thinking("qwen", user(marker)) == "open"
    assert await thinking("qwen", user(marker), enable_thinking=False) == "closed"


@pytest.mark.parametrize(("begins", "ends"), [("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>")])
async def test_a_prompt_may_open_a_think_block_that_mlx_lm_does_not_know(begins: str, ends: str) -> None:
    class Thinker(ByteTokenizer):
        """It has the markers, and mlx-lm says nothing of them."""

        def __init__(self, template: str) -> None:
            super().__init__(begins.encode(), ends.encode(), template=template)
            self.tokens[-2:] = [begins, ends]

    async def thinking(template: str) -> str:
        language = TextCodec(Thinker(template), 258)
        return (await language.prompt(request(HELLO))).thinking

    assert await thinking(f"{{{{ messages[0].content }}}}<assistant>{begins}\n") == "open"
    assert await thinking(f"{{{{ messages[0].content }}}}<assistant>{begins}\n{ends}\n") == "closed"
    assert await thinking(f"{begins}{{{{ messages[0].content }}}}<assistant>") == "none"


async def test_a_model_without_think_markers_does_not_think() -> None:
    tokenizer = ByteTokenizer(template="{{ messages[0].content }}<think>")
    assert (await Prompts(tokenizer, None).render(request(HELLO))).thinking == "none"


async def threads(*messages: Said, **rest: Any) -> set[threading.Thread]:
    tokenizer = ByteTokenizer(template="{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}")
    prompts = Prompts(tokenizer, None)
    await prompts.try_template()
    tokenizer.threads.clear()
    await prompts.render(request(*messages, **rest))
    return tokenizer.threads


async def test_a_short_prompt_stays_on_the_loop() -> None:
    assert await threads(HELLO) == {threading.current_thread()}


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('No.') if tools }}", "{{ messages[0].content if messages[0].role == 'user' }}"]
)
async def test_only_the_first_trial_of_a_short_prompt_is_on_the_loop(template: str) -> None:
    class Counting(ByteTokenizer):
        def render(self, conversation: TemplateMessages, **how: Any) -> str:
            on_the_loop.append(threading.current_thread() is threading.main_thread())
            return super().render(conversation, **how)

    on_the_loop, prompts = list[bool](), Prompts(Counting(template=template), None)
    await prompts.try_template()
    on_the_loop.clear()
    with suppress(JobFailure):
        await prompts.render(request(developer("Be brief."), HELLO, tools=[LOOK]))
    assert on_the_loop == sorted(on_the_loop, reverse=True)
    assert on_the_loop.count(True) <= 3  # as it is, with fewer calls, without tools
    assert on_the_loop.count(False) > 3


class PacedTokenizer(ByteTokenizer):
    """Its template takes as much processor time as it is told."""

    seconds = 0.0

    def render(self, conversation: TemplateMessages, **how: Any) -> str:
        ends = time.thread_time() + self.seconds
        while time.thread_time() < ends:
            pass
        return super().render(conversation, **how)


async def test_a_template_is_not_rendered_on_the_loop_before_it_was_quick_elsewhere() -> None:
    tokenizer = PacedTokenizer()
    prompts = Prompts(tokenizer, None)
    for seconds, on_the_loop in (0.1, False), (0.1, False), (0.0, False), (0.0, True), (0.1, True), (0.0, False):
        tokenizer.seconds = seconds
        tokenizer.threads.clear()
        await prompts.render(request(HELLO))
        assert (threading.current_thread() in tokenizer.threads) is on_the_loop


async def test_a_template_that_takes_too_long_for_one_word_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    class EndlessTokenizer(ByteTokenizer):
        def render(self, conversation: TemplateMessages, **how: Any) -> str:
            ended.wait(30)
            return ""

    monkeypatch.setattr("worker.text.prompt.prompt._TRIAL_S", 0.1)
    ended = threading.Event()
    with pytest.raises(CannotStart, match="chat template"):
        await asyncio.wait_for(TextCodec(EndlessTokenizer(), 256).prepare(), 10)
    ended.set()


async def test_what_a_template_refuses_is_left_to_the_requests() -> None:
    prompts = Prompts(ByteTokenizer(template="{{ raise_exception('No.') }}"), None)
    await prompts.try_template()
    with pytest.raises(JobFailure):
        await prompts.render(request(HELLO))


LONG = "long " * 500


@pytest.mark.parametrize(
    ("messages", "rest"),
    [
        ([user(LONG)], {}),
        ([calling(call("1", LONG))], {}),
        ([HELLO], {"tools": [{**LOOK, "function": {"name": "look", "description": LONG}}]}),
        ([HELLO], {"chat_template_kwargs": {"documents": [LONG]}}),
        ([HELLO, assistant("Hi")] * 10, {}),
    ],
    ids=["text", "a call", "a tool", "a variable", "many messages"],
)
async def test_a_long_prompt_leaves_the_loop(messages: list[Said], rest: Said) -> None:
    assert threading.current_thread() not in await threads(*messages, **rest)


async def test_the_loop_goes_on_while_a_long_prompt_is_rendered() -> None:
    class SlowTokenizer(ByteTokenizer):
        def render(self, conversation: TemplateMessages, **how: Any) -> str:
            assert ticked.wait(5), "the loop stood still"
            return super().render(conversation, **how)

    ticked = threading.Event()
    asyncio.get_running_loop().call_soon(ticked.set)
    assert len((await Prompts(SlowTokenizer(), None).render(request(user(LONG)))).tokens) > len(LONG)
