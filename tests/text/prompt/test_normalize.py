import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings

from tests.text.conversations import (
    Said,
    assistant,
    call,
    calling,
    developer,
    image,
    read,
    result,
    system,
    text,
    unique,
    user,
)
from worker.text.prompt.normalize import normalize


def normal(*said: Said) -> list[Said]:
    return normalize(read(list(said)))


def pieces(content: Any) -> list[str]:
    """Words and images, in order."""
    if isinstance(content, list):
        said = [part["text"] if part["type"] == "text" else part["image_url"]["url"] for part in content]
        return [piece for each in said for piece in pieces(each)]
    return re.findall(r"w\d+\.", content or "")


def _content(message: Said) -> Any:
    """The content, with the refusal, which becomes a part of it."""
    return [message["content"], message.get("refusal")]


def told(conversation: list[Said]) -> dict[str, list[Any]]:
    """Return the texts by role."""
    of: dict[str, list[Any]] = {}
    for message in conversation:
        role = message["role"].replace("developer", "system")
        of.setdefault(role, []).extend(pieces(message["content"]) + pieces(message.get("refusal")))
        thoughts = message.get("reasoning_content") or message.get("reasoning")
        of.setdefault("thoughts", []).extend(pieces(thoughts))
        for each in message.get("tool_calls") or []:
            arguments = each["function"]["arguments"]
            of.setdefault("calls", []).append((each["id"], pieces(json.dumps(arguments))))
    return {who: words for who, words in of.items() if words}


def sent_again(conversation: list[Said]) -> list[Said]:
    """Return messages as a client sends them, with strings for arguments."""
    again = json.loads(json.dumps(conversation))
    for each in (each["function"] for message in again for each in message.get("tool_calls", [])):
        if not isinstance(each["arguments"], str):
            each["arguments"] = json.dumps(each["arguments"])
    return again


@settings(deadline=None)
@given(unique())
def test_every_text_and_image_is_there_once_and_in_order_within_its_role(said: list[Said]) -> None:
    assert told(normal(*said)) == told(said)


@settings(deadline=None)
@given(unique())
def test_what_is_normal_stays_as_it_is(said: list[Said]) -> None:
    once = normal(*said)
    assert normal(*sent_again(once)) == once


@settings(deadline=None)
@given(unique())
def test_no_two_turns_of_one_role_are_neighbours_and_each_text_is_at_its_place(said: list[Said]) -> None:
    once = normal(*said)
    everything = [word for message in once for word in re.findall(r"w\d+\.", json.dumps(message["content"]))]
    assert everything == [word for message in said for word in re.findall(r"w\d+\.", json.dumps(_content(message)))]
    roles = ["call" if "tool_calls" in message else message["role"] for message in once]
    assert [a for a, b in pairwise(roles) if a == b and a not in ("call", "tool")] == []


def test_a_well_formed_conversation_is_left_alone() -> None:
    said = [
        system("Be brief."),
        user([text("What is this?"), image("AA==")], name="ada"),
        assistant("A cat."),
        user("And the weather?"),
        calling(call("1"), content="Let me see.", reasoning_content="Ask the tool."),
        result("1", [text("Rain,"), text("all day.")]),
        assistant("Rain.", reasoning_content="So it says."),
        user(""),
    ]
    expected = json.loads(json.dumps(said))
    expected[4]["tool_calls"][0]["function"]["arguments"] = {}
    assert normal(*said) == expected


def test_developers_and_systems_are_system_messages_at_their_places_and_one_if_they_are_neighbours() -> None:
    said = [
        developer("Zero."), user("a"), developer("One."), system([text("Two.")]), assistant("b"), system("Three."),
        user("c"),
    ]  # fmt: skip
    assert normal(*said) == [
        system("Zero."), user("a"), system([text("One."), text("\n\n"), text("Two.")]), assistant("b"),
        system("Three."), user("c"),
    ]  # fmt: skip


def test_an_empty_system_message_between_users_is_left_out_and_they_are_one() -> None:
    assert normal(user("a"), system(""), user("b")) == [user("a\n\nb")]


@settings(deadline=None)
@given(unique(), unique())
def test_a_longer_conversation_begins_with_the_turns_of_a_shorter_one(said: list[Said], more: list[Said]) -> None:
    before = normal(*said)
    after = normal(*said, assistant("An answer."), *more)
    assert after[: len(before) - 1] == before[:-1]
    assert before[-1]["role"] == "assistant" or after[len(before) - 1] == before[-1]


def test_strings_and_parts_make_parts_and_no_two_texts_of_different_messages_are_glued() -> None:
    said = [
        user("a"),
        user([text("b"), text("c")]),
        user([image("1")]),
        user("d"),
        user([text(""), image("2"), text("e")]),
    ]
    assert normal(*said) == [
        user([text("a"), text("\n\n"), text("b"), text("c"), image("1"), text("d"), image("2"), text("e")])
    ]


def test_calls_and_results_stay_apart_and_in_order() -> None:
    said = [user("a"), assistant("b"), calling(call("1")), calling(call("2")), result("2", "c"), result("1", "d")]
    roles = [message["role"] for message in normal(*said)]
    assert roles == ["user", "assistant", "assistant", "assistant", "tool", "tool"]


def test_a_name_stays_where_all_that_become_one_have_it() -> None:
    ada, bob = user("a", name="ada"), user("b", name="bob")
    assert normal(ada, ada) == [user("a\n\na", name="ada")]
    assert normal(ada, bob) == [user("a\n\nb")]


@pytest.mark.parametrize("content", [None, "", [], [text("")], [text(""), text("")]])
def test_nothing_is_an_empty_string(content: Any) -> None:
    assert normal(user("a"), assistant(content)) == [user("a"), assistant("")]


def test_an_empty_part_is_dropped() -> None:
    assert normal(user([text("a"), text(""), image("1")])) == [user([text("a"), image("1")])]


@pytest.mark.parametrize(
    ("sent", "arguments"),
    [
        ('{"city": "Ulm", "days": [1, 2.5, null]}', {"city": "Ulm", "days": [1, 2.5, None]}),
        (' {"a": {"b": true}}\n', {"a": {"b": True}}),
        ("", {}),
        ('{"city": "Ul', '{"city": "Ul'),
        ("[1]", "[1]"),
        ('"Ulm"', '"Ulm"'),
        ("Ulm", "Ulm"),
        ('{"a": NaN}', '{"a": NaN}'),
        ('{"a": 1e999}', '{"a": 1e999}'),
        (r'{"a": "\ud83d"}', r'{"a": "\ud83d"}'),
        ('{"a":' * 99 + "1" + "}" * 99, '{"a":' * 99 + "1" + "}" * 99),
        ('{"a":' * 99_999, '{"a":' * 99_999),
    ],
)
def test_arguments_are_an_object_where_they_are_one(sent: str, arguments: Any) -> None:
    assert normal(calling(call("1", sent))) == [calling(call("1", arguments), content="")]


@pytest.mark.parametrize(
    ("sent", "is_read"),
    [
        ('{"a": "' + "x" * 999_000 + '"}', True),
        ('{"a": "' + "x" * 1_000_000 + '"}', False),
    ],
)
def test_arguments_that_would_take_long_to_read_stay_text(sent: str, is_read: bool) -> None:
    (turn,) = normal(calling(call("1", sent)))
    assert turn["tool_calls"][0]["function"]["arguments"] == (json.loads(sent) if is_read else sent)


def test_what_other_servers_and_openai_s_libraries_send_back_is_read() -> None:
    empty = {"refusal": None, "annotations": None, "audio": None, "function_call": None, "tool_calls": None}
    streamed = {**call("1"), "index": 0}
    assert normal(assistant("a", **empty)) == [assistant("a")]
    assert normal(calling(streamed)) == [calling(call("1", {}), content="")]
    assert normal(assistant("a", tool_calls=[])) == [assistant("a")]
    assert normal(assistant(None, refusal="I must not.")) == [assistant("I must not.")]


@pytest.mark.parametrize(
    ("sent", "thoughts"),
    [
        ({"reasoning": "a"}, "a"),
        ({"reasoning_content": "a"}, "a"),
        ({"reasoning": "a", "reasoning_content": "a"}, "a"),
        ({"reasoning": "a", "reasoning_content": "b"}, "a\n\nb"),
    ],
)
def test_thoughts_have_the_name_that_templates_read(sent: Said, thoughts: str) -> None:
    assert normal(assistant("x", **sent)) == [assistant("x", reasoning_content=thoughts)]


def test_thoughts_of_answers_that_become_one_are_kept() -> None:
    said = [assistant("x", reasoning="a"), assistant("y"), assistant("z", reasoning="b")]
    assert normal(*said) == [assistant("x\n\ny\n\nz", reasoning_content="a\n\nb")]


def test_ten_thousand_messages_that_become_one_take_no_time_to_speak_of() -> None:
    (one,) = normal(*[user("word " * 300)] * 10_000)  # copied one by one, these were gigabytes
    assert len(one["content"]) == 10_000 * 1_502 - 2
