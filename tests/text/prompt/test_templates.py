"""The sequences that broke others, under templates as strict as those of well-known models. Each of `templates/`
says at its head what it refuses."""

import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.selection import examples
from tests.text.conversations import (
    Said,
    assistant,
    call,
    calling,
    conversations,
    developer,
    result,
    system,
    text,
    user,
)
from tests.text.templated import TEMPLATES, prompt, prompts, rendered, request, words
from worker.engine.tokenizer import MLXTokenizer
from worker.errors import JobFailure

LOOK: Said = {"type": "function", "function": {"name": "look"}}
OTHER: Said = {"type": "function", "function": {"name": "other", "parameters": {"type": "object", "properties": {}}}}
TAKE_TOOLS = sorted(TEMPLATES.keys() - {"forgetful", "gemma"})


def asked(id: str, about: str) -> Said:
    return calling(call(id, f'{{"about": "{about}"}}'))


# Each word comes once.
BROKE_OTHERS: dict[str, list[Said]] = {
    "two systems, two users": [system("w1."), system("w2."), user("w3."), user("w4.")],
    "a developer first": [developer("w1."), user("w2."), assistant("w3."), user("w4.")],
    "a developer mid-way": [user("w1."), assistant("w2."), developer("w3."), user("w4.")],
    "a system message after each result": [
        system("w1."), user("w2."), asked("call_1", "w3."), result("call_1", "w4."), system("w5."),
        asked("call_2", "w6."), result("call_2", "w7."), system("w8."),
    ],
    "results without a call": [user("w1."), result("call_1", "w2."), result("call_2", "w3."), user("w4.")],
    "a result first": [result("call_1", "w1."), assistant("w2."), user("w3.")],
    "an assistant last": [user("w1."), assistant("w2.")],
    "an assistant alone": [assistant("w1.")],
    "two assistants last": [system("w1."), user("w2."), assistant("w3."), assistant("w4.")],
    "only a system message": [system("w1.")],
    "only a developer's parts": [developer([text("w1."), text("w2.")])],
    "an assistant first": [system("w1."), assistant("w2."), user("w3.")],
    "a call first": [asked("call_1", "w1."), result("call_1", "w2."), user("w3.")],
    "a user in place of an answer": [user("w1."), asked("call_1", "w2."), result("call_1", "w3."), user("w4.")],
    "an answer in two halves": [
        user("w1."), assistant("w2."), asked("call_1", "w3."), result("call_1", "w4."), assistant("w5."), user("w6."),
    ],
    "two calls at once": [
        user("w1."), calling(call("call_1", '{"about": "w2."}'), call("call_2", '{"about": "w3."}')),
        result("call_1", "w4."), result("call_2", "w5."), assistant("w6."), user("w7."),
    ],
    "two calls at once, and a result too many": [
        user("w1."), calling(call("call_1"), call("call_2")), result("call_1", "w2."), result("call_3", "w3."),
    ],
    "arguments that are no JSON": [user("w1."), calling(call("call_1", "w2. {")), result("call_1", "w3.")],
    "a call that was not answered": [user("w1."), asked("call_1", "w2.")],
    "lines and quotes": [system('w1.\n  "w2."\n\tw3.'), user("w4."), asked("1", "w5."), result("1", 'w6.\n"w7."\n')],
    "a thousand messages": [(user, assistant)[number % 2](f"w{number}.") for number in range(1_000)],
    "a thousand messages of tools": [
        message for number in range(0, 1_000, 4)
        for message in (
            user(f"w{number}."), asked(f"call_{number}", f"w{number + 1}."),
            result(f"call_{number}", f"w{number + 2}."), assistant(f"w{number + 3}."),
        )
    ],
}  # fmt: skip


def numbers_in(text: str) -> list[str]:
    return sorted(re.findall(r"w\d+\.", text))


@pytest.mark.parametrize("template", TEMPLATES)
async def test_what_broke_others_renders_and_each_word_is_there_once(template: str) -> None:
    for name, said in BROKE_OTHERS.items():
        assert numbers_in(await rendered(template, *said)) == numbers_in(str(said)), name


@pytest.mark.parametrize("template", TAKE_TOOLS)
async def test_it_renders_beside_tools_too(template: str) -> None:
    for name, said in BROKE_OTHERS.items():
        whole = await rendered(template, *said, tools=[OTHER])
        assert numbers_in(whole) == numbers_in(str(said)), name
        assert "other" in whole, name


# What templates look for, and what they trim, split at or escape.
TEXTS = st.text(max_size=6) | st.sampled_from(
    ["", " ", "\n", "<think>", "</think>", "<think>a</think>b", '"', "\\", "{}", "{{", "[INST]", "\x00", "\ufeff"]
)


@st.composite
def of_any_text(draw: st.DrawFn) -> list[Said]:
    return draw(conversations(lambda: draw(TEXTS)))


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(said=of_any_text())
async def test_any_conversation_renders(template: str, said: list[Said]) -> None:
    await prompts(template).render(request(*said))


LONE = [user("Q"), result("call_1", "R")]
CALL = [user("Q"), calling(call("call_1", '{"a": "b"}')), result("call_1", "R")]
CALLS = [user("Q"), calling(call("1"), call("2"), reasoning="T", content="C"), result("2", "R2"), result("1", "R1")]


@pytest.mark.parametrize(
    ("template", "said", "whole"),
    [
        (
            "gemma", [system("S"), user("Q")],
            "<start_of_turn>user\nS\n\nQ<end_of_turn>\n<start_of_turn>model\n",
        ),
        (
            "gemma", [system("S"), assistant("A"), user("Q")],
            "<start_of_turn>user\nS<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n"
            "<start_of_turn>user\nQ<end_of_turn>\n<start_of_turn>model\n",
        ),
        (
            "gemma", [*CALL, user("Q2")],
            '<start_of_turn>user\nQ<end_of_turn>\n<start_of_turn>model\n{"name": "look", "arguments": {"a": "b"}}'
            "<end_of_turn>\n<start_of_turn>user\nR\n\nQ2<end_of_turn>\n<start_of_turn>model\n",
        ),
        ("forgetful", [system("S"), user("Q")], "<|user|>\nS\n\nQ</s>\n<|assistant|>\n"),
        ("forgetful", LONE, "<|user|>\nQ\n\nR</s>\n<|assistant|>\n"),
        (
            "qwen", [system("S")],
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n<think>\n",
        ),
        (
            "qwen", [user("Q"), calling(call("1", "no JSON"))],
            "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n\n<tool_call>\n<function=look>\n"
            "<parameter=arguments>\nno JSON\n</parameter>\n</function>\n</tool_call><|im_end|>\n"
            "<|im_start|>assistant\n<think>\n",
        ),
        (
            "deepseek", CALL,
            '<|User|>Q<|Assistant|><|tool_call|>look<|sep|>{"a": "b"}<|end|><|tool_output|>R<|Assistant|>',
        ),
        ("mistral", LONE, "[INST]Q[/INST][TOOL_RESULTS]Rcall00000[/TOOL_RESULTS]"),
        (
            "mistral", [*CALL, user("Q2")],
            '[INST]Q[/INST][TOOL_CALLS]{"name": "look", "arguments": {"a": "b"}}call00000</s>'
            "[TOOL_RESULTS]Rcall00000[/TOOL_RESULTS]</s>[INST]Q2[/INST]",
        ),
        (
            "llama", [user("Q"), calling(call("1"), call("2")), *CALLS[2:]],
            "<|start_header_id|>system<|end_header_id|>\n\n<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nQ<|eot_id|>"
            '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "look", "parameters": {}}<|eot_id|>'
            '<|start_header_id|>ipython<|end_header_id|>\n\n"R1"<|eot_id|>'
            '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "look", "parameters": {}}<|eot_id|>'
            '<|start_header_id|>ipython<|end_header_id|>\n\n"R2"<|eot_id|>'
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            "llama", [*CALL[:2], result("call_1", 'a "b"\nc')],
            "<|start_header_id|>system<|end_header_id|>\n\n<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nQ<|eot_id|>"
            '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "look", "parameters": {"a": "b"}}<|eot_id|>'
            r'<|start_header_id|>ipython<|end_header_id|>' "\n\n" r'"a \"b\"\nc"<|eot_id|>'
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            "gpt_oss", CALLS,
            "<|start|>system<|message|>Reasoning: medium<|end|><|start|>user<|message|>Q<|end|>"
            "<|start|>assistant<|channel|>analysis<|message|>T\n\nC<|end|>"
            "<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{}<|call|>"
            '<|start|>functions.look to=assistant<|channel|>commentary<|message|>"R1"<|end|>'
            "<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{}<|call|>"
            '<|start|>functions.look to=assistant<|channel|>commentary<|message|>"R2"<|end|><|start|>assistant',
        ),
        (
            "gpt_oss", [*LONE, *CALL[1:]],
            "<|start|>system<|message|>Reasoning: medium<|end|><|start|>user<|message|>Q\n\nR<|end|>"
            '<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{"a": "b"}<|call|>'
            '<|start|>functions.look to=assistant<|channel|>commentary<|message|>"R"<|end|><|start|>assistant',
        ),
    ],
)  # fmt: skip
async def test_what_a_template_does_not_take_is_said_in_another_way(
    template: str, said: list[Said], whole: str
) -> None:
    assert await rendered(template, *said) == whole


@pytest.mark.parametrize("template", TEMPLATES)
async def test_what_every_template_takes_is_left_alone(template: str) -> None:
    said = [user(" Q"), assistant("A\n"), user("Q2")]
    as_it_is = words(TEMPLATES[template]).render(said, tools=[], continues=False, variables={})
    assert await rendered(template, *said) == as_it_is


@pytest.mark.parametrize("begun", ["The capital", "One.\n\nTwo,", 'say "'])
@pytest.mark.parametrize("before", [[user("Q")], [system("S"), user("Q")], [*CALL, assistant("A"), user("Q")], []])
@pytest.mark.parametrize("template", TEMPLATES)
async def test_a_prompt_ends_with_what_the_assistant_has_begun(template: str, before: list[Said], begun: str) -> None:
    whole = await rendered(template, *before, assistant(begun))
    assert whole.endswith(begun)
    assert whole.count(begun) == 1


TAGS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Oslo"


@pytest.mark.parametrize("after", [[], [user("Q2")]])
async def test_channels_within_a_text_for_gpt_oss_are_refused_in_its_own_words(after: list[Said]) -> None:
    with pytest.raises(JobFailure, match=r"refuses these messages: .*containing <\|channel\|> tags in the content"):
        await rendered("gpt_oss", user("Q"), assistant(TAGS), *after)


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(earlier=st.lists(of_any_text(), max_size=3), said=of_any_text(), tools=st.booleans())
async def test_what_a_worker_has_rendered_before_changes_no_prompt(
    template: str, earlier: list[list[Said]], said: list[Said], tools: bool
) -> None:
    offered = {"tools": [LOOK]} if tools and template in TAKE_TOOLS else {}
    worker = prompts(template)
    for each in earlier:
        await worker.render(request(*each, **offered))
    assert await worker.render(request(*said, **offered)) == await prompts(template).render(request(*said, **offered))


async def test_what_a_worker_s_template_needed_before_is_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    renders = 0
    render = MLXTokenizer.render

    def counted(self: MLXTokenizer, *args: Any, **how: Any) -> str:
        nonlocal renders
        renders += 1
        return render(self, *args, **how)

    monkeypatch.setattr(MLXTokenizer, "render", counted)
    deepseek, counts = prompts("deepseek"), []
    for _ in range(2):
        renders = 0
        await deepseek.render(request(system("S"), *CALLS, assistant("A"), user("Q2"), tools=[LOOK]))
        counts.append(renders)
    assert counts[1] < counts[0] - 4


async def test_tools_that_stand_in_the_system_message_alone_get_one() -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ tools if m.role == 'system' else m.content }}{% endfor %}"
    called = [user("look"), calling(call("1")), result("1", "R")]
    for said in ([user("look")], called):
        assert "'name': 'look'" in await rendered(template, *said, tools=[LOOK])
    assert await rendered(template, user("Q")) == "<user>Q"


async def test_each_adaptation_is_logged_once_in_a_worker(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "sluice.text")
    gemma = prompts("gemma")
    for _ in range(2):
        await gemma.render(request(user("Hello")))
        assert caplog.messages == []
    for _ in range(2):
        await gemma.render(request(system("Be brief."), user("Hello")))
    await gemma.render(request(system("Be brief."), *CALL))
    assert caplog.messages == [
        "The chat template accepts no system role: system text is put in front of the first user message.",
        "The chat template writes no tool calls: they are sent as text of the assistant.",
        "The chat template accepts no tool results: they are sent as user messages.",
    ]


async def test_what_no_adaptation_helps_against_is_the_template_s_first_word() -> None:
    refuses = "{{ raise_exception('No ' + messages | map(attribute='role') | join(' and ') + '.') }}"
    with pytest.raises(JobFailure, match=r"refuses these messages: No system and tool\.$"):
        await rendered(refuses, system("S"), result("1", "R"))


PARTS = "{% for m in messages %}<{{ m.role }}>{{ m.content | map(attribute='text') | join }}{% endfor %}"
STRICT_PARTS = PARTS.replace("%}<", "%}{{ raise_exception('No parts.') if m.content is string }}<", 1)


@pytest.mark.parametrize("template", [PARTS, STRICT_PARTS], ids=["omits", "refuses"])
async def test_a_template_that_reads_parts_alone_gets_texts_as_parts(template: str) -> None:
    said = [system("S"), user([text("Q"), text("more")]), assistant(""), user("Q2")]
    assert await rendered(template, *said) == "<system>S<user>Q\nmore<assistant><user>Q2"
    made = await prompt(template, *said)
    assert made.adapted == ("accepts contents only as lists of parts: texts are sent as parts",)


async def test_a_template_that_prints_lists_gets_no_parts() -> None:
    template = "{% for m in messages %}{% if m.role != 'system' or m.content is not string %}{{ m.content }}{% endif %}"
    template += "{% endfor %}"
    assert "type" not in await rendered(template, system("S"), user("Q"))


async def test_an_empty_answer_that_a_template_refuses_is_left_out() -> None:
    template = (
        "{% for m in messages %}{{ raise_exception('Empty.') if m.role == 'assistant' and not m.content }}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    assert await rendered(template, user("Q"), assistant(""), user("Q2")) == "<user>Q\n\nQ2"
    assert await rendered(template, user("Q"), assistant("A"), user("Q2")) == "<user>Q<assistant>A<user>Q2"


async def test_what_is_left_out_whatever_we_do_is_logged_and_no_refusal(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "sluice.text")
    template = "{{ messages[1].content if messages[0].role == 'system' else raise_exception('No system.') }}"
    assert await rendered(template, system("Be brief."), user("Hello")) == "Hello"
    assert caplog.messages == ["The chat template omits texts, tool calls or results, in every form that was tried."]
