"""How a model's answers are read."""

from dataclasses import dataclass
from typing import Self

from worker.text.dialects.cursor import Cursor
from worker.text.dialects.dialect import Dialect, Functions
from worker.text.dialects.table import Thoughts
from worker.text.output import harmony
from worker.text.output.answer import AnswerReader
from worker.text.output.evidence import Proof, evidence_of
from worker.text.output.harmony import HarmonyReader
from worker.text.prompt.prompt import Thinking
from worker.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelFormat:
    """The output format of one model; a worker has one."""

    harmony: bool
    dialect: Dialect | None
    proof: Proof  # how the dialect was found
    thoughts: Thoughts | None
    opened: str = ""  # the opening of a call, with which the prompt ends

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """Return the format that the model's vocabulary and chat template show."""
        is_harmony = frozenset(tokenizer.tokens).issuperset(harmony.MARKERS)
        found = evidence_of(tokenizer)
        return cls(is_harmony, found.dialect, found.proof, found.thoughts, found.opened)

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
