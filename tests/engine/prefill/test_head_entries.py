"""A prompt's entries of an MTP head are those of its tokens, however its chunks are computed."""

from dataclasses import replace
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from tests.engine.speculation.mtp.test_drafts import head_of
from tests.engine.tiny import prompt
from worker.engine.batch.row import Row
from worker.engine.memory import MemoryModel
from worker.engine.prefill.queue import SharedForwards
from worker.engine.prefill.spans import ComputeSpans
from worker.engine.prefill.task import PromptTask
from worker.engine.prefix.cache import PrefixCache
from worker.engine.speculation.mtp import PromptEntries, PromptHead
from worker.request import GenerationRequest

NAME = "qwen3_5"
TOKENS = 40


def request_of(seed: int = 1, tokens: int = TOKENS, **more: Any) -> GenerationRequest:
    return GenerationRequest(f"row{seed}", prompt(tokens, seed), 9, **more)


def trunk() -> nn.Module:
    return cast(nn.Module, head_of(NAME).trunk)


def task_of(request: GenerationRequest, prefix: PrefixCache | None = None) -> PromptTask:
    return PromptTask(Row.of(request), ComputeSpans(trunk(), request, head=head_of(NAME)), prefix=prefix)


def entries_of(task: PromptTask) -> PromptEntries:
    entries = task.finish().entries
    assert entries is not None
    return entries


def expected(request: GenerationRequest, start: int = 0, end: int | None = None) -> mx.array:
    """Return the keys of the head's entries from token `start` on."""
    head, tokens = head_of(NAME), request.prompt
    end = len(tokens) - 1 if end is None else end
    fed = PromptHead(head)
    fed.feed(head.trunk.hidden(mx.array([tokens]))[:, start:end], tokens[start + 1 : end + 1], start)
    entries = fed.finish()
    assert entries is not None
    keys: mx.array = entries.cache.keys_and_values()[0]
    return keys


def keys(entries: PromptEntries) -> mx.array:
    held: mx.array = entries.cache.keys_and_values()[0]
    return held


def test_a_prompt_in_chunks_has_the_entries_of_all_tokens_but_the_last() -> None:
    request = request_of()
    task = task_of(request)
    while not task.is_computed:
        task.advance(7)
    entries = entries_of(task)
    assert entries.start == 0
    assert mx.allclose(keys(entries), expected(request), atol=1e-4).item()


def test_prompts_that_share_a_forward_have_their_own_entries() -> None:
    requests = [request_of(1), request_of(2, 25), request_of(3, 33)]
    tasks = [task_of(request) for request in requests]
    shared = SharedForwards(trunk(), MemoryModel(weights_bytes=0, chunk_token_bytes=1 << 20), head_of(NAME))
    assert shared.compute(
        [(task, len(request.prompt) - 1) for task, request in zip(tasks, requests, strict=True)], 10**6
    )
    for task, request in zip(tasks, requests, strict=True):
        task.advance(len(request.prompt) - 1)
        assert mx.allclose(keys(entries_of(task)), expected(request), atol=1e-4).item()


def test_tokens_from_the_prefix_cache_have_no_entries() -> None:
    cache = PrefixCache(trunk(), 10**9)
    half = request_of()
    task_of(replace(half, prompt=half.prompt[:21], boundaries=(20,)), cache).advance(TOKENS)
    task = task_of(half, cache)
    while not task.is_computed:
        task.advance(TOKENS)
    entries = entries_of(task)
    assert task.cached == entries.start > 0
    assert mx.allclose(keys(entries), expected(half, start=entries.start), atol=1e-4).item()


def test_entries_end_where_tokens_are_dropped() -> None:
    request = replace(request_of(), kept_ranges=((0, 12), (20, TOKENS)))
    task = task_of(request)
    while not task.is_computed:
        task.advance(8)
    entries = entries_of(task)
    assert entries.cache.offset == 12
    assert mx.allclose(keys(entries), expected(request, end=12), atol=1e-4).item()


def test_without_a_head_there_are_no_entries() -> None:
    request = request_of()
    task = PromptTask(Row.of(request), ComputeSpans(trunk(), request))
    task.advance(TOKENS)
    assert task.finish().entries is None
