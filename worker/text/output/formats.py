"""How a model's answers are read: its dialect is chosen by what its own chat template writes, and proved by reading
that back."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from schemas import ChatRequest
from worker.text.dialects.cursor import Cursor
from worker.text.dialects.dialect import CallArguments, CallBegan, Dialect, Functions
from worker.text.dialects.table import DIALECTS, THOUGHTS, Thoughts
from worker.text.dialects.values import Parameters
from worker.text.output import harmony
from worker.text.output.answer import AnswerReader
from worker.text.output.harmony import HarmonyReader
from worker.text.output.thought import Closing, ThoughtFormat
from worker.text.prompt.prompt import Thinking
from worker.text.tokenizer import TemplateMessages, Tokenizer, Vocabulary

Proof = Literal["read back", "by its markers", "none"]

_QUESTION, _RESULT = "Questionq7", "Resultq7"
_THOUGHT, _ANSWER = "Thoughtq7", "Answerq7"
_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "The city."},
        "days": {"type": "integer", "description": "How many days."},
    },
    "required": ["city"],
}
_FUNCTION = {"name": "weather_of", "description": "Return the weather.", "parameters": _SCHEMA}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_ARGUMENTS = {"city": 'Oslo "O" <b>', "days": 7}
_IDS = (
    "call_1",
    "a1b2c3d4e",
    "functions.weather_of:0",
)  # what templates demand: anything, nine characters, Kimi's form


def _by_template(tokenizer: Tokenizer) -> "ModelFormat":
    """Render a call, a thought and their markers with the model's template, and choose what reads them back."""
    opening = _rendered(tokenizer, [{"role": "user", "content": _QUESTION}])
    opening = opening.rpartition(_QUESTION)[2] if opening else ""
    answers = list(_answers(tokenizer, opening))
    thoughts = _with_closing(_thoughts(tokenizer, answers), tokenizer, answers)
    for answer in answers:
        for dialect in DIALECTS:
            opened = _opened(dialect, opening)
            if _reads_back(answer, dialect, thoughts, opened):
                return ModelFormat(False, dialect, "read back", thoughts, opened)
    named = _by_markers(tokenizer)
    opened = _opened(named, opening) if named else ""
    return ModelFormat(False, named, "by its markers" if named else "none", thoughts, opened)


def _opened(dialect: Dialect, opening: str) -> str:
    return dialect.openings[0] if opening.endswith(dialect.openings[0]) else ""


def _answers(tokenizer: Tokenizer, opening: str) -> Iterator[str]:
    """Yield what the template writes for an answer with a thought and a call, in each form that it accepts. `opening`:
    what it writes before an answer."""
    question = {"role": "user", "content": _QUESTION}
    for id in _IDS:
        for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS)):
            call = {"type": "function", "id": id, "function": {"name": _FUNCTION["name"], "arguments": arguments}}
            result = {"role": "tool", "tool_call_id": id, "name": _FUNCTION["name"], "content": _RESULT}
            for thought in ({"reasoning_content": _THOUGHT}, {}):
                turn = {"role": "assistant", "content": "", **thought, "tool_calls": [call]}
                text = _rendered(tokenizer, [question, turn, result])
                if text and _QUESTION in text and _RESULT in text:
                    answer = text.rpartition(_RESULT)[0].rpartition(_QUESTION)[2]
                    yield answer[_common(answer, opening) :]


def _rendered(
    tokenizer: Tokenizer, conversation: TemplateMessages, tools: list[dict[str, Any]] = _TOOLS,
    variables: dict[str, Any] | None = None,
) -> str | None:  # fmt: skip
    try:
        return tokenizer.render(conversation, tools=tools, continues=False, variables=variables or {})
    except Exception:  # a template may raise whatever Python does, and a trial that fails is no evidence
        return None


def _common(text: str, opening: str) -> int:
    """Return the length of the beginning that a turn shares with the opening of an answer, which may hold the marker of
    a thought besides: the common text ends behind a marker or white space."""
    end = next((at for at, (a, b) in enumerate(zip(text, opening, strict=False)) if a != b), len(opening))
    while 0 < end < len(opening) and not (text[end - 1] in ">]" or text[end - 1].isspace()):
        end -= 1
    return end


def _reads_back(answer: str, dialect: Dialect, thoughts: Thoughts | None, opened: str) -> bool:
    """True if the dialect reads exactly the call that the template wrote."""
    bare = bool(dialect.bare) and answer.strip()[:1] in dialect.bare
    if not (bare or opened) and dialect.openings[0] not in answer:
        return False
    cursor = Cursor()
    cursor.add(answer)
    cursor.end()
    functions = {str(_FUNCTION["name"]): Parameters(_SCHEMA)}
    reader = AnswerReader(
        cursor, thoughts, dialect, functions, reasons=False, thought=False, only_before_content=False, opened=opened
    )
    names, arguments = list[str](), list[str]()
    for event in reader.read():
        if isinstance(event, CallBegan):
            names.append(event.function)
        elif isinstance(event, CallArguments):
            arguments.append(event.text)
    try:
        return names == [_FUNCTION["name"]] and json.loads("".join(arguments)) == _ARGUMENTS
    except ValueError:
        return False


def _by_markers(tokenizer: Tokenizer) -> Dialect | None:
    """Return the dialect whose marker the template's instructions name, the vocabulary has, or mlx-lm knows."""
    question = [{"role": "user", "content": _QUESTION}]
    instructions = _rendered(tokenizer, question) or ""
    if instructions == _rendered(tokenizer, question, []):
        return None  # the template writes no tools
    for text in (instructions, tokenizer.template):
        shown = [dialect for dialect in DIALECTS if all(sign in text for sign in dialect.signs)]
        if shown:
            return max(shown, key=lambda dialect: sum(map(len, dialect.signs)))
    tokens = frozenset(tokenizer.tokens)
    opening = (tokenizer.tool or ("", ""))[0]
    for found in (tokens.__contains__, opening.__eq__):
        for dialect in DIALECTS:
            if any(map(found, dialect.openings)):
                return dialect
    return None


def _thoughts(tokenizer: Tokenizer, answers: list[str]) -> Thoughts | None:
    """Return the markers between which the template writes a thought, or that the model's prompts or words have."""
    tokens = frozenset(tokenizer.tokens)
    source = tokenizer.template
    for answer in answers:
        _, written, after = answer.partition(_THOUGHT)
        for each in THOUGHTS if written else ():
            if each.end and after.lstrip().startswith(each.end.lstrip()):
                return _with_answer_markers(each, source, tokens)
    for each in THOUGHTS:
        named = [*filter(None, (each.begin, each.end)), *(marker.strip() for marker in each.answer if not each.end)]
        if (each.begin, each.end) == tokenizer.think or all(marker in source for marker in named):
            return _with_answer_markers(each, source, tokens)
    if tokenizer.think:
        return Thoughts(*tokenizer.think)
    known = next((each for each in THOUGHTS if each.end and tokens.issuperset((each.begin, each.end))), None)
    return known and _with_answer_markers(known, source, tokens)


def _with_answer_markers(thoughts: Thoughts, source: str, tokens: frozenset[str]) -> Thoughts:
    """Return the thoughts with those markers of the answer that the model has."""
    # Tags, unlike tokens, may stand for something else in a template, such as the result of a call.
    has = [marker for marker in thoughts.answer if _has_tokens_of(marker, source, tokens)]
    named = "".join(thoughts.answer) in source or not thoughts.end
    return replace(thoughts, answer=thoughts.answer if named else tuple(has))


def _has_tokens_of(marker: str, source: str, tokens: frozenset[str]) -> bool:
    """True if the model has the tokens that a marker consists of, with words between them."""
    parts = re.findall(r"<\|[^|]+\|>", marker) or [marker]
    return all(part in tokens or (part in source and "|" in part) for part in parts)


def _with_closing(thoughts: Thoughts | None, tokenizer: Tokenizer, answers: list[str]) -> Thoughts | None:
    """Return the thoughts with the white space that the template writes around their end."""
    if thoughts is None or not thoughts.end:
        return thoughts
    turn = {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT}
    text = _rendered(tokenizer, [{"role": "user", "content": _QUESTION}, turn], []) or ""
    for written in (text, *answers):  # some templates write thoughts before calls alone
        # Grammars allow up to four of these characters after a thought.
        end = re.match(rf"(\s*){re.escape(thoughts.end.strip())}([ \n]{{0,4}})", written.partition(_THOUGHT)[2])
        if end:
            return replace(thoughts, closing=(end[1], end[2]))
    # A template that writes no thoughts shows nothing. Models with tags write them on lines of their own.
    return replace(thoughts, closing=("\n", "\n\n")) if thoughts.end.startswith("</") else thoughts


@dataclass(frozen=True, slots=True)
class ModelFormat:
    """The output format of one model; a worker has one."""

    harmony: bool
    dialect: Dialect | None
    proof: Proof  # how the dialect was found: its template's own call was read back, or only its markers were seen
    thoughts: Thoughts | None
    opened: str = ""  # the opening of a call, with which the template begins each answer
    marks: frozenset[int] = frozenset()  # harmony's markers; what other tokens spell is none

    @staticmethod
    def of(tokenizer: Tokenizer) -> "ModelFormat":
        """Return the format that the model's vocabulary and chat template show."""
        found = _by_template(tokenizer)
        if not frozenset(tokenizer.tokens).issuperset(harmony.MARKERS):
            return found
        added = tokenizer.added_tokens
        return replace(found, harmony=True, marks=frozenset(added[each] for each in harmony.MARKERS if each in added))

    def text_of(self, token: int, text: str) -> str:
        """Return a token's text for the reader, which finds no marker in it that other tokens than its own spell."""
        return harmony.escape_markers(text) if self.marks and token not in self.marks else text

    @property
    def think(self) -> tuple[str, str] | None:
        """The markers around reasoning, or None."""
        return (self.thoughts.begin, self.thoughts.end) if self.thoughts and self.thoughts.begin else None

    @property
    def reads_calls(self) -> bool:
        """True if the model's calls can be read."""
        return self.harmony or self.dialect is not None

    @property
    def openings(self) -> tuple[str, ...]:
        """Texts that begin calls."""
        if self.harmony:
            return (harmony.RECIPIENT,)
        return tuple(self.dialect.openings) if self.dialect else ()

    def reader(
        self, cursor: Cursor, thinking: Thinking, functions: Functions | None, *, only_before_content: bool = False,
        continues: bool = False,
    ) -> AnswerReader | HarmonyReader | None:  # fmt: skip
        """Return a reader of one answer, or None if there are no markers to find. See `AnswerReader`. `continues`: the
        prompt ends within an answer."""
        if self.harmony:
            return HarmonyReader(cursor, functions, only_before_content=only_before_content)
        if not self.thoughts and not (self.dialect and functions is not None):
            return None
        return AnswerReader(
            cursor, self.thoughts, self.dialect, functions, reasons=thinking == "open", thought=thinking == "closed",
            only_before_content=only_before_content, opened="" if continues else self.opened,
        )  # fmt: skip

    def thought_format(
        self, tokenizer: Tokenizer, vocabulary: Vocabulary, request: ChatRequest
    ) -> ThoughtFormat | None:
        """Return the markers around the thoughts of an answer, or None if the model has none."""
        calls = bool(request.offered_tools)
        thoughts = harmony.ANALYSIS if self.harmony else self.thoughts
        if thoughts is None or not (thoughts.begin and thoughts.end):  # without an end nothing can close them
            return None
        before, after = thoughts.closing
        if self.harmony:
            afters = harmony.after_thought(calls=calls, forced=request.forces_call)
            stops: Sequence[str] = harmony.ANSWERS if request.constrains_answer else ()
        else:
            afters = (after,)
            stops = self.dialect.openings if self.dialect and calls else ()
        encode = tokenizer.encode
        # Markers are tokens of their own, so that a grammar can begin after the end.
        closings = [Closing((*encode(before),), (*encode(thoughts.end), *encode(each))) for each in afters]
        bytes_of = partial(_quoted_bytes, vocabulary.bytes_of, self.marks) if self.marks else vocabulary.bytes_of
        return ThoughtFormat(
            thoughts.begin.encode(), thoughts.end.encode(), len(encode(thoughts.begin)), bytes_of,
            tuple(each for each in closings if tokenizer.eos_token_ids.isdisjoint(each.after)),
            tuple(stop.encode() for stop in stops), "|" in thoughts.begin,
        )  # fmt: skip


def _quoted_bytes(bytes_of: Callable[[int], bytes], marks: frozenset[int], token: int) -> bytes:
    """Return a token's bytes, in which there is no marker that other tokens than its own spell."""
    return bytes_of(token) if token in marks else bytes_of(token).replace(b"<", b"<\0")
