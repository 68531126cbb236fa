"""Drafts of an MTP head in a batch are those of the head computed for each row alone."""

from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any

import mlx.core as mx
import pytest

from tests.engine.speculation.mtp.checkpoints import MTP_CONFIGS, ReferenceHead, head_tensors
from tests.engine.tiny import VOCAB, build, prompt
from worker.engine.speculation.mtp import Head, HeadDrafts, PromptEntries, PromptHead, Trunk
from worker.engine.speculation.mtp_load import joined_experts, layout_of

LAYOUTS = [*MTP_CONFIGS]
DEPTH = 3


@cache
def head_of(name: str) -> Head:
    layout = layout_of(MTP_CONFIGS[name])
    assert layout is not None
    network = layout.build()
    named = {own: value for key, value in head_tensors(name).items() if (own := layout.rename(key))}
    network.load_weights([*joined_experts(named).items()])
    return Head(network, Trunk(build(MTP_CONFIGS[name])))


@cache
def reference_of(name: str) -> ReferenceHead:
    trunk: Any = head_of(name).trunk
    output = trunk.logits(mx.eye(64)[None])[0].T
    return ReferenceHead(name, head_tensors(name), trunk.embed(mx.arange(VOCAB)), output)


@dataclass
class Sequence:
    """A row's tokens, and the trunk's hidden states of all but the last."""

    name: str
    tokens: list[int]
    known: int  # number of tokens of which the head has entries
    hidden: mx.array = field(init=False)

    def __post_init__(self) -> None:
        self.hidden = head_of(self.name).trunk.hidden(mx.array([self.tokens]))

    def entries(self, chunk: int = 5) -> PromptEntries | None:
        """Feed the entries of the first `known` tokens, in chunks."""
        fed = PromptHead(head_of(self.name))
        for start in range(0, self.known, chunk):
            end = min(start + chunk, self.known)
            fed.feed(self.hidden[:, start:end], self.tokens[start + 1 : end + 1], start)
        return fed.finish()

    def advance(self, tokens: int, width: int) -> tuple[mx.array, list[int], int]:
        """Return the hidden states of the next tokens, padded to `width`, the tokens after these, and the position of
        the first."""
        start, self.known = self.known, self.known + tokens
        padding = mx.full((1, width - tokens, 64), 7.0)
        hidden = mx.concatenate([self.hidden[:, start : self.known], padding], axis=1)
        return hidden, self.tokens[start + 1 : self.known + 1], start

    def expected(self) -> list[int]:
        return reference_of(self.name).drafts(self.tokens[: self.known + 1], self.hidden[0, : self.known], DEPTH)


def sequence(name: str, seed: int, known: int) -> Sequence:
    return Sequence(name, list(prompt(60, seed)), known)


def drafted(drafts: HeadDrafts, rows: list[Sequence], counts: list[int]) -> list[list[int]]:
    width = max(counts)
    advanced = [row.advance(count, width) for row, count in zip(rows, counts, strict=True)]
    hidden = mx.concatenate([each[0] for each in advanced])
    return drafts.draft(hidden, [each[1] for each in advanced], [each[2] for each in advanced], DEPTH)


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_row_s_drafts_are_those_of_the_head_alone_whatever_it_keeps_while_rows_join_and_leave(name: str) -> None:
    rng = Random(name)
    rows = [sequence(name, 1, 11), sequence(name, 2, 3)]
    drafts = HeadDrafts(head_of(name))
    drafts.add([row.entries() for row in rows], [70, 70])
    for step in range(6):
        counts = [rng.randint(1, 5) for _ in rows]
        assert drafted(drafts, rows, counts) == [row.expected() for row in rows]
        if step == 1:
            rows += [sequence(name, 3, 22), sequence(name, 4, 1)]
            drafts.add([row.entries() for row in rows[2:]], [70, 70])
        if step == 3:
            order = [3, 1, 2]
            drafts.select(order)
            rows = [rows[index] for index in order]


@pytest.mark.parametrize("name", ["qwen3_5", "glm4_moe"])
def test_a_single_row_and_rows_of_equal_length_are_drafted_too(name: str) -> None:
    for rows in [[sequence(name, 5, 7)], [sequence(name, 6, 7), sequence(name, 7, 7)]]:
        drafts = HeadDrafts(head_of(name))
        drafts.add([row.entries() for row in rows], [70] * len(rows))
        for _ in range(2):
            assert drafted(drafts, rows, [1] * len(rows)) == [row.expected() for row in rows]


def test_a_row_without_entries_joins_and_drafts_from_its_first_state_on() -> None:
    row, other = sequence("qwen3_5", 1, 0), sequence("qwen3_5", 2, 9)
    drafts = HeadDrafts(head_of("qwen3_5"))
    drafts.add([row.entries(), other.entries()], [70, 70])
    for counts in [[1, 1], [3, 2], [2, 4]]:
        assert drafted(drafts, [row, other], counts) == [row.expected(), other.expected()]


def test_a_prompt_whose_beginning_came_from_a_cache_is_drafted_as_if_it_began_there() -> None:
    """Rotary positions are relative, so only the distances between entries matter."""
    name = "qwen3_5"
    whole = sequence(name, 1, 20)
    fed, skipped = PromptHead(head_of(name)), 8
    fed.feed(whole.hidden[:, skipped:20], whole.tokens[skipped + 1 : 21], skipped)
    drafts = HeadDrafts(head_of(name))
    drafts.add([fed.finish()], [70])
    ours = drafted(drafts, [whole], [2])
    end = whole.known
    expected = reference_of(name).drafts(whole.tokens[skipped : end + 1], whole.hidden[0, skipped:end], DEPTH)
    assert ours == [expected]


def test_entries_end_at_the_first_dropped_token() -> None:
    name = "qwen3_5"
    row = sequence(name, 1, 20)
    fed = PromptHead(head_of(name))
    fed.feed(row.hidden[:, :6], row.tokens[1:7], 0)
    fed.feed(row.hidden[:, 9:12], row.tokens[10:13], 9)
    entries = fed.finish()
    assert entries is not None
    assert (entries.cache.offset, entries.start) == (6, 0)


def test_a_batch_that_all_rows_have_left_holds_nothing() -> None:
    drafts = HeadDrafts(head_of("qwen3_5"))
    drafts.add([sequence("qwen3_5", 1, 9).entries()], [70])
    assert drafts.nbytes > 0
    drafts.select([])
    assert drafts.nbytes == 0
