"""Drafts of a grammar take little time of the engine's thread, however slowly it reads them."""

import pytest

from tests.engine.speculation.rows import row
from tests.text.guided import by, model, request
from tests.text.structured import Schema
from worker.engine.speculation.forced import GrammarProposer
from worker.text.grammar.row.grammar import AllDraftsTime, DraftTime

AT_ONCE_S = 0.002  # that a row may save up
LONG = "".join(chr(ord("a") + number % 26) for number in range(3_000))
KEY: Schema = {"type": "object", "properties": {LONG: {"type": "null"}}, "required": [LONG]}
ENUM: Schema = {"enum": [LONG, LONG[:-1] + "0"]}
TEXTS = {"key": (KEY, f'{{"{LONG}": null}}'), "enum": (ENUM, f'"{LONG}"')}


class SlowClock:
    """A clock by which all work takes as long."""

    WORK_S = 0.75 * AT_ONCE_S

    def __init__(self) -> None:
        self._readings = 0

    @property
    def works(self) -> int:
        return self._readings // 2

    def __call__(self) -> float:
        self._readings += 1
        return self._readings * self.WORK_S


def test_a_draft_ends_when_its_masks_take_too_long() -> None:
    slow = model().quick_guide(request(**by(KEY)), SlowClock())
    draft = model().tokenizer.encode(TEXTS["key"][1])[:7]
    masks = model().quick_guide(request(**by(KEY))).masks_along(draft)
    assert len(masks) == 8
    assert slow.masks_along(draft) == masks[:2]
    assert not slow.takes_drafts
    assert (slow.valid_prefix(draft), slow.ahead([]).forced, slow.masks_along(draft)) == (0, (), masks[:1])
    for token in draft[:5]:
        slow.accept(token)
    assert slow.takes_drafts
    assert slow.bitmask() == masks[5]


@pytest.mark.parametrize("name", TEXTS)
def test_drafts_take_a_part_of_the_time_of_each_token(name: str) -> None:
    schema, text = TEXTS[name]
    clock = SlowClock()
    grammar = model().quick_guide(request(**by(schema)), clock)
    answering, proposer = row([1], grammar=grammar), GrammarProposer()
    tokens = model().tokenizer.encode(text)[:400]
    for token in tokens:
        if (offer := proposer.offer(answering)) and (valid := grammar.valid_prefix(offer.tokens)):
            grammar.masks_along(offer.tokens[:valid])
        grammar.accept(token)
        answering.answer.append(token)
    assert grammar.error is None
    assert 1 < clock.works <= (AT_ONCE_S + len(tokens) * 0.000_25) / clock.WORK_S + 2


def test_tokens_that_are_taken_back_add_no_time() -> None:
    grammar = model().quick_guide(request(**by(KEY)), SlowClock())
    tokens = model().tokenizer.encode(TEXTS["key"][1])
    grammar.masks_along(tokens[:7])
    for _ in range(50):
        grammar.accept(tokens[0])
        grammar.rollback(1)
    assert not grammar.takes_drafts


class Clocks:
    """Seconds that have passed, and those of them that a thread has computed."""

    def __init__(self) -> None:
        self.passed = self.computed = 0.0

    def compute(self, row: DraftTime, seconds: float) -> None:
        with row:
            self.computed += seconds
            self.passed += seconds


def test_drafts_of_all_rows_together_take_a_share_of_the_time() -> None:
    clocks, tokens = Clocks(), 0
    together = AllDraftsTime(lambda: clocks.passed, share=0.25, at_once_s=0.01)
    rows = [DraftTime(lambda: clocks.computed, together) for _ in range(64)]
    in_a_step = list[float]()
    for _ in range(50):
        before, tokens = clocks.computed, tokens + 4
        for each in rows:
            each.advance(tokens)
            if each.left:
                clocks.compute(each, 0.000_8)
        in_a_step.append(clocks.computed - before)
        clocks.passed += 0.02
    assert max(in_a_step) <= 2 * 0.01
    assert 0.01 < clocks.computed <= 0.01 + 0.25 * clocks.passed + 0.001


def test_a_row_that_drafts_little_has_time_while_others_have_used_up_theirs() -> None:
    clocks = Clocks()
    together = AllDraftsTime(lambda: clocks.passed)
    slow, quick = (DraftTime(lambda: clocks.computed, together) for _ in range(2))
    clocks.compute(slow, 2 * AT_ONCE_S)
    assert (slow.left, quick.left) == (False, True)
