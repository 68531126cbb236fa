"""Whatever stands in a schema, a request ends in a grammar or in a refusal."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.selection import examples
from tests.text.grammar.schema.test_held import KEYWORDS, ODD, WHOLE
from tests.text.guided import FORCED, model
from worker.errors import JobFailure
from worker.text.grammar.builder import Grammars, OutputConstraint
from worker.text.grammar.guide import markup_of
from worker.text.grammar.tool_grammars import HeldFunction
from worker.text.grammar.trial import question

HUGE = st.sampled_from([10**400, -(10**400), 10**4299 - 1, 10**4300 - 1, 1e308, 5e-324, -0.0, 2**63])
NAMES = st.sampled_from(["a", "b", "$defs", "type", "", "a b", "</parameter>", "é"])
VALUE = st.one_of(ODD, HUGE, st.lists(st.lists(ODD, max_size=2), max_size=2), WHOLE)
ANY = st.one_of(
    st.dictionaries(st.sampled_from(KEYWORDS), VALUE, max_size=4),
    st.builds(
        lambda typed, more: {"type": typed, **more},
        st.sampled_from(["integer", "number", "string", "object", "array", "null", ["integer", "null"]]),
        st.dictionaries(st.sampled_from(KEYWORDS), VALUE, max_size=3),
    ),
    VALUE,
)
PARAMETERS = st.one_of(
    st.dictionaries(st.sampled_from(KEYWORDS), VALUE, max_size=4),
    st.fixed_dictionaries(
        {"type": st.just("object"), "properties": st.dictionaries(NAMES, ANY, max_size=3)},
        optional=dict.fromkeys(("$defs", "definitions", "required", "additionalProperties", "anyOf"), VALUE),
    ),
)


def of(parameters: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": parameters}}


@pytest.mark.parametrize("format", FORCED)
@settings(deadline=None, max_examples=examples(60))
@given(parameters=PARAMETERS)
@example(parameters=of({"type": "integer", "maximum": 10**400}))
@example(parameters=of({"type": "integer", "exclusiveMinimum": 10**4300 - 1}))
@example(parameters=of({"type": "number", "maximum": 10**4300 - 1, "minimum": 10**4299}))
@example(parameters={**of({"$ref": "#/$defs/b"}), "$defs": []})
@example(parameters={**of({"$ref": "#/definitions/b"}), "definitions": 5})
@example(parameters=of({"type": [["string"]]}))
@example(parameters=of({"type": {"a": 1}}))
@example(parameters=of({"enum": [10**4299]}))
@example(parameters=of({"type": "string", "minLength": 10**400}))
@example(parameters=of({"anyOf": [{"type": ["string"]}]}))
def test_parameters_end_in_a_grammar_or_in_a_refusal(format: str, parameters: Any) -> None:
    grammars = Grammars(markup_of(model(format).tokenizer, model(format).dialect))
    with suppress(JobFailure):
        wish = OutputConstraint(None, (HeldFunction("weather", parameters),), allows_many=True)
        _, parts = grammars.grammar_as_text(wish)
        grammars.grammar(wish, has_thought=True, rewritten=parts.schemas)


@settings(deadline=None, max_examples=examples(150))
@given(schema=st.one_of(ANY, PARAMETERS).filter(lambda schema: isinstance(schema, dict)))
@example(schema={"type": "integer", "maximum": 10**400})
@example(schema={"multipleOf": 10**400})
@example(schema={"const": 10**400})
@example(schema={"minItems": 10**400})
def test_a_response_s_schema_ends_in_a_grammar_or_in_a_refusal(schema: Any) -> None:
    grammars = Grammars(markup_of(model().tokenizer, model().dialect))
    with suppress(JobFailure):
        wish = OutputConstraint(schema, (), allows_many=True)
        spelled, parts = grammars.grammar_as_text(wish)
        grammar = grammars.grammar(wish, has_thought=False, rewritten=parts.schemas)
        assert json.loads(spelled)["grammars"][1:] == json.loads(grammar)["grammars"][1:]


def test_equal_wishes_ask_the_same_question() -> None:
    markup, text = markup_of(model().tokenizer, model().dialect), {"type": "string"}
    schema = {"type": "object", "properties": {"a": text, "b": text, "".join(["a", "b"]): text}}
    wishes = [
        OutputConstraint(each, (HeldFunction("f", None),), False) for each in (schema, json.loads(json.dumps(schema)))
    ]
    assert len({question(markup, wish, has_thought=True) for wish in wishes}) == 1
