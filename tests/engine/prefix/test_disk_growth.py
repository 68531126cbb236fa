"""Rows without a stated limit whose caches go to disk, since other rows grow: each ends as alone."""

import errno
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from tests.engine.prefix.test_disk import Worker, settled_writes
from tests.engine.tiny import model, network, prompt
from worker.engine import admission_controller as admission
from worker.engine.admission import plan as growth
from worker.prefix_store.folder import _CountingFile
from worker.request import Sampling

PROMPT, ANSWER, FIRST = 150, 350, 64  # tokens; `FIRST` are reserved for an answer at first
NO_END = Sampling(logit_bias=((2, -100.0),))
KINDS = ("llama", "gemma3", "qwen3_5")  # keys, a window, states
FAMILIES = pytest.mark.parametrize("family", KINDS)


def families(quick: str) -> pytest.MarkDecorator:
    """Run a test for one family, and with `--all` for the others too."""
    cases = [pytest.param(each, marks=[pytest.mark.slow] * (each != quick)) for each in KINDS]
    return pytest.mark.parametrize("family", cases)


@pytest.fixture(autouse=True)
def short_reservations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model computes a prefix faster than a disk reads it, and its answers are short."""
    monkeypatch.setattr("worker.engine.prefill.queue.load_limit_s", lambda *_, **__: 60.0)
    monkeypatch.setattr(growth, "FIRST_ANSWER", FIRST)
    monkeypatch.setattr(growth, "KNOWN_ANSWERS", 1_000)
    for module in growth, admission:
        monkeypatch.setattr(module, "BUFFER_TOKENS", FIRST)


def tokens_of(id: str) -> tuple[int, ...]:
    return prompt(PROMPT, {"old": 1, "young": 2}[id])


@cache
def alone(family: str, id: str) -> list[int]:
    def never_ends(_: Any, logits: Any) -> Any:
        return logits.at[..., 2].add(-100)

    given = mx.array(tokens_of(id))
    steps = generate_step(given, network(family), max_tokens=ANSWER, logits_processors=[never_ends])
    return [int(token) for token, _ in steps]


def opened(family: str, folder: Path) -> Worker:
    """Return a worker with memory for one whole row and a half."""
    costs = replace(model(family).costs, weights_bytes=mx.get_active_memory())
    one, two = (costs.peak_bytes([[PROMPT + ANSWER] * rows]) for rows in (1, 2))
    model_here = replace(model(family), costs=costs)
    return Worker(family, folder, opened=model_here, memory=(one + two) // 2, step_s=1.0)


def ask(run: Worker, id: str, *answered: int) -> None:
    run.add(id, tokens_of(id), max_tokens=ANSWER, sampling=NO_END, grows=True, resume_tokens=answered)


def spilled(family: str, folder: Path) -> tuple[Worker, int]:
    """Return a worker whose older row has grown, so that the cache of the younger one had to leave memory, and the
    tokens that this one has got."""
    run = opened(family, folder)
    ask(run, "old")
    ask(run, "young")
    run.until(lambda: run.waiting == ["young"], max_steps=ANSWER)
    run.until(lambda: run.held_bytes == 0, max_steps=ANSWER)
    settled_writes(run)
    assert run.active == ["old"]
    return run, len(run.generated["young"])


def finish(run: Worker) -> None:
    while len(run.engine):
        run.step()
    run.close()


@FAMILIES
def test_row_that_another_s_growth_has_moved_to_disk_continues_from_there(tmp_path: Path, family: str) -> None:
    run, delivered = spilled(family, tmp_path)
    assert delivered >= FIRST - run.engine._admission.tokens_ahead
    assert [*tmp_path.glob("*.safetensors")]
    finish(run)
    assert run.generated == {id: alone(family, id) for id in ("old", "young")}
    assert run.cached["young"] == PROMPT + delivered - 1, "all that was computed comes from the disk"
    assert not run.cut


@families("qwen3_5")
def test_row_on_disk_continues_on_another_worker_after_a_crash(tmp_path: Path, family: str) -> None:
    crashed, delivered = spilled(family, tmp_path)
    said = crashed.generated["young"]
    files = {*tmp_path.glob("*.safetensors")}
    run = opened(family, tmp_path)
    ask(run, "young", *said)
    finish(run)
    assert run.generated["young"] == alone(family, "young")
    assert run.cached["young"] == PROMPT + delivered - 1
    assert files
    crashed.close()


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let writes fail from now on. Returns the bytes of each."""
    refused = list[int]()

    def refuse(file: Any, data: Any) -> int:
        refused.append(len(data))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(_CountingFile, "write", refuse)
    return refused


@families("llama")
def test_row_that_finds_no_place_on_a_full_disk_is_computed_again(
    tmp_path: Path, family: str, full_disk: list[int]
) -> None:
    run, _ = spilled(family, tmp_path)
    assert full_disk, "nothing was written"
    assert not [*tmp_path.glob("*.safetensors")]
    finish(run)
    assert run.generated == {id: alone(family, id) for id in ("old", "young")}
    assert {*run.ended.values()} == {"length"}


@families("gemma3")
def test_damaged_file_of_a_row_is_computed_again(tmp_path: Path, family: str) -> None:
    run, _ = spilled(family, tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        content = bytearray(file.read_bytes())
        content[-20] ^= 0xFF
        file.write_bytes(content)
    finish(run)
    assert run.generated == {id: alone(family, id) for id in ("old", "young")}
