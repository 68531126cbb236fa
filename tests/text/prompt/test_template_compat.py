"""Whatever the order of a conversation, each text and each call is in the prompt: once, in order, as whose it was."""

import random
import re
from collections.abc import Iterator

import pytest
from jinja2 import Environment, TemplateError

from tests.selection import examples
from tests.text.conversations import Said, assistant, call, calling, numbered, result, system, user
from tests.text.templated import TEMPLATES, rendered
from worker.text.prompt.template_compat import Finding, Flaw, TemplateAdapter
from worker.text.prompt.template_inputs import TemplateFailed
from worker.text.tokenizer import TemplateMessages

LOOK: Said = {"type": "function", "function": {"name": "look", "description": "Look at it."}}
CONVERSATIONS = examples(150)  # with tools, and as many without
TAKE_TOOLS = sorted(TEMPLATES.keys() - {"forgetful", "gemma"})

# What begins a turn, and whose. The first group that matched is the name; others are as in ROLES.
TURNS = {
    "deepseek": r"<\|(User|Assistant|tool_output)\|>",
    "forgetful": r"<\|(user|assistant)\|>",
    "gemma": r"<start_of_turn>(user|model)",
    "gpt_oss": r"<\|start\|>(system|user|assistant|functions)|<\|start\|>(developer)",
    "llama": r"<\|start_header_id\|>(\w+)<",
    "mistral": r"\[(INST|/INST|TOOL_RESULTS|/TOOL_RESULTS|TOOL_CALLS)\]",
    "qwen": r"<\|im_start\|>(\w+)",
}
ROLES = {
    "User": "user", "INST": "user", "Assistant": "assistant", "model": "assistant", "/INST": "assistant",
    "/TOOL_RESULTS": "assistant", "TOOL_CALLS": "assistant", "tool_output": "tool", "functions": "tool",
    "ipython": "tool", "TOOL_RESULTS": "tool", "developer": "system",
}  # fmt: skip
# Where the words of a role may stand: a template may know no other way.
MAY_BE = {"system": {"system", "user", "tool"}, "user": {"user"}, "assistant": {"assistant"}, "tool": {"tool", "user"}}


def conversation(dice: random.Random) -> list[Said]:
    numbers, ids = numbered(), ["call_1", "call_2", "call_3"]

    def words() -> str:
        return " ".join(next(numbers) for _ in range(dice.randint(0, 2)))

    def calls() -> list[Said]:
        chosen = dice.sample(ids, dice.randint(1, 3))
        return [call(id, f'{{"about": "{next(numbers)}"}}' if dice.random() < 0.8 else words()) for id in chosen]

    def message() -> Said:
        match dice.choice(["system", "user", "assistant", "call", "tool"]):
            case "system":
                return system(words())
            case "user":
                return user(words())
            case "assistant":
                return assistant(words())
            case "call":
                return calling(*calls())
        return result(dice.choice(ids), words())

    return [message() for _ in range(dice.randint(1, 8))]


def told(said: list[Said]) -> Iterator[tuple[str, str]]:
    """Each word, and whose it is."""
    for message in said:
        written = [message["content"] or "", *(each["function"]["arguments"] for each in message.get("tool_calls", ()))]
        for word in re.findall(r"w\d+\.", " ".join(written)):
            yield message["role"], word


def places(template: str, text: str) -> dict[str, list[str]]:
    """Return the roles of the turns that contain each word."""
    found: dict[str, list[str]] = {}
    role = "system"
    for piece in re.finditer(rf"(?P<word>w\d+\.)|{TURNS[template]}", text):
        if piece["word"]:
            found.setdefault(piece["word"], []).append(role)
        else:
            name = next(group for group in piece.groups()[1:] if group)
            role = ROLES.get(name, name)
    return found


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("tools", [False, True])
async def test_of_random_conversations_nothing_is_dropped_or_put_into_another_s_mouth(
    template: str, tools: bool
) -> None:
    dice, wrong = random.Random(7), []
    offered = {"tools": [LOOK]} if tools and template in TAKE_TOOLS else {}
    for _ in range(CONVERSATIONS):
        said = conversation(dice)
        found = places(template, await rendered(template, *said, **offered))
        for role, word in told(said):
            if not found.get(word) or not MAY_BE[role].issuperset(found[word]):
                wrong.append((role, word, found.get(word), said))
    assert not wrong, f"{len(wrong)}, the first: {wrong[0]}"


@pytest.mark.parametrize("template", TEMPLATES)
async def test_the_texts_of_a_role_stay_in_order(template: str) -> None:
    dice = random.Random(8)
    for _ in range(examples(40)):
        said = conversation(dice)
        text = await rendered(template, *said)
        for role in MAY_BE:
            words = [word for whose, word in told(said) if whose == role]
            assert words == sorted(words, key=text.index)


CALLED: Said = calling(call("call_1", '{"about": "w1."}'))


@pytest.mark.parametrize("first", [assistant("w1."), CALLED, calling(call("call_1"), call("call_2"))])
async def test_where_tools_take_the_first_turn_for_a_user_s_llama_gets_one(first: Said) -> None:
    text = await rendered("llama", first, user("w2."), CALLED, user("w3."), tools=[LOOK])
    _, *turns = text.split("<|start_header_id|>")[1:]
    assert [turn.partition("<")[0] for turn in turns][:2] == ["user", "assistant"]
    assert text.count('{"name": "look", "parameters"') == 1 + len(first.get("tool_calls", ()))


def adapted(
    template: str, conversation: TemplateMessages, think: tuple[str, str] | None = None
) -> tuple[str, list[Finding]]:
    def render(said: TemplateMessages, tools: list[Said]) -> str:
        try:
            return Environment().from_string(template).render(messages=said, tools=tools)
        except TemplateError as error:
            raise TemplateFailed from error

    return TemplateAdapter(think).adapt(conversation, [], render)


def whys(template: str, conversation: TemplateMessages, think: tuple[str, str] | None = None) -> list[str]:
    return [finding.why for finding in adapted(template, conversation, think)[1]]


def test_a_text_that_comes_twice_has_to_be_there_twice() -> None:
    template = "{% for m in messages[:2] %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    said = [user("Yes"), assistant("No"), user("Yes")]
    assert whys(template, said) == [Flaw.OMITS.why]
    assert whys(template.replace("[:2]", ""), said) == []


def test_each_call_has_to_be_there_not_only_one_of_them() -> None:
    calls = "{% for m in messages[1:] %}{{ m.content }}{{ m.tool_calls }}|{% endfor %}"
    template = "{{ messages[0].content if messages[0].role != 'assistant' }}" + calls
    look = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {}}}
    called = {"role": "assistant", "content": "", "tool_calls": [look]}
    assert whys(template, [called, user("Q"), called]) == ["requires a user turn first: an empty one is added"]


def test_thoughts_in_a_text_may_be_left_out_and_no_other_words() -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}{% endfor %}"
    said = [user("Q"), assistant("<think>long thoughts</think>A"), user("Q")]
    assert whys(template, said, ("<think>", "</think>")) == []
    assert whys(template.replace("[-1]", "[0]"), said, ("<think>", "</think>")) == [Flaw.OMITS.why]


def test_a_template_that_knows_no_roles_is_taken_as_it_is() -> None:
    said = [assistant("A"), user("Q")]
    assert adapted("{% for m in messages %}{{ m.content }}{% endfor %}", said)[0] == "AQ"


def test_a_template_may_write_the_results_of_a_turn_in_the_order_of_its_calls() -> None:
    ordered = (
        "{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% if m.tool_calls %}{% set calls = m.tool_calls %}"
    )
    ordered += "{% for c in calls %}{% for r in messages if r.tool_call_id == c.id %}{{ r.content }}{% endfor %}"
    ordered = ordered.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' }}") + "{% endfor %}{% endif %}"
    said = [user("Q"), calling(call("1", {}), call("2", {}), content=""), result("2", "Sun"), result("1", "Rain")]
    text, needed = adapted(ordered + "{% endfor %}", said)
    assert (needed, text.endswith("RainSun")) == ([], True)
    # Results of another order are another conversation's: this one gets turns of one call.
    backwards = ordered.replace("in calls %}", "in calls | reverse %}") + "{% endfor %}"
    assert adapted(backwards, [*said[:2], *reversed(said[2:])])[1] != []
