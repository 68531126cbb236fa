"""The request for embeddings, in its model, in the page and in the JSON Schema."""

from typing import Any

import pytest
from pydantic import ValidationError

from schemas import EmbeddingRequest, explain, field_of
from tests.schemas import page
from tests.schemas.test_json_schema import reads

ACCEPTED: dict[str, tuple[Any, list[Any]]] = {
    "a text": ("a", ["a"]),
    "texts": (["a", "b"], ["a", "b"]),
    "tokens": ([5, 6], [[5, 6]]),
    "lists of tokens": ([[5], [6, 7]], [[5], [6, 7]]),
    "more tokens than there may be inputs": ([5] * 3_000, [[5] * 3_000]),
}
REFUSED: dict[str, tuple[Any, str, str]] = {
    "nothing": (None, "input", "must be a string, or a list"),
    "an empty text": ("", "input", "must not be empty"),
    "no inputs": ([], "input", "must not be empty"),
    "an empty text of two": (["a", ""], "input[1]", "must not be empty"),
    "an empty list of tokens": ([[]], "input[0]", "must not be empty"),
    "half a token": ([1.5], "input[0]", "must be a string, a token id or a list of token ids, not 1.5"),
    "a boolean": ([True], "input[0]", "must be a string, a token id or a list of token ids, not true"),
    "a negative token": ([[1], [2, -1]], "input[1][1]", "-1 is too small; the least is 0"),
    "half of a surrogate pair": (["\ud83d"], "input[0]", "half of a surrogate pair"),
    "kinds mixed": (["a", 1], "input", "mixes strings, token ids and lists; send entries of one kind"),
    "too many inputs": (["a"] * 2_049, "input", "has 2,049 entries; at most 2,048 are taken"),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_each_form_of_input_is_read(name: str) -> None:
    given, expected = ACCEPTED[name]
    assert EmbeddingRequest.model_validate({"input": given}).inputs == expected
    assert reads("EmbeddingRequest", {"input": given})


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_input_is_refused_with_its_place_and_the_reason(name: str) -> None:
    given, field, sentence = REFUSED[name]
    with pytest.raises(ValidationError) as refused:
        EmbeddingRequest.model_validate({"input": given})
    assert field_of(refused.value) == field
    assert sentence in explain(refused.value)
    beyond_a_schema = {"half of a surrogate pair", "kinds mixed", "too many inputs"}
    assert reads("EmbeddingRequest", {"input": given}) == (name in beyond_a_schema)


def test_an_unknown_field_is_refused_with_the_one_that_is_meant() -> None:
    with pytest.raises(ValidationError) as refused:
        EmbeddingRequest.model_validate({"input": "a", "dimension": 8})
    assert explain(refused.value) == "dimension: unknown field; did you mean dimensions?"


def test_the_page_lists_exactly_the_fields_of_the_request() -> None:
    lines = [line.partition(":")[0] for line in page.section("Embeddings").splitlines() if line.startswith("- ")]
    assert sorted(name for line in lines for name in page.names(line)) == sorted(EmbeddingRequest.model_fields)
