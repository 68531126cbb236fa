"""A prefix from disk changes no token of a miss, and no bit of a hit in memory."""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from models.tiny_vision import CONFIGS
from tests.engine.driver import answer
from tests.engine.driver import tokens as sampled
from tests.engine.prefill.test_specprefill import WISH, drafted
from tests.engine.prefix.test_cache import ALL, BY_TOKEN, SOME, STATEFUL, lonely
from tests.engine.prefix.test_disk import ANSWER, DOCUMENT, Worker, cached, raw, settled, turn_of
from tests.engine.tiny import FAMILIES, build, model, model_of, prompt
from tests.engine.vision import cases
from tests.engine.vision.cases import Prompt
from worker.engine.model.load import Model
from worker.engine.prefix.cache import PrefixCache
from worker.outcomes import Logprobs, Outcome, Sampled
from worker.prefix_store.index import Chain
from worker.prefix_store.reader import ChainReading, Reader
from worker.request import GenerationRequest

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


@dataclass(frozen=True)
class Talk:
    """A model, a request that it has answered, and one that continues it."""

    family: str
    opened: Model
    asked: GenerationRequest
    turn: GenerationRequest

    def begun(self, folder: Path) -> Chat:
        """Return a worker that has answered the first request."""
        run = Chat(self.family, folder, opened=self.opened)
        run.submit(self.asked)
        run.finish()
        return run

    def of(self, namespace: str) -> "Talk":
        """Return the same talk of a tenant."""
        asked, turn = (replace(each, namespace=namespace) for each in (self.asked, self.turn))
        return replace(self, asked=asked, turn=turn)


def talk_of(family: str, *, opened: Model | None = None, max_tokens: int = ANSWER) -> Talk:
    """Return a talk of text. `opened`: another model than the family's."""
    asked = GenerationRequest("asked", DOCUMENT, ANSWER, boundaries=(BOUNDARY,), top_logprobs=20)
    answered = lonely(family, DOCUMENT) if opened is None else sampled(answer(opened, asked))
    tokens = (*DOCUMENT, *answered, *prompt(10, 77))
    turn = replace(asked, id="turn", prompt=tokens, max_tokens=max_tokens)
    return Talk(family, opened or model(family), asked, turn)


def evicted(talk: Talk, folder: Path, *, on_disk: bool) -> Told:
    run = talk.begun(folder)
    if on_disk:
        run.evict()
    run.submit(talk.turn)
    run.finish()
    run.close()
    return told(run, "turn")


def restarted(talk: Talk, folder: Path, *, on_disk: bool) -> Told:
    run = talk.begun(folder)
    if on_disk:
        run.close()
        run = Chat(talk.family, folder, opened=talk.opened)
    run.submit(talk.turn)
    run.finish()
    run.close()
    return told(run, "turn")


def parked(talk: Talk, folder: Path, *, on_disk: bool) -> Told:
    run = talk.begun(folder)
    run.submit(talk.turn)
    run.until(lambda: len(run.generated["turn"]) == 4 or "turn" in run.ended)
    if "turn" not in run.ended:
        run.preempt("turn")
        if on_disk:
            run.evict()
        run.readmit(keep_caches=False)
    run.finish()
    run.close()
    return told(run, "turn")


def tenants(talk: Talk, folder: Path, *, on_disk: bool) -> Told:
    run = talk.of("a").begun(folder)
    if on_disk:
        run.evict()
    run.submit(replace(talk.of("b").turn, id="other"))
    run.finish()
    assert run.cached["other"] == 0
    run.submit(talk.of("a").turn)
    run.finish()
    run.close()
    return told(run, "turn")


WAYS: dict[str, Callable[..., Told]] = {
    "evicted": evicted,
    "restarted": restarted,
    "parked": parked,
    "tenants": tenants,
}


def from_both(way: str, talk: Talk, folder: Path) -> tuple[Told, Told]:
    """Return what a way yields with the prefix on disk, and with the prefix in memory."""
    return tuple(WAYS[way](talk, folder / str(on_disk), on_disk=on_disk) for on_disk in (True, False))  # type: ignore[return-value]


@ALL
@pytest.mark.parametrize("way", WAYS)
def test_a_prefix_from_disk_yields_the_tokens_of_a_miss_and_the_bits_of_a_hit_in_memory(
    tmp_path: Path, family: str, way: str
) -> None:
    max_tokens = LONG_ANSWER if way == "parked" else ANSWER
    from_disk, from_memory = from_both(way, talk_of(family, max_tokens=max_tokens), tmp_path)
    assert from_disk.tokens == lonely(family, turn_of(family, DOCUMENT), max_tokens)
    assert from_disk.cached >= len(DOCUMENT) - 1
    assert from_disk == from_memory


# The CPU's products of experts are fp32 only (mlx 0.32.4).
WITH_EXPERTS = "deepseek_v3", "gpt_oss", "jamba", "kimi_linear"
DENSE = pytest.mark.parametrize("family", [each for each in [*BY_TOKEN, *STATEFUL] if each not in WITH_EXPERTS])
DTYPES = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


@cache
def in_dtype(family: str, dtype: str) -> Model:
    """Return the family's model with weights of this type."""
    built = build(FAMILIES[family])
    built.set_dtype(getattr(mx, dtype))
    return model_of(built, FAMILIES[family])


@cache
def of_4_bits(family: str) -> Model:
    """Return the family's model with quantized weights."""
    built = build(FAMILIES[family])
    nn.quantize(built, group_size=32, bits=4)
    return model_of(built, FAMILIES[family])


@DENSE
@DTYPES
@pytest.mark.parametrize("way", ["evicted", "restarted"])
def test_in_16_bits_a_prefix_from_disk_yields_the_bits_of_a_hit_in_memory(
    tmp_path: Path, family: str, way: str, dtype: str
) -> None:
    from_disk, from_memory = from_both(way, talk_of(family, opened=in_dtype(family, dtype)), tmp_path)
    assert from_disk.cached >= len(DOCUMENT) - 1
    assert from_disk == from_memory


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
@pytest.mark.parametrize("way", ["evicted", "restarted"])
def test_with_weights_of_4_bits_a_prefix_from_disk_yields_the_bits_of_a_hit_in_memory(
    tmp_path: Path, family: str, way: str
) -> None:
    from_disk, from_memory = from_both(way, talk_of(family, opened=of_4_bits(family)), tmp_path)
    assert from_disk.cached >= len(DOCUMENT) - 1
    assert from_disk == from_memory


def logits_after(prefix: PrefixCache, talk: Talk) -> Any:
    """Return the bytes of the logits of the turn's tokens that the prefix cache does not hold, from one forward."""
    cache, length = prefix.load("", talk.turn.tokens)
    assert len(DOCUMENT) - 1 <= length < len(talk.turn.tokens)
    return raw(talk.opened.network(mx.array([talk.turn.tokens[length:]]), cache=cache))


def wait_for(reading: ChainReading) -> None:
    until = time.monotonic() + 20
    while not reading.done:
        assert time.monotonic() < until
        time.sleep(0.002)


def assert_equal_logits(talk: Talk, folder: Path) -> None:
    """Assert that a forward after a prefix from disk yields the bits of one after the same prefix in memory."""
    run = talk.begun(folder)
    from_memory = logits_after(run.prefix, talk)
    run.close()
    again = Chat(talk.family, folder, opened=talk.opened)
    load = again.prefix.read("", talk.turn.tokens, lambda size: 60.0)
    assert load is not None
    wait_for(load.reading)
    again.prefix.insert_read(load.reading)
    from_disk = logits_after(again.prefix, talk)
    again.close()
    assert from_disk == from_memory


@ALL
def test_logits_after_a_prefix_from_disk_are_those_after_one_in_memory(tmp_path: Path, family: str) -> None:
    assert_equal_logits(talk_of(family), tmp_path)


@DENSE
@DTYPES
def test_logits_of_16_bits_after_a_prefix_from_disk_are_those_after_one_in_memory(
    tmp_path: Path, family: str, dtype: str
) -> None:
    assert_equal_logits(talk_of(family, opened=in_dtype(family, dtype)), tmp_path)


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


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a reading end before the step that begins it, so that rows from disk and from memory share their steps."""
    read = Reader.read

    def read_at_once(reader: Reader, chain: Chain) -> ChainReading:
        reading = read(reader, chain)
        wait_for(reading)
        return reading

    monkeypatch.setattr(Reader, "read", read_at_once)


@ALL
@pytest.mark.usefixtures("no_wait")
def test_a_prefix_from_disk_yields_the_bits_of_a_hit_in_memory_beside_a_row_with_dropped_tokens(
    tmp_path: Path, family: str
) -> None:
    talk = talk_of(family, opened=replace(drafted(family)))
    results = []
    for on_disk in (True, False):
        run = talk.begun(tmp_path / str(on_disk))
        if on_disk:
            run.evict()
        run.add("thin", prompt(200, 1), max_tokens=LONG_ANSWER, specprefill=WISH)
        run.submit(talk.turn)
        run.finish()
        run.close()
        assert "thin" in run.kept_ranges
        results.append(told(run, "turn"))
    from_disk, from_memory = results
    assert from_disk.tokens == lonely(family, turn_of(family, DOCUMENT))
    assert from_disk.cached >= len(DOCUMENT) - 1
    assert from_disk == from_memory


@pytest.mark.parametrize("family", [*BY_TOKEN, *(family for family in STATEFUL if family != "gpt_oss")])
def test_bytes_of_a_model_in_bf16_are_those_that_were_stored(tmp_path: Path, family: str) -> None:
    opened = in_dtype(family, "bfloat16")
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
@pytest.mark.parametrize("way", ["evicted", "restarted", "tenants"])
def test_an_image_in_a_prefix_from_disk_yields_the_bits_of_a_hit_in_memory(
    tmp_path: Path, family: str, way: str
) -> None:
    shown = cases.prompt(family, 40, (1, 24, 16), 30)
    more = replace(shown, tokens=(*shown.tokens, *cases.alone(family, shown, ANSWER), *range(60, 70)))
    asked, turn = (
        cases.image_request(family, id, given, ANSWER, boundaries=(len(shown.tokens) - 1,), top_logprobs=20)
        for id, given in (("asked", shown), ("turn", more))
    )
    from_disk, from_memory = from_both(way, Talk(family, cases.model(family), asked, turn), tmp_path)
    assert list(from_disk.tokens) == cases.alone(family, more, ANSWER)
    assert from_disk.cached >= len(shown.tokens) - 1
    assert from_disk == from_memory


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
