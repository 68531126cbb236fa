"""Many conversations over a small budget of memory."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

from scripts.benchmarks.disk.figures import Figure
from scripts.benchmarks.disk.worker import ANSWER, Worker
from scripts.benchmarks.engine import prompt
from worker.engine.model.load import Model

_FIRST = 200  # tokens of a first turn
_SECOND = 40


def figures(model: Model, folder: Path, number: int) -> Iterator[Figure]:
    """Measure how many tokens of their first turns `number` conversations find over a budget of a tenth of them."""
    chats = [prompt(_FIRST, seed=10_000 + chat) for chat in range(number)]
    budget = max(1, number // 10)
    one = Worker(model, None)
    before = one.cache_bytes
    one.answer(chats[0], (_FIRST - 1,))
    budget_bytes = (one.cache_bytes - before) * budget
    label = f"tokens found, {number:,} conversations over a budget of {budget:,}"
    alone = _share_found(Worker(model, None, prefix_bytes=budget_bytes), chats)
    yield Figure(f"{label}: memory alone", alone, f"{alone:.1%}")
    with_disk = _share_found(Worker(model, folder, prefix_bytes=budget_bytes), chats)
    yield Figure("  with the disk", with_disk, f"{with_disk:.1%}")


def _share_found(worker: Worker, chats: list[tuple[int, ...]]) -> float:
    """Return the share of the first turns' tokens that the second turns find, in random order."""
    answers = [worker.answer(chat, (_FIRST - 1,)).tokens for chat in chats]
    order = [*range(len(chats))]
    Random(0).shuffle(order)
    found = 0
    for number in order:
        history = chats[number] + answers[number]
        found += worker.answer(history + prompt(_SECOND, seed=20_000 + number), (len(history),)).cached
    worker.close()
    return found / (len(chats) * (_FIRST + ANSWER - 1))
