"""One prompt on its way into a cache, a chunk at a time."""

import mlx.nn as nn

from worker.engine.cache import end_prefill
from worker.engine.guided import guided
from worker.engine.sampling import Processor, Row, draw, processors_for
from worker.engine.upstream import (
    GenerationBatch,
    PromptProcessingBatch,
    StopSequences,
    make_prompt_cache,
)
from worker.schedule.sequence import Sequence

_WHOLE = 1 << 30  # upstream's own chunking is off: the plan decides how long a chunk is


class Prefill:
    """All but the last token of the prompt are prefilled; the last one is the first that the row decodes."""

    def __init__(self, network: nn.Module, sequence: Sequence, *, stop: StopSequences) -> None:
        self.sequence, self.done, self.waited = sequence, 0, 0
        self._tokens, row = sequence.known, Row.of(sequence)
        # Every list is given: upstream's filter fails on one that is not.
        self._batch = PromptProcessingBatch(
            network,
            [row],
            [make_prompt_cache(network)],
            tokens=[[]],
            prefill_step_size=_WHOLE,
            samplers=[lambda logprobs: draw(logprobs, [row])],
            logits_processors=[_processors(sequence)],
            stop_sequences=[stop],
            max_tokens=[sequence.max_tokens - len(sequence.delivered)],
        )

    @property
    def total(self) -> int:
        return len(self._tokens) - 1

    @property
    def remaining(self) -> int:
        return self.total - self.done

    def advance(self, tokens: int) -> None:
        """Blocks until they are computed."""
        if tokens:
            self._batch.prompt([list(self._tokens[self.done : self.done + tokens])])
            self.done += tokens

    def row(self) -> GenerationBatch:
        """A batch of one that has its first token under way. The prefill is spent."""
        end_prefill(self._batch.prompt_cache)
        return self._batch.generate([[self._tokens[-1]]])


def _processors(sequence: Sequence) -> tuple[Processor, ...]:
    """The guide comes last: what it forbids, no bias brings back."""
    others, prompt_tokens = processors_for(sequence.sampling, len(sequence.prompt)), len(sequence.prompt)
    return (*others, guided(sequence.guide, prompt_tokens)) if sequence.guide else others
