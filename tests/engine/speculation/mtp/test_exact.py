"""Rows draw the same tokens with an MTP head as without: with grammars, penalties, bias and logprobs, with dropped
tokens, as others join and leave, are preempted and lose their caches."""

from dataclasses import replace
from functools import cache

import pytest

from tests.engine.driver import Run
from tests.engine.speculation.mtp.checkpoints import MTP_CONFIGS
from tests.engine.speculation.mtp.test_drafts import head_of
from tests.engine.speculation.oracle import verify_everything
from tests.engine.speculation.scenarios import Drive, eventful, guided, joined, sparse, submit
from tests.engine.tiny import model_of
from worker.engine.cache.recurrent import Replay
from worker.engine.model.drafter import Head
from worker.engine.model.load import Model
from worker.engine.speculation.mtp import HeadProposer, Trunk
from worker.engine.speculation.speculator import Speculator

LAYOUTS = [*MTP_CONFIGS]


@pytest.fixture(autouse=True)
def any_width(monkeypatch: pytest.MonkeyPatch) -> None:
    verify_everything(monkeypatch)


def with_head(head: Head, name: str) -> Model:
    return replace(model_of(head.trunk._network, MTP_CONFIGS[name]), head=head)


@cache
def model(name: str) -> Model:
    return with_head(head_of(name), name)


class Counting(HeadProposer):
    """A proposer that counts the drafted tokens that were verified."""

    proposed = 0

    def observe_accepted(self, row: object, proposed: int, accepted: int) -> None:
        self.proposed += proposed


def drafted(name: str, drive: Drive) -> tuple[Run, Counting]:
    proposer = Counting(head_of(name), 3)
    tiny = model(name)
    eos_ids = tiny.tokenizer.eos_token_ids
    speculator = Speculator(head=proposer, max_draft=7, recurrence=Replay(tiny.network), eos_ids=eos_ids)
    run = Run(model(name), prefix_bytes=10**8, speculator=speculator)
    drive(run)
    return run, proposer


def plain(name: str, drive: Drive) -> Run:
    run = Run(model(name), prefix_bytes=10**8)
    drive(run)
    return run


@pytest.mark.parametrize("drive", [joined, eventful, guided, sparse])
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_with_a_head_draw_what_they_draw_without(name: str, drive: Drive) -> None:
    run, proposer = drafted(name, drive)
    without = plain(name, drive)
    assert (run.generated, run.ended) == (without.generated, without.ended)
    if drive is not eventful:  # rows without a cache are recomputed without drafts, by other forwards
        for id, logprobs in without.logprobs.items():
            assert run.logprobs[id] == pytest.approx(logprobs, abs=1e-4)
    assert proposer.proposed > (20 if drive is guided else 50)


def removals(run: Run) -> None:
    for index in range(5):
        submit(run, index)
    for _ in range(3):
        run.step()
    run.engine.remove("1")
    for _ in range(2):
        run.step()
    run.engine.remove("3")
    run.drain()


def test_rows_that_leave_change_no_other_row() -> None:
    run, proposer = drafted("qwen3_5", removals)
    without = plain("qwen3_5", removals)
    for id in ("0", "2", "4"):
        assert run.generated[id] == without.generated[id], id
    assert proposer.proposed > 10


def test_without_a_head_no_hidden_states_are_held() -> None:
    tiny = with_head(head_of.__wrapped__("qwen3_5"), "qwen3_5")  # no other test has run the trunk of this one
    run = Run(tiny, prefix_bytes=0)
    submit(run, 0)
    for _ in range(4):
        run.step()
    assert tiny.head is not None
    assert isinstance(tiny.head.trunk, Trunk)
    with pytest.raises(ValueError, match="No forward"):
        tiny.head.trunk.take_hidden()
