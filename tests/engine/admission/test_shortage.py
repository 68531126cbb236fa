"""What failures for lack of memory teach, and for how long."""

from worker.engine.admission.decision import AdmissionLimits, Admit, Refuse, RowEstimate, Wait, admit_in_turn
from worker.engine.admission.shortage import Shortage
from worker.engine.memory import KVLayers, MemoryModel

COSTS = MemoryModel(1_000_000, (KVLayers(10, 10),))
LIMITS = AdmissionLimits(COSTS, 100_000_000)
MINUTES = 60.0


def rows_bytes(shortage: Shortage, now: float) -> int:
    return shortage.bounded(LIMITS, now).max_bytes - COSTS.resident_bytes


def row(id: str, tokens: int) -> RowEstimate:
    return RowEstimate(id, "interactive", tokens - 100, 100)


def test_nothing_is_learned_before_a_failure() -> None:
    shortage = Shortage()
    assert shortage.bounded(LIMITS, 5.0) is LIMITS
    assert shortage.longest_chunk(4_096, 5.0) == 4_096


def test_a_failure_halves_what_was_reserved_and_time_doubles_it() -> None:
    shortage = Shortage()
    shortage.record(8_000_000, 0, 0.0)
    assert rows_bytes(shortage, 0.0) == 4_000_000
    assert rows_bytes(shortage, 5 * MINUTES) == 8_000_000
    assert rows_bytes(shortage, 60 * MINUTES) == LIMITS.max_bytes - COSTS.resident_bytes
    shortage.record(6_000_000, 0, 5 * MINUTES)
    assert rows_bytes(shortage, 5 * MINUTES) == 3_000_000


def test_plans_are_made_again_while_the_limits_grow() -> None:
    shortage = Shortage()
    assert not shortage.has_eased(0.0, 60 * MINUTES)
    shortage.record(8_000_000, 0, 0.0)
    assert [shortage.has_eased(since, now) for since, now in ((0.0, 4.9), (0.0, 5.0), (20.0, 24.0))] == [
        False, True, False
    ]  # fmt: skip
    assert not shortage.has_eased(60 * MINUTES, 90 * MINUTES)


def test_shorter_chunks_are_tried_before_less_memory() -> None:
    shortage = Shortage()
    shortage.record(8_000_000, 512, 0.0)
    assert shortage.longest_chunk(4_096, 0.0) == 64
    assert shortage.longest_chunk(4_096, 10 * MINUTES) == 512
    assert shortage.bounded(LIMITS, 0.0).max_bytes == LIMITS.max_bytes
    shortage.record(8_000_000, 64, 0.0)
    assert rows_bytes(shortage, 0.0) == 4_000_000


def test_what_a_short_row_has_taught_is_forgotten_in_minutes_too() -> None:
    """Another program had all of the memory for a minute: no request is refused for it half an hour later."""
    shortage, short = Shortage(), COSTS.peak_bytes([[100]]) - COSTS.resident_bytes
    for _ in range(2):
        shortage.record(short, 0, 0.0)
        shortage.is_too_large("short", short)
    longest = COSTS.max_tokens(LIMITS.max_bytes)
    ((_, decision),) = admit_in_turn([row("x", longest)], [], shortage.bounded(LIMITS, 0.0))
    assert isinstance(decision, Refuse)
    ((_, decision),) = admit_in_turn([row("x", longest)], [], shortage.bounded(LIMITS, 25 * MINUTES))
    assert decision == Admit()


def test_a_row_that_needs_more_than_was_learned_is_admitted_alone() -> None:
    shortage = Shortage()
    small, large = row("small", 300), row("large", 2_000)
    shortage.record(2 * COSTS.peak_bytes([[1_000]]) - 2 * COSTS.resident_bytes, 0, 0.0)
    limits = shortage.bounded(LIMITS, 0.0)
    assert [decision for _, decision in admit_in_turn([large], [small], limits)] == [Wait()]
    assert [decision for _, decision in admit_in_turn([large, small], [], limits)] == [Admit(), Wait()]


def test_a_row_that_has_failed_alone_twice_is_too_large_and_so_are_longer_ones() -> None:
    shortage = Shortage()
    nbytes = COSTS.peak_bytes([[2_000]]) - COSTS.resident_bytes
    shortage.record(nbytes, 0, 0.0)
    assert not shortage.is_too_large("large", nbytes)
    assert not shortage.is_too_large("other", nbytes)
    assert shortage.is_too_large("large", nbytes)
    for tokens, kind in (1_000, Admit), (3_000, Refuse):
        ((_, decision),) = admit_in_turn([row("x", tokens)], [], shortage.bounded(LIMITS, 0.0))
        assert isinstance(decision, kind)
    ((_, decision),) = admit_in_turn([row("x", 3_000)], [], shortage.bounded(LIMITS, 20 * MINUTES))
    assert decision == Admit()
