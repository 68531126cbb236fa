"""Predicts where later prompts diverge from this one, by rendering the likely next turns.

Recurrent and rotating caches can be restored only at positions where a snapshot was taken, so these positions are
planned before prefill. A wrong prediction only costs a cache miss: tokens are compared before a snapshot is restored.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any
from unicodedata import normalize

from worker.text.prompt.template_inputs import TemplateFailed, TemplateTools
from worker.text.tokenizer import TemplateMessages, Vocabulary

Form = Callable[[str], str]

_SPACE = b" \t\n\v\f\r"
# Forms of the text that tokens may spell: unchanged, or in NFC as with Qwen's tokenizer.
_FORMS: tuple[Form, ...] = (str, partial(normalize, "NFC"))


class TokenOffsets:
    """Maps character positions to token counts; a worker has one."""

    def __init__(self, vocabulary: Vocabulary, tokens: int) -> None:
        """`tokens`: the size of the tokenizer's vocabulary."""
        self._spelled = [_without_space(vocabulary.bytes_of(token)) for token in range(tokens)]

    def counts(
        self, text: str, tokens: Sequence[int], places: Collection[int], plain: Form = str
    ) -> dict[int, int] | None:
        """Return, for each position in characters, the number of tokens that end at or before it.

        Returns None if these tokens do not spell this text. `plain` removes the marks from a piece of the text.
        Whitespace is ignored, since some tokenizers add or drop it. So whitespace tokens just before a position are not
        counted; such tokens often merge with the text that follows.
        """
        spelled = [self._spelled[token] for token in tokens]
        whole = b"".join(spelled)
        order = sorted({*places, len(text)})
        for form in _FORMS:
            parts = (form(plain(text[a:b])) for a, b in pairwise([0, *order]))
            pieces = [_without_space(piece.encode("utf-8", "surrogatepass")) for piece in parts]
            if b"".join(pieces) == whole:
                ends = _ends(spelled)
                return {place: _count(ends, length) for place, length in zip(order, _ends(pieces), strict=True)}
        # Another normalizer changed the text, or the vocabulary uses an unknown alphabet.
        return None


def _without_space(written: bytes) -> bytes:
    return written.translate(None, _SPACE)


def _ends(pieces: list[bytes]) -> list[int]:
    return list(accumulate(map(len, pieces)))


def _count(ends: list[int], length: int) -> int:
    reached = bisect_left(ends, length)
    return reached + 1 if ends[reached] == length else reached


# Private-use characters: no template treats them specially, and texts hardly ever contain them.
_MARKS = tuple(map(chr, range(0xE000, 0xE010)))

_ANSWER = {"role": "assistant", "content": "…"}
_QUESTION = {"role": "user", "content": "…"}
_CALL = "call00000"  # nine letters and digits, as Mistral's templates require
_NO_ARGUMENTS: tuple[Any, ...] = ({}, "{}")  # some templates accept only text


@dataclass(frozen=True, slots=True)
class Codec:
    """Encodes a template's text."""

    encode: Callable[[str], list[int]]
    plain: Callable[[str], str] = str  # a piece of the text without the marks that escape control tokens


@dataclass(frozen=True, slots=True)
class Rendered:
    """One request's rendered prompt, with what is needed to render variations of it."""

    conversation: TemplateMessages
    tools: TemplateTools
    text: str
    tokens: Sequence[int]
    thinks: bool  # the text ends within a think block
    render: Callable[[TemplateMessages], str]  # renders another conversation with the same tools
    marks: Collection[str]  # characters that mark the images' positions in the contents
    codec: Codec


def cache_boundaries(offsets: TokenOffsets, rendered: Rendered) -> tuple[int, ...]:
    """Return boundaries as token counts from 1 to one less than the prompt's, the most valuable first."""
    last = len(rendered.tokens) - 1
    if last < 1:
        return ()
    counts = (min(count, last) for count in _counts(offsets, rendered, _places(rendered)))
    return tuple(dict.fromkeys(count for count in counts if count > 0))


def _counts(offsets: TokenOffsets, rendered: Rendered, places: list[int]) -> list[int]:
    counts = offsets.counts(rendered.text, rendered.tokens, places, rendered.codec.plain)
    if counts is not None:
        return [counts[place] for place in places]
    tokens = list(rendered.tokens)
    # Worth a tokenization each: the next user turn, the next tool result, the system message's end.
    return [common_prefix(rendered.codec.encode(rendered.text[:place].rstrip()), tokens) for place in places[:3]]


@dataclass(frozen=True, slots=True)
class _Comparison:
    """A predicted text compared with the prompt's text; positions in characters."""

    end: int  # length of the common prefix
    starts: list[int]  # starts of the contents that begin within the common prefix
    whole: bool  # all contents begin within the common prefix


def _places(rendered: Rendered) -> list[int]:
    """Return boundaries as positions in the text, in characters, the most valuable first."""
    mark = next((mark for mark in _MARKS if mark not in rendered.text), None)
    if mark is None:
        return []
    marked = [_marked(message, mark) for message in rendered.conversation]
    asked = _compare(rendered, mark, [[*_with_answer(marked, rendered), _QUESTION]])
    called = _compare(rendered, mark, _with_calls(marked, rendered)) if rendered.tools else None
    seen = [each for each in (asked, called) if each]
    if not any(each.whole for each in seen) and (itself := _compare(rendered, mark, [marked])):
        # The template rewrites earlier turns when another one is added. The prompt itself still has boundaries.
        seen.append(itself)
    starts = sorted({start for each in seen for start in each.starts})
    ends = [_before_the_last_word(rendered, starts, each.end) for each in (asked, called) if each]
    first = rendered.conversation[0]
    system = int(first["role"] == "system" and _is_text(first))
    return [*ends, *starts[system : system + 1], *reversed(starts)]


def _compare(rendered: Rendered, mark: str, conversations: list[TemplateMessages]) -> _Comparison | None:
    """Compare the prompt with the first of these conversations that the template accepts. None if it accepts none."""
    for conversation in conversations:
        try:
            pieces = rendered.render(conversation).split(mark)
        except TemplateFailed:
            continue
        end = common_prefix("".join(pieces), rendered.text)
        starts = list(accumulate(map(len, pieces[:-1])))
        within = [start for start in starts if start <= end]
        return _Comparison(end, within, within == starts)
    return None


def _marked(message: dict[str, Any], mark: str) -> dict[str, Any]:
    """Put the mark in front of the content, but behind leading space, which some templates strip."""
    content = message["content"]
    text = content.lstrip()
    return {**message, "content": content[: len(content) - len(text)] + mark + text} if text else message


def _is_text(message: dict[str, Any]) -> bool:
    return bool(message["content"].strip())


def _is_begun(message: dict[str, Any]) -> bool:
    return message["role"] == "assistant" and "tool_calls" not in message


def _with_answer(conversation: TemplateMessages, rendered: Rendered) -> TemplateMessages:
    *before, last = conversation
    if not _is_begun(last):
        return [*conversation, _ANSWER]
    # If the answer stops within its reasoning, the next turn's prompt may leave that reasoning out.
    return [*before, _ANSWER] if rendered.thinks else conversation


def _with_calls(conversation: TemplateMessages, rendered: Rendered) -> list[TemplateMessages]:
    """Return conversations continued with a tool call and its result, one for each form of arguments.

    Templates that drop earlier reasoning keep it in front of a call, so they render these differently.
    """
    *before, answer = _with_answer(conversation, rendered)
    result = {"role": "tool", "tool_call_id": _CALL, "content": "…"}
    name = rendered.tools[0]["function"]["name"]
    ways: list[TemplateMessages] = []
    for arguments in _NO_ARGUMENTS:
        call = {"id": _CALL, "type": "function", "function": {"name": name, "arguments": arguments}}
        ways.append([*before, {**answer, "tool_calls": [call]}, result])
    return ways


def _before_the_last_word(rendered: Rendered, starts: list[int], end: int) -> int:
    """Return `end`, or the start of the last word if the prompt ends with the beginning of an answer.

    The next prompt holds the whole answer, in which that word may be longer and so have other tokens.
    """
    last, text = rendered.conversation[-1], rendered.text
    if end < len(text) or not (_is_begun(last) and _is_text(last)):
        return end
    return max(len(text.rstrip().rsplit(None, 1)[0]), *starts[-1:])


def common_prefix(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the common prefix. A binary search over slices, since a loop over a document is slow."""
    known, maximum = 0, min(len(one), len(other))
    while known < maximum:
        middle = (known + maximum + 1) // 2
        if one[known:middle] == other[known:middle]:
            known = middle
        else:
            maximum = middle - 1
    return known


# Plans the droppable ranges of a prompt, from which SpecPrefill may leave out tokens.
#
# They are the long texts of messages, between images. Never dropped are the template's own text, system prompt, tools,
# images, short messages, and the last question, which is expected at an end of a text of the last user message.


def droppable_ranges(offsets: TokenOffsets, rendered: Rendered) -> tuple[tuple[int, int], ...]:
    """Return ranges of tokens, end exclusive, in order."""
    spans = list(_spans(rendered))
    places = {place for span in spans for place in span}
    counts = offsets.counts(rendered.text, rendered.tokens, places, rendered.codec.plain) if spans else None
    if counts is None:
        return ()
    # A token that reaches over the beginning of a content may hold some of the template's own text.
    ranges = ((counts[start] + 1, counts[end]) for start, end in spans)
    return tuple((start, end) for start, end in ranges if start < end)


def _spans(rendered: Rendered) -> Iterator[tuple[int, int]]:
    """Yield ranges of characters.

    Pieces that the template changed are skipped, and so are repeated pieces: the other occurrence may
    be in the system prompt or in a tool.
    """
    text, long = rendered.text, list(_long_pieces(rendered))
    longest_first = sorted(range(len(long)), key=lambda at: -len(long[at][0]))
    # Each is searched in the whole text, and a conversation may have ten thousand.
    for at in sorted(longest_first[:256]):
        piece, ends = long[at]
        if text.count(piece) == 1:
            start = text.find(piece)
            yield start + ends, start + len(piece) - ends


def _long_pieces(rendered: Rendered) -> Iterator[tuple[str, int]]:
    """Yield each long piece of a content, and the number of characters to keep at each end of it."""
    conversation = rendered.conversation
    short = 400  # characters; also kept at both ends of each text in the last user message and after it
    asked = max((at for at, message in enumerate(conversation) if message["role"] == "user"), default=0)
    for at, message in enumerate(conversation):
        ends = short if at >= asked else 0
        for piece in _pieces(message["content"], rendered.marks) if message["role"] != "system" else ():
            if len(piece) > max(short, 2 * ends):
                yield piece, ends


def _pieces(content: str, marks: Collection[str]) -> list[str]:
    """Split a content at its images."""
    pieces = [content]
    for mark in marks:
        pieces = [part for piece in pieces for part in piece.split(mark)]
    return [piece.strip() for piece in pieces]
