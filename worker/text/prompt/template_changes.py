"""Changes to a conversation that make a chat template accept it.

No change drops text, and none affects a conversation that does not need it. They are tried in groups (ladders), all
changes of a ladder at once.
"""

import json
import re
from collections.abc import Callable, Sequence
from itertools import chain, count
from typing import Any, NamedTuple

from worker.text.prompt.normalize import joined, merged
from worker.text.tokenizer import TemplateMessages

TemplateMessage = dict[str, Any]
WriteCalls = Callable[[Sequence[tuple[str, dict[str, Any]]]], str]  # of functions with their arguments


class Adaptation(NamedTuple):
    """One change, with its reason."""

    why: str  # the template's restriction, and the change; logged
    change: Callable[[TemplateMessages], TemplateMessages]


def _lone_results_as_user(conversation: TemplateMessages) -> TemplateMessages:
    called, turns = set[str](), []
    for message in conversation:
        called |= {call["id"] for call in _calls(message)}
        lone = message["role"] == "tool" and message["tool_call_id"] not in called
        turns.append(_turn("user", message["content"]) if lone else message)
    return merged(turns)


def _thoughts_in_content(conversation: TemplateMessages) -> TemplateMessages:
    return [_with_reasoning_in_content(turn) if _calls(turn) and turn["content"] else turn for turn in conversation]


def _with_reasoning_in_content(turn: TemplateMessage) -> TemplateMessage:
    return {**_without("reasoning_content", turn), "content": joined([turn.get("reasoning_content"), turn["content"]])}


def _one_call_a_turn(conversation: TemplateMessages) -> TemplateMessages:
    return [message for turn, results in _exchanges(conversation) for message in _call_by_call(turn, results)]


def _exchanges(conversation: TemplateMessages) -> list[tuple[TemplateMessage, list[TemplateMessage]]]:
    """Return each message with the tool results after it."""
    exchanges: list[tuple[TemplateMessage, list[TemplateMessage]]] = []
    for message in conversation:
        if message["role"] == "tool" and exchanges:
            exchanges[-1][1].append(message)
        else:
            exchanges.append((message, []))
    return exchanges


def _call_by_call(turn: TemplateMessage, results: list[TemplateMessage]) -> TemplateMessages:
    """Return one turn for each call, followed by its own results."""
    if len(_calls(turn)) < 2:
        return [turn, *results]
    first, *further = _calls(turn)
    own: dict[str, list[TemplateMessage]] = {}
    for result in results:
        own.setdefault(result["tool_call_id"], []).append(result)
    turns = [{**turn, "tool_calls": [first]}, *own.pop(first["id"], ())]
    for call in further:
        turns += [{**_turn("assistant"), "tool_calls": [call]}, *own.pop(call["id"], ())]
    return [*turns, *chain.from_iterable(own.values())]


def results_by_call(conversation: TemplateMessages) -> TemplateMessages:
    """Return the conversation with the results after a turn in the order of its calls, as some templates write them."""

    def in_order(turn: TemplateMessage, results: list[TemplateMessage]) -> list[TemplateMessage]:
        places = {call["id"]: at for at, call in enumerate(_calls(turn))}
        return sorted(results, key=lambda result: places.get(result["tool_call_id"], len(places)))

    return [message for turn, results in _exchanges(conversation) for message in (turn, *in_order(turn, results))]


def _arguments_as_objects(conversation: TemplateMessages) -> TemplateMessages:
    return _each_arguments(conversation, lambda given: {"arguments": given} if isinstance(given, str) else given)


def _arguments_as_text(conversation: TemplateMessages) -> TemplateMessages:
    return _each_arguments(conversation, lambda given: given if isinstance(given, str) else _json(given))


def _each_arguments(conversation: TemplateMessages, change: Callable[[Any], Any]) -> TemplateMessages:
    def changed(call: dict[str, Any]) -> dict[str, Any]:
        return {**call, "function": {**call["function"], "arguments": change(call["function"]["arguments"])}}

    return _each_call(conversation, changed)


def _short_ids(conversation: TemplateMessages) -> TemplateMessages:
    short: dict[str, str] = {}

    def of(id: str) -> str:
        # An id that is accepted stays: a later one that is not must change no earlier turn.
        return id if _ACCEPTED_ID.fullmatch(id) else short.setdefault(id, f"call{len(short):05}")

    renamed = _each_call(conversation, lambda call: {**call, "id": of(call["id"])})
    return [{**each, "tool_call_id": of(each["tool_call_id"])} if each["role"] == "tool" else each for each in renamed]


def _calls_as_text(write: WriteCalls) -> Callable[[TemplateMessages], TemplateMessages]:
    def change(conversation: TemplateMessages) -> TemplateMessages:
        return [_with_calls_in_content(message, write) for message in conversation]

    return change


def _with_calls_in_content(message: TemplateMessage, write: WriteCalls) -> TemplateMessage:
    if not _calls(message):
        return message
    calls = write([_written(call["function"]) for call in _calls(message)])
    return {**_without("tool_calls", message), "content": joined([message["content"], calls])}


def _written(function: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    given = function["arguments"]
    return function["name"], given if isinstance(given, dict) else {"arguments": given}


def write_as_json(calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Return calls as JSON, for a model whose own form is not known."""
    return "\n".join(_json({"name": name, "arguments": arguments}) for name, arguments in calls)


def _results_as_user(conversation: TemplateMessages) -> TemplateMessages:
    return merged([_turn("user", turn["content"]) if turn["role"] == "tool" else turn for turn in conversation])


def _text_apart(conversation: TemplateMessages) -> TemplateMessages:
    return [part for turn in conversation for part in _text_and_calls(turn)]


def _text_and_calls(turn: TemplateMessage) -> TemplateMessages:
    if not (_calls(turn) and turn["content"]):
        return [turn]
    return [_without("tool_calls", turn), {**_turn("assistant"), "tool_calls": turn["tool_calls"]}]


def _without_empty_answers(conversation: TemplateMessages) -> TemplateMessages:
    return merged([turn for turn in conversation if not _is_empty_answer(turn)])


def _is_empty_answer(turn: TemplateMessage) -> bool:
    said = turn["content"] or _calls(turn) or turn.get("reasoning_content")
    return turn["role"] == "assistant" and not said


def _as_parts(conversation: TemplateMessages) -> TemplateMessages:
    return [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in conversation]


def _system_first(conversation: TemplateMessages) -> TemplateMessages:
    system, turns = split_system(conversation)
    return conversation if system else [_turn("system"), *turns]


def _user_first(conversation: TemplateMessages) -> TemplateMessages:
    system, turns = split_system(conversation)
    return conversation if turns and turns[0]["role"] == "user" else [*system, _turn("user"), *turns]


def _turns_between(conversation: TemplateMessages) -> TemplateMessages:
    # Mistral's templates skip calls and results when they check that the roles alternate.
    turns: TemplateMessages = []
    last = None
    for message in conversation:
        if message["role"] in ("user", "assistant") and not _calls(message):
            if message["role"] == last:
                turns.append(_turn("assistant" if last == "user" else "user"))
            last = message["role"]
        turns.append(message)
    return turns


def _later_systems_in_turns(conversation: TemplateMessages) -> TemplateMessages:
    """Put each system text behind the first turn into the tool result before it, else into a user turn at its place.

    Only the turns before a text decide where it goes, so that the prompt of a longer conversation begins with this one.
    It joins a result, since templates drop the thoughts before the last user turn.
    """
    turns: TemplateMessages = []
    marked: TemplateMessage | None = None  # the last turn, if it is a system text
    for at, message in enumerate(conversation):
        if at > 0 and message["role"] == "system":
            system = f"<system>\n{message['content']}\n</system>"
            if turns[-1]["role"] == "tool":
                turns[-1] = {**turns[-1], "content": joined([turns[-1]["content"], system])}
            else:
                turns.append(marked := _turn("user", system))
        elif message["role"] == "tool" and len(turns) > 1 and turns[-1] is marked and _calls(turns[-2]):
            turns[-1] = {**message, "content": joined([message["content"], marked["content"]])}
        else:
            turns.append(message)
    return merged(turns)


def _system_in_user(conversation: TemplateMessages) -> TemplateMessages:
    system, turns = split_system(conversation)
    if not system:
        return conversation
    user, *rest = turns if turns and turns[0]["role"] == "user" else [_turn("user"), *turns]
    return [{**user, "content": joined([system[0]["content"], user["content"]])}, *rest]


def split_system(conversation: TemplateMessages) -> tuple[TemplateMessages, TemplateMessages]:
    """Return the system message, as a list of at most one, and the other messages."""
    start = 1 if conversation and conversation[0]["role"] == "system" else 0
    return conversation[:start], conversation[start:]


class CallMarks:
    """Unique marks in names and arguments of calls, which show if a template writes each call.

    Arguments get a mark only if one of them is a string.
    """

    def __init__(self, text: str) -> None:
        """Choose marks that do not occur in `text`, of letters and digits only, since no template escapes these."""
        unused = (stem for stem in map("mark{}x".format, count()) if stem not in text)
        self._stem = next(unused)
        self._names, self._words = list[int](), list[int]()

    def add_to(self, conversation: TemplateMessages) -> TemplateMessages:
        """Return the conversation with marks in its calls."""
        return _each_call(conversation, self._marked)

    def all_found(self, text: str) -> bool:
        """True if `text` holds all marks, those of the names in order."""
        found = dict.fromkeys(int(number) for number in re.findall(f"{self._stem}([0-9]+)z", text))
        names = [number for number in found if number % 2 == 0]
        return names == self._names and found.keys() >= set(self._words)

    def _marked(self, call: dict[str, Any]) -> dict[str, Any]:
        number = 2 * len(self._names)
        self._names.append(number)
        function = call["function"]
        arguments = self._with_words_marked(function["arguments"], number + 1)
        return {**call, "function": {"name": f"{function['name']}{self._mark(number)}", "arguments": arguments}}

    def _with_words_marked(self, arguments: Any, number: int) -> Any:
        names = (
            [name for name, value in arguments.items() if isinstance(value, str)] if isinstance(arguments, dict) else []
        )
        if not names:
            return arguments
        self._words.append(number)
        return {**arguments, names[0]: f"{arguments[names[0]]}{self._mark(number)}"}

    def _mark(self, number: int) -> str:
        return f"{self._stem}{number}z"


def _calls(message: TemplateMessage) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = message.get("tool_calls", [])
    return calls


def _each_call(conversation: TemplateMessages, change: Callable[[dict[str, Any]], dict[str, Any]]) -> TemplateMessages:
    return [{**turn, "tool_calls": list(map(change, _calls(turn)))} if _calls(turn) else turn for turn in conversation]


def _turn(role: str, content: Any = "") -> TemplateMessage:
    return {"role": role, "content": content}


def _without(field: str, message: TemplateMessage) -> TemplateMessage:
    return {name: value for name, value in message.items() if name != field}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


_ACCEPTED_ID = re.compile("[a-zA-Z0-9]{9}")
_IDS = Adaptation("accepts only tool call ids of nine letters and digits: other calls are numbered", _short_ids)
_THOUGHTS = Adaptation("accepts only text or reasoning before a call: both are sent as content", _thoughts_in_content)
_ONE_CALL = Adaptation("accepts one tool call per turn: each call gets its own turn and result", _one_call_a_turn)
_OBJECTS = Adaptation("accepts arguments only as objects: other arguments are wrapped in one", _arguments_as_objects)
_TEXT = Adaptation("accepts arguments only as text: they are sent as JSON", _arguments_as_text)
_LONE = Adaptation("accepts no tool result without a call: it is sent as a user message", _lone_results_as_user)
_RESULTS_AS_USER = Adaptation("accepts no tool results: they are sent as user messages", _results_as_user)
# Is made before all others, for a template that does not take each system message where it stands.
LATER_SYSTEMS = Adaptation(
    "accepts system messages only at the front: later ones are marked in user turns or results",
    _later_systems_in_turns,
)
# Is tried after a ladder's changes if the template drops the text beside a call.
TEXT_APART = Adaptation("drops the text beside a tool call: it gets a turn of its own", _text_apart)
_EMPTY = Adaptation("accepts no empty turn of the assistant: it is left out", _without_empty_answers)
_TURNS = (
    Adaptation("requires a user turn first: an empty one is added", _user_first),
    Adaptation("requires alternating user and assistant turns: empty turns are added", _turns_between),
)


def ladders(write: WriteCalls) -> tuple[tuple[Adaptation, ...], ...]:
    """Return the ladders, the one that loses least of the template's own formatting first, and so the changes of each.
    `write`: writes calls as the model does, for templates that write none."""
    calls = Adaptation("writes no tool calls: they are sent as text of the assistant", _calls_as_text(write))
    known = (
        *((_IDS, _THOUGHTS, _ONE_CALL, arguments, _LONE, *_TURNS) for arguments in (_OBJECTS, _TEXT)),
        (calls, *_TURNS),
        (calls, _RESULTS_AS_USER, *_TURNS),
    )
    return (*known, *((_EMPTY, *ladder) for ladder in known))


# Is tried, with all ladders again, if a template omits texts that are strings, or refuses them.
AS_PARTS = Adaptation("accepts contents only as lists of parts: texts are sent as parts", _as_parts)
# Each ladder ends with one of these two.
SYSTEM_FIRST = Adaptation("writes tools only into a system message: an empty one is added", _system_first)
SYSTEM_IN_USER = Adaptation(
    "accepts no system role: system text is put in front of the first user message", _system_in_user
)
