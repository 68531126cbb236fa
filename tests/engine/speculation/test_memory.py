"""The memory of rows that verify drafts stays within what admission reserves: wider rings, room behind the last token,
and the recurrent states that a forward holds until it is committed."""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from tests.engine.driver import ONE_GROUP, Run
from tests.engine.speculation.oracle import Oracle, Unhurried, speculator_of, verify_everything
from tests.engine.tiny import CONFIGS, FAMILIES, build, model_of, prompt
from tests.engine.tiny import model as tiny_model
from worker.engine.admission_controller import Calibration
from worker.engine.model.calibration import calibrated
from worker.engine.model.drafter import added, with_head_costs
from worker.engine.model.load import Model
from worker.engine.speculation.draft_model import DraftModelProposer
from worker.engine.speculation.mtp import Head, HeadProposer, Trunk
from worker.engine.speculation.mtp_load import layout_of
from worker.engine.speculation.speculator import Speculator
from worker.outcomes import Speculated
from worker.request import Sampling

ROWS, PROMPT, ANSWER = 6, 60, 40
_TEXT = CONFIGS["qwen3_5"]["text_config"]
_WIDE = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
_STATES = {"linear_num_value_heads": 8, "linear_num_key_heads": 8, "linear_key_head_dim": 64}
# Each of these caches takes more than all else, and at last the logits do.
LARGE: dict[str, dict[str, Any]] = {
    "keys": {**CONFIGS["llama"], **_WIDE, "num_hidden_layers": 2},
    "rings": {**CONFIGS["gemma3"], **_WIDE, "sliding_window": 24, "sliding_window_pattern": 4},
    "replayed states": {
        **CONFIGS["qwen3_5"],
        "text_config": {
            **_TEXT,
            **_STATES,
            "linear_value_head_dim": 64,
            "num_hidden_layers": 12,
            "full_attention_interval": 6,
        },
    },
    "states of each token": {**CONFIGS["mamba2"], "num_hidden_layers": 8, "state_size": 128, "num_heads": 16},
    "states of stepped layers": {
        **FAMILIES["rwkv7"],
        "hidden_size": 256,
        "intermediate_size": 64,
        "head_dim": 64,
        "num_hidden_layers": 8,
    },
    "logits": {**CONFIGS["llama"], "vocab_size": 1 << 16, "num_hidden_layers": 2},
}
LARGE["states of each token"]["intermediate_size"] = 256


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Measured by predicted bytes of all steps. Rows that have left are still in the peak of a step."""
    verify_everything(monkeypatch)
    record, shares, last = Calibration.record_step, list[float](), [0]

    def recording(self: Calibration, predicted: int, measured: int) -> bool:
        shares.append(measured / max(predicted, last[0], 1))
        last[0] = predicted
        return record(self, predicted, measured)

    monkeypatch.setattr(Calibration, "record_step", recording)
    return shares


def served(caches: str) -> Model:
    """Return a model whose weights include what other tests have left in memory."""
    network = build(LARGE[caches])
    guessed = model_of(network, LARGE[caches])
    costs = calibrated(guessed.costs, network, guessed.context)
    gc.collect()
    return replace(guessed, costs=replace(costs, weights_bytes=mx.get_active_memory()))


def ask(run: Run) -> None:
    run.group_by(ONE_GROUP)
    for row in range(ROWS):
        sampling = Sampling() if row else Sampling(temperature=0.8, top_p=0.9, seed=1)
        run.add(str(row), prompt(PROMPT + row, row), max_tokens=ANSWER, sampling=sampling)


@pytest.mark.slow
@pytest.mark.parametrize("caches", [*LARGE])
def test_memory_of_drafts_stays_within_what_is_reserved(caches: str, steps: list[float]) -> None:
    model = served(caches)
    plain = Run(model)
    ask(plain)
    answers = plain.drain()
    without = max(steps)
    steps.clear()
    del plain
    gc.collect()
    oracle = Oracle(answers)
    speculator = speculator_of(model, oracle)
    limit = speculator.reserving(model.costs).peak_bytes([[PROMPT + ROWS + ANSWER] * ROWS])
    run = Run(model, memory=limit, speculator=speculator)
    ask(run)
    highest = 0
    while len(run.engine):
        run.step()
        highest = max(highest, mx.get_peak_memory())
    print(
        f"{caches}: {max(steps):.2f} of the prediction ({without:.2f} without drafts), {highest / limit:.2f} reserved"
    )
    assert run.generated == answers
    assert oracle.accepted > 20
    assert 0.3 < max(steps) <= 1.05
    assert highest <= limit


# Caches of networks that draft, which take more than all else.


def with_wide_head() -> tuple[Model, Speculator]:
    """Return a small model with a head of many keys and values."""
    config = CONFIGS["qwen3_5"]
    wide = layout_of({**config, "text_config": {**_TEXT, **_WIDE}})
    assert wide is not None
    network = build(config)
    model = model_of(network, config)
    head = Head(wide.build(), Trunk(network))
    mx.eval(head.network.parameters())
    costs = with_head_costs(calibrated(model.costs, network, model.context), head)
    model = replace(model, head=head, costs=costs)
    recurrence = model.drafting.recurrence(network)
    return model, Speculator(head=HeadProposer(head), max_draft=7, recurrence=recurrence)


def with_wide_drafter() -> tuple[Model, Speculator]:
    """Return a small model with a draft model of many layers of keys and values."""
    config, wide = CONFIGS["qwen3"], {**LARGE["keys"], "num_hidden_layers": 8}
    network, drafting_network = build(config), build(wide)
    model, drafter = model_of(network, config), model_of(drafting_network, wide)
    model = replace(model, costs=calibrated(model.costs, network, model.context))
    costs = calibrated(drafter.costs, drafting_network, drafter.context)
    model = added(model, drafting_network, costs, drafter.drafting, wide)
    assert model.drafter is not None
    recurrence = model.drafting.recurrence(network)
    proposer = DraftModelProposer(model.drafter, chunks=Unhurried())
    return model, Speculator(draft=proposer, max_draft=7, recurrence=recurrence)


@pytest.mark.slow
@pytest.mark.parametrize("make", [with_wide_head, with_wide_drafter])
def test_memory_of_networks_that_draft_stays_within_what_is_reserved(
    make: Callable[[], tuple[Model, Speculator]], steps: list[float]
) -> None:
    model, speculator = make()
    gc.collect()
    weights = mx.get_active_memory()
    model = replace(model, costs=replace(model.costs, weights_bytes=weights, draft_bytes=0))
    limit = speculator.reserving(model.costs).peak_bytes([[PROMPT + ROWS + ANSWER] * ROWS])
    run = Run(model, memory=limit, speculator=speculator, step_s=1.0)
    ask(run)
    highest = drafted = 0
    while len(run.engine):
        drafted += sum(isinstance(each, Speculated) for each in run.step().outcomes)
        highest = max(highest, mx.get_peak_memory())
    print(f"{make.__name__}: {max(steps):.2f} of the prediction, {highest / limit:.2f} reserved")
    assert drafted > 20
    assert 0.3 < max(steps) <= 1.05
    assert highest <= 1.05 * limit


@pytest.mark.parametrize(("family", "states"), [("qwen3", 1), ("qwen3_5", 2), ("mamba2", 10), ("rwkv7", 10)])
def test_states_are_reserved_for_as_many_tokens_as_keep_theirs(family: str, states: int) -> None:
    speculator = speculator_of(tiny_model(family), Oracle({}))
    assert speculator.reserving(tiny_model(family).costs).draft_states == states
