"""The prompt of a conversation that goes on begins with the prompt that it had before. Through real models' templates:
`test_real_prompts.py`."""

import random
import re

import pytest
from jinja2 import Environment

from tests.selection import examples
from tests.text.conversations import Said, assistant, call, calling, developer, result, system, user
from tests.text.prompt.appended import LOOK, ours, partings, turns
from tests.text.prompt.test_template_compat import TAKE_TOOLS, whys
from tests.text.templated import TEMPLATES, rendered
from worker.text.prompt.template_compat import NeedsAdaptation, TemplateAdapter
from worker.text.prompt.template_inputs import TemplateFailed
from worker.text.tokenizer import TemplateMessages

WHY = "accepts system messages only at the front: later ones are marked in user turns or results"


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("tools", [False, True])
async def test_a_longer_conversation_s_prompt_begins_with_the_shorter_one_s(template: str, tools: bool) -> None:
    dice = random.Random(3)
    tools = tools and template in TAKE_TOOLS
    offered = {"tools": [LOOK]} if tools else {}

    async def render(said: list[Said]) -> str:
        return await rendered(template, *said, **offered)

    for _ in range(examples(20)):
        conversation = turns(dice, tools=tools, systems=True)
        assert await ours(conversation, render) == {}, conversation.said


async def test_a_template_that_moves_results_parts_by_itself() -> None:
    async def render(said: list[Said]) -> str:
        return "".join(each["content"] for each in reversed(said))

    conversation = turns(random.Random(3), tools=False, systems=True)
    assert await partings(conversation, render)
    assert await ours(conversation, render) == {}


async def test_a_system_message_stays_where_it_is_if_the_template_takes_it_there() -> None:
    text = await rendered("llama", user("a"), assistant("b"), developer("c"), user("d"))
    turns = re.findall(r"<\|start_header_id\|>(\w+)<\|end_header_id\|>\s+(\w)<", text)
    assert turns == [("user", "a"), ("assistant", "b"), ("system", "c"), ("user", "d")]


SAID = [user("a"), assistant("b"), system("c"), user("d")]


async def test_else_it_is_a_marked_part_of_the_next_user_turn() -> None:
    text = await rendered("mistral", *SAID)
    assert "[INST] <system>\nc\n</system>\n\nd [/INST]" in text or "[INST]<system>\nc\n</system>\n\nd[/INST]" in text


async def test_behind_a_result_it_is_a_part_of_the_result_and_no_user_s_turn() -> None:
    """Templates drop the thoughts of calls before the last turn of the user."""
    said = [user("a"), calling(call("call_1")), result("call_1", "Rain."), system("c")]
    text = await rendered("mistral", *said, tools=[LOOK])
    assert text.count("[INST]") == 1
    assert "Rain.\\n\\n<system>\\nc\\n</system>" in text or "Rain.\n\n<system>\nc\n</system>" in text


async def test_between_a_call_and_its_result_it_follows_the_result() -> None:
    said = [user("a"), calling(call("call_1")), system("c"), result("call_1", "Rain."), assistant("b"), user("d")]
    text = await rendered("mistral", *said, tools=[LOOK])
    assert text.index("TOOL_CALLS") < text.index("Rain.") < text.index("<system>") < text.index("b")


MOVED = "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
TURNS = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
SYSTEMS = "|selectattr('role', 'equalto', 'system')|list %}"
EACH = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
CHANGED_BY = {
    "moved to the front": MOVED + TURNS,
    "left out": TURNS,
    "refused": "{% if messages[1:]" + SYSTEMS + "{{ raise_exception('no') }}{% endif %}" + EACH,
    "as an answer": EACH.replace("{{ m.role }}", "{{ 'user' if m.role == 'user' else 'assistant' }}"),
    "instead of a default": "{% if not messages" + SYSTEMS + "<system>Be nice.{% endif %}" + EACH,
}  # fmt: skip


@pytest.mark.parametrize("template", CHANGED_BY.values(), ids=CHANGED_BY)
def test_a_template_does_not_take_it_there_if(template: str) -> None:
    assert WHY in whys(template, SAID)
    assert WHY not in whys(template, [system("c"), user("a")])


def test_a_template_that_takes_it_is_left_alone() -> None:
    assert whys(EACH, SAID) == []
    assert Environment().from_string(EACH).render(messages=SAID) == "<user>a<assistant>b<system>c<user>d"


async def test_ids_that_are_accepted_stay_when_a_later_one_is_not() -> None:
    before = [user("a"), calling(call("a1b2c3d4e")), result("a1b2c3d4e", "b")]
    text = await rendered("mistral", *before, calling(call("x")), result("x", "c"), tools=[LOOK])
    assert "a1b2c3d4e" in text
    assert "call00000" in text


def test_a_request_that_the_template_refuses_says_nothing_about_the_next() -> None:
    adapter, refuses = TemplateAdapter(), [True]

    def render(said: TemplateMessages, tools: list[Said]) -> str:
        if refuses[0]:
            raise TemplateFailed
        return Environment().from_string(EACH).render(messages=said)

    with pytest.raises(TemplateFailed):
        adapter.adapt(SAID, [], render)
    refuses[0] = False
    assert adapter.adapt(SAID, [], render) == ("<user>a<assistant>b<system>c<user>d", [])


def test_a_template_is_tried_on_a_thread_and_not_on_the_event_loop() -> None:
    adapter = TemplateAdapter()

    def render(said: TemplateMessages, tools: list[Said]) -> str:
        return Environment().from_string(EACH).render(messages=said)

    with pytest.raises(NeedsAdaptation):
        adapter.render_unchanged(SAID, [], render)
    adapter.adapt(SAID, [], render)
    assert adapter.render_unchanged(SAID, [], render)[1] == []
