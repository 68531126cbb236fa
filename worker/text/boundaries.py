"""Where later prompts are likely to part from this one, as the template's text tells.

Recurrent and rotating states can be taken up only where they were kept, so the places are planned before a prompt is
computed. None of them has to be right: tokens are compared before they are taken up.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from worker.text.adapt import RAISED, Tools
from worker.text.places import Places
from worker.text.tokenizer import Conversation

# For private use, so no template looks for them and hardly a text has them.
_MARKS = tuple(map(chr, range(0xE000, 0xE010)))
# What a template may stumble over in a turn that was only imagined harms no one.
_STUMBLES = (*RAISED, ArithmeticError, AttributeError, LookupError)
_FEW = 3  # places that are worth a tokenization each: the next turn by a user, that by a tool, and the system's end

_ANSWER = {"role": "assistant", "content": "…"}
_QUESTION = {"role": "user", "content": "…"}
_CALL = "call00000"  # such an id is taken by Mistral's templates too
_NO_ARGUMENTS: tuple[Any, ...] = ({}, "{}")  # some templates take text alone


@dataclass(frozen=True, slots=True)
class Codec:
    """How a template's text becomes tokens."""

    encode: Callable[[str], list[int]]
    plain: Callable[[str], str] = str  # what a piece of the text says: contents may have control tokens marked


@dataclass(frozen=True, slots=True)
class Rendered:
    conversation: Conversation
    tools: Tools
    text: str
    tokens: Sequence[int]
    thinks: bool  # whether the text ends within a think block
    render: Callable[[Conversation], str]  # another conversation, beside the same tools
    marks: Collection[str]  # characters of the contents that the text has images for
    codec: Codec


class Boundaries:
    """A worker has one."""

    def __init__(self, places: Places) -> None:
        self._places = places

    def plan(self, rendered: Rendered) -> tuple[int, ...]:
        """Token counts, the most valuable first, each of less than the whole and more than nothing."""
        most = len(rendered.tokens) - 1
        if most < 1:
            return ()
        counts = (min(count, most) for count in self._counts(rendered, _places(rendered)))
        return tuple(dict.fromkeys(count for count in counts if count > 0))

    def _counts(self, rendered: Rendered, places: list[int]) -> list[int]:
        counts = self._places.counts(rendered.text, rendered.tokens, places, rendered.codec.plain)
        if counts is not None:
            return [counts[place] for place in places]
        tokens = list(rendered.tokens)
        return [_alike(rendered.codec.encode(rendered.text[:place].rstrip()), tokens) for place in places[:_FEW]]


@dataclass(frozen=True, slots=True)
class _Seen:
    """An imagined text beside the real one, in characters."""

    end: int  # of what they have in common
    starts: list[int]  # of the contents within that
    whole: bool  # whether no content starts behind it


def _places(rendered: Rendered) -> list[int]:
    """Characters, the most valuable place first."""
    mark = next((mark for mark in _MARKS if mark not in rendered.text), None)
    if mark is None:
        return []
    marked = [_marked(message, mark) for message in rendered.conversation]
    asked = _seen(rendered, mark, [[*_answered(marked, rendered), _QUESTION]])
    called = _seen(rendered, mark, _called(marked, rendered)) if rendered.tools else None
    seen = [each for each in (asked, called) if each]
    if not any(each.whole for each in seen) and (itself := _seen(rendered, mark, [marked])):
        # The template rewrites earlier turns when another one comes. What others may share with this prompt stays.
        seen.append(itself)
    starts = sorted({start for each in seen for start in each.starts})
    ends = [_before_the_last_word(rendered, starts, each.end) for each in (asked, called) if each]
    system = sum(message["role"] == "system" and _is_text(message) for message in rendered.conversation)
    return [*ends, *starts[system : system + 1], *reversed(starts)]


def _seen(rendered: Rendered, mark: str, conversations: list[Conversation]) -> _Seen | None:
    """The first of these that the template takes."""
    for conversation in conversations:
        try:
            pieces = rendered.render(conversation).split(mark)
        except _STUMBLES:
            continue
        end = _alike("".join(pieces), rendered.text)
        starts = list(accumulate(map(len, pieces[:-1])))
        within = [start for start in starts if start <= end]
        return _Seen(end, within, within == starts)
    return None


def _marked(message: dict[str, Any], mark: str) -> dict[str, Any]:
    """Behind the space that a content begins with, which some templates take away."""
    content = message["content"]
    said = content.lstrip()
    return {**message, "content": content[: len(content) - len(said)] + mark + said} if said else message


def _is_text(message: dict[str, Any]) -> bool:
    return bool(message["content"].strip())


def _is_begun(message: dict[str, Any]) -> bool:
    return message["role"] == "assistant" and "tool_calls" not in message


def _answered(conversation: Conversation, rendered: Rendered) -> Conversation:
    *before, last = conversation
    if not _is_begun(last):
        return [*conversation, _ANSWER]
    # An answer that was begun within its thoughts may be told without them.
    return [*before, _ANSWER] if rendered.thinks else conversation


def _called(conversation: Conversation, rendered: Rendered) -> list[Conversation]:
    """A tool was called, and answered, in place of an answer: templates that drop thoughts keep them for that."""
    *before, answer = _answered(conversation, rendered)
    result = {"role": "tool", "tool_call_id": _CALL, "content": "…"}
    name = rendered.tools[0]["function"]["name"]
    ways: list[Conversation] = []
    for arguments in _NO_ARGUMENTS:
        call = {"id": _CALL, "type": "function", "function": {"name": name, "arguments": arguments}}
        ways.append([*before, {**answer, "tool_calls": [call]}, result])
    return ways


def _before_the_last_word(rendered: Rendered, starts: list[int], end: int) -> int:
    """Where the prompt ends with an answer's beginning, the next turn's has the rest, perhaps of the same word."""
    last, text = rendered.conversation[-1], rendered.text
    if end < len(text) or not (_is_begun(last) and _is_text(last)):
        return end
    return max(len(text.rstrip().rsplit(None, 1)[0]), *starts[-1:])


def _alike(one: Sequence[object], other: Sequence[object]) -> int:
    """How much they begin with alike. By halves, since a loop over the characters of a document takes long."""
    known, most = 0, min(len(one), len(other))
    while known < most:
        middle = (known + most + 1) // 2
        if one[known:middle] == other[known:middle]:
            known = middle
        else:
            most = middle - 1
    return known
