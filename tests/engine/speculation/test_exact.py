"""Rows with drafts draw what they draw without: greedy and sampled, with penalties, grammars and logprobs, as others
join and leave, are preempted and lose their caches."""

from collections.abc import Callable, Iterator

import pytest

from tests.engine.driver import Run
from tests.engine.machine import grammars
from tests.engine.machine.families import Family
from tests.engine.speculation.oracle import Oracle, speculator_of, verify_everything
from tests.engine.tiny import FAMILIES, alone, model, network, prompt
from worker.schedule.request import GenerationRequest, Sampling

ANSWER = 26
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.8, seed=11),
    Sampling(repetition_penalty=1.3, frequency_penalty=0.4),
    Sampling(temperature=1.0, top_k=20, top_p=0.9, seed=7, presence_penalty=0.5),
    Sampling(temperature=1.3, min_p=0.02, seed=3, logit_bias=((17, 2.0), (40, -5.0))),
]
LENGTHS = (5, 17, 2, 30, 45)


@pytest.fixture(autouse=True)
def any_width(monkeypatch: pytest.MonkeyPatch) -> None:
    verify_everything(monkeypatch)


def submit(run: Run, index: int, *, prefix: str = "", guided: bool = False) -> None:
    family = Family("qwen3")  # of the vocabulary
    run.add(
        f"{prefix}{index}",
        prompt(LENGTHS[index % 5], index),
        max_tokens=ANSWER - index,
        sampling=SAMPLINGS[index % len(SAMPLINGS)],
        grammar=grammars.make(family, grammars.Picky() if index % 3 else grammars.Json()) if guided else None,
        top_logprobs=2 if index % 2 else None,
    )


def joined(run: Run, *, guided: bool) -> None:
    """Run all requests; some join late."""
    for index in range(3):
        submit(run, index, guided=guided)
    for _ in range(4):
        run.step()
    for index in range(3, 7):
        submit(run, index, guided=guided)
    run.drain()


def pair(family: str, drive: Callable[[Run], None]) -> tuple[Run, Run, Oracle]:
    """Return a run without drafts, one with drafts, and the oracle of these."""
    plain = Run(model(family), prefix_bytes=10**8)
    drive(plain)
    oracle = Oracle(plain.generated)
    drafted = Run(model(family), prefix_bytes=10**8, speculator=speculator_of(model(family), oracle))
    drive(drafted)
    return plain, drafted, oracle


def assert_equal(plain: Run, drafted: Run, oracle: Oracle) -> None:
    assert drafted.generated == plain.generated
    assert drafted.ended == plain.ended
    for id, values in plain.logprobs.items():
        assert drafted.logprobs[id] == pytest.approx(values, abs=1e-4)
    assert 0 < oracle.right < oracle.offered
    assert oracle.held == set()


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_with_drafts_draw_the_same(family: str) -> None:
    assert_equal(*pair(family, lambda run: joined(run, guided=False)))


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_5", "rwkv7"])
def test_rows_with_a_grammar_draw_the_same(family: str) -> None:
    assert_equal(*pair(family, lambda run: joined(run, guided=True)))


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_5", "mamba2"])
def test_greedy_rows_with_drafts_equal_mlx_lm_alone(family: str) -> None:
    _, drafted, _ = pair(family, lambda run: joined(run, guided=False))
    assert drafted.generated["0"] == alone(network(family), prompt(5, 0), ANSWER)
    assert drafted.generated["5"] == alone(network(family), prompt(5, 5), ANSWER - 5)


def eventful(run: Run) -> None:
    """Rows are preempted and restored, with their caches and without; all lose their caches; some are cancelled."""
    for index in range(6):
        submit(run, index)
    run.until(lambda: all(len(answer) > 2 for answer in run.generated.values()))
    run.preempt("1")
    run.preempt("3")
    for _ in range(2):
        run.step()
    run.readmit()
    run.step()
    run.preempt("2")
    run.readmit(keep_caches=False)
    run.engine.remove("4")
    run.generated.pop("4")
    run.step()
    run.engine._active.lose_decoding()
    for _ in range(3):
        run.step()
    submit(run, 6)
    run.drain()


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_5", "falcon_h1", "rwkv7"])
def test_rows_that_are_preempted_lost_or_cancelled_draw_the_same(family: str) -> None:
    plain, drafted, oracle = pair(family, eventful)
    assert drafted.generated == plain.generated
    assert drafted.ended == plain.ended
    assert 0 < oracle.right < oracle.offered


def next_turns(run: Run) -> Iterator[str]:
    """Continue each conversation from what the prefix cache holds of it."""
    for index in range(7):
        said = (*prompt(LENGTHS[index % 5], index), *run.generated[str(index)])
        run.add(f"next {index}", (*said, *prompt(4, 40 + index)), max_tokens=8)
        yield f"next {index}"
    run.drain()


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_5", "falcon_h1"])
def test_a_next_turn_uses_the_cache_that_a_row_with_drafts_has_left(family: str) -> None:
    plain, drafted, _ = pair(family, lambda run: joined(run, guided=False))
    for run in plain, drafted:
        ids = [*next_turns(run)]
        assert all(run.cached[id] > 0 for id in ids)
    assert drafted.generated == plain.generated


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_a_request_that_resumes_draws_the_same(family: str) -> None:
    plain, _, _ = pair(family, lambda run: joined(run, guided=False))

    def resume(run: Run) -> None:
        for index in range(5):
            said = plain.generated[str(index)][: 3 + index]
            sampling = SAMPLINGS[index % 5]
            tokens = prompt(LENGTHS[index], index)
            run.add(str(index), tokens, max_tokens=ANSWER - index, sampling=sampling, resume_tokens=said)
        run.drain()

    _, drafted, oracle = pair(family, resume)
    assert oracle.right > 0
    assert drafted.generated == {str(index): plain.generated[str(index)] for index in range(5)}


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_5"])
def test_memory_of_verified_drafts_is_predicted(family: str) -> None:
    plain, _, _ = pair(family, lambda run: joined(run, guided=False))
    run = Run(model(family), speculator=speculator_of(model(family), Oracle(plain.generated)))
    for index in range(5):
        submit(run, index)
    while len(run.engine):
        report = run.step()
        if report.memory:
            predicted, measured = report.memory
            assert measured <= 1.05 * predicted


def test_a_request_limits_its_drafts() -> None:
    plain = Run(model("qwen3"))
    requests = [GenerationRequest(str(n), prompt(9, n), ANSWER, max_draft=n) for n in range(3)]
    for request in requests:
        plain.submit(request)
    plain.drain()
    oracle = Oracle(plain.generated)
    run = Run(model("qwen3"), speculator=speculator_of(model("qwen3"), oracle))
    for request in requests:
        run.submit(request)
    accepted = list[int]()
    while len(run.engine):
        accepted.append(len(run.step().drafts.accepted_at))
    assert run.generated == plain.generated
    assert max(accepted) == 2
