"""A device with less memory than was predicted costs the largest row at most, and the others nothing but time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import mlx.core as mx
import pytest

from tests.engine.driver import Run
from tests.engine.tiny import alone, model, network, prompt
from worker.engine import isolation

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
        if self._when == "at once":
            raise RuntimeError(METAL)
        logits = whole(network, tokens, *args, **kwargs)
        return logits[..., ::-1] + mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu).sum()


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
