"""The bodies of the fuzz test: mostly valid if the schema allows them, and the same in each run."""

import json
from typing import Any

from hypothesis import given, settings
from jsonschema import Draft202012Validator

from schemas.generate import contract
from tests.selection import examples
from tests.support.chaos.from_schema import REQUESTS, bodies

CONTRACT = contract()
REQUEST = Draft202012Validator({**CONTRACT, "$ref": "#/$defs/Request"})


@settings(max_examples=examples(150), deadline=None)
@given(REQUESTS)
def test_what_is_made_from_the_schema_is_what_the_schema_allows(request: Any) -> None:
    assert [error.message for error in REQUEST.iter_errors(request)] == []


def test_the_bodies_are_the_same_each_time_and_as_many_different_ones_as_asked_for() -> None:
    first = bodies(40)
    assert bodies(40) == first
    assert len(set(first)) == len(first) == 40


def test_some_bodies_are_json_and_some_are_not() -> None:
    def is_json(body: bytes) -> bool:
        try:
            json.loads(body)
        except (ValueError, RecursionError):  # some nest deeper than the reader goes
            return False
        return True

    assert {is_json(body) for body in bodies(100)} == {True, False}
