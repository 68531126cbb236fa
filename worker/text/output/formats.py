"""How a model's answers are read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

from schemas import ChatRequest
from worker.text.dialects.cursor import Cursor
from worker.text.dialects.dialect import Dialect, Functions
from worker.text.dialects.table import Thoughts
from worker.text.output import harmony
from worker.text.output.answer import AnswerReader
from worker.text.output.evidence import Proof, evidence_of
from worker.text.output.harmony import HarmonyReader
from worker.text.output.thought import Closing, ThoughtFormat
from worker.text.prompt.prompt import Thinking
from worker.text.tokenizer import Tokenizer
from worker.text.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class ModelFormat:
    """The output format of one model; a worker has one."""

    harmony: bool
    dialect: Dialect | None
    proof: Proof  # how the dialect was found
    thoughts: Thoughts | None
    opened: str = ""  # the opening of a call, with which the prompt ends
    marks: frozenset[int] = frozenset()  # harmony's markers; what other tokens spell is none

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """Return the format that the model's vocabulary and chat template show."""
        is_harmony = frozenset(tokenizer.tokens).issuperset(harmony.MARKERS)
        found = evidence_of(tokenizer)
        added = tokenizer.added_tokens
        marks = frozenset(added[each] for each in harmony.MARKERS if each in added) if is_harmony else frozenset[int]()
        return cls(is_harmony, found.dialect, found.proof, found.thoughts, found.opened, marks)

    def text_of(self, token: int, text: str) -> str:
        """Return a token's text for the reader, which finds no marker in it that other tokens than its own spell."""
        return harmony.quoted(text) if self.marks and token not in self.marks else text

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
