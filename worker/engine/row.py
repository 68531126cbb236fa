"""One sequence past its prompt, as the engine carries it from step to step."""

from dataclasses import dataclass, replace

import mlx.core as mx

from worker.engine.guided import guided
from worker.engine.sampling import Kind, Processor, draw_key, kind_of, processors_for
from worker.engine.upstream import TokenBuffer
from worker.schedule.sequence import Range, Sequence


@dataclass(slots=True, eq=False)
class Row:
    sequence: Sequence
    processors: tuple[Processor, ...]
    context: TokenBuffer | None  # all tokens that were fed, for the processors
    kind: Kind
    drawn: int  # tokens of the answer, those of earlier attempts and the one under way among them
    answer: list[int]  # the tokens that were told, those of earlier attempts among them
    left_out: int = 0  # tokens of the prompt that are not in its cache
    suspect: bool = False  # it was in a step that failed, and has not been told anything since
    fresh: bool = True  # what it is fed next is the last token of what is known, and no news

    @classmethod
    def of(cls, sequence: Sequence, *, suspect: bool = False) -> "Row":
        processors = _processors(sequence)
        context = TokenBuffer(list(sequence.known[:-1])) if processors else None
        delivered = list(sequence.delivered)
        kind, left_out = kind_of(sequence.sampling), sequence.left_out
        return cls(sequence, processors, context, kind, len(delivered), delivered, left_out, suspect=suspect)

    @property
    def id(self) -> str:
        return self.sequence.id

    @property
    def length(self) -> int:
        """In tokens that are computed."""
        return len(self.sequence.prompt) - self.left_out + len(self.answer)

    def leave_out(self, kept: tuple[Range, ...]) -> None:
        """All of the prompt but these: before its prefill, and whenever it comes again."""
        self.sequence = replace(self.sequence, kept=kept)
        self.left_out = self.sequence.left_out

    def leave_nothing_out(self) -> None:
        """Nor be scored again, so admission need not allow for the draft's cache any more."""
        self.sequence, self.left_out = replace(self.sequence, kept=None, thinning=None), 0

    def fed(self, *ending: int) -> tuple[int, ...]:
        """What a prefix of all that is in its cache between two steps is found by: what is known of it, and what else
        it was fed."""
        return self.sequence.keys((*self.sequence.prompt, *self.answer, *ending))

    @property
    def asks(self) -> bool:
        return self.sequence.top_logprobs is not None

    def again(self) -> Sequence:
        """What brings the row to where it is, without its cache."""
        return replace(self.sequence, delivered=tuple(self.answer))

    def next_key(self) -> tuple[int, int]:
        """Draw k is keyed by (seed, k), so a row goes on where it was when it is resumed."""
        key = draw_key(self.sequence.sampling.seed, self.drawn)
        self.drawn += 1
        return key >> 32, key & 0xFFFFFFFF  # as mx.random.key lays it out

    def processed(self, logits: mx.array, fed: mx.array) -> mx.array:
        """logits (1, vocab), fed (1,)."""
        if self.context is None:
            return logits
        so_far = self.context.update_and_fetch(fed)
        for process in self.processors:
            logits = process(so_far, logits)
        return logits


def _processors(sequence: Sequence) -> tuple[Processor, ...]:
    """The guide comes last: what it forbids, no bias brings back."""
    prompt_tokens = len(sequence.prompt)
    others = processors_for(sequence.sampling, prompt_tokens)
    return (*others, guided(sequence.guide, prompt_tokens)) if sequence.guide else others
