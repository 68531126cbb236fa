"""The steps whose memory is not predicted change nothing: admission is corrected as if every step were compared."""

import gc
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from random import Random

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.driver import ONE_GROUP, Run
from tests.engine.tiny import CONFIGS, build, model_of, prompt
from worker.engine.admission.classes import Decoding
from worker.engine.admission.decision import RowEstimate
from worker.engine.admission.plan import AdmissionPlan
from worker.engine.admission_controller import AdmissionController, Calibration
from worker.engine.memory import ImageDemand, KVLayers, MemoryModel, StepDemand
from worker.engine.model.calibration import calibrated
from worker.engine.model.load import Model
from worker.engine.upstream.mlx_lm import generation_stream

# Its keys and values take far more than anything else: 8 kB a token.
WIDE = {**CONFIGS["llama"], "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
MB = 1_000_000
DRAFTER = MemoryModel(weights_bytes=5, kv_layers=(KVLayers(300, 150),), chunk_token_bytes=900)
MODELS = {
    "KV": MemoryModel(weights_bytes=10, kv_layers=(KVLayers(1000, 500),), chunk_token_bytes=70, score_bytes=3),
    "window": MemoryModel(weights_bytes=10, kv_layers=(KVLayers(1000, 500, 300), KVLayers(100, 100))),
    "state": MemoryModel(weights_bytes=10, kv_layers=(KVLayers(100, 100),), state_bytes=10**6, state_layer_bytes=10**5),
    "drafts": MemoryModel(weights_bytes=10, kv_layers=(KVLayers(1000, 500),), state_bytes=10**5, max_draft=7),
    "logits": MemoryModel(weights_bytes=10, kv_layers=(KVLayers(10, 5),), vocab=10**5),
    "draft model": MemoryModel(weights_bytes=10, kv_layers=(KVLayers(1000, 500),), max_draft=7, drafter=DRAFTER),
}


# Which steps need at least as much


def predicted_bytes(costs: MemoryModel, demand: StepDemand) -> int:
    slack_bytes = costs.slack_bytes(demand.lengths[: len(demand.buffers)], demand.buffers)
    return costs.working_bytes(demand.lengths, demand.chunk, demand.images, demand.drawn) + slack_bytes


lengths = st.lists(st.lists(st.integers(1, 3000), min_size=1, max_size=5), max_size=3)


@pytest.mark.parametrize("name", MODELS)
@given(lengths, st.data())
def test_step_that_covers_another_is_predicted_to_take_at_least_as_much(
    name: str, groups: list[list[int]], data: st.DataObject
) -> None:
    change = st.one_of(st.just(0), st.integers(0, 700), st.integers(-3, 3))
    buffers = [data.draw(st.integers(0, 20 * MB)) for _ in groups]
    before = StepDemand(groups, buffers, data.draw(st.integers(0, 600)), drawn=data.draw(st.integers(0, 600)))
    now = StepDemand(
        [[max(1, tokens + data.draw(change)) for tokens in group] for group in groups],
        [max(0, nbytes + data.draw(change)) for nbytes in buffers],
        max(0, before.chunk + data.draw(change)),
        drawn=max(0, before.drawn + data.draw(change)),
    )
    if now.covers(before):
        assert predicted_bytes(MODELS[name], now) >= predicted_bytes(MODELS[name], before)


def test_step_covers_another_only_if_nothing_became_less() -> None:
    before = StepDemand([[100, 40], [7]], [3000, 1000], 3, drawn=2)
    assert before.covers(before)
    assert StepDemand([[101, 20], [8]], [3000, 1001], 4, drawn=3).covers(before)
    for other in (
        replace(before, lengths=[[99, 40], [7]]),
        replace(before, lengths=[[100], [40, 7]]),
        replace(before, lengths=[[100, 40, 7]]),
        replace(before, lengths=[[100, 40], [7], [7]]),
        replace(before, buffers=[2999, 1000]),
        replace(before, buffers=[4000]),
        replace(before, chunk=2),
        replace(before, drawn=1),
        replace(before, images=ImageDemand(1)),
    ):
        assert not other.covers(before)


# In the engine


class EveryStep:
    """Compares every step beside admission, which may skip it."""

    def __init__(self, admission: AdmissionController, costs: MemoryModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self._admission, self._costs, self._compare = admission, costs, admission.compare
        self.reference = Calibration()  # by all steps
        self.steps = self.skipped = 0
        monkeypatch.setattr(admission, "compare", self._compare_both)

    def _compare_both(self, demand: StepDemand, prefix_bytes: int) -> tuple[int, int] | None:
        used, last = self._admission._used_bytes(prefix_bytes), self._admission._compared
        memory = self._compare(demand, prefix_bytes)
        self.reference.record_step(predicted_bytes(self._costs, demand) + self._admission._held_bytes(), used)
        self.reference.compare()
        self.steps, self.skipped = self.steps + 1, self.skipped + (self._admission._compared is last)
        assert self._admission.calibration.factor >= self.reference.factor - 1e-9
        return memory


@cache
def built() -> Model:
    network = build(WIDE)
    guessed = model_of(network, WIDE)
    return replace(guessed, costs=calibrated(guessed.costs, network, guessed.context))


def model_with(kv: float = 1.0, chunk: float = 1.0) -> Model:
    """Return the model with costs that predict these multiples of what it takes. Its weights include what other tests
    have left in memory."""
    mx.synchronize(generation_stream)  # a step that still runs holds memory
    gc.collect()
    costs = built().costs
    layers = tuple(
        KVLayers(int(kv * each.token_bytes), int(kv * each.layer_bytes), each.window) for each in costs.kv_layers
    )
    return replace(
        built(),
        costs=replace(
            costs,
            weights_bytes=mx.get_active_memory(),
            kv_layers=layers,
            chunk_token_bytes=int(chunk * costs.chunk_token_bytes),
        ),
    )


class Watched:
    """A run whose engine is held to what comparing every step would have shown."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: Model, limit: int, prefix_bytes: int = 0) -> None:
        self.run = Run(model, step_s=1.0, memory=limit, prefix_bytes=prefix_bytes)
        self.run.group_by(ONE_GROUP)
        self.every = EveryStep(self.run.engine._admission, model.costs, monkeypatch)
        self._limit, self._costs = limit, model.costs
        self._decide = self.run.engine._admission.decide
        self.admitted = 0  # rows admitted after the first step
        monkeypatch.setattr(self.run.engine._admission, "decide", self._checked)

    def _checked(self, active: Sequence[RowEstimate], decoding: Decoding) -> AdmissionPlan:
        """Decide, and check that the active rows fit by what all steps before have shown, if any row is admitted."""
        plan = self._decide(active, decoding)
        if plan.admit:
            costs = replace(self._costs, factor=self.every.reference.factor)
            assert costs.peak_bytes(plan.reservation.lengths) <= self._limit
            self.admitted += len(plan.admit) * (self.every.steps > 0)
        return plan


@pytest.mark.parametrize(("kv", "chunk"), [(1.0, 1.0), (0.4, 8.0)], ids=["exact", "KV less, chunks more"])
def test_rows_are_admitted_as_if_every_step_were_compared(
    kv: float, chunk: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice, model = Random(1), model_with(kv, chunk)
    watched = Watched(monkeypatch, model, model.costs.peak_bytes([[1000] * 5]), prefix_bytes=20 * MB)
    run = watched.run
    for number in range(9):
        run.add(str(number), prompt(dice.choice((100, 700)), number), max_tokens=dice.choice((20, 150)))
        for _ in range(dice.choice((1, 5, 23))):
            run.step()
    run.drain()
    assert set(run.ended.values()) <= {"length", "stop"}
    assert watched.admitted > 5
    assert watched.every.skipped > watched.every.steps / 2
    assert (run.engine._admission.calibration.factor > 1.1) == (kv < 1)


@pytest.mark.parametrize(
    "later", [pytest.param(0, marks=pytest.mark.slow), 5, pytest.param(11, marks=pytest.mark.slow)]
)
def test_buffers_that_grow_more_than_predicted_are_noticed_before_the_next_row_is_admitted(
    later: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of steps since the last one that is always compared. `later`: steps until they grow, more."""
    model = model_with(kv=0.4)
    limit = model.costs.resident_bytes + int(1.8 * model.costs.working_bytes([[300] * 13]))
    watched = Watched(monkeypatch, model, limit)
    run, admission = watched.run, watched.run.engine._admission
    for number in range(12):
        run.add(str(number), prompt(227 - later, number), max_tokens=70)
    run.until(lambda: all(run.generated.values()))
    before = sum(run.engine._running.buffers)
    assert admission.calibration.factor == 1.0, "by which another row fits"
    run.until(lambda: sum(run.engine._running.buffers) > before)
    assert watched.every.skipped > 0.9 * (watched.every.steps - 5)
    assert admission.calibration.factor > 1.8
    run.add("next", prompt(200, 9), max_tokens=70)
    run.step()
    assert run.waiting == ["next"]


def test_step_after_prompts_is_compared_though_it_takes_less_than_they_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less is predicted for it, too: without prompts, the 40 MB that no prediction contains are noticed."""
    model = model_with(chunk=8.0)
    costs = replace(model.costs, weights_bytes=model.costs.weights_bytes - 40 * MB)
    watched = Watched(monkeypatch, replace(model, costs=costs), 2 * costs.peak_bytes([[300] * 13]))
    run = watched.run
    for number in range(12):
        run.add(str(number), prompt(240, number), max_tokens=30)
    run.until(lambda: all(run.generated.values()))
    assert watched.every.reference.factor > 1.1
    assert run.engine._admission.calibration.factor == watched.every.reference.factor
