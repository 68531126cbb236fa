"""The dialects of real models' chat templates. They are fetched, so the tests run with `--all` alone."""

import pytest

from tests.text.dialects.families import FOUND
from tests.text.dialects.real_templates import fetch, tokenizer
from worker.text.output.formats import ModelFormat

pytestmark = [pytest.mark.registry, pytest.mark.slow]


@pytest.fixture(scope="module")
def templates(pytestconfig: pytest.Config) -> dict[str, str]:
    assert pytestconfig.cache is not None
    return fetch(pytestconfig.cache.mkdir("chat_templates"))


def test_each_template_is_in_the_table(templates: dict[str, str]) -> None:
    assert {name for name in templates if "training" not in name} == set(FOUND)


def test_the_dialect_of_each_template_is_found(templates: dict[str, str]) -> None:
    for name, expected in FOUND.items():
        found = ModelFormat.of(tokenizer(templates[name]))
        dialect = "harmony" if found.harmony else found.dialect and found.dialect.name
        thoughts = found.thoughts.begin if found.thoughts else ""
        assert (dialect or "", found.proof, thoughts) == expected, name
