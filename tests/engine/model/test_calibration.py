"""A chunk is measured after several contexts, so memory that a model takes for each pair of tokens is counted."""

import gc
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import pytest

from tests.engine.driver import Run
from tests.engine.tiny import FAMILIES, build, model, model_of, prompt
from worker.engine.memory import CHUNK, KVLayers, MemoryModel
from worker.engine.model.calibration import _longest, calibrated
from worker.engine.model.load import Model

# Both select the tokens to attend to by an indexer of their own.
SEARCHING: dict[str, dict[str, Any]] = {
    "deepseek_v32": FAMILIES["deepseek_v32"],
    "glm_moe_dsa": {
        **FAMILIES["deepseek_v32"],
        "model_type": "glm_moe_dsa",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_shared_experts": None,
        "norm_topk_prob": True,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.0,
        "scoring_func": "sigmoid",
        "topk_group": 1,
        "topk_method": "noaux_tc",
    },
}
FAMILY = pytest.mark.parametrize("family", ["deepseek_v32", pytest.param("glm_moe_dsa", marks=pytest.mark.slow)])


@cache
def searching(family: str) -> Model:
    network = build(SEARCHING[family])
    gc.collect()  # what is freed in the middle of a measurement would be taken for its own
    guessed = model_of(network, SEARCHING[family])
    return replace(guessed, costs=calibrated(guessed.costs, network, guessed.context))


@pytest.mark.parametrize("megabytes", [24, pytest.param(48, marks=pytest.mark.slow), 120])
@FAMILY
def test_a_model_that_searches_its_context_stays_within_its_memory(family: str, megabytes: int) -> None:
    gc.collect()
    costs = replace(searching(family).costs, weights_bytes=mx.get_active_memory())
    limit, highest = costs.weights_bytes + megabytes * 1_000_000, 0
    run = Run(replace(searching(family), costs=costs), step_s=1.0, memory=limit)
    for i in range(6):
        run.add(str(i), prompt(400 + 200 * i, i), max_tokens=8)
    while len(run.engine):
        run.step()
        highest = max(highest, mx.get_peak_memory())
    ended = list(run.ended.values())
    assert set(ended) <= {"length", "stop", "refused"}
    assert ended.count("refused") <= (2 if megabytes == 24 else 0)  # at 24 MB the longest prompts are a close call
    assert highest <= limit


@FAMILY
def test_bytes_per_pair_of_a_context_search_are_measured(family: str) -> None:
    guessed = model_of(searching(family).network, SEARCHING[family]).costs
    assert searching(family).costs.score_bytes > 1.2 * guessed.score_bytes


@pytest.mark.parametrize("family", ["mamba2", "rwkv7"])
def test_without_a_context_pairs_cost_nothing(family: str) -> None:
    known = calibrated(model(family).costs, model(family).network, 2048)
    assert known.score_bytes == 0
    assert known.chunk_token_bytes > 0


def test_measurement_is_limited_by_the_weights_and_the_context() -> None:
    costs = MemoryModel(weights_bytes=8 * 10**9, kv_layers=(KVLayers(100_000, 1_000),))
    assert _longest(costs, 1 << 20) == 8192
    assert _longest(costs, 4096) == 4096 - 2 * CHUNK
    assert _longest(replace(costs, weights_bytes=10**9), 1 << 20) == 512
    assert _longest(costs, CHUNK) == 0
    assert _longest(replace(costs, kv_layers=(KVLayers(10**9, 1),)), 1 << 20) == 0
    assert _longest(replace(costs, kv_layers=(KVLayers(1, 1, window=16),)), 1 << 20) == 0, (
        "there is none behind a window"
    )
