"""A multi-token-prediction (MTP) head with its keys and values, and its drafts for all rows of a batch at once."""

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, cast
from weakref import WeakKeyDictionary

import mlx.core as mx
import mlx.nn as nn

from worker.engine.cache import slots
from worker.engine.cache.kv import SlotKVCache
from worker.engine.speculation.offer import DraftedRow, NetworkProposer, RowInput, SpeculatingRow, undelivered
from worker.engine.upstream.mlx_lm import KVCache
from worker.outcomes import MAX_DRAFT


class Trunk:
    """A causal language model of mlx-lm in its two parts: the layers up to the final norm, and the output head. It
    stands in for its network, and holds the hidden states of its last forward until they are taken."""

    def __init__(self, network: nn.Module) -> None:
        """`network`: of a layout for which there are heads."""
        self._network = network
        self._text = getattr(network, "language_model", network)
        self._hidden: mx.array | None = None

    def hidden(self, tokens: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        """Return the hidden states (rows, tokens, hidden_size) behind the final norm. Lazy; writes to `cache`."""
        states: mx.array = self._text.model(tokens, cache)
        return states

    def logits(self, hidden: mx.array) -> mx.array:
        """Return the logits (rows, tokens, vocab) of hidden states. Lazy."""
        head = self._text.lm_head if "lm_head" in self._text else self._text.model.embed_tokens.as_linear
        logits: mx.array = head(hidden)
        return logits

    def embed(self, tokens: mx.array) -> mx.array:
        """Return the embeddings (rows, tokens, hidden_size) of tokens. Lazy."""
        embedded: mx.array = self._text.model.embed_tokens(tokens)
        return embedded

    def __call__(self, tokens: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        """Return the logits (rows, tokens, vocab), as the network does. Lazy; writes to `cache`."""
        self._hidden = self.hidden(tokens, cache)
        return self.logits(self._hidden)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def take_hidden(self) -> mx.array:
        """Return the hidden states (rows, tokens, hidden_size) of the last forward. Lazy. Raises ValueError if there
        was none since the last call."""
        hidden, self._hidden = self._hidden, None
        if hidden is None:
            raise ValueError("No forward has run since its hidden states were taken.")
        return hidden


Network = nn.Module | Trunk  # what computes logits from tokens and a cache


class MTPHead(nn.Module):
    """One decoder layer that predicts the token after the next one. Its weights are named as those of Qwen3.5 are
    behind `mtp.`; other layouts are renamed to these."""

    def __init__(self, layer: nn.Module, hidden_size: int, eps: float) -> None:
        """`layer`: a decoder layer with full attention. `eps`: of all norms."""
        super().__init__()
        self.pre_fc_norm_embedding = nn.RMSNorm(hidden_size, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(hidden_size, eps=eps)
        self.fc = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.layers = [layer]
        self.norm = nn.RMSNorm(hidden_size, eps=eps)

    def add_own_vocabulary(self, vocab: int) -> None:
        """Give the head an embedding and an output head of its own, for `vocab` tokens."""
        size = self.norm.weight.shape[0]
        self.embed_tokens = nn.Embedding(vocab, size)
        self.lm_head = nn.Linear(size, vocab, bias=False)

    def drop_unused(self, names: Container[str]) -> None:
        """Share the trunk's embedding or output head if the weights, of these names, have none."""
        for own in ("embed_tokens", "lm_head"):
            if own in self and f"{own}.weight" not in names:
                del self[own]

    def embed(self, tokens: mx.array, trunk: Trunk) -> mx.array:
        """Return the embeddings (rows, tokens, hidden_size) of the head's inputs. Lazy."""
        embedded: mx.array = self.embed_tokens(tokens) if "embed_tokens" in self else trunk.embed(tokens)
        return embedded

    def logits(self, hidden: mx.array, trunk: Trunk) -> mx.array:
        """Return the logits (rows, tokens, vocab) of the head's hidden states. Lazy."""
        logits: mx.array = self.lm_head(hidden) if "lm_head" in self else trunk.logits(hidden)
        return logits

    def __call__(
        self, embedded: mx.array, hidden: mx.array, mask: Any = "causal", cache: Sequence[Any] | None = None
    ) -> mx.array:
        """Return the head's hidden states (rows, tokens, hidden_size), behind its norm: entry t predicts token t + 2.
        `hidden`: of tokens t, behind the norm of the trunk, or of this head for deeper drafts. `embedded`: of tokens
        t + 1. Lazy; writes to `cache`."""
        both = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        x = self.fc(mx.concatenate(both, axis=-1))
        for layer, layer_cache in zip(self.layers, cache or [None], strict=True):
            x = layer(x, mask, layer_cache)
        states: mx.array = self.norm(x)
        return states


@dataclass(frozen=True, slots=True)
class Head:
    """An MTP head and the trunk that it shares."""

    network: MTPHead
    trunk: Trunk

    def states(self, tokens: mx.array, hidden: mx.array, mask: Any, cache: Any) -> mx.array:
        """Return the head's hidden states (rows, tokens, hidden_size). `tokens`: those after the tokens of `hidden`.
        Lazy; writes to `cache`."""
        return self.network(self.network.embed(tokens, self.trunk), hidden, mask, [cache])

    def likeliest(self, states: mx.array) -> mx.array:
        """Return the most probable tokens (rows, tokens) by the head's hidden states. Lazy."""
        return mx.argmax(self.network.logits(states, self.trunk), axis=-1)


def entry_shape(head: Head) -> tuple[mx.array, mx.array]:
    """Return keys and values of one entry, which are not computed."""
    cache, token = KVCache(), mx.zeros((1, 1), mx.int32)
    head.states(token, head.network.embed(token, head.trunk), None, cache)
    keys, values = cache.keys_and_values()
    return keys, values


@dataclass(frozen=True, slots=True)
class PromptEntries:
    """The head's entries of a prompt, which its row takes along when it joins a batch."""

    cache: Any  # an mlx-lm cache
    start: int  # position of the first entry's token


class PromptHead:
    """Computes the head's entries of one prompt, chunk by chunk. It ends at the first token that is not computed, if
    some are dropped."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._cache = KVCache()
        self._start: int | None = None

    def feed(self, hidden: mx.array, after: Sequence[int], position: int) -> None:
        """Add an entry for each hidden state (1, tokens, hidden_size). `after`: the token after each. `position`: of
        the first one's token. Blocks."""
        if self._start is None:
            self._start = position
        if position != self._start + self._cache.offset:
            return
        mask = self._cache.make_mask(len(after), return_array=False, window_size=None)
        self._head.states(mx.array([list(after)]), hidden, mask, self._cache)
        mx.eval(self._cache.state)

    def finish(self) -> PromptEntries | None:
        """Return the entries; None if there are none. The object must not be used afterwards."""
        return None if self._start is None else PromptEntries(self._cache, self._start)


class _HeadCache(SlotKVCache):
    """Keys and values of a head, for rows of which some have no entries yet."""

    def join(self, rows: Sequence[Any | None], ends: Sequence[int], shape: tuple[mx.array, mx.array]) -> None:
        """Append rows: an mlx-lm cache, or None for a row without entries. `shape`: keys and values of any length.
        Blocks."""
        held = [row.keys_and_values() if row else None for row in rows]
        added = [each[0].shape[2] if each else 0 for each in held]
        self._make_room(added, ends, *shape)
        for slot, each in enumerate(held, self.rows):
            self._write_row(slot, each)
        lengths, current = self._current()
        self._set_rows([*lengths, *added], [*current, *added], [*self.slot_rows.ends, *ends])
        mx.eval(self.state)

    def _write_row(self, slot: int, held: tuple[mx.array, mx.array] | None) -> None:
        if held:
            self._fill(slot, *held)
            return
        for buffer in self.state:
            buffer[slot : slot + 1] = 0

    def continue_at(self, positions: list[int]) -> None:
        """Set the position of each row's next token."""
        lengths, _ = self._current()
        self._set_rows(lengths, positions, self.slot_rows.ends)


class HeadDrafts:
    """The drafts of one batch, whose rows join and leave as those of the batch do. For the engine's thread."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._cache = _HeadCache()
        self._starts: list[int] = []  # position of each row's first entry

    @property
    def nbytes(self) -> int:
        """Allocated bytes of the head's keys and values."""
        return self._cache.nbytes

    def add(self, rows: Sequence[PromptEntries | None], ends: Sequence[int]) -> None:
        """Append rows, with their entries if there are any. `ends`: the most tokens that each will have. Blocks."""
        ends = [end + MAX_DRAFT for end in ends]
        self._cache.join([row.cache if row else None for row in rows], ends, entry_shape(self._head))
        self._starts += [row.start if row else 0 for row in rows]

    def select(self, order: Sequence[int]) -> None:
        """Keep row `order[i]` as row i, and drop the others. Blocks."""
        self._cache.filter(order)
        self._starts = [self._starts[index] for index in order]

    def draft(
        self, hidden: mx.array, after: Sequence[Sequence[int]], positions: Sequence[int], depth: int
    ) -> list[list[int]]:
        """Return `depth` tokens for each row. Blocks.

        `hidden`: (rows, width, hidden_size), the trunk's states of the row's last tokens, without those that it did not
        keep. `after`: the token after each of these; of a row without any, the drafts mean nothing. `positions`: of the
        first of these tokens."""
        counts = [len(tokens) for tokens in after]
        self._cache.continue_at([at - start for at, start in zip(positions, self._starts, strict=True)])
        states = self._fed(hidden, after, counts)
        drafts = [self._head.likeliest(states)]
        for _ in range(depth - 1):  # from its own states, which are dropped afterwards
            mask = self._cache.make_mask(1)
            states = self._head.states(drafts[-1], states, mask, self._cache)
            drafts.append(self._head.likeliest(states))
        self._cache.drop_last(depth - 1)
        return cast("list[list[int]]", mx.concatenate(drafts, axis=1).tolist())

    def _fed(self, hidden: mx.array, after: Sequence[Sequence[int]], counts: Sequence[int]) -> mx.array:
        """Add the entries, and return the head's state of each row's last one, (rows, 1, hidden_size)."""
        width = max(counts)
        padded = mx.array([[*tokens, *[0] * (width - len(tokens))] for tokens in after], dtype=mx.int32)
        self._cache.begin(width)
        try:
            states = self._head.states(padded, hidden[:, :width], self._cache.make_mask(width), self._cache)
        except BaseException:
            self._cache.roll_back()
            raise
        self._cache.commit(counts)
        last = mx.maximum(mx.array([*counts]) - 1, 0)[:, None, None]
        return mx.take_along_axis(states, last, axis=1)


MTP = "mtp"
# Rates that are hoped for, by depth: published heads are trained for one token, and later ones are right less often.
# test_trials.py
HEAD_RATES = (0.85, 0.8, 0.75)


@dataclass(frozen=True, slots=True)
class FedTokens:
    """The tokens that a forward fed to the rows of a batch and that these keep."""

    ids: tuple[str, ...]  # of the rows, in the order of the arrays
    hidden: mx.array  # (rows, width, hidden_size)
    positions: tuple[int, ...]  # of each row's first token
    after: tuple[tuple[int, ...], ...] | None = None  # the token after each; None: one was fed, the next is not known


class _Batch:
    """The head's cache of a batch, whose rows may be in another order."""

    def __init__(self, head: Head) -> None:
        self.drafts = HeadDrafts(head)
        self.ids: list[str] = []

    def match(self, rows: Sequence[SpeculatingRow], entries: dict[str, PromptEntries]) -> None:
        """Drop the rows that have left the batch, and add those that have joined it."""
        self.keep({row.id for row in rows})
        if joining := [row for row in rows if row.id not in self.ids]:
            self.drafts.add([entries.pop(row.id, None) for row in joining], [row.end for row in joining])
            self.ids += [row.id for row in joining]

    def keep(self, present: Collection[str]) -> None:
        """Drop all other rows. The last rows fill their slots."""
        leaving = {index for index, id in enumerate(self.ids) if id not in present}
        if leaving:
            order = slots.compact_order(len(self.ids), leaving)
            self.drafts.select(order)
            self.ids = [self.ids[index] for index in order]


class HeadProposer(NetworkProposer):
    """Offers the drafts that `prepare` has computed. For the engine's thread.

    A row that moves to another batch leaves its entries behind."""

    def __init__(self, head: Head, depth: int = len(HEAD_RATES)) -> None:
        """`depth`: most tokens of a draft."""
        super().__init__(MTP, [HEAD_RATES[min(at, len(HEAD_RATES) - 1)] for at in range(depth)])
        self._head = head
        self._batches = WeakKeyDictionary[Any, _Batch]()
        self._entries: dict[str, PromptEntries] = {}  # of rows that have not drafted yet

    @property
    def nbytes(self) -> int:
        """Allocated bytes of the head's keys and values, without those of prompts that have not drafted yet."""
        return sum(batch.drafts.nbytes for batch in self._batches.values())

    def nbytes_of(self, batch: Any) -> int:
        """Return the part of `nbytes` for the rows of one batch."""
        own = self._batches.get(batch)
        return own.drafts.nbytes if own else 0

    def add_prompt(self, id: str, entries: PromptEntries | None) -> None:
        """Take over the head's entries of a prompt."""
        if entries:
            self._entries[id] = entries

    def prepare(
        self,
        batch: Any,
        inputs: Sequence[RowInput],
        fed: FedTokens | None = None,
        depth: int = MAX_DRAFT,
        prefill_s: float = inf,
    ) -> bool:
        """Compute drafts, as far as `fed` has the rows' hidden states."""
        if fed is None or not inputs:
            return False
        own = self._batches.setdefault(batch, _Batch(self._head))
        own.match([each.row for each in inputs], self._entries)
        drafted = {each.row.id: each for each in inputs}
        fed_at = {id: index for index, id in enumerate(fed.ids)}
        known = [id for id in own.ids if id in fed_at]
        if not known:
            return False
        index = mx.array([fed_at.get(id, 0) for id in own.ids])
        after = [_after(drafted[id], fed_at.get(id), fed) for id in own.ids]
        positions = [fed.positions[fed_at[id]] if id in fed_at else 0 for id in own.ids]
        drafts = own.drafts.draft(fed.hidden[index], after, positions, min(depth, self.depth))
        for id, tokens in zip(own.ids, drafts, strict=True):
            if id in fed_at:
                self.hold(id, len(drafted[id].row.answer) + len(undelivered(drafted[id])), tokens)
        return True

    def leave(self, id: str) -> None:
        """Free a row's slot in its batch."""
        for batch in self._batches.values():
            batch.keep({*batch.ids} - {id})

    def forget(self, row: DraftedRow) -> None:
        """Free what is held for a row."""
        super().forget(row)
        self._entries.pop(row.id, None)
        self.leave(row.id)


def _after(row: RowInput, index: int | None, fed: FedTokens) -> tuple[int, ...]:
    """Return the tokens after those that were fed to the row; none if the forward had not this row."""
    if index is None:
        return ()
    return (row.token,) if fed.after is None else fed.after[index]
