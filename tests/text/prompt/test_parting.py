"""Where the next turn's prompt parts from a prompt, and why."""

import pytest

from tests.text.conversations import Said, assistant, call, calling, result, system, user
from tests.text.prompt.appended import LOOK
from tests.text.templated import TEMPLATES, request, words
from worker.text.codec import TextCodec
from worker.text.prompt.parting import Parting

LOOKED = [system("S"), user("w1."), calling(call("a1b2c3d4e"), content="w2."), result("a1b2c3d4e", "w3.")]
THOUGHT = [user("w1."), calling(call("a1b2c3d4e"), reasoning="w2."), result("a1b2c3d4e", "w3.")]


async def parting(template: str, said: list[Said], **offered: object) -> Parting | None:
    told = words(TEMPLATES[template])
    codec = TextCodec(told, len(told.tokens))
    found = await codec.next_parting(request(*said, **offered))
    tokens = (await codec.prompt(request(*said, **offered))).tokens
    assert found is None or 0 <= found.token < len(tokens)
    return found


@pytest.mark.parametrize(
    ("template", "said", "why"),
    [
        ("qwen", THOUGHT, "drops the thoughts of earlier turns"),
        ("gpt_oss", LOOKED, "drops the text beside the calls of earlier turns, so it is put apart"),
        ("mistral", [system("S"), user("w1.")], "writes the system message in front of the last user message"),
    ],
)
async def test_what_the_template_does_is_the_reason(template: str, said: list[Said], why: str) -> None:
    found = await parting(template, said)
    assert found is not None
    assert found.why == why


async def test_tools_in_front_of_the_last_question_are_the_reason() -> None:
    found = await parting("mistral", [user("w1.")], tools=[LOOK])
    assert found is not None
    assert found.why == "writes the tools in front of the last user message"


@pytest.mark.parametrize("template", ["deepseek", "llama"])
async def test_a_template_that_appends_has_none(template: str) -> None:
    said = [system("S"), user("w1."), assistant("w2."), system("w3."), user("w4.")]
    assert await parting(template, said) is None
