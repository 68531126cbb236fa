"""Which variables of the template a request sets."""

import logging
from typing import Any

import pytest

from tests.text.conversations import user
from tests.text.templated import prompts, rendered, request
from worker.errors import JobFailure
from worker.text.prompt.template_inputs import template_variables

READS = "{{ messages[0].content }} {{ reasoning_effort }}"


def variables(template: str, **fields: Any) -> tuple[dict[str, Any], list[str]]:
    return template_variables(request(user("Hi"), **fields), template)


def test_a_field_that_the_template_reads_is_given_to_it() -> None:
    assert variables(READS, reasoning_effort="low") == ({"reasoning_effort": "low"}, [])


def test_a_field_that_the_template_does_not_read_is_named() -> None:
    assert variables(READS, reasoning_effort="low", verbosity="high") == ({"reasoning_effort": "low"}, ["verbosity"])


def test_part_of_a_longer_name_is_not_the_field() -> None:
    assert variables("{{ my_reasoning_effort }}", reasoning_effort="low") == ({}, ["reasoning_effort"])


def test_a_template_that_is_no_text_is_given_the_request_s_own_variables_alone() -> None:
    own = {"thinking": True}
    assert variables("", verbosity="low", chat_template_kwargs=own) == (own, ["verbosity"])


async def test_the_effort_reaches_gpt_oss() -> None:
    assert "Reasoning: high" in await rendered("gpt_oss", user("Hi"), reasoning_effort="high")
    assert "Reasoning: medium" in await rendered("gpt_oss", user("Hi"))


@pytest.mark.parametrize(
    ("asked", "written"),
    [("none", "low"), ("minimal", "low"), ("medium", "medium"), ("xhigh", "high"), ("max", "high")],
)
async def test_gpt_oss_is_given_an_effort_that_it_knows(asked: str, written: str) -> None:
    assert f"Reasoning: {written}<" in await rendered("gpt_oss", user("Hi"), reasoning_effort=asked)


SOLAR = "{{ 'off' if reasoning_effort in ['low', 'minimal'] else 'on' if reasoning_effort != 'high' else 'full' }}"
HY3 = "{% if reasoning_effort not in ['high', 'low', 'no_think'] %}{{ raise_exception('No.') }}{% endif %}"
MORE = "{{ 'more' if reasoning_effort == 'high' else 'most' if reasoning_effort == 'max' else '' }}"


@pytest.mark.parametrize(
    ("template", "asked", "text"),
    [
        (SOLAR, "none", "off"),
        (SOLAR, "xhigh", "full"),
        (HY3 + "{{ reasoning_effort }}", "none", "no_think"),
        (HY3 + "{{ reasoning_effort }}", "max", "high"),
        (MORE, "low", ""),  # what it does not name is less than what it names
        (MORE, "xhigh", ""),
        ("{{ reasoning_effort | default('medium') }}", "low", "low"),
    ],
)
async def test_an_effort_that_the_template_does_not_name_is_the_nearest_that_it_names(
    template: str, asked: str, text: str
) -> None:
    assert await rendered(template + "{{ messages[0].content }}", user("Hi"), reasoning_effort=asked) == text + "Hi"


SWITCH = "{{ enable_thinking }} {{ thinking_budget }} {{ thinking }}"


@pytest.mark.parametrize("fields", [{"max_reasoning_tokens": 0}, {"reasoning_effort": "none"}])
def test_no_reasoning_switches_it_off_where_the_template_has_a_switch(fields: dict[str, Any]) -> None:
    assert variables(SWITCH, **fields) == ({"enable_thinking": False, "thinking": False, "thinking_budget": 0}, [])
    own = {"enable_thinking": True}
    assert variables("{{ enable_thinking }}", chat_template_kwargs=own, **fields)[0] == own


def test_a_budget_is_told_to_templates_that_read_one() -> None:
    assert variables(SWITCH, max_reasoning_tokens=7) == ({"thinking_budget": 7}, [])
    assert variables("{{ messages }}", thinking_token_budget=7) == ({}, [])


async def test_an_effort_without_effect_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="sluice.text")
    plain = prompts("{{ messages[0].content }}")
    for _ in range(2):
        await plain.render(request(user("Hi"), reasoning_effort="high"))
    assert [record.getMessage() for record in caplog.records if "reasoning_effort" in record.getMessage()] == [
        "The chat template does not read reasoning_effort: it has no effect on requests that set it."
    ]


# Tools and efforts that a template refuses

HEAD = "{% for tool in tools or [] %}"
TAIL = "{% endfor %}{{ reasoning_effort }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
PICKY = {
    "no description": "{{ tool.function.name + ': ' + tool.function.description }}",
    "no parameters": "{{ tool.function.name ~ tool.function.parameters['properties'] | length }}",
    "a list of types": "{{ tool.function.name }}{% for p in (tool.function.parameters.properties or {}).values() %}"
    "{{ p.type + '' }}{% endfor %}",
}
BARE = {"type": "function", "function": {"name": "look"}}
LISTED = {"about": {"type": ["string", "null"]}}
TYPED = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": LISTED}}}


@pytest.mark.parametrize("restriction", PICKY)
async def test_tools_are_adapted_to_a_template_that_fails_on_them(
    restriction: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sluice.text")
    worker = prompts(HEAD + PICKY[restriction] + TAIL)
    for _ in range(2):
        await worker.render(request(user("Hi"), tools=[TYPED if restriction == "a list of types" else BARE]))
    assert len(caplog.messages) == 1
    plain = {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"properties": {}}}}
    unneeded = await prompts(HEAD + PICKY[restriction] + TAIL).render(request(user("Hi"), tools=[plain]))
    assert await worker.render(request(user("Hi"), tools=[plain])) == unneeded


@pytest.mark.parametrize(
    ("known", "asked", "given"),
    [
        (("low", "medium", "xhigh"), "high", "xhigh"),
        (("low", "medium", "xhigh"), "minimal", "low"),
        (("none", "high"), "low", "high"),
        (("none", "high"), "medium", "high"),
        (("low", "high"), "medium", "high"),
        (("other",), "high", ""),
    ],
)
async def test_the_nearest_effort_that_the_template_knows_is_given(
    known: tuple[str, ...], asked: str, given: str
) -> None:
    check = "{% if reasoning_effort and reasoning_effort not in KNOWN %}{{ raise_exception('No.') }}{% endif %}"
    template = check.replace("KNOWN", str(list(known))) + TAIL.removeprefix("{% endfor %}")
    assert await rendered(template, user("Hi"), reasoning_effort=asked) == f"{given}<user>Hi"


@pytest.mark.parametrize(
    "fails",
    [
        "{{ messages.nothing.at.all }}",
        "{{ 1 // 0 }}",
        "{{ [].pop() }}",
        "{{ messages[99].content }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
async def test_whatever_a_template_raises_the_request_is_refused_with_its_reason(fails: str) -> None:
    with pytest.raises(JobFailure) as refused:
        await prompts(fails).render(request(user("Hi")))
    assert (refused.value.type, refused.value.param) == ("invalid_request", "messages")
