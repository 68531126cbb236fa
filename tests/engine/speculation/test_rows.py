"""Rows of every kind draw with drafts what they draw without: with images, with dropped tokens, in half precision, and
with drafts that run beyond the end."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import mlx.core as mx
import pytest

from tests.engine.driver import Run
from tests.engine.machine import grammars
from tests.engine.machine.families import Family
from tests.engine.speculation.oracle import Oracle, speculator_of, verify_everything
from tests.engine.speculation.scenarios import (
    SAMPLINGS,
    assert_equal,
    drafted,
    every_family,
    joined,
    pair,
    plain,
)
from tests.engine.tiny import EOS, EVERY_FAMILY, build, model, model_of, network, prompt
from tests.engine.vision import cases
from tests.engine.vision.test_rows import OTHER_ROWS, mixed
from worker.engine.model.load import DraftModel, Model
from worker.engine.speculation import verify
from worker.engine.speculation.verify import Accepted
from worker.outcomes import Speculated, StepReport
from worker.request import Sampling, SpecPrefillParams

SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in ("gemma3", "qwen3_5")]


@pytest.fixture(autouse=True)
def any_width(monkeypatch: pytest.MonkeyPatch) -> None:
    verify_everything(monkeypatch)


# Images


def with_images(run: Run, family: str) -> None:
    """Rows with images and rows of text, of which some join late; two are preempted, one loses its cache."""
    for index, (id, each) in enumerate(mixed(family).items()):
        run.submit(cases.image_request(family, id, each, 24, sampling=SAMPLINGS[index % len(SAMPLINGS)]))
        run.step()
    run.until(lambda: all(len(answer) > 2 for answer in run.generated.values()))
    for id in "one", "two":
        if id in run.active:  # a step may deliver the rest of an answer
            run.preempt(id)
            run.readmit(keep_caches=id == "one")
            run.step()
    run.drain()


@pytest.mark.parametrize(
    "family", [each if each == "gemma3" else pytest.param(each, marks=pytest.mark.slow)
               for each in OTHER_ROWS]
)  # fmt: skip
def test_rows_with_images_draw_the_same(family: str) -> None:
    assert_equal(*pair(cases.model(family), lambda run: with_images(run, family)))


# Prompts of which tokens are dropped

LONG = 200
DROPPING = SpecPrefillParams(keep=0.3, droppable_ranges=((10, 180),), min_tokens=1, requested=True)


@cache
def with_draft(family: str) -> Model:
    return replace(model(family), draft=DraftModel(network("llama"), context=1000))


def sparse(run: Run) -> None:
    """Rows with dropped tokens beside a whole one. One is preempted, and one loses its cache."""
    run.add("whole", prompt(30, 9), max_tokens=40)  # shares no prefix with the others
    run.until(lambda: len(run.generated["whole"]) > 2)
    for index in range(3):
        run.add(
            str(index), prompt(LONG, index), max_tokens=24, sampling=SAMPLINGS[index], specprefill=DROPPING,
            top_logprobs=0,
        )  # fmt: skip
    for id in "01":
        run.until(lambda id=id: len(run.generated[id]) > 3)  # type: ignore[misc]
        if id in run.active:  # a step may deliver the rest of an answer
            run.preempt(id)
            run.readmit(keep_caches=id == "0")
    run.drain()


@pytest.mark.parametrize("family", ["qwen3", *SLOW, pytest.param("falcon_h1", marks=pytest.mark.slow)])
def test_rows_with_dropped_tokens_draw_the_same(family: str) -> None:
    without, run, oracle = pair(with_draft(family), sparse)
    assert run.kept_ranges == without.kept_ranges
    assert_equal(without, run, oracle)
    assert {*run.kept_ranges} == {"0", "1", "2"}


@pytest.mark.parametrize("family", ["qwen3", *SLOW])
def test_a_row_with_dropped_tokens_resumes(family: str) -> None:
    whole = plain(with_draft(family), sparse)

    def resume(run: Run) -> None:
        for index in range(3):
            id = str(index)
            said, kept = whole.generated[id][:5], whole.kept_ranges[id]
            run.add(
                id, prompt(LONG, index), max_tokens=24, sampling=SAMPLINGS[index], resume_tokens=said, kept_ranges=kept
            )
        run.drain()

    run, oracle = drafted(with_draft(family), whole.generated, resume)
    assert run.generated == {id: whole.generated[id] for id in "012"}
    assert oracle.accepted > 0


# Drafts beyond the end

ENDING = Sampling(temperature=1.0, seed=4, logit_bias=((EOS, 7.0),))  # ends after some tokens


def ending(run: Run) -> None:
    for index in range(6):
        grammar = grammars.make(Family("qwen3"), grammars.Json()) if index % 2 else None
        sampling = replace(ENDING, seed=index)
        run.add(str(index), prompt(9, index), max_tokens=60, sampling=sampling, grammar=grammar)
    run.drain()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_drafts_beyond_the_end_of_an_answer_change_nothing(family: str) -> None:
    without = plain(model(family), ending)
    assert [*without.ended.values()].count("stop") > 3
    beyond = {id: [*answer, EOS, 11, EOS, 12, 13, 14, 15] for id, answer in without.generated.items()}
    run, oracle = drafted(model(family), beyond, ending)
    assert_equal(without, run, oracle)


def limited(run: Run) -> None:
    for limit in range(1, 9):
        run.add(str(limit), prompt(9, limit), max_tokens=limit)
    run.drain()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_drafts_beyond_the_most_tokens_change_nothing(family: str) -> None:
    without = plain(model(family), limited)
    beyond = {id: [*answer, *range(11, 20)] for id, answer in without.generated.items()}
    assert_equal(without, *drafted(model(family), beyond, limited))


def slowly_guided(run: Run) -> None:
    """Rows with a grammar, of which every other has little time for drafts, and ends them early."""
    for index in range(6):
        grammar = grammars.make(Family("qwen3"), grammars.Json(slow=index % 2 == 0))
        run.add(str(index), prompt(9, index), max_tokens=24, sampling=SAMPLINGS[index % 5], grammar=grammar)
    run.drain()


def test_drafts_that_end_since_their_masks_take_too_long_change_nothing() -> None:
    assert_equal(*pair(model("qwen3"), slowly_guided))


# Half precision


@dataclass(frozen=True)
class Verified:
    """What one row has kept of a forward."""

    draft: tuple[int, ...]
    tokens: tuple[int, ...]
    inputs: int


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[Verified]:
    """All drafts of all forwards."""
    decide, rows = verify._accepted, list[Verified]()

    def recording(drawn: Sequence[Any], draft: Sequence[int], clean: Sequence[bool]) -> Accepted:
        accepted = decide(drawn, draft, clean)
        if draft:
            rows.append(Verified(tuple(draft), tuple(each.token for each in accepted.tokens), accepted.inputs))
        return accepted

    monkeypatch.setattr(verify, "_accepted", recording)
    return rows


@cache
def in_half(family: str, dtype: mx.Dtype) -> Model:
    built = build(EVERY_FAMILY[family])
    built.set_dtype(dtype)
    return model_of(built, EVERY_FAMILY[family])


class Reporting(Run):
    """A run that collects the receipts of all drafts."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.receipts = list[tuple[int, int]]()  # tokens proposed and accepted

    def step(self) -> StepReport:
        report = super().step()
        self.receipts += [(each.proposed, each.accepted) for each in report.outcomes if isinstance(each, Speculated)]
        return report


# Their experts run in fp32 alone on a CPU (MLX 0.32.4).
EXPERTS = "gpt_oss", "qwen3_moe", "deepseek_v3", "kimi_linear", "jamba", "qwen3_next", "granitemoehybrid"


@pytest.mark.parametrize("dtype", [mx.bfloat16, pytest.param(mx.float16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("family", every_family("qwen3", "qwen3_5", but=EXPERTS))
def test_half_precision_keeps_drafts_by_the_same_rule(family: str, dtype: mx.Dtype, verified: list[Verified]) -> None:
    """Forwards of several tokens round otherwise than those of one, so answers may differ."""
    served = in_half(family, dtype)
    answers = plain(served, joined).generated
    oracle = Oracle(answers)
    run = Reporting(served, speculator=speculator_of(served, oracle))
    joined(run)
    assert {*run.ended.values()} <= {"length", "stop"}
    for row in verified:
        right = row.inputs - 1
        assert len(row.tokens) == row.inputs
        assert row.tokens[:right] == row.draft[:right]
        assert right == len(row.draft) or row.tokens[right] != row.draft[right]
    assert run.receipts == [(len(row.draft), row.inputs - 1) for row in verified]
    assert (oracle.proposed, oracle.accepted) == tuple(map(sum, zip(*run.receipts, strict=True)))
    assert oracle.accepted > 0
