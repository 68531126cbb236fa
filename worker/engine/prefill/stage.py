"""The interface of a stage of a prompt: images are encoded, tokens are scored, and spans of tokens are computed."""

from dataclasses import dataclass
from typing import Any, Protocol

from worker.engine.memory import NO_IMAGES, ImageDemand
from worker.outcomes import Outcome, SpecPrefillApplied, SpecPrefillSkipped
from worker.outcomes import Phase as Phase


@dataclass(frozen=True, slots=True)
class StageProgress:
    """Result of an advance. `tokens`: number of tokens computed. A stage may end with more: `choice`: the tokens of the
    prompt that the later stages compute. `loaded`: a cache of the row, and the number of first tokens in it."""

    tokens: int
    choice: SpecPrefillApplied | SpecPrefillSkipped | None = None
    loaded: tuple[list[Any], int] | None = None


class Stage(Protocol):
    """One kind of work on one prompt. Its `PromptTask` owns it, and calls it on the engine's thread. A stage counts
    tokens of its own: those of images, of the draft's prompt, or of the row's cache."""

    @property
    def phase(self) -> Phase:
        """Name of the stage in progress reports and budgets."""

    @property
    def total(self) -> int:
        """Tokens of the whole stage."""

    @property
    def remaining(self) -> int:
        """Tokens left to compute. Tokens that a cache holds are not left."""

    @property
    def done(self) -> int:
        """Tokens computed, or found in a cache."""
        return self.total - self.remaining

    @property
    def report(self) -> Outcome:
        """The outcome that reports the tokens done."""

    # When it is advanced

    @property
    def needed(self) -> bool:
        """True if the stage has to end before the next one."""
        return True

    @property
    def ready(self) -> bool:
        """False while the stage waits for something that the engine's thread does not compute. Its prompt stays active,
        and is not planned. May change on another thread, which then calls `EngineThread.wake`."""
        return True

    @property
    def started(self) -> bool:
        """True if the stage holds memory that it frees only at its end, so that it should be finished first."""
        return False

    @property
    def exclusive(self) -> bool:
        """True if, of all prompts in this phase, one at a time is advanced."""
        return False

    @property
    def before_prefix(self) -> bool:
        """True if the cached prefix of the prompt is loaded only after the stage: until then it would only occupy
        memory. A choice of tokens is reported after the stage too."""
        return False

    @property
    def fallback(self) -> SpecPrefillSkipped | None:
        """The choice to make if the stage fails, so that the whole prompt is computed; None if the prompt fails with
        it. A stage with a fallback is dropped once a choice is made."""
        return None

    # The memory that it takes

    @property
    def held_tokens(self) -> int:
        """Tokens of the model's own cache that take as much memory as what the stage holds in a cache."""
        return 0

    @property
    def takes_chunk(self) -> bool:
        """True if an advance takes the memory of a chunk of as many tokens; else `images` has what it takes."""
        return True

    @property
    def images(self) -> ImageDemand:
        """The images that the prompt has still to be computed with."""
        return NO_IMAGES

    # Its work

    def refresh(self, start: int) -> StageProgress | None:
        """Adapt to the caches. `start`: index of the first token that is neither computed nor in the prefix cache.
        Copies and computes nothing. Returns a result if the stage ends without an advance."""
        return None

    def prepare(self) -> None:
        """Load what caches of the stage's own hold, so that `advance` only computes. Blocks."""
        return

    def advance(self, tokens: int) -> StageProgress:
        """Compute about `tokens` tokens. Called only if the stage is ready. Blocks."""
