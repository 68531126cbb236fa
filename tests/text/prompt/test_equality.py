"""Prompts are those of transformers, to the token, if the template takes the conversation. Through templates of real
models: `test_real_prompts.py`."""

import pytest

from tests.support.stack import TINY_CHAT
from tests.text.prompt.equality import CONVERSATIONS, codec, compared, words
from tests.text.templated import TEMPLATES

TAKEN = {"plain", "turns", "continued", "unicode", "space", "code", "long", "markers"}  # by every template


@pytest.mark.parametrize("template", TEMPLATES)
async def test_a_prompt_is_that_of_transformers_to_the_token(template: str) -> None:
    tokenizer = words(TINY_CHAT, TEMPLATES[template])
    model = codec(tokenizer)
    found = {kind: await compared(tokenizer, model, kind) for kind in CONVERSATIONS}
    taken = {kind: each for kind, each in found.items() if each.taken}
    assert taken.keys() >= TAKEN
    assert {kind: each.ours for kind, each in taken.items() if not each.equal} == {}
