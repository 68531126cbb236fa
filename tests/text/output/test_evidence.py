"""What a chat template shows about its model's answers."""

from typing import Any

import pytest

from tests.text.dialects.reading import BY_NAME
from tests.text.dialects.real_templates import tokenizer
from worker.text.output.formats import ModelFormat

TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
HERMES = (
    "{{ tools | tojson }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}"
)
THINKS = "{% for m in messages %}<|{{ m.role }}|><think>{{ m.reasoning_content }}</think>{{ m.content }}{% endfor %}"
XML_TOOLS = (
    "{% if xml_tools %}{{ xml_tools }} Call them within <tool_call></tool_call>:{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
)


@pytest.mark.parametrize(
    ("templates", "dialect", "proof", "thinks"),
    [
        (TURNS, None, "none", False),
        (HERMES, "hermes", "read back", False),
        (XML_TOOLS, "hermes", "by its markers", False),
        ({"default": TURNS, "tool_use": HERMES}, "hermes", "read back", False),
        ({"default": THINKS, "tool_use": HERMES}, "hermes", "read back", True),
        ({"default": TURNS, "rag": HERMES}, None, "none", False),
        ({"default": HERMES}, "hermes", "read back", False),
    ],
)
def test_each_template_that_renders_chats_or_tools_is_evidence(
    templates: Any, dialect: str | None, proof: str, thinks: bool
) -> None:
    found = ModelFormat.of(tokenizer(templates))
    assert (found.dialect, found.proof) == (BY_NAME.get(dialect or ""), proof)
    assert (found.thoughts is not None) == thinks


@pytest.mark.parametrize(("prompt", "opened"), [("<|assistant|>>>>", ">>>"), ("<|assistant|>", "")])
def test_the_prompt_may_end_with_the_opening_of_a_call(prompt: str, opened: str) -> None:
    template = (
        "{{ tools | tojson }}{% for m in messages %}<|{{ m.role }}|>{% for call in m.tool_calls or [] %}"
        ">>>{{ call.function.name }}\n{{ call.function.arguments | tojson }}{% else %}{{ m.content }}{% endfor %}"
        "{% endfor %}{% if add_generation_prompt %}" + prompt + "{% endif %}"
    )
    found = ModelFormat.of(tokenizer(template))
    assert (found.dialect, found.proof) == (BY_NAME["functionary_v3.2"], "read back")
    assert found.opened == opened
