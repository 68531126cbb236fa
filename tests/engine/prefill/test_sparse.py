"""Prompts of which only some tokens are computed. The oracle is mlx-lm's: its batch caches of one row, a forward for
each run of tokens, with the caches' offset set to where the run begins."""

from collections.abc import Callable
from collections.abc import Sequence as Sequences
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.rope_utils import initialize_rope

from tests.engine.driver import EACH_ALONE, ONE_GROUP, Fixed
from tests.engine.tiny import FAMILIES, VOCAB, build, network, prompt, told_alone
from tests.selection import examples
from worker.engine.batch.groups import Groups
from worker.engine.batch.row import Row
from worker.engine.cache.layers import layers
from worker.engine.cache.prefix import PrefixCache
from worker.engine.prefill.base import Prefill
from worker.engine.prefill.sparse import (
    Ranges,
    SparsePrefill,
    UnsupportedRope,
    _placed,
    dense_prefix_len,
    why_not_sparse,
    window_of,
)
from worker.engine.upstream.mlx_lm import make_prompt_cache
from worker.schedule.grouping import StepCost
from worker.schedule.request import GenerationRequest, Sampling

LONG = 90
KEPT = ((0, 9), (12, 13), (17, 29), (40, 47), (72, 90))  # with the tiny models' window of 16 at the end
OTHER = ((3, 5), (6, 25), (70, 90))
CHUNK = 11
ANSWER = 12
ROPE = mx.fast.rope

Told = list[tuple[int, float]]  # each token, and its logprob


def sequence(
    id: str, tokens: tuple[int, ...], sampling: Sampling | None = None, told: Told | None = None
) -> GenerationRequest:
    delivered = tuple(token for token, _ in told or [])
    return GenerationRequest(id, tokens, 99, sampling or Sampling(), resume_tokens=delivered, top_logprobs=0)


class Decoding:
    """Rows that prefill and decode, greedily unless they say otherwise, and what each says."""

    def __init__(self, network: nn.Module) -> None:
        self.network, self.groups = network, Groups(network, lambda groups: True)
        self.rows: dict[str, Row] = {}
        self.said: dict[str, Told] = {}

    def dense(self, asked: GenerationRequest) -> None:
        prefill = Prefill(self.network, Row.of(asked))
        prefill.advance(prefill.total)
        self._join(prefill.row, *prefill.finish())

    def sparse(
        self,
        asked: GenerationRequest,
        kept: Ranges,
        *,
        cache: list[Any] | None = None,
        length: int = 0,
        chunk: int = CHUNK,
    ) -> None:
        cache = make_prompt_cache(self.network) if cache is None else cache
        prefill = SparsePrefill(self.network, Row.of(asked), kept, cache, length)
        while prefill.remaining:
            prefill.advance(chunk)
        assert prefill.done == prefill.total
        self._join(prefill.row, *prefill.finish())

    def _join(self, row: Row, cache: list[Any], drawn: Any, position: int | None = None) -> None:
        self.rows[row.id] = row
        self.said.setdefault(row.id, [])
        self.groups.add(row, cache, drawn, position)

    def steps(self, count: int) -> None:
        for _ in range(count):
            told, failed = self.groups.step()
            assert failed == []
            for news in told:
                assert news.finite
                assert news.logprobs
                news.row.answer.append(news.token)
                self.said[news.row.id].append((news.token, news.logprobs.token))

    def ends(self, id: str) -> Told:
        self.steps(ANSWER + 1 - len(self.said[id]))
        return self.said[id][:ANSWER]

    def group_by(self, cost: StepCost) -> None:
        self.groups._cost = Fixed(cost)  # type: ignore[assignment]
        self.groups._balanced = False
        self.groups.rebalance()


def alone(network: nn.Module, asked: GenerationRequest, kept: Ranges, **how: Any) -> Told:
    table = Decoding(network)
    table.sparse(asked, kept, **how)
    return table.ends(asked.id)


def kept_logits(
    network: nn.Module, tokens: tuple[int, ...], kept: Ranges
) -> tuple[mx.array, Callable[[int, int], mx.array]]:
    """Return the logits after the tokens in these ranges, and a function from each next token to those after it."""
    batch = [layer.merge([layer]) for layer in make_prompt_cache(network)]
    for start, end in kept:
        for layer in layers(batch):
            layer.offset = mx.array([start])
        logits = network(mx.array([tokens[start:end]]), cache=batch)

    def next_(token: int, number: int) -> mx.array:
        following: mx.array = network(mx.array([[token]]), cache=batch)
        return following

    return logits, next_


def run_by_run(network: nn.Module, tokens: tuple[int, ...], kept: Ranges, count: int = ANSWER) -> Told:
    logits, next_ = kept_logits(network, tokens, kept)
    said: Told = []
    while len(said) < count:
        logprobs = nn.log_softmax(logits[0, -1])
        said.append((int(logprobs.argmax()), logprobs.max().item()))
        logits = next_(said[-1][0], len(said) - 1)
    return said


@cache
def reference(family: str, seed: int, kept: Ranges) -> Told:
    return run_by_run(network(family), prompt(LONG, seed), kept)


def agree(one: Sequences[tuple[int, float]], other: Sequences[tuple[int, float]]) -> bool:
    assert len(one) == len(other)
    return [t for t, _ in one] == [t for t, _ in other] and all(
        abs(p - q) < 1e-4 for (_, p), (_, q) in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_all_tokens_kept_say_what_a_dense_prompt_says(family: str) -> None:
    tokens = prompt(LONG, 1)
    said = alone(network(family), sequence("all", tokens), ((0, 40), (40, LONG)))
    dense = told_alone(network(family), tokens, ANSWER)
    assert agree(said[: len(dense)], dense)


@pytest.mark.parametrize("family", FAMILIES)
def test_sparse_rows_and_dense_rows_say_beside_each_other_what_they_say_alone(family: str) -> None:
    table = Decoding(network(family))
    table.dense(sequence("dense", prompt(30, 5)))
    table.steps(2)
    table.sparse(sequence("sparse", prompt(LONG, 1)), KEPT)
    table.steps(2)
    table.sparse(sequence("other", prompt(LONG, 2)), OTHER)
    table.dense(sequence("late", prompt(LONG, 3)))
    table.steps(ANSWER)
    assert agree(table.ends("sparse"), reference(family, 1, KEPT))
    assert agree(table.ends("other"), reference(family, 2, OTHER))
    for id, tokens in ("dense", prompt(30, 5)), ("late", prompt(LONG, 3)):
        dense = told_alone(network(family), tokens, ANSWER)
        assert agree(table.ends(id)[: len(dense)], dense)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_5", "deepseek_v32"])
@pytest.mark.parametrize("length", [1, 9, 30])
def test_a_cached_prefix_is_used_and_changes_nothing(family: str, length: int) -> None:
    prefixes, cache = PrefixCache(network(family), 1 << 30), make_prompt_cache(network(family))
    network(family)(mx.array([prompt(LONG, 1)[:length]]), cache=cache)
    prefixes.insert("", prompt(LONG, 1)[:length], cache)
    kept = ((0, 9), (9, 30), (41, 55), (60, LONG))
    found, cached = prefixes.load("", prompt(LONG, 1)[: dense_prefix_len(kept)])
    assert cached == length
    nbytes = prefixes.nbytes
    said = alone(network(family), sequence("row", prompt(LONG, 1)), kept, cache=found, length=cached)
    assert agree(said, reference(family, 1, kept))
    assert prefixes.nbytes == nbytes, "a sparse row left something for others"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sparse_row_goes_on_where_it_was_after_a_pause_and_in_another_group(family: str) -> None:
    table = Decoding(network(family))
    for seed in 1, 2:
        table.sparse(sequence(f"row {seed}", prompt(LONG, seed)), KEPT)
    table.dense(sequence("dense", prompt(20, 4)))
    table.steps(3)
    parked = table.groups.preempt(table.rows["row 1"])
    table.steps(2)
    table.groups.restore(parked)
    table.group_by(EACH_ALONE)
    assert len(table.groups.lengths) == 3
    table.steps(3)
    table.group_by(ONE_GROUP)
    assert len(table.groups.lengths) == 1
    assert [agree(table.ends(f"row {seed}"), reference(family, seed, KEPT)) for seed in (1, 2)] == [True, True]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_that_lost_its_cache_comes_again_and_goes_on(family: str) -> None:
    whole = reference(family, 1, KEPT)
    for told in 1, 5:
        again = sequence("row", prompt(LONG, 1), told=whole[:told])
        assert agree(alone(network(family), again, KEPT)[: ANSWER - told], whole[told:])


def test_a_row_that_draws_its_tokens_draws_the_same_wherever_it_is() -> None:
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=7)
    asked = sequence("row", prompt(LONG, 1), sampling)
    whole = alone(network("qwen3"), asked, KEPT)
    assert whole != reference("qwen3", 1, KEPT)
    again = sequence("row", prompt(LONG, 1), sampling, told=whole[:5])
    assert agree(alone(network("qwen3"), again, KEPT)[: ANSWER - 5], whole[5:])
    table = Decoding(network("qwen3"))
    table.dense(sequence("dense", prompt(30, 5)))
    table.sparse(asked, KEPT)
    table.sparse(sequence("other", prompt(LONG, 2), sampling), OTHER)
    table.steps(4)
    table.groups.restore(table.groups.preempt(table.rows["row"]))
    assert agree(table.ends("row"), whole)


@st.composite
def some_ranges(draw: st.DrawFn) -> Ranges:
    edges = sorted(draw(st.sets(st.integers(0, LONG - 16), min_size=1, max_size=9)))
    *pairs, last = zip(edges[::2], [*edges[1::2], LONG][: len(edges[::2])], strict=True)
    return (*pairs, (last[0], last[1]), (LONG - 16, LONG)) if last[1] < LONG else (*pairs, last)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
@settings(max_examples=examples(8), deadline=None)
@given(kept=some_ranges(), chunk=st.integers(2, 40))
def test_it_is_the_same_whatever_is_kept_and_in_chunks_of_any_size(family: str, kept: Ranges, chunk: int) -> None:
    expected = run_by_run(network(family), prompt(LONG, 3), kept, 3)
    assert agree(alone(network(family), sequence("row", prompt(LONG, 3)), kept, chunk=chunk)[:3], expected)


@given(kept=some_ranges())
def test_the_front_ends_before_the_first_token_that_is_left_out(kept: Ranges) -> None:
    there = {at for start, end in kept for at in range(start, end)}
    assert dense_prefix_len(kept) == next((at for at in range(LONG) if at not in there), LONG)


_ONCE = {"original_max_position_embeddings": 64}
SCALED: dict[str, Any] = {
    "plain": None,
    "linear": {"type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_ONCE},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **_ONCE},
    "su": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0 + k for k in range(8)], **_ONCE},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("scaling", SCALED)
@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("width", [16, 24])  # the dimensions that are turned, and more
def test_every_rope_turns_a_token_as_it_turns_it_alone(scaling: str, traditional: bool, width: int) -> None:
    rope = initialize_rope(16, 10000.0, traditional, SCALED[scaling], max_position_embeddings=2048)
    x, positions = mx.random.normal((1, 3, 5, width)), [3, 4, 90, 700, 2047]
    with _placed(positions, 40):
        turned = rope(x, offset=40)
    each = [rope(x[:, :, i : i + 1], offset=position) for i, position in enumerate(positions)]
    assert mx.array_equal(turned, mx.concatenate(each, axis=2))


class Failing(nn.Module):
    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        raise RuntimeError("on purpose")


def test_rope_is_itself_again_whatever_happens() -> None:
    prefill = SparsePrefill(
        Failing(), Row.of(sequence("row", prompt(LONG, 1))), KEPT, make_prompt_cache(network("llama")), 0
    )
    with pytest.raises(RuntimeError, match="on purpose"):
        prefill.advance(10)
    assert mx.fast.rope is ROPE
    alone(network("llama"), sequence("row", prompt(LONG, 1)), KEPT)
    why_not_sparse(network("llama"), 2048)
    assert mx.fast.rope is ROPE


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can(family: str) -> None:
    assert why_not_sparse(network(family), 2048) is None


_TABLE = {"n_ctx": 2048, "n_positions": 2048, "n_embd": 64, "n_head": 4, "n_layer": 2, "layer_norm_epsilon": 1e-5}
_GROWING = {"rope_type": "default", "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 1024}
ASKS_ELSEWHERE: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "vocab_size": VOCAB, **_TABLE},
    # Queries grow with their position, from one on that no short trial comes to.
    "ministral3": {
        **FAMILIES["llama"],
        "model_type": "ministral3",
        "layer_types": ["full_attention"] * 3,
        "rope_parameters": {"rope_theta": 10000.0, **_GROWING},
    },
}


@pytest.mark.parametrize("model", ASKS_ELSEWHERE)
def test_a_model_that_uses_positions_elsewhere_cannot(model: str) -> None:
    assert "not only in MLX's rope" in str(why_not_sparse(build(ASKS_ELSEWHERE[model]), 2048))


class Shifted(nn.Module):
    """It begins to count at two."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network("llama")

    @property
    def layers(self) -> list[nn.Module]:
        return self.inner.layers

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        rope = mx.fast.rope
        mx.fast.rope = lambda x, dims, *, offset, **how: rope(x, dims, offset=offset + 2, **how)
        try:
            return self.inner(tokens, cache=cache)
        finally:
            mx.fast.rope = rope


def test_a_model_that_asks_rope_for_something_else_cannot() -> None:
    assert "are not the 4 tokens" in str(why_not_sparse(Shifted(), 2048))
    prefill = SparsePrefill(
        Shifted(), Row.of(sequence("row", prompt(LONG, 1))), KEPT, make_prompt_cache(network("llama")), 0
    )
    with pytest.raises(UnsupportedRope, match="are not the 10 tokens"):
        prefill.advance(10)


@pytest.mark.parametrize(
    ("kept", "length", "sentence"),
    [
        ((), 0, "in order"),
        (((5, 9), (8, LONG)), 0, "in order"),
        (((-1, LONG),), 0, "in order"),
        (((9, 5), (9, LONG)), 0, "in order"),
        (((0, 90), (LONG, LONG)), 0, "in order"),
        (((0, LONG - 1),), 0, "last range must end at 90, the end of the prompt, not at 89"),
        (((0, LONG + 1),), 0, "last range must end at 90, the end of the prompt, not at 91"),
        (((0, 30), (75, LONG)), 0, "the last 16 tokens must be kept"),
        (((0, 30), (70, 75), (76, LONG)), 0, "the last 16 tokens must be kept"),
        (((0, 30), (70, LONG)), 31, "only the first 30 are all kept"),
        (((1, 30), (70, LONG)), 1, "only the first 0 are all kept"),
        (((0, LONG),), LONG, "at least two kept tokens"),
    ],
)
def test_ranges_that_will_not_do_are_refused_before_anything_is_computed(
    kept: Ranges, length: int, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        SparsePrefill(Failing(), Row.of(sequence("row", prompt(LONG, 1))), kept, _rotating(), length)


def test_a_row_of_a_single_token_is_not_for_this() -> None:
    with pytest.raises(ValueError, match="at least two kept tokens"):
        SparsePrefill(Failing(), Row.of(sequence("row", prompt(LONG, 1))), ((LONG - 1, LONG),), [], 0)


def _rotating() -> list[Any]:
    return make_prompt_cache(network("gemma3"))


def test_a_window_is_the_longest_of_all_layers() -> None:
    assert [window_of(make_prompt_cache(network(family))) for family in ("llama", "gemma3", "mamba2")] == [0, 16, 0]
