"""Prompts of which only some tokens are computed. The oracle uses mlx-lm's batch caches of one row: a forward for each
range of tokens, with the caches' offset set to the position of the range."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.rope_utils import initialize_rope

from tests.engine.driver import EACH_ALONE, ONE_GROUP, FixedCost
from tests.engine.tiny import FAMILIES, VOCAB, build, greedy_with_logprobs, network, prompt
from tests.selection import examples
from worker.engine.admission.grouping import StepCost
from worker.engine.batch.decode_batch import ComputedRow
from worker.engine.batch.groups import Groups
from worker.engine.batch.row import Row
from worker.engine.cache.layers import layers
from worker.engine.prefill.scoring import why_not_sparse
from worker.engine.prefill.spans import ComputeSpans, Ranges, dense_prefix_len, window_of
from worker.engine.prefill.task import PromptTask
from worker.engine.prefix.cache import PrefixCache
from worker.engine.upstream.hooks import UnsupportedRope, rope_at
from worker.engine.upstream.mlx_lm import make_prompt_cache
from worker.request import GenerationRequest, Sampling

LONG = 90
KEPT = ((0, 9), (12, 13), (17, 29), (40, 47), (72, 90))  # with the tiny models' window of 16 at the end
OTHER = ((3, 5), (6, 25), (70, 90))
CHUNK = 11
ANSWER = 12
ROPE = mx.fast.rope

Tokens = list[tuple[int, float]]  # each token, and its logprob


def request_of(
    id: str, tokens: tuple[int, ...], sampling: Sampling | None = None, told: Tokens | None = None
) -> GenerationRequest:
    delivered = tuple(token for token, _ in told or [])
    return GenerationRequest(id, tokens, 99, sampling or Sampling(), resume_tokens=delivered, top_logprobs=0)


def spans_of(network: nn.Module, request: GenerationRequest, kept: Ranges) -> ComputeSpans:
    return ComputeSpans(network, replace(request, kept_ranges=tuple(kept)))


class Decoding:
    """Rows that prefill and decode, greedily by default, and the tokens of each."""

    def __init__(self, network: nn.Module) -> None:
        self.network, self.groups = network, Groups(network, lambda groups: True)
        self.rows: dict[str, Row] = {}
        self.generated: dict[str, Tokens] = {}

    def dense(self, request: GenerationRequest) -> None:
        task = PromptTask(Row.of(request), ComputeSpans(self.network, request))
        task.advance(task.stage.total)
        self._join(task.finish())

    def sparse(
        self,
        request: GenerationRequest,
        kept: Ranges,
        *,
        cache: list[Any] | None = None,
        length: int = 0,
        chunk: int = CHUNK,
    ) -> None:
        spans = spans_of(self.network, request, kept)
        if cache is not None:
            spans.load(cache, length)
        while spans.remaining:
            spans.advance(chunk)
        assert spans.length == spans.total
        row = Row.of(replace(request, kept_ranges=tuple(kept)))
        self._join(ComputedRow(row, *spans.finish(row)))

    def _join(self, computed: ComputedRow) -> None:
        row = computed.row
        self.rows[row.id] = row
        self.generated.setdefault(row.id, [])
        self.groups.add([computed])

    def steps(self, count: int) -> None:
        for _ in range(count):
            told, failed = self.groups.step()
            assert failed == []
            for outcomes in told:
                assert outcomes.finite
                assert outcomes.logprobs
                outcomes.row.answer.append(outcomes.token)
                self.generated[outcomes.row.id].append((outcomes.token, outcomes.logprobs.token))

    def ends(self, id: str) -> Tokens:
        self.steps(ANSWER + 1 - len(self.generated[id]))
        return self.generated[id][:ANSWER]

    def group_by(self, cost: StepCost) -> None:
        self.groups._cost = FixedCost(cost)  # type: ignore[assignment]
        self.groups._balanced = False
        self.groups.rebalance()


def alone(network: nn.Module, request: GenerationRequest, kept: Ranges, **how: Any) -> Tokens:
    decoding = Decoding(network)
    decoding.sparse(request, kept, **how)
    return decoding.ends(request.id)


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


def run_by_run(network: nn.Module, tokens: tuple[int, ...], kept: Ranges, count: int = ANSWER) -> Tokens:
    logits, next_ = kept_logits(network, tokens, kept)
    generated: Tokens = []
    while len(generated) < count:
        logprobs = nn.log_softmax(logits[0, -1])
        generated.append((int(logprobs.argmax()), logprobs.max().item()))
        logits = next_(generated[-1][0], len(generated) - 1)
    return generated


@cache
def reference(family: str, seed: int, kept: Ranges) -> Tokens:
    return run_by_run(network(family), prompt(LONG, seed), kept)


def agree(one: Sequence[tuple[int, float]], other: Sequence[tuple[int, float]]) -> bool:
    assert len(one) == len(other)
    return [t for t, _ in one] == [t for t, _ in other] and all(
        abs(p - q) < 1e-4 for (_, p), (_, q) in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_keeping_all_tokens_equals_a_dense_prefill(family: str) -> None:
    tokens = prompt(LONG, 1)
    generated = alone(network(family), request_of("all", tokens), ((0, 40), (40, LONG)))
    dense = greedy_with_logprobs(network(family), tokens, ANSWER)
    assert agree(generated[: len(dense)], dense)


@pytest.mark.parametrize("family", FAMILIES)
def test_sparse_and_dense_rows_in_a_batch_equal_their_answers_alone(family: str) -> None:
    decoding = Decoding(network(family))
    decoding.dense(request_of("dense", prompt(30, 5)))
    decoding.steps(2)
    decoding.sparse(request_of("sparse", prompt(LONG, 1)), KEPT)
    decoding.steps(2)
    decoding.sparse(request_of("other", prompt(LONG, 2)), OTHER)
    decoding.dense(request_of("late", prompt(LONG, 3)))
    decoding.steps(ANSWER)
    assert agree(decoding.ends("sparse"), reference(family, 1, KEPT))
    assert agree(decoding.ends("other"), reference(family, 2, OTHER))
    for id, tokens in ("dense", prompt(30, 5)), ("late", prompt(LONG, 3)):
        dense = greedy_with_logprobs(network(family), tokens, ANSWER)
        assert agree(decoding.ends(id)[: len(dense)], dense)


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
    generated = alone(network(family), request_of("row", prompt(LONG, 1)), kept, cache=found, length=cached)
    assert agree(generated, reference(family, 1, kept))
    assert prefixes.nbytes == nbytes, "a sparse row inserted a prefix"


@pytest.mark.parametrize("family", FAMILIES)
def test_sparse_row_continues_after_preemption_and_in_another_group(family: str) -> None:
    decoding = Decoding(network(family))
    for seed in 1, 2:
        decoding.sparse(request_of(f"row {seed}", prompt(LONG, seed)), KEPT)
    decoding.dense(request_of("dense", prompt(20, 4)))
    decoding.steps(3)
    preempted = decoding.groups.preempt(decoding.rows["row 1"])
    decoding.steps(2)
    decoding.groups.restore(preempted)
    decoding.group_by(EACH_ALONE)
    assert len(decoding.groups.lengths) == 3
    decoding.steps(3)
    decoding.group_by(ONE_GROUP)
    assert len(decoding.groups.lengths) == 1
    assert [agree(decoding.ends(f"row {seed}"), reference(family, seed, KEPT)) for seed in (1, 2)] == [True, True]


@pytest.mark.parametrize("family", FAMILIES)
def test_sparse_row_that_lost_its_cache_is_recomputed(family: str) -> None:
    dense_answer = reference(family, 1, KEPT)
    for told in 1, 5:
        again = request_of("row", prompt(LONG, 1), told=dense_answer[:told])
        assert agree(alone(network(family), again, KEPT)[: ANSWER - told], dense_answer[told:])


def test_sampled_sparse_row_draws_the_same_in_any_batch() -> None:
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=7)
    request = request_of("row", prompt(LONG, 1), sampling)
    dense_answer = alone(network("qwen3"), request, KEPT)
    assert dense_answer != reference("qwen3", 1, KEPT)
    again = request_of("row", prompt(LONG, 1), sampling, told=dense_answer[:5])
    assert agree(alone(network("qwen3"), again, KEPT)[: ANSWER - 5], dense_answer[5:])
    decoding = Decoding(network("qwen3"))
    decoding.dense(request_of("dense", prompt(30, 5)))
    decoding.sparse(request, KEPT)
    decoding.sparse(request_of("other", prompt(LONG, 2), sampling), OTHER)
    decoding.steps(4)
    decoding.groups.restore(decoding.groups.preempt(decoding.rows["row"]))
    assert agree(decoding.ends("row"), dense_answer)


@st.composite
def some_ranges(draw: st.DrawFn) -> Ranges:
    edges = sorted(draw(st.sets(st.integers(0, LONG - 16), min_size=1, max_size=9)))
    *pairs, last = zip(edges[::2], [*edges[1::2], LONG][: len(edges[::2])], strict=True)
    return (*pairs, (last[0], last[1]), (LONG - 16, LONG)) if last[1] < LONG else (*pairs, last)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
@settings(max_examples=examples(8), deadline=None)
@given(kept=some_ranges(), chunk=st.integers(2, 40))
def test_sparse_prefill_does_not_depend_on_the_chunks(family: str, kept: Ranges, chunk: int) -> None:
    expected = run_by_run(network(family), prompt(LONG, 3), kept, 3)
    assert agree(alone(network(family), request_of("row", prompt(LONG, 3)), kept, chunk=chunk)[:3], expected)


@given(kept=some_ranges())
def test_dense_prefix_ends_before_the_first_dropped_token(kept: Ranges) -> None:
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
def test_every_rope_rotates_a_token_as_alone(scaling: str, traditional: bool, width: int) -> None:
    rope = initialize_rope(16, 10000.0, traditional, SCALED[scaling], max_position_embeddings=2048)
    x, positions = mx.random.normal((1, 3, 5, width)), [3, 4, 90, 700, 2047]
    with rope_at(positions, 40):
        turned = rope(x, offset=40)
    each = [rope(x[:, :, i : i + 1], offset=position) for i, position in enumerate(positions)]
    assert mx.array_equal(turned, mx.concatenate(each, axis=2))


class Failing(nn.Module):
    """Computes nothing. Its caches are those of another model."""

    def __init__(self, caches_of: str = "llama") -> None:
        super().__init__()
        self.caches_of = caches_of

    def make_cache(self) -> list[Any]:
        return make_prompt_cache(network(self.caches_of))

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        raise RuntimeError("on purpose")


def test_rope_is_restored_after_any_failure() -> None:
    spans = spans_of(Failing(), request_of("row", prompt(LONG, 1)), OTHER)
    with pytest.raises(RuntimeError, match="on purpose"):
        spans.advance(10)
    assert mx.fast.rope is ROPE
    alone(network("llama"), request_of("row", prompt(LONG, 1)), KEPT)
    why_not_sparse(network("llama"), 2048)
    assert mx.fast.rope is ROPE


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_supports_sparse_prefill(family: str) -> None:
    assert why_not_sparse(network(family), 2048) is None


_TABLE = {"n_ctx": 2048, "n_positions": 2048, "n_embd": 64, "n_head": 4, "n_layer": 2, "layer_norm_epsilon": 1e-5}
_GROWING = {"rope_type": "default", "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 1024}
ASKS_ELSEWHERE: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "vocab_size": VOCAB, **_TABLE},
    # Queries grow with their position, from a position on that no short trial reaches.
    "ministral3": {
        **FAMILIES["llama"],
        "model_type": "ministral3",
        "layer_types": ["full_attention"] * 3,
        "rope_parameters": {"rope_theta": 10000.0, **_GROWING},
    },
}


@pytest.mark.parametrize("model", ASKS_ELSEWHERE)
def test_model_that_uses_positions_elsewhere_is_unsupported(model: str) -> None:
    assert "not only in MLX's rope" in str(why_not_sparse(build(ASKS_ELSEWHERE[model]), 2048))


class Shifted(nn.Module):
    """A model whose positions begin at two."""

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


def test_model_that_calls_rope_with_other_positions_is_unsupported() -> None:
    assert "are not the 4 tokens" in str(why_not_sparse(Shifted(), 2048))
    spans = spans_of(Shifted(), request_of("row", prompt(LONG, 1)), OTHER)
    with pytest.raises(UnsupportedRope, match="are not the 10 tokens"):
        spans.advance(10)


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
        (((0, LONG),), LONG, "only the first 89 are all kept"),
    ],
)
def test_invalid_ranges_and_prefixes_are_refused_before_computing(kept: Ranges, length: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        spans_of(Failing("gemma3"), request_of("row", prompt(LONG, 1)), kept).load([], length)


def test_single_kept_token_is_refused() -> None:
    with pytest.raises(ValueError, match="at least two kept tokens"):
        spans_of(Failing(), request_of("row", prompt(LONG, 1)), ((LONG - 1, LONG),))


def test_a_window_is_the_longest_of_all_layers() -> None:
    assert [window_of(make_prompt_cache(network(family))) for family in ("llama", "gemma3", "mamba2")] == [0, 16, 0]
