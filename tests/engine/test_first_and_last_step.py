"""The first decode step of rows that come together, and the last one of an answer."""

import time

import pytest

from tests.engine.driver import Run
from tests.engine.tiny import alone, model, network, prompt
from worker.engine.batch.decode_batch import DecodeBatch
from worker.engine.step.tuning import FIRST_STEP_AT_MOST_S
from worker.outcomes import Prefilled, Sampled
from worker.request import Sampling

PENALTIES = Sampling(repetition_penalty=1.3, frequency_penalty=0.5)
NO_TIME = 0.0  # target of a step: each computes one chunk of the least length


def first_tokens_and_chunks(run: Run, steps: int = 400) -> list[str]:
    """Run to the end, and return in order: `chunk` for each computed chunk, and the id of each first token."""
    happened = list[str]()
    while len(run.engine) and steps:
        steps -= 1
        for outcome in run.step().outcomes:
            match outcome:
                case Prefilled():
                    happened.append("chunk")
                case Sampled(id) if id not in happened:
                    happened.append(id)
    return happened


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_prompts_that_come_together_are_computed_before_any_of_them_decodes(family: str) -> None:
    run = Run(model(family), step_s=NO_TIME)
    for i in range(4):
        run.add(str(i), prompt(40 + i, i), max_tokens=3)
    happened = first_tokens_and_chunks(run)
    assert happened[-4:] == ["0", "1", "2", "3"]
    assert {*happened[:-4]} == {"chunk"}
    assert run.generated == {str(i): alone(network(family), prompt(40 + i, i), 3) for i in range(4)}


def test_row_decodes_while_an_offline_prompt_is_computed() -> None:
    run = Run(model("qwen3"), step_s=NO_TIME)
    run.add("chat", prompt(10, 0), max_tokens=3)
    run.add("file", prompt(400, 1), max_tokens=3, lane="batch")
    happened = first_tokens_and_chunks(run)
    assert happened.index("chat") < len(happened) - 1 - happened[::-1].index("chunk")


def test_resumed_row_decodes_while_prompts_are_computed() -> None:
    tokens = alone(network("qwen3"), prompt(10, 0), 8)
    run = Run(model("qwen3"), step_s=NO_TIME)
    run.add("resumed", prompt(10, 0), max_tokens=8, resume_tokens=tokens[:2])
    run.add("new", prompt(400, 1), max_tokens=3)
    happened = first_tokens_and_chunks(run)
    assert happened.index("resumed") < len(happened) - 1 - happened[::-1].index("chunk")
    assert run.generated["resumed"] == tokens


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_while_prompts_wait_each_step_reports_the_tokens_that_it_draws(family: str) -> None:
    run = Run(model(family), step_s=NO_TIME)
    run.add("a", prompt(10, 0), max_tokens=12, sampling=PENALTIES)
    run.until(lambda: len(run.generated["a"]) == 2)
    run.add("long", prompt(200, 1), max_tokens=3)
    run.step()  # reports the token of the step before too
    while "long" in run.active and run.engine._prefills.has_work:
        reported = len(run.generated["a"])
        run.step()
        if "a" in run.ended:
            break
        assert len(run.generated["a"]) == reported + 1
        assert all(row.last_unfed for _, row in run.engine._running) == run.engine._prefills.has_work
    assert len(run.generated["a"]) > 5
    run.drain()
    alone_with_penalties = Run(model(family))
    alone_with_penalties.add("a", prompt(10, 0), max_tokens=12, sampling=PENALTIES)
    assert run.generated["a"] == alone_with_penalties.drain()["a"]
    assert run.generated["long"] == alone(network(family), prompt(200, 1), 3)


def test_first_token_is_reported_with_the_step_that_draws_it_on_a_device_that_computes_at_launch() -> None:
    steps = dict[bool, int]()
    for pipelined in True, False:
        run = Run(model("qwen3"), pipelined=pipelined)
        run.add("a", prompt(10, 0), max_tokens=6)
        run.until(lambda run=run: bool(run.generated["a"]))  # type: ignore[misc]
        steps[pipelined] = run.steps
        run.drain()
        assert run.generated["a"] == alone(network("qwen3"), prompt(10, 0), 6)
    assert steps[False] == steps[True] - 1


def test_each_token_is_reported_with_the_step_that_draws_it_if_steps_are_long() -> None:
    run = Run(model("qwen3"), step_s=NO_TIME, pipelined=False)  # so every step is long
    run.add("a", prompt(10, 0), max_tokens=6)
    run.until(lambda: bool(run.generated["a"]))
    for reported in range(2, 6):
        run.step()
        assert len(run.generated["a"]) == reported
        assert all(row.last_unfed for _, row in run.engine._running)


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_answer_takes_one_forward_for_each_token(max_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = list[DecodeBatch]()
    launch = DecodeBatch.launch

    def counted(batch: DecodeBatch) -> None:
        launches.append(batch)
        launch(batch)

    monkeypatch.setattr(DecodeBatch, "launch", counted)
    run = Run(model("qwen3"))
    run.add("a", prompt(20, 0), max_tokens=max_tokens)
    run.add("b", prompt(25, 1), max_tokens=max_tokens)
    run.drain()
    assert len(launches) == max_tokens
    for id, tokens in ("a", prompt(20, 0)), ("b", prompt(25, 1)):
        assert run.generated[id] == alone(network("qwen3"), tokens, max_tokens)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_5", "rwkv7"])
def test_next_turn_finds_all_of_an_answer_that_was_fed(family: str) -> None:
    run = Run(model(family), prefix_bytes=1 << 24)
    run.add("x", prompt(50, 1), max_tokens=6)
    answer = run.drain()["x"]
    turn = (*prompt(50, 1), *answer, *prompt(4, 2))
    run.add("y", turn, max_tokens=5)
    assert run.drain()["y"] == alone(network(family), turn, 5)
    assert run.cached["y"] == 50 + 5
    assert run.ended == {"x": "length", "y": "length"}


def test_row_waits_no_longer_than_the_limit_for_prompts_that_keep_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(model("qwen3"), step_s=NO_TIME)
    run.add("first", prompt(10, 0), max_tokens=3)
    for i in range(30):
        run.add(f"later {i}", prompt(40, 1 + i), max_tokens=3)
    run.until(lambda: len(run.engine._running) > 0)
    assert not run.generated["first"]
    monkeypatch.setattr(time, "perf_counter", lambda later=time.perf_counter: later() + FIRST_STEP_AT_MOST_S)
    run.until(lambda: len(run.generated["first"]) > 0, max_steps=3)
    assert any(not tokens for tokens in run.generated.values())
