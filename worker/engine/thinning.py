"""A long prompt, of which a draft says what matters, and only that is computed: SpecPrefill.

It has the face of `Prefill`. What the prefix cache has of the prompt is used as it is, and so are the first tokens that
stay in any case: those are computed as ever, and others may find them. Whatever fails, the prompt is computed whole.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.nn as nn

from worker.engine.prefill import Phase, Prefill
from worker.engine.prefix import PrefixCache
from worker.engine.row import Row
from worker.engine.rows import Drawn
from worker.engine.scene import Scene
from worker.engine.scoring import LOOKAHEAD, Draft, Scores, Scoring
from worker.engine.sparse import SparsePrefill, front, window_of
from worker.engine.upstream import make_prompt_cache
from worker.schedule.selection import merged, outside, select
from worker.schedule.sequence import Outcome, Prefilled, Range, Scored, Thinned, Thinning, Whole, tokens_in

logger = logging.getLogger("sluice.engine")

Pays = Callable[[int, int, float], bool]


class ThinnedPrefill:
    def __init__(
        self,
        network: nn.Module,
        row: Row,
        thinning: Thinning,
        prefix: PrefixCache | None,
        draft: Draft,
        pays: Pays,
        scene: Scene | None = None,
    ) -> None:
        """`pays`: whether to score so many tokens, and of so many to compute that share, is faster than to compute all;
        `scene`: of a prompt with images, which stay."""
        self.row, self.waited = row, 0
        self._network, self._prefix, self._thinning, self._scene = network, prefix, thinning, scene
        self._draft, self._pays = draft, pays
        self._prefill = Prefill(network, row, prefix, scene)  # of the whole, or of the first tokens that stay
        self._scoring: Scoring | None = None
        self._sparse: SparsePrefill | None = None
        self._undecided, self._seconds = True, 0.0
        self._told: list[Outcome] = []

    @property
    def phase(self) -> Phase:
        return "scoring" if self._scoring else "prefill"

    @property
    def begun(self) -> bool:
        return self._seconds > 0 or self._prefill.begun

    @property
    def total(self) -> int:
        """Of the draft while it scores, and so are the others."""
        return self._scoring.total if self._scoring else len(self.row.sequence.known) - 1 - self.row.left_out

    @property
    def done(self) -> int:
        return self.total - self.remaining

    @property
    def remaining(self) -> int:
        """Tokens to compute."""
        if self._scoring:
            return self._scoring.remaining
        now = self._sparse or self._prefill
        return self.total - (now.total - now.remaining)

    @property
    def start(self) -> int:
        """Where the first token is that the row is to have in its cache, and that is neither there nor found."""
        return (self._sparse or self._prefill).start

    @property
    def cached(self) -> int:
        return self._prefill.cached

    def look(self) -> None:
        self._prefill.look()
        if self._undecided:
            self._undecided = False
            with self._or_whole("The draft"):
                self._decide()

    def skip(self) -> None:
        self._prefill.skip()
        if self._scoring:
            with self._or_whole("The draft"):
                self._scoring.skip()

    def advance(self, tokens: int) -> int:
        """Blocks until they are computed; says how many they were."""
        if self._scoring:
            with self._or_whole("The draft"):
                self._score(self._scoring, tokens)
        elif self.row.left_out:
            with self._or_whole("The prefill of what was kept"):
                return self._compute(tokens)
        else:
            return self._prefill.advance(tokens)
        return tokens

    def news(self) -> list[Outcome]:
        """What came of it."""
        told, self._told = self._told, []
        if self._scoring:
            return [*told, Scored(self.row.id, self.done, self.total)]
        return [*told, Prefilled(self.row.id, self.done, self.total, self.cached)]

    def finish(self) -> tuple[list[Any], Drawn, int | None]:
        return (self._rest() if self.row.left_out else self._prefill).finish()

    def _decide(self) -> None:
        thinning, rest = self._thinning, self._prefill.remaining + 1  # and the last one, which is fed later
        prompt, reads = self.row.sequence.prompt, self._draft.reads
        start = len(prompt) - rest
        if rest < thinning.least:
            self._leave_whole(f"{rest:,} tokens were left to compute, and it begins at {thinning.least:,}.")
        elif tokens_in(self._stays(start)) == rest:
            self._leave_whole(f"Of the {rest:,} tokens that were left to compute none may be left out.")
        elif reads(prompt) + LOOKAHEAD > self._draft.context:
            self._leave_whole(f"The draft was made for {self._draft.context:,} tokens, and the prompt has more.")
        elif not thinning.asked and not self._pays(reads(prompt[start:]), rest, self._share(start)):
            self._leave_whole("The draft would have taken longer than it saves.")
        else:
            asked = self.row.sequence
            self._scoring = self._draft.scoring(asked.space, asked.prompt, asked.boundaries)

    def _score(self, scoring: Scoring, tokens: int) -> None:
        began = time.perf_counter()
        scoring.advance(tokens)
        self._seconds += time.perf_counter() - began
        if scoring.scores is not None:
            self._thin(scoring.scores)

    def _thin(self, scores: Scores) -> None:
        kept = self._kept(scores, self._prefill.done)
        self._scoring = None
        self.row.leave_out(kept)
        self._prefill.end_at(front(kept))
        self._told.append(Thinned(self.row.id, kept, self._seconds))

    def _kept(self, scores: Scores, start: int) -> tuple[Range, ...]:
        """`start`: tokens that are there already."""
        tokens = len(scores) - start
        stays = [(first - start, end - start) for first, end in self._stays(start)]
        chosen = select(scores[start:], self._share(start), stays)
        return tuple(merged([(0, start), *((first + start, end + start) for first, end in chosen)], tokens + start))

    def _stays(self, start: int) -> list[Range]:
        """Whatever its tokens score."""
        tokens = len(self.row.sequence.prompt)
        end = tokens - max(1, window_of(make_prompt_cache(self._network)))
        thinnable = [(max(first, start), min(behind, end)) for first, behind in self._thinning.thinnable]
        # With what is right around them: the tokens that say where an image begins and ends.
        images = [(picture.span[0] - 1, picture.span[1] + 1) for picture in self.row.sequence.pictures]
        stays = [*outside(thinnable, tokens), *images]
        return merged(((max(first, start), behind) for first, behind in stays), tokens)

    def _share(self, start: int) -> float:
        """To keep of the tokens from there on: those that stay, and of the others what was asked for. Else the scores
        would have nothing to choose where much stays."""
        tokens, stay = len(self.row.sequence.prompt) - start, tokens_in(self._stays(start))
        return (stay + self._thinning.keep * (tokens - stay)) / max(1, tokens)

    def _compute(self, tokens: int) -> int:
        computed = self._prefill.advance(tokens)
        if not self._prefill.remaining:
            computed += self._rest().advance(max(0, tokens - computed))
        return computed

    def _rest(self) -> SparsePrefill:
        """What follows the first tokens that stay."""
        if self._sparse is None:
            assert self.row.sequence.kept is not None, "something is left out"
            kept, taken = self.row.sequence.kept, self._prefill.taken()
            self._sparse = SparsePrefill(self._network, self.row, kept, *taken, self._scene)
        return self._sparse

    @contextmanager
    def _or_whole(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception:  # whatever it was, the prompt can still be computed as ever
            logger.exception("%s is computed whole", self.row.id)
            self._leave_whole(f"{what} failed; the worker's log says why.")
            self._prefill, self._sparse = Prefill(self._network, self.row, self._prefix, self._scene), None

    def _leave_whole(self, why: str) -> None:
        self._scoring = None
        self.row.leave_nothing_out()
        self._told.append(Whole(self.row.id, why))
