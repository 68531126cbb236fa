"""Drafts of a draft model in a batch are what it would answer to each row alone."""

from random import Random
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step

from tests.engine.speculation.oracle import recurrence_of
from tests.engine.tiny import model, network, prompt
from worker.engine.speculation import draft_model
from worker.engine.speculation.draft_model import DraftNetwork, DraftRows, PrefillChunks
from worker.engine.speculation.tuning import MAX_PREFILL
from worker.engine.upstream.mlx_lm import make_prompt_cache

FAMILIES = ["qwen3", "qwen3_5", "gemma3", "falcon_h1", "jamba", "mamba2"]
DEPTH = 4


def draft_of(family: str, context: int = 2048) -> DraftNetwork:
    return DraftNetwork(network(family), recurrence_of(model(family)), context)


def expected(family: str, tokens: tuple[int, ...]) -> tuple[int, ...]:
    generated = generate_step(mx.array(tokens), network(family), max_tokens=DEPTH)
    return tuple(token for token, _ in generated)


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_those_of_the_draft_alone_while_rows_join_and_leave(family: str) -> None:
    rng, draft = Random(family), DraftRows(draft_of(family))
    texts = {name: prompt(80, seed) for seed, name in enumerate("abcd", 1)}
    lengths = {"a": 9, "b": 23}
    for step in range(7):
        rows = {id: texts[id][:length] for id, length in lengths.items()}
        drafts = draft.draft(rows, DEPTH)
        assert drafts == {id: expected(family, tokens) for id, tokens in rows.items()}, step
        lengths = {id: length + rng.randint(1, 6) for id, length in lengths.items()}
        if step == 1:
            lengths |= {"c": 14, "d": 3}
        if step == 3:
            del lengths["a"]


def test_a_row_that_leaves_moves_one_other() -> None:
    draft, texts = DraftRows(draft_of("qwen3")), {name: prompt(80, seed) for seed, name in enumerate("abcdefgh", 1)}
    draft.draft({name: text[:60] for name, text in texts.items()}, DEPTH)
    held = draft.nbytes
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    draft.drop("a")
    assert mx.get_peak_memory() - before < held / 4
    rows = {name: text[:62] for name, text in texts.items() if name != "a"}
    assert draft.draft(rows, DEPTH) == {id: expected("qwen3", tokens) for id, tokens in rows.items()}


def test_a_row_with_many_new_tokens_is_drafted_again_after_it_has_caught_up() -> None:
    draft, text, other = DraftRows(draft_of("qwen3_5")), prompt(80, 1), prompt(80, 2)
    draft.draft({"a": text[:9], "b": other[:12]}, DEPTH)
    rows = {"a": text[:60], "b": other[:14]}
    assert draft.draft(rows, DEPTH) == {id: expected("qwen3_5", tokens) for id, tokens in rows.items()}


def test_one_row_at_a_time_is_outside_the_batch() -> None:
    draft, texts = DraftRows(draft_of("qwen3_5")), {name: prompt(800, seed) for seed, name in enumerate("ab", 1)}
    for step in range(6):
        rows = {name: text[: 700 + step] for name, text in texts.items()}
        drafts = draft.draft(rows, DEPTH)
        assert len(draft._outside) == (step < 5)
    assert drafts == {name: expected("qwen3_5", tokens) for name, tokens in rows.items()}


def test_rows_without_a_new_token_are_not_drafted_again() -> None:
    draft, rows = DraftRows(draft_of("qwen3")), {"a": prompt(9, 1)}
    assert draft.draft(rows, DEPTH) != {}
    assert draft.draft(rows, DEPTH) == {}
    rows = {"a": (*rows["a"], 4)}
    assert draft.draft(rows, DEPTH) == {"a": expected("qwen3", rows["a"])}


def test_a_row_that_waits_for_another_to_catch_up_goes_on_by_some_tokens() -> None:
    draft, long, short = DraftRows(draft_of("qwen3_5")), prompt(900, 1), prompt(80, 2)
    draft.draft({"a": short[:9]}, DEPTH)
    assert draft.draft({"b": long[:700], "a": short[:40]}, DEPTH) == {}
    for step in range(1, 6):
        rows = {"b": long[: 700 + step], "a": short[: 40 + step]}
        drafts = draft.draft(rows, DEPTH)
        assert drafts == {id: expected("qwen3_5", rows[id]) for id in drafts}
    assert drafts.keys() == rows.keys()


def test_a_row_is_given_one_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[Any]()

    def make(network: nn.Module) -> list[Any]:
        made.append(make_prompt_cache(network))
        return cast("list[Any]", made[-1])

    monkeypatch.setattr(draft_model, "make_prompt_cache", make)
    draft, text = DraftRows(draft_of("qwen3")), prompt(3 * MAX_PREFILL, 1)
    while not draft.draft({"a": text}, DEPTH):
        pass
    draft.draft({"a": (*text, 5)}, DEPTH)
    assert len(made) == 1


def test_a_long_prompt_is_computed_in_several_steps() -> None:
    draft, text = DraftRows(draft_of("qwen3")), prompt(3 * MAX_PREFILL, 1)
    steps = 0
    while not (drafts := draft.draft({"a": text}, DEPTH)):
        steps += 1
    assert (steps, drafts["a"]) == (2, expected("qwen3", text))


class Slow(PrefillChunks):
    """Leaves time for a few tokens in each second."""

    def __init__(self) -> None:
        self.computed = list[int]()
        self.limits = list[float]()

    def observe(self, tokens: int, seconds: float) -> None:
        self.computed.append(tokens)

    def next_chunk(self, seconds: float) -> int:
        self.limits.append(seconds)
        return 20 - sum(self.computed)


def test_rows_are_computed_as_far_as_there_is_time_in_a_step() -> None:
    chunks, texts = Slow(), {name: prompt(40, seed) for seed, name in enumerate("ab", 1)}
    draft = DraftRows(draft_of("qwen3_5"), chunks)
    computed = list[list[int]]()
    for step in range(4):
        rows = {id: text[: 30 + step] for id, text in texts.items()}
        drafts = draft.draft(rows, DEPTH, prefill_s=1.0)
        assert drafts == {id: expected("qwen3_5", rows[id]) for id in drafts}
        computed.append([*chunks.computed])
        chunks.computed.clear()
    assert computed == [[20], [10, 10], [20], [2]]
    assert drafts.keys() == rows.keys()
    assert 0 < min(chunks.limits) < max(chunks.limits) <= 1.0


def test_a_row_beyond_the_draft_s_context_is_not_drafted() -> None:
    draft = DraftRows(draft_of("qwen3", context=20))
    assert draft.draft({"a": prompt(30, 1)}, DEPTH) == {}
