"""Mistakes that speculation could make, one by one and on purpose: each changes an answer, so the tests of exactness
would notice it."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest

from tests.engine.machine.grammars import _Recording
from tests.engine.speculation.oracle import verify_everything
from tests.engine.speculation.scenarios import Drive, drafted, guided, joined, penalized, plain_of
from tests.engine.tiny import model
from worker.engine.batch import decode_batch
from worker.engine.batch.row import Row
from worker.engine.cache import recurrent
from worker.engine.cache.kv import SlotKVCache
from worker.engine.cache.recurrent import SlotArraysCache
from worker.engine.cache.rotating import SlotRotatingKVCache
from worker.engine.cache.slots import Verification
from worker.engine.sampling.sampler import draw_key
from worker.engine.speculation import verify
from worker.engine.speculation.verify import Accepted, Position
from worker.text.grammar.row.grammar import RowGrammar

Patch = pytest.MonkeyPatch
Mistake = Callable[[Patch], None]


def states_keep_a_token_too_many(patch: Patch) -> None:
    commit, widths = _with_widths(patch, SlotArraysCache)

    def keep_more(self: SlotArraysCache, counts: Sequence[int], clear: Collection[int] = ()) -> None:
        commit(self, [min(count + 1, widths[id(self)]) for count in counts], clear)

    patch.setattr(SlotArraysCache, "commit", keep_more)


def states_keep_a_token_too_few(patch: Patch) -> None:
    commit = SlotArraysCache.commit
    patch.setattr(
        SlotArraysCache,
        "commit",
        lambda self, counts, clear=(): commit(self, [max(1, count - 1) for count in counts], clear),
    )


def rows_swap_their_counts(patch: Patch) -> None:
    commit = SlotArraysCache.commit
    patch.setattr(SlotArraysCache, "commit", lambda self, counts, clear=(): commit(self, [*counts][::-1], clear))


def windows_of_convolutions_lag(patch: Patch) -> None:
    window_after = recurrent._window_after

    def lagging(*given: Any) -> Callable[[Any], Any]:
        advance = window_after(*given)
        return lambda kept: advance(kept - 1)

    patch.setattr(recurrent, "_window_after", lagging)


def stepped_states_lag(patch: Patch) -> None:
    chosen = recurrent._chosen
    patch.setattr(recurrent, "_chosen", lambda states, kept: chosen(states, kept - 1))


def keys_keep_a_token_too_many(patch: Patch) -> None:
    commit, widths = _with_widths(patch, SlotKVCache)

    def keep_more(self: SlotKVCache, counts: Sequence[int], clear: Collection[int] = ()) -> None:
        commit(self, [min(count + 1, widths[id(self)]) for count in counts], clear)

    patch.setattr(SlotKVCache, "commit", keep_more)


def positions_count_rejected_tokens(patch: Patch) -> None:
    commit, widths = _with_widths(patch, SlotKVCache)

    def move_on(self: SlotKVCache, counts: Sequence[int], clear: Collection[int] = ()) -> None:
        commit(self, counts, clear)
        rows = self.slot_rows
        rejected = [widths[id(self)] - count for count in counts]
        positions = [at + count for at, count in zip(rows.positions, rejected, strict=True)]
        self._set_rows(rows.lengths, positions, rows.ends)

    patch.setattr(SlotKVCache, "commit", move_on)


def _with_widths(patch: Patch, kind: type) -> tuple[Callable[..., None], dict[int, int]]:
    """Return the `commit` of a kind of cache, and the tokens per row of the last forward of each cache."""
    begin, widths = kind.begin, dict[int, int]()  # type: ignore[attr-defined]

    def noting(self: Any, width: int) -> None:
        widths[id(self)] = width
        begin(self, width)

    patch.setattr(kind, "begin", noting)
    return kind.commit, widths  # type: ignore[attr-defined]


def rings_are_a_column_short(patch: Patch) -> None:
    create = SlotRotatingKVCache.__init__
    patch.setattr(SlotRotatingKVCache, "__init__", lambda self, size, spare=0: create(self, size, spare - 1))
    patch.setattr(SlotRotatingKVCache, "begin", SlotKVCache.begin)  # does not refuse the width


def forwards_are_not_committed(patch: Patch) -> None:
    patch.setattr(Verification, "commit", lambda self, counts, clear=(): None)


def grammars_are_not_rolled_back(patch: Patch) -> None:
    for kind in RowGrammar, _Recording:
        patch.setattr(kind, "rollback", lambda self, count: None)


def masks_are_those_of_the_first_place(patch: Patch) -> None:
    positions_after = decode_batch.positions_after

    def masked_alike(row: Row, token: int, draft: Sequence[int]) -> list[Position]:
        made = [*positions_after(row, token, draft)]
        for position in made:
            position.mask = made[0].mask
        return made

    patch.setattr(decode_batch, "positions_after", masked_alike)


def penalties_count_rejected_tokens(patch: Patch) -> None:
    positions_after = decode_batch.positions_after

    def counting_all(row: Row, token: int, draft: Sequence[int]) -> list[Position]:
        made = [*positions_after(row, token, draft)]
        for position in made:
            position._before = [*made[0]._before, *draft]
        return made

    patch.setattr(decode_batch, "positions_after", counting_all)


def places_share_a_random_key(patch: Patch) -> None:
    def next_key(self: Position) -> tuple[int, int]:
        key = draw_key(self._row.request.sampling.seed, self._row.drawn)
        return key >> 32, key & 0xFFFFFFFF

    patch.setattr(Position, "next_key", next_key)


def drafts_use_up_no_random_keys(patch: Patch) -> None:
    mark = Row.mark_verified

    def forget_draws(self: Row, tokens: int) -> None:
        mark(self, tokens)
        self.drawn -= tokens - 1

    patch.setattr(Row, "mark_verified", forget_draws)


def wrong_tokens_are_accepted(patch: Patch) -> None:
    def accept_all(drawn: Sequence[Any], draft: Sequence[int], clean: Sequence[bool]) -> Accepted:
        return Accepted(tuple(drawn), len(drawn), True)

    patch.setattr(verify, "_accepted", accept_all)


def case(mistake: Mistake, family: str, drive: Drive = joined, *, by_default: bool = False) -> Any:
    marks = [] if by_default else [pytest.mark.slow]
    return pytest.param(mistake, family, drive, marks=marks, id=f"{mistake.__name__}-{family}")


MISTAKES = [
    case(states_keep_a_token_too_many, "qwen3_5", by_default=True),
    case(states_keep_a_token_too_many, "mamba2"),
    case(states_keep_a_token_too_many, "rwkv7"),
    case(states_keep_a_token_too_many, "lfm2"),
    case(states_keep_a_token_too_few, "qwen3_5"),
    case(states_keep_a_token_too_few, "mamba"),
    case(rows_swap_their_counts, "nemotron_h"),
    case(windows_of_convolutions_lag, "qwen3_next"),
    case(windows_of_convolutions_lag, "lfm2"),
    case(stepped_states_lag, "rwkv7"),
    case(stepped_states_lag, "granitemoehybrid"),
    case(keys_keep_a_token_too_many, "qwen3"),
    case(keys_keep_a_token_too_many, "gemma3"),
    case(positions_count_rejected_tokens, "qwen3", by_default=True),
    case(positions_count_rejected_tokens, "gemma3"),
    case(rings_are_a_column_short, "gemma3", by_default=True),
    case(forwards_are_not_committed, "qwen3"),
    case(forwards_are_not_committed, "qwen3_5"),
    case(grammars_are_not_rolled_back, "qwen3", guided, by_default=True),
    case(masks_are_those_of_the_first_place, "qwen3", guided),
    case(penalties_count_rejected_tokens, "qwen3", penalized, by_default=True),
    case(places_share_a_random_key, "qwen3"),
    case(drafts_use_up_no_random_keys, "qwen3"),
    case(wrong_tokens_are_accepted, "qwen3"),
]


@pytest.mark.parametrize(("mistake", "family", "drive"), MISTAKES)
def test_a_mistake_changes_an_answer(mistake: Mistake, family: str, drive: Drive, monkeypatch: Patch) -> None:
    answers = plain_of(family, drive).generated
    verify_everything(monkeypatch)
    mistake(monkeypatch)
    run, oracle = drafted(model(family), answers, drive)
    assert oracle.proposed > 0
    assert run.generated != answers
