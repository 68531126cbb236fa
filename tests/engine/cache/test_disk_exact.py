"""A prefix from disk changes no token of a miss, and no bit of a hit in memory."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import mlx.core as mx
import pytest

from tests.engine.cache.test_disk import ANSWER, DOCUMENT, Worker, cached, settled, turn_of
from tests.engine.cache.test_prefix import ALL, BY_TOKEN, SOME, STATEFUL, lonely
from tests.engine.prefill.test_specprefill import WISH, drafted
from tests.engine.tiny import FAMILIES, build, model_of, prompt
from tests.engine.vision import cases
from tests.engine.vision.cases import Prompt
from tests.engine.vision.checkpoints import CONFIGS
from worker.engine.cache.prefix import PrefixCache
from worker.engine.model.load import Model
from worker.schedule.outcomes import Logprobs, Outcome, Sampled

BOUNDARY = 40
LONG_ANSWER = 12


@pytest.fixture(autouse=True)
def always_worthwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model computes a prefix faster than a disk reads it."""
    monkeypatch.setattr("worker.engine.prefill.queue.load_limit_s", lambda *_, **__: 60.0)


class Chat(Worker):
    """A worker that keeps the log probabilities of each token, with twenty alternatives."""

    def __init__(self, family: str, folder: Path, *, opened: Model | None = None, step_s: float = 10.0) -> None:
        """`step_s`: by default, a prompt is computed in one chunk."""
        self.details = defaultdict[str, list[Logprobs]](list)
        super().__init__(family, folder, opened=opened, step_s=step_s)

    def receive(self, outcome: Outcome) -> None:
        super().receive(outcome)
        if isinstance(outcome, Sampled) and outcome.logprobs:
            self.details[outcome.id].append(outcome.logprobs)

    def start(self, id: str, tokens: tuple[int, ...], *, max_tokens: int = ANSWER, namespace: str = "") -> None:
        boundaries = (BOUNDARY,)
        self.add(id, tokens, max_tokens=max_tokens, boundaries=boundaries, namespace=namespace, top_logprobs=20)

    def finish(self) -> None:
        while len(self.engine):
            self.step()

    @property
    def prefix(self) -> PrefixCache:
        assert self.engine._caches.prefix is not None
        return self.engine._caches.prefix

    def evict(self) -> None:
        """Move all prefixes to disk."""
        self.engine._caches.set_limit(0)
        settled(self)
        self.engine._caches.set_limit(10**9)


@dataclass(frozen=True)
class Told:
    """What a row has got."""

    tokens: tuple[int, ...]
    cached: int
    logprobs: tuple[Logprobs, ...]


def told(run: Chat, id: str) -> Told:
    return Told(tuple(run.generated[id]), run.cached[id], tuple(run.details[id]))


# Each way runs with the prefix in memory and with the prefix on disk.


def evicted(family: str, folder: Path, *, on_disk: bool) -> Told:
    run = Chat(family, folder)
    run.say(family, DOCUMENT, BOUNDARY)
    if on_disk:
        run.evict()
    run.start("turn", turn_of(family, DOCUMENT))
    run.finish()
    run.close()
    return told(run, "turn")


def restarted(family: str, folder: Path, *, on_disk: bool) -> Told:
    run = Chat(family, folder)
    run.say(family, DOCUMENT, BOUNDARY)
    if on_disk:
        run.close()
        run = Chat(family, folder)
    run.start("turn", turn_of(family, DOCUMENT))
    run.finish()
    run.close()
    return told(run, "turn")


def parked(family: str, folder: Path, *, on_disk: bool) -> Told:
    run = Chat(family, folder)
    run.say(family, DOCUMENT, BOUNDARY)
    run.start("turn", turn_of(family, DOCUMENT), max_tokens=LONG_ANSWER)
    run.until(lambda: len(run.generated["turn"]) == 4 or "turn" in run.ended)
    if "turn" not in run.ended:
        run.preempt("turn")
        if on_disk:
            run.evict()
        run.readmit(keep_caches=False)
    run.finish()
    run.close()
    return told(run, "turn")


def tenants(family: str, folder: Path, *, on_disk: bool) -> Told:
    run = Chat(family, folder)
    run.say(family, DOCUMENT, BOUNDARY, namespace="a")
    if on_disk:
        run.evict()
    run.start("other", turn_of(family, DOCUMENT), namespace="b")
    run.finish()
    assert run.cached["other"] == 0
    run.start("turn", turn_of(family, DOCUMENT), namespace="a")
    run.finish()
    run.close()
    return told(run, "turn")


WAYS: dict[str, tuple[Callable[..., Told], int]] = {
    "evicted": (evicted, ANSWER),
    "restarted": (restarted, ANSWER),
    "parked": (parked, LONG_ANSWER),
    "tenants": (tenants, ANSWER),
}


@ALL
@pytest.mark.parametrize("way", WAYS)
def test_a_prefix_from_disk_yields_the_tokens_of_a_miss_and_the_bits_of_a_hit_in_memory(
    tmp_path: Path, family: str, way: str
) -> None:
    run, max_tokens = WAYS[way]
    from_memory = run(family, tmp_path / "memory", on_disk=False)
    from_disk = run(family, tmp_path / "disk", on_disk=True)
    assert from_disk.tokens == lonely(family, turn_of(family, DOCUMENT), max_tokens)
    assert from_disk.cached >= len(DOCUMENT) - 1
    assert from_disk == from_memory


def preempted(run: Chat, id: str, tokens: int, *, on_disk: bool = True) -> int:
    """Preempt a row after `tokens` tokens of its answer. Returns the number of tokens that it has got. `on_disk`: its
    cache is given up, as if memory were short; else it is kept."""
    run.until(lambda: len(run.generated[id]) >= tokens)
    run.preempt(id)
    assert id not in run.ended
    if on_disk:
        run.spill()
        run.evict()
    return len(run.generated[id])


def with_long_answer(family: str) -> tuple[int, ...]:
    """Return a prompt that the model does not answer with an end of the sequence."""
    prompts = (prompt(len(DOCUMENT), seed) for seed in range(9, 99))
    return next(tokens for tokens in prompts if len(lonely(family, tokens, LONG_ANSWER)) == LONG_ANSWER)


@ALL
def test_a_preempted_row_continues_from_the_disk_with_the_bits_of_its_cache(tmp_path: Path, family: str) -> None:
    runs = [Chat(family, tmp_path / name) for name in ("memory", "disk")]
    tokens = with_long_answer(family)
    for run in runs:
        run.start("row", tokens, max_tokens=LONG_ANSWER)
        delivered = preempted(run, "row", 4, on_disk=run is runs[1])
        run.readmit()
        run.finish()
        run.close()
    kept, loaded = (told(run, "row") for run in runs)
    assert loaded.tokens == lonely(family, tokens, LONG_ANSWER)
    assert loaded.cached == len(tokens) + delivered - 1  # all that was computed
    assert loaded.logprobs == kept.logprobs


@ALL
def test_a_row_preempted_in_its_prompt_continues_from_the_disk(tmp_path: Path, family: str) -> None:
    run = Chat(family, tmp_path, step_s=0.0)  # in several chunks
    run.start("row", DOCUMENT)
    run.until(lambda: sum(run.engine._prefills.lengths) > 2 * BOUNDARY)
    (computed,) = run.engine._prefills.lengths
    run.preempt("row")
    run.evict()
    run.readmit()
    run.finish()
    run.close()
    assert told(run, "row").tokens == lonely(family, DOCUMENT)
    assert run.cached["row"] == computed < len(DOCUMENT) - 1


@SOME
def test_no_other_tenant_finds_the_text_of_a_preempted_row(tmp_path: Path, family: str) -> None:
    run = Chat(family, tmp_path)
    run.start("row", DOCUMENT, max_tokens=LONG_ANSWER, namespace="a")
    delivered = preempted(run, "row", 4)
    run.start("other", DOCUMENT, namespace="b")
    run.until(lambda: "other" in run.ended)
    run.readmit()
    run.finish()
    run.close()
    assert run.cached["other"] == 0
    assert run.cached["row"] == len(DOCUMENT) + delivered - 1


@SOME
def test_a_preempted_row_with_dropped_tokens_is_not_taken_for_a_whole_one(tmp_path: Path, family: str) -> None:
    run = Chat(family, tmp_path, opened=replace(drafted(family)))
    tokens = prompt(200, 1)
    run.add("thin", tokens, max_tokens=LONG_ANSWER, specprefill=WISH)
    preempted(run, "thin", 4)
    talk = *tokens, *run.generated["thin"]
    run.start("whole", talk)
    run.finish()
    run.close()
    assert run.cached["whole"] <= run.kept_ranges["thin"][0][1]
    assert told(run, "whole").tokens == lonely(family, talk)


@ALL
def test_a_row_with_a_prefix_from_disk_is_right_beside_one_with_dropped_tokens(tmp_path: Path, family: str) -> None:
    opened = replace(drafted(family))
    run = Chat(family, tmp_path, opened=opened)
    run.say(family, DOCUMENT, BOUNDARY)
    run.evict()
    run.add("thin", prompt(200, 1), max_tokens=LONG_ANSWER, specprefill=WISH)
    run.start("turn", turn_of(family, DOCUMENT))
    run.finish()
    run.close()
    assert "thin" in run.kept_ranges
    assert told(run, "turn").tokens == lonely(family, turn_of(family, DOCUMENT))
    assert run.cached["turn"] >= len(DOCUMENT) - 1


# The CPU's products of experts are fp32 only (mlx 0.32.4).
@pytest.mark.parametrize("family", [*BY_TOKEN, *(family for family in STATEFUL if family != "gpt_oss")])
def test_bytes_of_a_model_in_bf16_are_those_that_were_stored(tmp_path: Path, family: str) -> None:
    network = build(FAMILIES[family])
    network.set_dtype(mx.bfloat16)
    opened = model_of(network, FAMILIES[family])
    held = []
    for _ in range(2):
        run = Chat(family, tmp_path, opened=opened)
        run.start("turn", DOCUMENT)
        run.finish()
        for end in held[0] if held else ():  # of the states along a prefix, only the last one is read with it
            run.start(f"to {end}", (*DOCUMENT[:end], *prompt(10, 5)))
            run.finish()
        held.append(cached(run, DOCUMENT))
        run.close()
    stored, found = held
    assert run.cached["turn"] >= len(DOCUMENT) - 1
    assert stored.keys() <= found.keys()
    assert all(found[end] == content for end, content in stored.items())
    assert "bfloat16" in str(stored)


@pytest.mark.parametrize("family", [*CONFIGS])
def test_a_prefix_with_an_image_is_loaded_and_another_image_is_not_taken_for_it(tmp_path: Path, family: str) -> None:
    def asked(run: Chat, id: str, given: Prompt) -> list[int]:
        run.submit(cases.image_request(family, id, given, ANSWER, boundaries=(len(given.tokens) - 1,)))
        run.finish()
        return run.generated[id]

    picture = partial(cases.prompt, family, 40)
    shown, other = picture((1, 24, 16), 30), picture((2, 24, 16), 30)
    turn = replace(shown, tokens=(*shown.tokens, *range(60, 70)))
    opened = cases.model(family)
    run = Chat(family, tmp_path, opened=opened)
    asked(run, "first", shown)
    run.close()
    again = Chat(family, tmp_path, opened=opened)
    assert asked(again, "other", other) == cases.alone(family, other, ANSWER)
    assert asked(again, "turn", turn) == cases.alone(family, turn, ANSWER)
    again.close()
    assert again.cached["other"] <= 40
    assert again.cached["turn"] >= len(shown.tokens) - 1


@pytest.mark.parametrize("family", [*CONFIGS])
def test_a_preempted_row_with_images_continues_from_the_disk_without_encoding_them_again(
    tmp_path: Path, family: str
) -> None:
    given = cases.prompt(family, 40, (1, 24, 16), 30)
    run = Chat(family, tmp_path, opened=cases.model(family))
    run.submit(cases.image_request(family, "row", given, LONG_ANSWER, lane="batch"))
    delivered = preempted(run, "row", 4)
    encoded = run.encoded["row"]
    run.readmit()
    run.finish()
    run.close()
    assert run.generated["row"] == cases.alone(family, given, LONG_ANSWER)
    assert run.cached["row"] == len(given.tokens) + delivered - 1
    assert run.encoded["row"] == encoded > 0
