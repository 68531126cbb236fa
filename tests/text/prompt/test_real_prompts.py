"""Prompts through real models' chat templates and tokenizers. They are fetched, so these tests run with `--all` alone;
`test_equality.py` compares with the templates that are here."""

import asyncio
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.selection import examples
from tests.text.conversations import Said
from tests.text.dialects.families import FOUND
from tests.text.dialects.real_templates import fetch
from tests.text.dialects.real_templates import tokenizer as tiny
from tests.text.prompt.appended import ours, turns
from tests.text.prompt.equality import CONVERSATIONS, ESCAPED, Compared, codec, compared, tokenizer_for, words
from tests.text.prompt.test_template_compat import LOOK, conversation, told
from tests.text.real_tokenizers import fetch_tokenizers
from tests.text.templated import request
from worker.errors import JobFailure
from worker.text.prompt.template_changes import results_by_call

pytestmark = [pytest.mark.registry, pytest.mark.slow]

# Of those that transformers renders with all texts, by template and conversation: why ours differs.
DIFFERS = {
    ("llama-cpp-python: Apertus-8B-Instruct", "calls one after the other"): "no content beside a call is an empty one",
    # With a system message anywhere: so it would change the beginning of a conversation that had none.
    **dict.fromkeys(
        [
            ("llama-cpp-python: muse-glimmer", "system later"),
            ("llama-cpp-python: unsloth-Apriel-1.5", "system later"),
            ("trl: muse_glimmer", "system later"),
        ],
        "the template leaves out its own system message",
    ),
}
# Templates that render no conversation, or none of some kind, and why.
REFUSE = {
    "llama-cpp-python: CohereForAI-c4ai-command-r-plus-tool_use": "a template for requests with tools alone",
    "llama-cpp-python: NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "a template for requests with tools alone",
    "llama-cpp-python: NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "a template for requests with tools alone",
    "llama-cpp-python: fireworks-ai-llama-3-firefunction-v2": "requires functions as a variable",
}


@pytest.fixture(scope="module")
def templates(pytestconfig: pytest.Config) -> dict[str, str]:
    assert pytestconfig.cache is not None
    fetched = fetch(pytestconfig.cache.mkdir("chat_templates"))
    return {name: source for name, source in fetched.items() if "training" not in name}


@pytest.fixture(scope="module")
def tokenizers(pytestconfig: pytest.Config) -> dict[str, Path]:
    assert pytestconfig.cache is not None
    return fetch_tokenizers(pytestconfig.cache.mkdir("tokenizers"))


async def test_prompts_are_those_of_transformers_to_the_token(
    templates: dict[str, str], tokenizers: dict[str, Path]
) -> None:
    found: dict[tuple[str, str], Compared] = {}
    for name, source in templates.items():
        model = codec(words(tokenizers[tokenizer_for(source)], source))
        for kind in CONVERSATIONS:
            found[name, kind] = await compared(words(tokenizers[tokenizer_for(source)], source), model, kind)
    taken = {case: each for case, each in found.items() if each.taken}
    assert len(taken) > 2_000
    differ = {case: each.ours for case, each in taken.items() if not each.equal and case[1] not in ESCAPED}
    assert differ.keys() == DIFFERS.keys(), {case: ours for case, ours in differ.items() if case not in DIFFERS}
    assert len(differ) <= 0.005 * len(taken)


async def test_in_random_conversations_each_text_is_there_once_and_in_its_place(templates: dict[str, str]) -> None:
    wrong = list[tuple[str, str, object]]()
    for name, source in templates.items():
        model, dice = codec(tiny(source)), random.Random(7)
        for number in range(examples(60)):
            said = conversation(dice)
            offered = {"tools": [LOOK]} if number % 2 and FOUND[name][0] else {}
            try:
                tokens = (await model.prompt(request(*said, **offered))).tokens
            except JobFailure as refusal:
                if name not in REFUSE and not _may_refuse(refusal):
                    wrong.append((name, refusal.message, said))
                continue
            text = str(tiny(source)._tokenizer.decode(tokens))
            count = Counter(re.findall(r"w\d+\.", text))
            for role in ("system", "user", "assistant", "tool"):
                own = [word for whose, word in told(said) if whose == role]
                by_call = [word for whose, word in told(results_by_call(said)) if whose == role]
                in_text = sorted(own, key=text.find)
                if [count[word] for word in own] != [1] * len(own) or in_text not in (own, by_call):
                    wrong.append((name, role, said))
            await asyncio.sleep(0)
    assert not wrong, f"{len(wrong)}, the first: {wrong[0]}"


async def test_a_longer_conversation_s_prompt_begins_with_the_shorter_one_s(templates: dict[str, str]) -> None:
    """But for what a template changes by itself: some put tools before the last question, others drop thoughts."""
    wrong = list[tuple[str, object]]()
    for name, source in templates.items():
        model, dice = codec(tiny(source)), random.Random(7)
        for number in range(examples(24)):
            tools = number % 2 == 1 and FOUND[name][0] is not None
            offered = {"tools": [LOOK]} if tools else {}

            async def render(said: list[Said]) -> str:
                tokens = (await model.prompt(request(*said, **offered))).tokens  # noqa: B023
                return str(tiny(source)._tokenizer.decode(tokens))  # noqa: B023

            conversation = turns(dice, tools=tools, systems=number % 4 > 1)
            try:
                if found := await ours(conversation, render):
                    wrong.append((name, found))
            except JobFailure as refusal:
                if name not in REFUSE and not _may_refuse(refusal):
                    wrong.append((name, refusal.message))
    assert not wrong, f"{len(wrong)}, the first: {wrong[0]}"


def _may_refuse(refusal: JobFailure) -> bool:
    """True for what a template does not support, and for a conversation of nothing but an empty answer."""
    return refusal.param == "tools" or any(
        reason in refusal.message for reason in ("empty conversation", "generator is not JSON serializable")
    )
