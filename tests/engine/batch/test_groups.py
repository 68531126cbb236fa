"""Groups of decoding rows: the cost of a step, and tokens that are computed when the next step begins."""

import io
from collections.abc import Iterator

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from tests.engine.driver import EACH_ALONE, ONE_GROUP, FixedCost
from tests.engine.tiny import network, prompt
from worker.engine.admission.grouping import StepCost
from worker.engine.batch.decode_batch import ComputedRow, DecodeBatch
from worker.engine.batch.groups import Groups
from worker.engine.batch.row import PendingTokens, Row
from worker.engine.speculation.copies import CopyProposer
from worker.engine.speculation.speculator import Speculator
from worker.engine.upstream.mlx_lm import make_prompt_cache
from worker.request import GenerationRequest


class DecodingRows:
    """Groups whose rows join and leave."""

    def __init__(self, cost: StepCost, speculator: Speculator | None = None, family: str = "qwen3") -> None:
        self._network = network(family)
        self.groups = Groups(self._network, lambda groups: True, speculator)
        self.cost(cost)

    def cost(self, cost: StepCost) -> None:
        self.groups._cost = FixedCost(cost)  # type: ignore[assignment]

    def join(self, tokens: int, seed: int) -> Row:
        *computed, last = prompt(tokens, seed)
        cache = make_prompt_cache(self._network)
        self._network(mx.array([computed]), cache=cache)
        row = Row.of(GenerationRequest(str(seed), (*computed, last), 100))
        self.groups.add([ComputedRow(row, cache, PendingTokens.known([last]))])
        return row

    def decode(self, steps: int) -> None:
        for _ in range(steps):
            tokens, failed = self.groups.step()
            assert not failed
            for each in tokens:
                each.row.deliver(each.token)

    @property
    def names(self) -> list[list[str]]:
        """The seeds of the rows by group."""
        return [[row.id for row in group.rows] for group in self.groups._groups]

    def next_tokens(self) -> Iterator[mx.array]:
        for group in self.groups._groups:
            assert group._next is not None
            yield group._next.tokens


def operations(array: mx.array) -> int:
    """Return the number of operations that the array still depends on."""
    graph = io.StringIO()
    mx.export_to_dot(graph, array)
    return graph.getvalue().count("shape=rectangle")


def alone_without_end(family: str, tokens: tuple[int, ...], answer: int) -> list[int]:
    """Return as many tokens of mlx-lm's own, also after an end of the sequence."""
    steps = generate_step(mx.array(tokens), network(family), max_tokens=answer)
    return [int(token) for token, _ in steps]


def failing(monkeypatch: pytest.MonkeyPatch, name: str, kind: type[Exception] = RuntimeError) -> None:
    """Make one method of decode batches fail from now on."""

    def fails(*given: object) -> None:
        raise kind("[malloc] Unable to allocate 1000000000 bytes.")

    monkeypatch.setattr(DecodeBatch, name, fails)


@pytest.mark.parametrize("name", ["launch", "collect", "tighten"])
def test_rows_of_a_group_that_fails_are_lost_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    decoding = DecodingRows(ONE_GROUP)
    rows = [decoding.join(tokens, seed) for seed, tokens in enumerate((9, 12))]
    decoding.groups.step()
    failing(monkeypatch, name)
    if name == "tighten":
        decoding.groups.tighten()
    else:
        assert decoding.groups.step() == ([], [])
    assert len(decoding.groups) == 0
    assert decoding.groups.pop_lost() == rows
    assert decoding.groups.pop_lost() == []


def test_row_that_fails_in_a_group_of_its_own_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = DecodingRows(EACH_ALONE)
    row = decoding.join(9, 1)
    row.recomputed = True  # at the first failure an earlier step may have been the cause
    failing(monkeypatch, "launch")
    assert decoding.groups.step() == ([], [row])
    assert decoding.groups.pop_lost() == []


def test_all_rows_are_lost_if_the_device_fails_and_may_have_failed_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = DecodingRows(EACH_ALONE)
    rows = [decoding.join(tokens, seed) for seed, tokens in enumerate((9, 400))]
    decoding.groups.step()
    failing(monkeypatch, "launch")
    assert decoding.groups.step() == ([], [])
    assert {*decoding.groups.pop_lost()} == {*rows}


def test_rows_that_stay_are_lost_if_their_group_fails_to_remove_another(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = DecodingRows(ONE_GROUP)
    rows = [decoding.join(tokens, seed) for seed, tokens in enumerate((9, 12, 7))]
    decoding.groups.step()
    failing(monkeypatch, "remove")
    decoding.groups.remove([rows[1]])
    assert {rows[0], rows[2]} <= {*decoding.groups.pop_lost()}
    assert len(decoding.groups) == 0


@pytest.mark.parametrize("name", ["preempt", "restore"])
def test_row_that_fails_on_its_way_is_lost(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    decoding = DecodingRows(ONE_GROUP)
    moved, stays = (decoding.join(tokens, seed) for seed, tokens in enumerate((9, 12)))
    decoding.groups.step()
    preempted = decoding.groups.preempt(moved)
    if name == "preempt":
        decoding.groups.restore(preempted)
    assert decoding.groups.pop_lost() == []
    failing(monkeypatch, name)
    with pytest.raises(RuntimeError):
        decoding.groups.preempt(moved) if name == "preempt" else decoding.groups.restore(preempted)
    assert decoding.groups.pop_lost() == [moved]
    decoding.groups.clear()
    assert stays in decoding.groups.pop_lost()


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "qwen3_5", "falcon_h1", "mamba2", "deepseek_v32"])
def test_row_that_moves_to_a_group_of_its_own_and_back_draws_as_alone(family: str) -> None:
    """Its length passes the window and a step of its buffers; it moves while a token that it has drawn is not known."""
    decoding = DecodingRows(ONE_GROUP, family=family)
    given = dict(enumerate((9, 251, 40)))
    rows = {seed: decoding.join(tokens, seed) for seed, tokens in given.items()}
    decoding.decode(4)
    decoding.cost(EACH_ALONE)
    decoding.groups.move(rows[1])
    assert decoding.names == [["0", "2"], ["1"]]
    decoding.decode(9)
    decoding.cost(ONE_GROUP)
    decoding.groups.rebalance()
    assert [sorted(names) for names in decoding.names] == [["0", "1", "2"]]
    decoding.decode(7)
    for seed, tokens in given.items():
        answer = rows[seed].answer
        assert len(answer) == 19
        assert answer == alone_without_end(family, prompt(tokens, seed), len(answer)), f"row {seed}"
    assert decoding.groups.pop_lost() == []


def test_row_that_is_alone_or_does_not_decode_does_not_move() -> None:
    decoding = DecodingRows(EACH_ALONE)
    row = decoding.join(9, 1)
    decoding.groups.move(row)
    decoding.groups.move(Row.of(GenerationRequest("waits", (10,), 100)))
    assert decoding.names == [["1"]]


def test_row_moves_to_a_new_group_if_memory_has_room_in_no_other() -> None:
    decoding = DecodingRows(ONE_GROUP)
    rows = [decoding.join(tokens, seed) for seed, tokens in enumerate((9, 12))]
    decoding.decode(2)
    decoding.groups._make_room = lambda groups: False
    decoding.groups.move(rows[0])
    assert decoding.names == [["1"], ["0"]]
    assert len(decoding.groups.buffers) == 2


@pytest.mark.parametrize("name", ["preempt", "restore"])
def test_row_that_fails_while_it_moves_is_lost(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    decoding = DecodingRows(ONE_GROUP)
    moved, _ = (decoding.join(tokens, seed) for seed, tokens in enumerate((9, 12)))
    decoding.decode(2)
    failing(monkeypatch, name)
    with pytest.raises(RuntimeError):
        decoding.groups.move(moved)
    assert decoding.groups.pop_lost() == [moved]


def test_rows_whose_buffers_cannot_be_tightened_for_a_move_are_lost_and_the_moved_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoding = DecodingRows(ONE_GROUP)
    moved, stays = (decoding.join(tokens, seed) for seed, tokens in enumerate((9, 12)))
    decoding.decode(2)
    failing(monkeypatch, "tighten", ValueError)  # the device's errors cost all rows
    decoding.groups.move(moved)
    assert decoding.names == [["0"]]
    assert decoding.groups.pop_lost() == [stays]


def test_first_join_copies_no_bytes() -> None:
    assert DecodingRows(StepCost(group_s=1.0)).groups.join_copy_bytes(100) == 0


def test_pending_tokens_are_computed_before_the_next_step_when_rows_join_or_leave() -> None:
    # Else they would be computed as a part of that step, and known only at its end.
    decoding = DecodingRows(StepCost(group_s=1.0))
    rows = [decoding.join(tokens, seed) for seed, tokens in enumerate((9, 12, 7))]
    assert [operations(tokens) for tokens in decoding.next_tokens()] == [0]
    decoding.groups.step()
    decoding.groups.remove([rows[0]])
    decoding.groups.wait()
    assert [operations(tokens) for tokens in decoding.next_tokens()] == [0]


def test_the_cost_of_a_plain_step_is_learned_with_several_groups() -> None:
    speculator = Speculator([CopyProposer()], max_draft=4)
    decoding = DecodingRows(EACH_ALONE, speculator)
    for seed, tokens in enumerate((9, 2_000)):
        decoding.join(tokens, seed)
    assert not speculator.costs.measured
    for _ in range(4):
        decoding.groups.step()
    assert len(decoding.groups.lengths) == 2
    assert speculator.costs.measured


def test_the_time_of_a_step_is_taken_once_with_its_rows() -> None:
    rows = DecodingRows(ONE_GROUP)
    rows.join(5, 1)
    rows.join(5, 2)
    assert rows.groups.take_measured() == (0, 0.0)
    rows.decode(4)
    number, seconds = rows.groups.take_measured()
    assert number == 2
    assert seconds > 0
    assert rows.groups.take_measured() == (0, 0.0)
