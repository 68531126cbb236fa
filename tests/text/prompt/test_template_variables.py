"""Which variables of the template a request sets."""

import logging
from typing import Any

import pytest

from tests.text.conversations import user
from tests.text.templated import prompts, rendered, request
from worker.text.prompt.template_variables import template_variables

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


async def test_an_effort_without_effect_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="sluice.text")
    plain = prompts("{{ messages[0].content }}")
    for _ in range(2):
        await plain.render(request(user("Hi"), reasoning_effort="high"))
    assert [record.getMessage() for record in caplog.records if "reasoning_effort" in record.getMessage()] == [
        "The chat template does not read reasoning_effort: it has no effect on requests that set it."
    ]
