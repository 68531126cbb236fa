"""Each row in a batch says what it would have said alone."""

from pathlib import Path

import pytest

from tests.engine.tiny import CONFIGS, VOCAB, alone, prompt, write_checkpoint
from worker.engine.engine import Engine
from worker.engine.model import Model, open_model
from worker.schedule.sequence import Faulted, Prefilled, Sampled, Sampling, Sequence

LENGTHS = (1, 2, 37, 5, 64, 16, 3, 90, 17, 8, 33, 150, 4, 48)


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp(request.param)
    return open_model(str(write_checkpoint(CONFIGS[request.param], folder)))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return open_model(str(write_checkpoint(CONFIGS["qwen3_5"], tmp_path_factory.mktemp("qwen3_5"))))


class Run:
    """Drives an engine and keeps what each row said."""

    def __init__(self, model: Model, *, step_s: float = 0.02) -> None:
        self.engine = Engine(model, step_s=step_s)
        self.said: dict[str, list[int]] = {}
        self.ended: dict[str, str | None] = {}
        self.steps = 0

    def add(self, id: str, tokens: tuple[int, ...], *, max_tokens: int = 20, sampling: Sampling | None = None) -> None:
        self.said[id] = []
        self.engine.add(Sequence(id, tokens, max_tokens, sampling or Sampling()))

    def step(self) -> None:
        self.steps += 1
        assert self.steps < 5000
        for outcome in self.engine.step().outcomes:
            match outcome:
                case Sampled(id, token, finish_reason):
                    assert id not in self.ended, "a row that has ended said more"
                    self.said[id] += [] if token is None else [token]
                    if finish_reason:
                        self.ended[id] = finish_reason
                case Faulted(id):
                    self.ended[id] = "faulted"
                case Prefilled():
                    pass

    def drain(self) -> dict[str, list[int]]:
        while len(self.engine):
            self.step()
        return self.said


def test_rows_that_come_and_go_say_what_they_say_alone(model: Model) -> None:
    run, cancelled = Run(model), {"5": 9, "8": 14}
    arrivals = {str(i): i * 2 for i in range(len(LENGTHS))}
    while len(run.said) < len(LENGTHS) or len(run.engine):
        for id, at in arrivals.items():
            if at == run.steps:
                run.add(id, prompt(LENGTHS[int(id)], int(id)), max_tokens=10 + 3 * int(id))
        for id, at in cancelled.items():
            if at == run.steps - arrivals[id]:
                run.engine.remove(id)
        run.step()
    for id, said in run.said.items():
        expected = alone(model.network, prompt(LENGTHS[int(id)], int(id)), 10 + 3 * int(id))
        assert said == (expected[: len(said)] if id in cancelled else expected)
    assert len(run.ended) >= len(LENGTHS) - len(cancelled)


def test_a_long_prompt_is_cut_into_chunks_and_still_exact(model: Model) -> None:
    run = Run(model, step_s=0.0)  # no time to spare: the least budget at every step
    run.add("short", prompt(4, 1), max_tokens=40)
    run.step()
    run.add("long", prompt(300, 2), max_tokens=5)
    run.step()
    assert not run.said["long"]
    assert run.drain() == {
        "short": alone(model.network, prompt(4, 1), 40),
        "long": alone(model.network, prompt(300, 2), 5),
    }


def test_a_removed_row_frees_its_place_at_once(qwen: Model) -> None:
    run = Run(qwen)
    run.add("a", prompt(5, 1))
    run.add("b", prompt(200, 2))
    run.step()
    run.engine.remove("b")
    assert len(run.engine) == 1
    run.engine.remove("a")
    assert len(run.engine) == 0
    run.engine.remove("never there")


def test_an_answer_ends_at_its_limit(qwen: Model) -> None:
    run = Run(qwen)
    run.add("a", prompt(5, 1), max_tokens=7, sampling=Sampling(logit_bias=((2, -100.0),)))
    assert len(run.drain()["a"]) == 7
    assert run.ended == {"a": "length"}


def test_the_end_of_sequence_is_not_among_the_tokens(qwen: Model) -> None:
    run = Run(qwen)
    run.add("a", prompt(5, 1), sampling=Sampling(logit_bias=((2, 100.0),)))
    assert run.drain() == {"a": []}
    assert run.ended == {"a": "stop"}


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=1.0, seed=5),
        Sampling(presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.3),
    ],
    ids=["greedy", "seeded", "penalties"],
)
@pytest.mark.parametrize("delivered", [1, 7, 23])
def test_a_resumed_row_goes_on_as_if_it_had_never_stopped(model: Model, sampling: Sampling, delivered: int) -> None:
    whole = Run(model)
    whole.add("a", prompt(40, 3), max_tokens=24, sampling=sampling)
    said = whole.drain()["a"]
    if len(said) <= delivered:
        return
    resumed = Run(model)
    resumed.add("beside", prompt(11, 4))
    resumed.step()
    resumed.said["a"] = said[:delivered]
    resumed.engine.add(Sequence("a", prompt(40, 3), 24, sampling, delivered=tuple(said[:delivered])))
    assert resumed.drain()["a"] == said


DRAWN = Sampling(temperature=1.0, seed=7)


@pytest.mark.parametrize(
    "sampling",
    [DRAWN, Sampling(temperature=0.8, top_p=0.9, seed=1), Sampling(temperature=1.2, top_k=20, min_p=0.05, seed=2)],
)
def test_a_seeded_row_draws_the_same_beside_any_others(qwen: Model, sampling: Sampling) -> None:
    lonely, busy = Run(qwen), Run(qwen)
    lonely.add("a", prompt(9, 1), sampling=sampling)
    for i in range(6):
        busy.add(str(i), prompt(5 + i, 10 + i), max_tokens=3 + 4 * i, sampling=Sampling(temperature=1.0, seed=i))
        busy.step()
    busy.add("a", prompt(9, 1), sampling=sampling)
    assert busy.drain()["a"] == lonely.drain()["a"]


def test_another_seed_draws_other_tokens(qwen: Model) -> None:
    run = Run(qwen)
    for seed in range(3):
        run.add(str(seed), prompt(9, 1), sampling=Sampling(temperature=1.0, seed=seed))
    said = run.drain()
    assert len({tuple(tokens) for tokens in said.values()}) == 3


@pytest.mark.parametrize("filtered", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_a_filter_that_leaves_one_token_is_greedy(qwen: Model, filtered: dict[str, float]) -> None:
    run = Run(qwen)
    run.add("a", prompt(9, 1), sampling=Sampling(temperature=1.5, seed=3, **filtered))  # type: ignore[arg-type]
    assert run.drain()["a"] == alone(qwen.network, prompt(9, 1), 20)


def test_penalties_keep_a_row_from_repeating_itself(qwen: Model) -> None:
    run = Run(qwen)
    no_end = ((2, -100.0),)
    run.add("presence", prompt(3, 1), max_tokens=60, sampling=Sampling(presence_penalty=1000.0, logit_bias=no_end))
    run.add("frequency", prompt(3, 1), max_tokens=60, sampling=Sampling(frequency_penalty=1000.0, logit_bias=no_end))
    run.add("free", prompt(3, 1), max_tokens=60, sampling=Sampling(logit_bias=no_end))
    said = run.drain()
    assert len(set(said["presence"])) == len(set(said["frequency"])) == 60
    assert len(set(said["free"])) < 60


def test_a_repetition_penalty_counts_the_prompt(qwen: Model) -> None:
    tokens = tuple(range(10, VOCAB))  # all but ten
    run = Run(qwen)
    run.add("a", tokens, max_tokens=4, sampling=Sampling(repetition_penalty=1e6))
    assert all(token < 10 for token in run.drain()["a"])


def test_a_decode_step_that_fails_ends_its_rows_and_leaves_the_engine_alive(
    qwen: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(qwen)
    run.add("a", prompt(5, 1))
    run.step()
    monkeypatch.setattr(run.engine._running, "next", _broken)
    run.step()
    assert run.ended == {"a": "faulted"}
    run.add("b", prompt(5, 1))
    assert run.drain()["b"] == alone(qwen.network, prompt(5, 1), 20)


def test_a_prompt_that_cannot_be_prefilled_fails_alone(qwen: Model) -> None:
    run = Run(qwen)
    run.add("a", prompt(5, 1))
    run.add("bad", ("no token", 1), max_tokens=2)  # type: ignore[arg-type]
    assert run.drain()["a"] == alone(qwen.network, prompt(5, 1), 20)
    assert run.ended["bad"] == "faulted"


def _broken() -> None:
    raise RuntimeError("no such luck")


def test_open_model_finds_the_checkpoint(tmp_path: Path) -> None:
    model = open_model(str(write_checkpoint(CONFIGS["qwen3"], tmp_path)))
    assert (model.context, model.vocab, model.generation) == (2048, VOCAB, {"eos_token_id": 2, "do_sample": False})
