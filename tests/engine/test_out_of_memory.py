"""A device with less memory than was predicted costs the largest row at most, and the others nothing but time."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Literal

import mlx.core as mx
import pytest

from tests.engine.driver import EACH_ALONE, Run
from tests.engine.prefill.test_specprefill import ANSWER as KEPT_ANSWER
from tests.engine.prefill.test_specprefill import LONG, WISH, drafted, kept_alone
from tests.engine.sampling.test_grammar_processor import RecordingGrammar
from tests.engine.speculation.oracle import Oracle, speculator_of, verify_everything
from tests.engine.tiny import alone, model, network, prompt
from worker.engine import admission_controller, isolation
from worker.engine.batch import decode_batch
from worker.engine.upstream.mlx_lm import generation_stream
from worker.outcomes import MAX_DRAFT, Admitted, Preempted

ANSWER = 16
METAL = "[METAL] Command buffer execution failed: Insufficient Memory (kIOGPUCommandBufferCallbackErrorOutOfMemory)."
# What is raised when the forward is given to the device, or with the first result that is read afterwards.
When = Literal["at once", "late"]


class SmallDevice:
    """The twin of a device without memory for more than `room` tokens in all caches, or for a longer chunk than
    `chunk`. A forward that fails late yields wrong logits, as on a GPU, and one error, whatever is read first."""

    def __init__(self, run: Run, room: int, chunk: int, when: When) -> None:
        self._engine, self._room, self._chunk, self._when = run.engine, room, chunk, when
        self.failures = 0

    def held(self) -> int:
        """Tokens in all caches."""
        engine = self._engine
        cached = engine._caches.nbytes // max(1, engine._admission._limits.costs.token_bytes)
        return sum(map(sum, engine._running.lengths)) + sum(engine._prefills.lengths) + cached

    def forward(self, whole: Any, network: Any, tokens: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        rows, length = tokens.shape
        fed = rows * length if length > 1 else 0  # rows that decode count it already
        if self.held() + fed <= self._room and length <= self._chunk:
            return whole(network, tokens, *args, **kwargs)
        self.failures += 1
        if self._when == "at once" or length > MAX_DRAFT + 1:  # nobody reads the logits of a chunk
            raise RuntimeError(METAL)
        logits = whole(network, tokens, *args, **kwargs)
        return logits[..., ::-1] + late_error()


@contextmanager
def small_device(
    run: Run, family: str, *, room: int = 1 << 30, chunk: int = 1 << 30, when: When = "at once"
) -> Iterator[SmallDevice]:
    device, kind = SmallDevice(run, room, chunk, when), type(network(family))
    whole = kind.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "__call__", lambda *args, **kwargs: device.forward(whole, *args, **kwargs))
        patch.setattr(isolation, "_NO_MEMORY", (*isolation._NO_MEMORY, "LU factorization"))
        yield device


ROWS = {"a": 3, "b": 40, "c": 17, "d": 64, "e": 9, "f": 25}  # prompt tokens
ALL = sum(ROWS.values()) + len(ROWS) * ANSWER


def start(run: Run, *, apart: int = 1, **more: Any) -> None:
    for id, tokens in ROWS.items():
        run.add(id, prompt(tokens, ord(id)), max_tokens=ANSWER, **more)
        for _ in range(apart):
            run.step()


def all_is_well(run: Run, family: str, *refused: str) -> None:
    """Run to the end. Each row says what it says alone; only these are refused."""
    run.drain()
    assert {id for id, ending in run.ended.items() if ending not in ("length", "stop")} == {*refused}
    for id in ROWS:
        assert run.generated[id] == alone(network(family), prompt(ROWS[id], ord(id)), ANSWER), id


FAMILIES = pytest.mark.parametrize(
    "family",
    [
        "llama",
        "qwen3_5",
        "gemma3",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("gpt_oss", "deepseek_v3", "kimi_linear", "mamba2", "falcon_h1")
        ),
    ],
)
WHEN = pytest.mark.parametrize("when", ["at once", "late"])


@FAMILIES
@WHEN
def test_rows_that_are_too_many_take_turns(family: str, when: When) -> None:
    run = Run(model(family))
    with small_device(run, family, room=ALL // 2, when=when) as device:
        start(run)
        all_is_well(run, family)
        assert device.failures


def test_a_row_that_lost_its_cache_counts_as_preempted_until_it_is_admitted_again() -> None:
    run, moves = Run(model("llama")), dict[str, list[str]]()
    with small_device(run, "llama", room=ALL // 2):
        start(run, apart=0)
        while len(run.engine):
            for outcome in run.step().outcomes:
                if isinstance(outcome, Admitted | Preempted):
                    moves.setdefault(outcome.id, []).append(type(outcome).__name__)
    turns = ["Admitted", "Preempted"]
    assert all(each == [*turns * (len(each) // 2), "Admitted"] for each in moves.values()), moves
    assert moves.keys() == ROWS.keys()
    assert any(len(each) > 1 for each in moves.values())


def test_a_row_is_admitted_beside_a_long_answer_once_the_device_may_have_room_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, now = Run(model("llama")), [1_000.0]
    monkeypatch.setattr(admission_controller, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with small_device(run, "llama", room=60) as device:
        run.add("long", prompt(40, 1), max_tokens=600)
        run.until(lambda: len(run.generated["long"]) > 0)
        run.add("next", prompt(40, 2), max_tokens=4)
        run.until(lambda: device.failures > 0)
    for _ in range(20):
        run.step()
    assert run.waiting == ["next"]
    now[0] += 3_600.0
    run.step()
    assert run.active == ["long", "next"]
    run.drain()
    assert run.generated == {id: alone(network("llama"), prompt(40, at), most) for id, at, most in
                             (("long", 1, 600), ("next", 2, 4))}  # fmt: skip


@FAMILIES
@WHEN
def test_only_the_row_that_is_too_large_ends(family: str, when: When) -> None:
    run = Run(model(family))
    with small_device(run, family, room=ALL // 2, when=when):
        run.add("large", prompt(ALL // 2 - 4, 99), max_tokens=ANSWER)
        start(run)
        all_is_well(run, family, "large")
    assert (
        run.generated["large"]
        == alone(network(family), prompt(ALL // 2 - 4, 99), ANSWER)[: len(run.generated["large"])]
    )
    assert "memory" in run.refused["large"]


def test_an_answer_without_a_limit_ends_where_memory_does() -> None:
    run = Run(model("llama"))
    with small_device(run, "llama", room=48):
        run.add("grows", prompt(40, 7), max_tokens=ANSWER, grows=True)
        run.drain()
    assert run.ended == {"grows": "length"}
    assert run.cut == ["grows"]
    said = run.generated["grows"]
    assert 0 < len(said) < ANSWER
    assert said == alone(network("llama"), prompt(40, 7), ANSWER)[: len(said)]


def test_a_long_prompt_is_computed_in_shorter_chunks() -> None:
    run = Run(model("qwen3_5"), step_s=1.0)
    start(run)
    run.until(lambda: all(run.generated.values()))
    with small_device(run, "qwen3_5", chunk=64) as device:
        run.add("long", prompt(400, 99), max_tokens=ANSWER)
        failed = [run.step().num_out_of_memory for _ in range(4)]
        all_is_well(run, "qwen3_5")
    assert device.failures == 1
    assert sum(failed) == 1  # the rows that decode have lost nothing
    assert run.generated["long"] == alone(network("qwen3_5"), prompt(400, 99), ANSWER)


def test_prompts_that_fail_together_all_wait() -> None:
    run = Run(model("llama"), step_s=1.0)
    with small_device(run, "llama", chunk=64):
        for id in "ab":
            run.add(id, prompt(100, ord(id)), max_tokens=4)
        run.drain()
    assert run.generated == {id: alone(network("llama"), prompt(100, ord(id)), 4) for id in "ab"}
    assert {*run.ended.values()} <= {"length", "stop"}


def test_a_prompt_that_is_too_large_costs_only_itself_and_its_like_are_refused_at_once() -> None:
    run = Run(model("llama"))
    start(run)
    with small_device(run, "llama", room=ALL) as device:
        run.add("large", prompt(600, 99), max_tokens=ANSWER)
        all_is_well(run, "llama", "large")
        assert run.generated["large"] == []
        before = device.failures
        run.add("again", prompt(600, 98), max_tokens=ANSWER)
        run.drain()
        assert run.ended["again"] == "refused"
        assert device.failures == before


def test_what_was_learned_holds_for_the_rows_that_follow() -> None:
    run = Run(model("llama"))
    with small_device(run, "llama", room=ALL // 2) as device:
        start(run)
        all_is_well(run, "llama")
        first = device.failures
        for time in range(3):
            for id, tokens in ROWS.items():
                run.add(f"{id} {time}", prompt(tokens, ord(id)), max_tokens=ANSWER)
            run.drain()
        assert device.failures == first
    assert all(run.generated[f"{id} 2"] == run.generated[id] for id in ROWS)


@WHEN
@pytest.mark.parametrize("family", ["qwen3", "gemma3", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def test_rows_that_verify_drafts_lose_no_token(family: str, when: When, monkeypatch: pytest.MonkeyPatch) -> None:
    verify_everything(monkeypatch)
    oracle = Oracle({id: alone(network(family), prompt(tokens, ord(id)), ANSWER) for id, tokens in ROWS.items()})
    run = Run(model(family), speculator=speculator_of(model(family), oracle))
    with small_device(run, family, room=ALL // 2, when=when) as device:
        start(run)
        all_is_well(run, family)
        assert device.failures
    assert oracle.accepted


@WHEN
def test_cached_prefixes_go_first_and_hold_nothing_of_a_failed_step(when: When) -> None:
    run = Run(model("qwen3_5"), prefix_bytes=1 << 24)
    begun = prompt(80, 5)
    for round in range(3):
        with small_device(run, "qwen3_5", room=260, when=when) as device:
            for turn in range(3):
                tokens = (*begun, *prompt(20 * (turn + 1), turn))
                run.add(f"{round} {turn}", tokens, max_tokens=ANSWER, boundaries=(len(begun),))
                run.step()
            run.drain()
        for turn in range(3):
            tokens = (*begun, *prompt(20 * (turn + 1), turn))
            assert run.generated[f"{round} {turn}"] == alone(network("qwen3_5"), tokens, ANSWER)
        assert device.failures < 12


@WHEN
def test_a_scored_prompt_keeps_the_tokens_that_were_chosen(when: When) -> None:
    run = Run(drafted("qwen3_5"), prefix_bytes=0)
    with small_device(run, "qwen3_5", room=LONG, when=when) as device:
        run.add("thin", prompt(LONG, 1), max_tokens=KEPT_ANSWER, specprefill=WISH)
        start(run, apart=0)
        all_is_well(run, "qwen3_5")
        assert device.failures
    assert run.generated["thin"] == kept_alone("qwen3_5", run.kept_ranges["thin"])


def late_error() -> mx.array:
    """A zero whose computation fails, for the stream's thread and for whatever is read next, once."""
    return mx.linalg.inv(mx.zeros((2, 2)), stream=generation_stream).sum()


def test_an_error_that_a_copy_for_the_prefix_cache_raises_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that ends is copied while the step after it is in progress."""
    run = Run(model("qwen3_5"), prefix_bytes=1 << 24)
    start(run)
    run.add("short", prompt(5, 50), max_tokens=6)
    whole, failed = decode_batch.forward, list[int]()

    def fails_as_short_ends(network: Any, cache: Any, rows: Any, *more: Any) -> Any:
        pending = whole(network, cache, rows, *more)
        if not failed and any(row.id == "short" and len(row.answer) == 5 for row in rows):
            failed.append(len(rows))
            pending.tokens = mx.zeros_like(pending.tokens) + 7 + late_error().astype(mx.uint32)
            mx.async_eval(pending.tokens)
        return pending

    monkeypatch.setattr(decode_batch, "forward", fails_as_short_ends)
    all_is_well(run, "qwen3_5")
    assert failed[0] > 1


def test_no_row_is_copied_after_the_error_that_the_copy_of_another_has_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows end while the step after theirs fails, and the error is raised only once."""
    run = Run(model("qwen3_5"), prefix_bytes=1 << 24)
    for id in "xyz":
        run.add(id, prompt(5, ord(id)), max_tokens=20 if id == "z" else 6)
    whole, failed = decode_batch.forward, list[int]()
    at_once = list[RuntimeError]()

    def fails_as_two_end(network: Any, cache: Any, rows: Any, *more: Any) -> Any:
        pending = whole(network, cache, rows, *more)
        if not failed and sum(len(row.answer) + 1 == row.request.max_tokens for row in rows) == 2:
            failed.append(len(rows))
            pending.tokens = mx.zeros_like(pending.tokens) + late_error().astype(mx.uint32)
            try:
                mx.async_eval(pending.tokens)
            except RuntimeError as error:  # raised so early, it is the launch's: the rows are computed again, and end
                at_once.append(error)
                raise
        return pending

    monkeypatch.setattr(decode_batch, "forward", fails_as_two_end)
    run.drain()
    assert failed == [3]
    prefix = run.engine._caches.prefix
    assert prefix is not None
    said = [(*prompt(5, ord(id)), *run.generated[id]) for id in "xy"]
    assert at_once or [prefix.match_length("", tokens) for tokens in said] == [0, 0]


class Noting(RecordingGrammar):
    """Allows every token, and notes all that it was given."""

    def __init__(self) -> None:
        super().__init__(None)
        self.given = list[int]()

    def accept(self, token: int) -> None:
        super().accept(token)
        self.given.append(token)


def fail_last_group(run: Run, drawn: int, monkeypatch: pytest.MonkeyPatch) -> list[mx.array]:
    """Let rows that decode alone begin, and let the last of them fail once and draw this token. Another group raises
    the error, which is raised only once. The list that is returned is empty until then."""
    run.until(lambda: all(run.generated.values()) and len(run.engine._running.lengths) > 2)
    whole, failed = decode_batch.forward, list[mx.array]()

    def last_fails(network: Any, cache: Any, rows: Any, *more: Any) -> Any:
        pending = whole(network, cache, rows, *more)
        if not failed and rows[0].id == [*run.engine._running][-1][1].id:
            failed.append(late_error())
            mx.async_eval(failed)
            pending.tokens = mx.zeros_like(pending.tokens) + drawn
            mx.async_eval(pending.tokens)
        return pending

    monkeypatch.setattr(decode_batch, "forward", last_fails)
    return failed


@pytest.mark.parametrize("pipelined", [True, False])
def test_no_grammar_accepts_what_a_failed_step_has_drawn(pipelined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of a grammar would end the job."""
    run, grammars = Run(model("qwen3_5"), pipelined=pipelined), {id: Noting() for id in ROWS}
    run.group_by(EACH_ALONE)
    for id, tokens in ROWS.items():
        run.add(id, prompt(tokens, ord(id)), max_tokens=ANSWER, grammar=grammars[id])
        run.step()
    failed = fail_last_group(run, 1_007, monkeypatch)
    all_is_well(run, "qwen3_5")
    assert failed
    assert not any(1_007 in grammar.given for grammar in grammars.values())


def test_an_error_that_another_group_raises_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(model("qwen3_5"))
    run.group_by(EACH_ALONE)
    start(run)
    failed = fail_last_group(run, 7, monkeypatch)
    all_is_well(run, "qwen3_5")
    assert failed
