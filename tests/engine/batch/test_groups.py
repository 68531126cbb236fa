"""Groups of rows that decode: what a step will cost, and tokens that are there when the next step begins."""

import io
from collections.abc import Iterator

import mlx.core as mx
import pytest

from tests.engine.driver import Fixed
from tests.engine.tiny import network, prompt
from worker.engine.batch.decode_batch import PendingTokens
from worker.engine.batch.groups import Groups
from worker.engine.batch.row import Row
from worker.engine.upstream.mlx_lm import make_prompt_cache
from worker.schedule.grouping import StepCost
from worker.schedule.request import GenerationRequest


class Table:
    """Groups whose rows join and leave."""

    def __init__(self, cost: StepCost) -> None:
        self._network = network("qwen3")
        self.groups = Groups(self._network, lambda groups: True)
        self.groups._cost = Fixed(cost)  # type: ignore[assignment]

    def join(self, tokens: int, seed: int) -> Row:
        *computed, last = prompt(tokens, seed)
        cache = make_prompt_cache(self._network)
        self._network(mx.array([computed]), cache=cache)
        row = Row.of(GenerationRequest(str(seed), (*computed, last), 100))
        self.groups.add(row, cache, PendingTokens(mx.array([last]), mx.array([True]), {}))
        return row

    def next_tokens(self) -> Iterator[mx.array]:
        for group in self.groups._groups:
            assert group._next is not None
            yield group._next.tokens


def operations(array: mx.array) -> int:
    """What is still to be done for it, or is under way."""
    graph = io.StringIO()
    mx.export_to_dot(graph, array)
    return graph.getvalue().count("shape=rectangle")


@pytest.mark.parametrize(("more", "counted"), [(0, 0), (1, 1), (2, 2), (50, 2)])
def test_what_a_step_takes_with_more_rows_follows_from_what_rows_cost_up_to_twice_as_many(
    more: int, counted: int
) -> None:
    table = Table(StepCost(group_s=5.0, row_s=1.0, cell_s=0.01))
    for seed, tokens in enumerate((100, 20)):
        table.join(tokens, seed)
    now, then = 5.0 + 2 * (1 + 1), 5.0 + (2 + counted) * (1 + 1)
    assert table.groups.decode_slowdown(more) == pytest.approx(then / now)


def test_where_nobody_decodes_a_join_copies_nothing() -> None:
    assert Table(StepCost(group_s=1.0)).groups.join_copy_bytes(100) == 0


def test_tokens_are_computed_before_the_next_step_whoever_joins_or_leaves() -> None:
    # Else they are computed as a part of that step, and told when it has ended.
    table = Table(StepCost(group_s=1.0))
    rows = [table.join(tokens, seed) for seed, tokens in enumerate((9, 12, 7))]
    assert [operations(tokens) for tokens in table.next_tokens()] == [0]
    table.groups.step()
    table.groups.remove([rows[0]])
    table.groups.wait()
    assert [operations(tokens) for tokens in table.next_tokens()] == [0]
