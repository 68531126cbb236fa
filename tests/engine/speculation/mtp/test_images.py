"""Rows with images, of which an MTP head has no entries, draw the same tokens with drafts of the head as without."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import mlx.core as mx
import pytest

from models.tiny_vision import CONFIGS
from tests.engine.driver import Run
from tests.engine.speculation.mtp.test_exact import Counting
from tests.engine.speculation.oracle import verify_everything
from tests.engine.speculation.scenarios import SAMPLINGS
from tests.engine.vision import cases
from worker.engine.cache.recurrent import Replay
from worker.engine.model.load import Model
from worker.engine.speculation.mtp import Head, PromptEntries, Trunk
from worker.engine.speculation.mtp_load import layout_of
from worker.engine.speculation.speculator import Speculator

FAMILY = "qwen3_5"
ANSWER = 24


@pytest.fixture(autouse=True)
def any_width(monkeypatch: pytest.MonkeyPatch) -> None:
    verify_everything(monkeypatch)


@cache
def seeing() -> Model:
    """Return a vision model with a head of random weights."""
    own, layout = cases.model(FAMILY), layout_of(CONFIGS[FAMILY])
    assert layout is not None
    mx.random.seed(5)
    head = Head(layout.build(), Trunk(own.network))
    mx.eval(head.network.parameters())
    return replace(own, head=head)


PROMPTS = {
    "text": (23,),
    "one": (5, (1, 24, 16), 9),
    "two": (4, (2, 32, 16), 6, (3, 16, 16), 11),
    "other text": (31,),
    "long tail": (2, (1, 24, 16), 40),
}


def answered(run: Run) -> Run:
    """Answer texts and images together, of which the last join late."""
    for index, (id, parts) in enumerate(PROMPTS.items()):
        each = cases.prompt(FAMILY, *parts, seed=index)
        sampling = SAMPLINGS[index % len(SAMPLINGS)]
        run.submit(cases.image_request(FAMILY, id, each, ANSWER, sampling=sampling, top_logprobs=index % 3))
        if index == 2:
            run.step()
            run.step()
    run.drain()
    return run


def test_rows_with_images_draw_with_a_head_what_they_draw_without(monkeypatch: pytest.MonkeyPatch) -> None:
    entries, join = dict[str, bool](), Speculator.join

    def joining(speculator: Speculator, rows: Iterable[tuple[str, PromptEntries | None]]) -> None:
        joined = [*rows]
        entries.update({id: found is not None for id, found in joined})
        join(speculator, joined)

    monkeypatch.setattr(Speculator, "join", joining)
    tiny = seeing()
    assert tiny.head is not None
    proposer = Counting(tiny.head, 3)
    eos_ids = tiny.tokenizer.eos_token_ids
    speculator = Speculator(head=proposer, max_draft=7, recurrence=Replay(tiny.network), eos_ids=eos_ids)
    run = answered(Run(tiny, speculator=speculator))
    assert entries == {id: len(parts) == 1 for id, parts in PROMPTS.items()}
    without = answered(Run(cases.model(FAMILY)))
    assert (run.generated, run.ended) == (without.generated, without.ended)
    for id, logprobs in without.logprobs.items():
        assert run.logprobs[id] == pytest.approx(logprobs, abs=1e-4)
    assert proposer.proposed > 30
    assert proposer.nbytes == 0
