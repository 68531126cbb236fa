"""Rows draw the same tokens with a draft model as without, also with grammars, as others join and leave, are preempted
and lose their caches."""

from collections.abc import Iterator

import pytest

from tests.engine.driver import Run
from tests.engine.speculation.oracle import Unhurried, recurrence_of, verify_everything
from tests.engine.speculation.scenarios import Drive, eventful, guided, joined
from tests.engine.tiny import model, network, prompt
from worker.engine.speculation.draft_model import DRAFT, DraftModelProposer, DraftNetwork
from worker.engine.speculation.speculator import Speculator
from worker.outcomes import MAX_DRAFT, Speculated
from worker.request import GenerationRequest


@pytest.fixture(autouse=True)
def any_width(monkeypatch: pytest.MonkeyPatch) -> None:
    verify_everything(monkeypatch)


class Counting(DraftModelProposer):
    """A proposer that counts the drafted tokens that were verified, and those that were right."""

    proposed = accepted = 0

    def observe_accepted(self, row: object, proposed: int, accepted: int) -> None:
        self.proposed += proposed
        self.accepted += accepted


def drafted(served: str, drafter: str, drive: Drive) -> tuple[Run, Counting]:
    draft = DraftNetwork(network(drafter), recurrence_of(model(drafter)), 2048)
    proposer = Counting(draft, chunks=Unhurried())
    eos_ids = model(served).tokenizer.eos_token_ids
    recurrence = recurrence_of(model(served))
    speculator = Speculator(draft=proposer, max_draft=MAX_DRAFT, recurrence=recurrence, eos_ids=eos_ids)
    run = Run(model(served), prefix_bytes=10**8, speculator=speculator)
    drive(run)
    return run, proposer


def plain(served: str, drive: Drive) -> Run:
    run = Run(model(served), prefix_bytes=10**8)
    drive(run)
    return run


# A model that drafts for itself is mostly right; another one is mostly wrong.
@pytest.mark.parametrize(("served", "drafter"), [("qwen3", "qwen3"), ("qwen3_5", "qwen3_5"), ("qwen3", "mamba2")])
@pytest.mark.parametrize("drive", [joined, eventful, guided])
def test_rows_with_a_draft_model_draw_what_they_draw_without(served: str, drafter: str, drive: Drive) -> None:
    run, proposer = drafted(served, drafter, drive)
    without = plain(served, drive)
    assert (run.generated, run.ended) == (without.generated, without.ended)
    assert proposer.proposed > 30
    assert proposer.accepted > (10 if served == drafter else -1)
    assert proposer.nbytes == 0, "rows that have ended hold nothing"


def kinds(run: Run) -> Iterator[tuple[str, str]]:
    while len(run.engine):
        for outcome in run.step().outcomes:
            if isinstance(outcome, Speculated):
                yield outcome.id, outcome.kind


def test_a_row_with_dropped_tokens_gets_no_drafts_of_a_draft_model() -> None:
    def drive(run: Run) -> None:
        run.add("whole", prompt(40, 1), max_tokens=30)
        run.add("sparse", prompt(40, 2), max_tokens=30, kept_ranges=((0, 10), (20, 40)))
        found.update(kinds(run))

    found = set[tuple[str, str]]()
    drafted("qwen3", "qwen3", drive)
    assert found == {("whole", DRAFT)}


def test_a_prompt_that_is_long_for_its_answer_is_not_read_by_a_draft_model() -> None:
    def drive(run: Run) -> None:
        run.add("long", prompt(600, 1), max_tokens=12)
        run.add("short", prompt(40, 2), max_tokens=12)
        found.update(kinds(run))

    found = set[tuple[str, str]]()
    drafted("qwen3", "qwen3", drive)
    assert found == {("short", DRAFT)}


def test_a_limit_of_a_request_holds_for_a_draft_model() -> None:
    def drive(run: Run) -> None:
        run.submit(GenerationRequest("a", prompt(20, 1), 30, max_draft=2))
        while len(run.engine):
            proposed.update(each.proposed for each in run.step().outcomes if isinstance(each, Speculated))

    proposed = set[int]()
    drafted("qwen3", "qwen3", drive)
    assert max(proposed) == 2
