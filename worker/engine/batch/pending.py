"""The next inputs of rows: tokens that a forward draws, before the host knows them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple, cast

import mlx.core as mx

from worker.engine.batch.row import Row
from worker.engine.sampling.logprobs import StepLogprobs
from worker.engine.sampling.processors import masked, processors_for
from worker.engine.sampling.sampler import Sampler, draw
from worker.engine.speculation.mtp.head import Network
from worker.engine.speculation.verify import Position
from worker.outcomes import Logprobs


class RowLogprobs(NamedTuple):
    """Log probabilities of a row's next input, among those of the forward that has drawn it."""

    step: StepLogprobs
    number: int

    def read(self) -> Logprobs:
        """Return them. Blocks until they are computed."""
        return self.step.rows[self.number]


class StepToken(NamedTuple):
    """A token that a row has drawn. `finite` is False if it was drawn from non-finite logits. `accepted`: it was in the
    row's draft."""

    row: Row
    token: int
    finite: bool
    logprobs: Logprobs | None
    accepted: bool = False


@dataclass(slots=True)
class PendingTokens:
    """The next input of each row: a token that was drawn, or the last one of a prompt. Lazy."""

    tokens: mx.array  # (rows,)
    norms: mx.array  # (rows,): logarithm of the sum of the exponentials of the logits; finite only if they are
    logprobs: dict[Row, RowLogprobs]  # of the rows that want logprobs and have drawn their token

    @classmethod
    def known(cls, tokens: Sequence[int]) -> "PendingTokens":
        """Return inputs that the host knows."""
        return cls(mx.array([*tokens]), mx.array([0.0] * len(tokens)), {})

    @classmethod
    def together(cls, pending: Sequence["PendingTokens"]) -> "PendingTokens":
        """Return the next inputs of all these rows. If there are several, the device has begun to compute them."""
        if len(pending) == 1:
            return pending[0]
        logprobs = {row: each for part in pending for row, each in part.logprobs.items()}
        tokens, norms = [each.tokens for each in pending], [each.norms for each in pending]
        joined = cls(mx.concatenate(tokens), mx.concatenate(norms), logprobs)
        joined.compute()
        return joined

    def compute(self) -> None:
        """Start computing the arrays, without blocking. If they were first computed as a part of the next step, they
        could be read only at its end, a step late."""
        steps = {each.step for each in self.logprobs.values()}
        mx.async_eval(self.tokens, self.norms, [step.arrays for step in steps])

    def read(self, rows: Sequence[Row]) -> list[StepToken]:
        """Return the token of each row. Blocks until they are computed."""
        tokens, norms = cast("list[int]", self.tokens.tolist()), cast("list[float]", self.norms.tolist())
        logprobs = self.logprobs
        return [
            StepToken(row, token, isfinite(norm), logprobs[row].read() if row in logprobs else None)
            for row, token, norm in zip(rows, tokens, norms, strict=True)
        ]


class BatchSampling:
    """Draws the next tokens of the same rows in every step. What these have in common is prepared once."""

    def __init__(self, rows: Sequence[Row], fed_drawn: Sequence[bool]) -> None:
        """`fed_drawn`: see `processors_for`."""
        self._processors = processors_for(rows, fed_drawn)
        self._draw = Sampler(rows)
        self._wanting = [index for index, row in enumerate(rows) if row.wants_logprobs]
        self._rows = rows
        grammars = {row: row.request.grammar for row in rows if row.request.grammar}
        self._free = {row: grammar for row, grammar in grammars.items() if grammar.is_free}
        self._held = [grammar for row, grammar in grammars.items() if row not in self._free]
        self._logits: mx.array | None = None  # of the last draw, if a row is free

    def draw(self, logits: mx.array, fed: mx.array) -> PendingTokens:
        """Draw a token from the logits (rows, vocab) after the tokens that were fed (rows,). Lazy, but blocks for rows
        with a grammar, which needs their last token. Advances the rows' random keys and the processors."""
        for process in self._processors:
            logits = process(logits, fed)
        self._logits = logits if self._free else None
        norm = mx.logsumexp(logits, axis=-1, keepdims=True)
        logprobs = logits - norm
        drawn = self._draw(logprobs)
        return PendingTokens(drawn, norm.squeeze(1), self._logprobs(logprobs, drawn) if self._wanting else {})

    def accept(self, fed: Sequence[StepToken], pending: PendingTokens) -> PendingTokens | None:
        """Let free grammars accept the tokens that were fed for the last draw. Returns None if the rows go on as they
        are; else the draw, in which the rows that are held from now on have drawn again. Lazy."""
        free, begun = self._free, list[Row]()
        for each in fed:
            if grammar := free.get(each.row):
                grammar.accept(each.token)
                if not grammar.is_free:
                    begun.append(each.row)
        logits, self._logits = self._logits, None
        masks = {self._rows.index(row): mask for row in begun if (mask := free[row].bitmask()) is not None}
        if masks and logits is not None:
            return self._again(logits, pending, masks)
        return pending if any(grammar.is_free for grammar in self._held) else None

    def _again(self, logits: mx.array, pending: PendingTokens, masks: Mapping[int, bytes]) -> PendingTokens:
        """Draw the tokens of these rows again, by their masks and with the same random keys."""
        at = mx.array([*masks])
        own = masked(logits[at], dict(enumerate(masks.values())))
        norm = mx.logsumexp(own, axis=-1, keepdims=True)
        rows = [self._rows[index] for index in masks]
        tokens, norms = mx.array(pending.tokens), mx.array(pending.norms)
        tokens[at] = drawn = draw(own - norm, [Position(row, row.request, -1, (), None) for row in rows])
        norms[at] = norm.squeeze(1)
        logprobs = dict(pending.logprobs)
        if wanting := [place for place, row in enumerate(rows) if row.wants_logprobs]:
            step = StepLogprobs(
                (own - norm)[mx.array(wanting)],
                drawn[mx.array(wanting)],
                [rows[place].request.top_logprobs or 0 for place in wanting],
            )
            logprobs |= {rows[place]: RowLogprobs(step, number) for number, place in enumerate(wanting)}
        found = PendingTokens(tokens, norms, logprobs)
        found.compute()
        return found

    def _logprobs(self, logprobs: mx.array, drawn: mx.array) -> dict[Row, RowLogprobs]:
        """Return the log probabilities of the rows that want them. `logprobs` (rows, vocab), `drawn` (rows,). Lazy."""
        wanting = self._wanting
        if len(wanting) < len(self._rows):
            logprobs, drawn = logprobs[mx.array(wanting)], drawn[mx.array(wanting)]
        rows = [self._rows[index] for index in wanting]
        step = StepLogprobs(logprobs, drawn, [row.request.top_logprobs or 0 for row in rows])
        return {row: RowLogprobs(step, number) for number, row in enumerate(rows)}


def forward(
    network: Network, cache: list[Any], rows: Sequence[Row], tokens: mx.array, sampling: BatchSampling | None = None
) -> PendingTokens:
    """Feed each row its token (rows,), and return the next ones, which the device has begun to compute. Blocks only for
    rows with a grammar, which needs their last token. Writes to `cache`, and advances the rows' random keys and the
    processors. `sampling`: of these rows; None: of rows that are fed their last known token."""
    sampling = sampling or BatchSampling(rows, [False] * len(rows))
    pending = sampling.draw(network(tokens[:, None], cache=cache).squeeze(1), tokens)
    pending.compute()
    return pending
