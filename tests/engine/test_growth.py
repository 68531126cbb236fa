"""Rows without a stated limit: their memory grows with their answers, and none fails for it."""

import gc
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache

import mlx.core as mx
import pytest

from tests.engine.driver import EACH_ALONE, ONE_GROUP, Run
from tests.engine.machine.asked import Asked
from tests.engine.machine.families import Family, request
from tests.engine.machine.families import prompt as family_prompt
from tests.engine.machine.grammars import Picky, make
from tests.engine.machine.reference import alone as alone_as
from tests.engine.speculation.oracle import WRONG, Oracle, any_width, pause_nothing, speculator_of
from tests.engine.test_memory import DEAR_LENGTH, WIDE, built
from tests.engine.tiny import CONFIGS, alone, build, model_of, prompt
from worker.engine import admission_controller as admission
from worker.engine.admission import plan as growth
from worker.engine.admission.grouping import StepCost
from worker.engine.model.calibration import calibrated
from worker.engine.model.load import Model
from worker.engine.speculation import speculator
from worker.outcomes import MAX_DRAFT
from worker.request import Sampling

PROMPT, FIRST = 60, 64  # tokens; `FIRST` are reserved for an answer at first
SEEDS = 0, 1, 2, 6  # of prompts whose answers have more than 1,000 tokens


@pytest.fixture
def wide_model(monkeypatch: pytest.MonkeyPatch) -> Model:
    """Return a model whose weights include what other tests have left in memory."""
    monkeypatch.setattr(growth, "FIRST_ANSWER", FIRST)
    monkeypatch.setattr(growth, "KNOWN_ANSWERS", 1_000)
    for module in growth, admission:
        monkeypatch.setattr(module, "BUFFER_TOKENS", FIRST)
    gc.collect()
    return replace(built(), costs=replace(built().costs, weights_bytes=mx.get_active_memory()))


@cache
def whole(seed: int, answer: int) -> list[int]:
    return alone(built().network, prompt(PROMPT, seed), answer)


def memory_for(model: Model, rows: int, answer: int) -> int:
    """Return the bytes in which this number of rows fits at their end."""
    return model.costs.peak_bytes([[PROMPT + answer] * rows])


def run_in(model: Model, memory: int, cost: StepCost = ONE_GROUP) -> Run:
    run = Run(model, step_s=1.0, memory=memory)
    run.group_by(cost)
    return run


@pytest.mark.parametrize("cost", [ONE_GROUP, pytest.param(EACH_ALONE, marks=pytest.mark.slow), DEAR_LENGTH])
def test_rows_start_together_without_memory_for_their_ends_and_all_end_as_alone_the_oldest_first(
    wide_model: Model, cost: StepCost
) -> None:
    answer, rows = 500, 5
    limit = memory_for(wide_model, 2, answer)
    run = run_in(wide_model, limit, cost)
    for i in range(rows):
        run.add(str(i), prompt(PROMPT, SEEDS[i % 4]), max_tokens=answer, grows=True)
    run.until(lambda: len(run.engine._running) == rows)
    preemptions, ended_at = 0, dict[str, int]()
    while len(run.engine):
        preemptions += run.step().num_preemptions
        ended_at |= {id: run.steps for id in run.ended if id not in ended_at}
        assert mx.get_peak_memory() <= limit
        assert run.steps < 20_000
    assert all(run.generated[str(i)] == whole(SEEDS[i % 4], answer) for i in range(rows))
    assert preemptions > 0
    assert not run.cut
    times = [ended_at[str(i)] for i in range(rows)]
    assert times[0] == min(times), "the oldest first"


def test_row_that_outgrows_memory_alone_ends_with_length_and_says_so(
    wide_model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_in(wide_model, memory_for(wide_model, 1, 500))
    run.add("endless", prompt(PROMPT, SEEDS[0]), max_tokens=100_000, grows=True)
    run.add("other", prompt(PROMPT, SEEDS[1]), max_tokens=200, grows=True)
    run.drain()
    said = run.generated["endless"]
    assert (run.ended["endless"], run.cut) == ("length", ["endless"])
    assert 500 <= len(said) < 1_000
    assert said == whole(SEEDS[0], 1_000)[: len(said)]
    assert run.generated["other"] == whole(SEEDS[1], 200)
    assert "endless: memory holds no longer row" in caplog.text


def test_row_that_another_worker_has_made_longer_than_memory_ends_where_it_is(wide_model: Model) -> None:
    said = whole(SEEDS[0], 1_000)
    run = run_in(wide_model, memory_for(wide_model, 1, 200))
    run.add("a", prompt(PROMPT, SEEDS[0]), max_tokens=100_000, resume_tokens=said, grows=True)
    run.drain()
    assert (run.ended["a"], run.cut, run.generated["a"]) == ("length", ["a"], said)


def test_prompt_that_leaves_no_memory_for_an_answer_is_refused(wide_model: Model) -> None:
    run = run_in(wide_model, memory_for(wide_model, 1, 200))
    run.add("a", prompt(2_000, 1), max_tokens=100_000, grows=True)
    run.drain()
    assert run.ended["a"] == "refused"
    assert "shorten the prompt by about" in run.refused["a"]


def test_prompt_that_leaves_less_memory_than_is_likely_is_answered(wide_model: Model) -> None:
    run = run_in(wide_model, wide_model.costs.peak_bytes([[PROMPT + 20]]))
    run.add("a", prompt(PROMPT, SEEDS[0]), max_tokens=100_000, grows=True)
    run.drain()
    assert run.ended["a"] == "length"
    assert len(run.generated["a"]) >= 20
    assert run.generated["a"] == whole(SEEDS[0], 1_000)[: len(run.generated["a"])]


def test_stated_limits_are_kept_and_offline_rows_give_way_first(wide_model: Model) -> None:
    at_first = [[PROMPT + tokens] for tokens in (400, 400, FIRST, FIRST)]
    run = run_in(wide_model, wide_model.costs.peak_bytes(at_first), EACH_ALONE)
    run.add("stated", prompt(PROMPT, SEEDS[0]), max_tokens=400)
    run.add("grows", prompt(PROMPT, SEEDS[1]), max_tokens=500, grows=True)
    run.add("young", prompt(PROMPT, SEEDS[2]), max_tokens=500, grows=True)
    run.add("offline", prompt(PROMPT, SEEDS[3]), max_tokens=400, lane="batch")
    lost = list[str]()
    while len(run.engine):
        before = {*run.active}
        run.step()
        lost += sorted(before & {*run.waiting})
    assert lost[0] == "offline"
    assert "stated" not in lost
    assert "grows" not in lost
    expected = {"stated": (0, 400), "grows": (1, 500), "young": (2, 500), "offline": (3, 400)}
    assert run.generated == {id: whole(SEEDS[seed], tokens) for id, (seed, tokens) in expected.items()}


def test_row_that_grows_leaves_its_group_before_another_row_is_preempted(wide_model: Model) -> None:
    """In a group every row takes as much memory as the longest."""
    tokens, answer, short = prompt(300, 1), 500, 440
    said = alone(wide_model.network, tokens, answer)
    limit = wide_model.costs.peak_bytes([[len(tokens) + answer], [PROMPT + short] * 5])
    assert wide_model.costs.peak_bytes([[len(tokens) + answer] * 6]) > limit
    run = run_in(wide_model, limit)
    run.add("long", tokens, max_tokens=answer, grows=True)
    for i in range(5):
        run.add(str(i), prompt(PROMPT, SEEDS[1]), max_tokens=short)
    run.until(lambda: len(run.engine._running) == 6)
    assert len(run.engine._running.lengths) == 1
    groups, preemptions = set[tuple[int, ...]](), 0
    while len(run.engine):
        preemptions += run.step().num_preemptions
        groups.add(tuple(map(len, run.engine._running.lengths)))
        assert mx.get_peak_memory() <= limit
    assert (5, 1) in groups
    assert preemptions == 0
    assert run.generated == {"long": said, **{str(i): whole(SEEDS[1], short) for i in range(5)}}
    assert len(said) > short


def test_rows_with_drafts_grow_within_memory_and_end_as_alone(
    wide_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, rows = 500, 5
    monkeypatch.setattr(speculator, "choose_width", any_width())
    pause_nothing(monkeypatch)
    answers = {str(i): whole(SEEDS[i % 4], answer) for i in range(rows)}
    costs = replace(wide_model.costs, max_draft=MAX_DRAFT)
    limit = costs.peak_bytes([[PROMPT + answer] * 2])
    oracle = Oracle(answers, seed=1, wrong=WRONG[:20])
    run = Run(wide_model, step_s=1.0, memory=limit, speculator=speculator_of(wide_model, oracle))
    run.group_by(ONE_GROUP)
    for id in answers:
        run.add(id, prompt(PROMPT, SEEDS[int(id) % 4]), max_tokens=answer, grows=True)
    preemptions = 0
    while len(run.engine):
        preemptions += run.step().num_preemptions
        assert mx.get_peak_memory() <= limit
    assert run.generated == answers
    assert preemptions > 0
    assert oracle.accepted > 0


def test_what_is_reserved_follows_the_answers_that_have_ended(
    wide_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "KNOWN_ANSWERS", 2)
    run = run_in(wide_model, memory_for(wide_model, 8, 500))
    for i in range(4):
        run.add(str(i), prompt(PROMPT, SEEDS[i]), max_tokens=300, grows=i < 3)
    run.drain()
    run.add("next", prompt(PROMPT, SEEDS[0]), max_tokens=1_000, grows=True)
    run.step()
    (row,) = run.engine._active.values()
    assert row.reserved == 300


# A crowd: many chats without a limit, in the memory of four that fill the context

CROWD, CONTEXT = 16, 1_100
ANSWERS = CONTEXT - PROMPT, 800, 300, 260  # tokens, in turn
HYBRID_TEXT = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
WIDE_CONFIGS = {
    "llama": WIDE,
    "qwen3_5": {**CONFIGS["qwen3_5"], "text_config": {**CONFIGS["qwen3_5"]["text_config"], **HYBRID_TEXT}},
}


@cache
def wide(name: str) -> Model:
    network = build(WIDE_CONFIGS[name])
    guessed = model_of(network, WIDE_CONFIGS[name])
    return replace(guessed, costs=calibrated(guessed.costs, network, guessed.context))


@dataclass(frozen=True)
class WideFamily(Family):
    @property
    def model(self) -> Model:
        return wide(self.name)


def chat_of(family: WideFamily, number: int) -> Asked:
    """Return one of the crowd: the even ones are greedy, and each third has a grammar. None draws an end."""
    no_end = ((family.end, -100.0),)
    warm = Sampling(temperature=0.9, top_p=0.95, seed=number, logit_bias=no_end)
    sampling = Sampling(logit_bias=no_end) if number % 2 == 0 else warm
    grammar = Picky() if number % 3 == 2 else None
    return Asked(family_prompt(family, PROMPT, seed=number), sampling, grammar, ANSWERS[number % len(ANSWERS)])


@pytest.mark.slow  # the tests above have each by itself
@pytest.mark.parametrize("name", WIDE_CONFIGS)
def test_crowd_without_limits_runs_at_once_in_the_memory_of_four_and_each_ends_as_alone(
    wide_model: Model, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(speculator, "choose_width", any_width())
    pause_nothing(monkeypatch)
    family = WideFamily(name)
    costs = replace(wide(name).costs, max_draft=MAX_DRAFT)
    chats = {str(number): chat_of(family, number) for number in range(CROWD)}
    expected = {
        id: [token for token, _ in alone_as(family, chat.prompt, chat.sampling, chat.grammar, None, chat.max_tokens)]
        for id, chat in chats.items()
    }
    assert [len(answer) for answer in expected.values()] == [chat.max_tokens for chat in chats.values()]
    gc.collect()
    model = replace(wide(name), costs=replace(costs, weights_bytes=mx.get_active_memory()))
    limit = model.costs.peak_bytes([[CONTEXT] * 4])
    assert model.costs.peak_bytes([[CONTEXT] * 5]) > limit
    drafted = {id: answer for id, answer in expected.items() if int(id) % 4 == 1}
    oracle = Oracle(drafted, seed=1, wrong=WRONG[:20])
    run = Run(model, step_s=1.0, memory=limit, speculator=speculator_of(model, oracle))
    run.group_by(ONE_GROUP)  # measured costs would decide how short memory is
    for id, chat in chats.items():
        run.submit(
            request(
                family,
                id,
                chat.prompt,
                chat.max_tokens,
                sampling=chat.sampling,
                grammar=make(family, chat.grammar),
                grows=True,
            )
        )
    run.until(lambda: len(run.engine._running) == CROWD)
    preempted, ended_at = Counter[str](), dict[str, int]()
    peak = 0
    while len(run.engine):
        waiting = {*run.waiting}
        run.step()
        preempted.update({*run.waiting} - waiting)
        ended_at |= {id: run.steps for id in run.ended if id not in ended_at}
        peak = max(peak, mx.get_peak_memory())
        assert run.steps < 20_000
    assert run.generated == expected
    assert {*run.ended.values()} == {"length"}
    assert not run.cut
    assert peak <= limit
    assert preempted, "memory was not short"
    assert "0" not in preempted, "the oldest goes on"
    assert oracle.accepted > 0
    assert ended_at["0"] == min(ended_at[id] for id, chat in chats.items() if chat.max_tokens == ANSWERS[0])
