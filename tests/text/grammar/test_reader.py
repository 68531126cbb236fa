"""Drafts of a grammar take little time of the engine's thread, however slowly it reads them."""

import pytest

from tests.schedule.speculation.rows import row
from tests.text.guided import by, model, request
from tests.text.structured import Schema
from worker.schedule.speculation.forced import GrammarProposer
from worker.text.grammar.reader import _AT_ONCE_S, _PER_TOKEN_S

LONG = "".join(chr(ord("a") + number % 26) for number in range(3_000))
KEY: Schema = {"type": "object", "properties": {LONG: {"type": "null"}}, "required": [LONG]}
ENUM: Schema = {"enum": [LONG, LONG[:-1] + "0"]}
TEXTS = {"key": (KEY, f'{{"{LONG}": null}}'), "enum": (ENUM, f'"{LONG}"')}


class SlowClock:
    """A clock by which all work takes as long."""

    WORK_S = 0.75 * _AT_ONCE_S

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
    assert 1 < clock.works <= (_AT_ONCE_S + len(tokens) * _PER_TOKEN_S) / clock.WORK_S + 2


def test_tokens_that_are_taken_back_add_no_time() -> None:
    grammar = model().quick_guide(request(**by(KEY)), SlowClock())
    tokens = model().tokenizer.encode(TEXTS["key"][1])
    grammar.masks_along(tokens[:7])
    for _ in range(50):
        grammar.accept(tokens[0])
        grammar.rollback(1)
    assert not grammar.takes_drafts
