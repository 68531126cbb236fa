"""Cached prefixes are not computed again, and a hit yields the same tokens as a miss."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine import test_memory
from tests.engine.driver import EACH_ALONE, ONE_GROUP, Run
from tests.engine.test_isolation import always, failing_once, once, raising
from tests.engine.tiny import EOS, VOCAB, alone, greedy_with_logprobs, model, network, prompt
from tests.selection import examples
from worker.engine.admission_controller import AdmissionController
from worker.engine.batch import decode_batch as rows_module
from worker.engine.cache.layers import layers
from worker.engine.memory import KVLayers, MemoryModel
from worker.engine.model.load import Model
from worker.engine.prefill import task as prefill_module
from worker.engine.prefix import cache as prefix_module
from worker.engine.prefix import tree as tree_module
from worker.engine.prefix.tree import CLOSE_TOKENS, shared_length
from worker.request import Sampling

Tokens = tuple[int, ...]

BY_TOKEN = ["llama", "deepseek_v3", "deepseek_v32"]
WINDOWED = ["gemma3", "gpt_oss", "gemma3n"]  # of 16
STATEFUL = [*WINDOWED, "qwen3_5", "falcon_h1", "jamba", "kimi_linear", "mamba2", "rwkv7"]
FEW = ["llama", "gemma3", "qwen3_5", pytest.param("deepseek_v32", marks=pytest.mark.slow)]
ALL = pytest.mark.parametrize("family", [*BY_TOKEN, *STATEFUL])
# Two caches in a layer, and states alone, which qwen3_5 has beside keys.
SELDOM = "deepseek_v32", "falcon_h1", "mamba2", "rwkv7"
MOST = pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] * (name in SELDOM)) for name in [*BY_TOKEN, *STATEFUL]]
)
SOME = pytest.mark.parametrize("family", FEW)

ANSWER, LONG = 6, 24
UNFED = 1  # the last token of an answer that ends at its limit, and not beside rows that decode on
SYSTEM = prompt(40, 5)


@cache
def lonely(family: str, tokens: Tokens, max_bytes: int = ANSWER) -> Tokens:
    return tuple(alone(network(family), tokens, max_bytes))


def opened(family: str, *, step_s: float = 0.02, max_bytes: int = 10**9) -> Run:
    return Run(model(family), step_s=step_s, prefix_bytes=max_bytes)


def say(run: Run, family: str, tokens: Tokens, *boundaries: int, max_bytes: int = ANSWER, namespace: str = "") -> int:
    """To its end, and right; returns how many of its tokens were found."""
    id = f"row {len(run.generated)}"
    run.add(id, tokens, max_tokens=max_bytes, boundaries=boundaries, namespace=namespace)
    run.drain()
    assert tuple(run.generated[id]) == lonely(family, tokens, max_bytes)
    return run.cached[id]


# Typical conversations


@ALL
def test_a_system_prompt_is_computed_once(family: str) -> None:
    run = opened(family)
    found = [say(run, family, SYSTEM + prompt(9 + i, 20 + i), 40) for i in range(3)]
    assert found == [0, 40, 40]


@MOST
def test_next_turn_reuses_the_last_answer(family: str) -> None:
    run, talk, found, expected = opened(family), SYSTEM, list[int](), [0]
    for turn in range(3):
        talk += prompt(7 + turn, 30 + turn)
        found.append(say(run, family, talk, 40))
        talk += lonely(family, talk)
        expected.append(len(talk) - UNFED)
    assert found == expected[:-1]


@MOST
def test_tool_result_continues_from_the_call(family: str) -> None:
    """A tool's result is long, and the template writes the last answer differently in the next turn."""
    run, question = opened(family), SYSTEM + prompt(9, 40)
    say(run, family, question, 40)
    called = question + lonely(family, question)
    returned = called + prompt(50, 41)
    assert say(run, family, returned, 40, len(called)) == len(called) - UNFED
    # The last answer is written differently: the prompt is found up to the tool's turn.
    first, *others = lonely(family, returned)
    spelt_anew = (*returned, (first + 1) % VOCAB, *others, *prompt(8, 42))
    assert say(run, family, spelt_anew, 40, len(returned)) == len(returned) - (family not in BY_TOKEN)


@ALL
def test_prompt_that_diverges_is_reused_up_to_there_or_to_the_last_boundary(family: str) -> None:
    run, whole = opened(family), SYSTEM + prompt(40, 50)
    say(run, family, whole, 40, 62)
    parted = [whole[:at] + prompt(9, 51) for at in (70, 62, 61, 39)]
    found = [say(run, family, tokens) for tokens in parted]
    assert found == ([70, 62, 61, 39] if family in BY_TOKEN else [62, 62, 40, 0])


@MOST
def test_identical_prompt_computes_only_its_last_token(family: str) -> None:
    run = opened(family)
    assert [say(run, family, SYSTEM), say(run, family, SYSTEM), say(run, family, SYSTEM)] == [0, 39, 39]


@MOST
def test_prefix_of_an_earlier_prompt_is_found(family: str) -> None:
    run, whole = opened(family), SYSTEM + prompt(40, 60)
    say(run, family, whole, 40)
    assert say(run, family, whole[:60]) == (59 if family in BY_TOKEN else 40)
    assert say(run, family, whole[:41]) == 40
    assert say(run, family, whole[:40]) == (39 if family in BY_TOKEN else 0)  # its last token is to be computed


@pytest.mark.parametrize("family", STATEFUL)
def test_boundary_close_to_another_is_recomputed(family: str) -> None:
    run, whole = opened(family), SYSTEM + prompt(40, 61)
    say(run, family, whole, 40, 50)
    assert say(run, family, whole[:55] + prompt(5, 62)) == 40


@pytest.mark.parametrize("family", STATEFUL)
def test_long_text_is_reused_up_to_the_checkpoint_grid(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    monkeypatch.setattr(prefix_module, "GRID", 32)
    run, text = opened(family), prompt(110, 66)
    say(run, family, text)
    assert [say(run, family, text[:at] + prompt(20, 67)) for at in (31, 63, 80)] == [0, 32, 64]


# Where prompts part


@ALL
def test_third_prompt_with_a_common_beginning_finds_all_of_it(family: str) -> None:
    run, common = opened(family), prompt(90, 72)
    found = [say(run, family, common + prompt(20, 73 + i)) for i in range(4)]
    assert found == [0, 90 if family in BY_TOKEN else 0, 90, 90]


@pytest.mark.parametrize("family", STATEFUL)
def test_parting_in_an_answer_is_found_by_the_third_prompt(family: str) -> None:
    run, talk = opened(family), SYSTEM + lonely(family, SYSTEM, LONG)
    say(run, family, SYSTEM, max_bytes=LONG)
    assert [say(run, family, talk[:60] + prompt(20, 80 + i)) for i in range(2)] == [39, 60]


@pytest.mark.parametrize("family", STATEFUL)
def test_prompts_that_part_within_a_few_tokens_take_no_snapshot_there(family: str) -> None:
    run = opened(family)
    say(run, family, SYSTEM + prompt(40, 82), 40)
    for seed in range(83, 86):
        assert say(run, family, SYSTEM + prompt(40, 82)[:15] + prompt(20, seed)) == 40


@pytest.mark.parametrize("family", STATEFUL)
@pytest.mark.parametrize("step_s", [0.0, 0.02, 10.0], ids=["in small chunks", "in some", "in one step"])
def test_prompts_that_come_together_compute_their_beginning_once(family: str, step_s: float) -> None:
    run, common = opened(family, step_s=step_s), prompt(90, 72)
    question = {str(i): common + prompt(20, 73 + i) for i in range(4)}
    for id, tokens in question.items():
        run.add(id, tokens, max_tokens=ANSWER)
    run.drain()
    assert {id: tuple(run.generated[id]) for id in question} == {id: lonely(family, question[id]) for id in question}
    assert sorted(run.cached.values()) == [0, 90, 90, 90]


@SOME
def test_prompts_of_different_tenants_that_come_together_share_nothing(family: str) -> None:
    run, common = opened(family), prompt(90, 72)
    for namespace in "one", "other":
        run.add(namespace, common + prompt(20, 73), max_tokens=ANSWER, namespace=namespace)
    run.drain()
    assert set(run.cached.values()) == {0}
    assert {tuple(generated) for generated in run.generated.values()} == {lonely(family, common + prompt(20, 73))}


@pytest.mark.parametrize(
    "family", ["qwen3_5", *(pytest.param(each, marks=pytest.mark.slow) for each in ("gemma3", "mamba2"))]
)
def test_parting_that_is_used_again_outlives_one_that_is_not(family: str) -> None:
    run = opened(family)
    used, unused = prompt(90, 86), prompt(90, 87)
    for common in used, unused:
        for seed in 88, 89:
            say(run, family, common + prompt(20, seed))
    assert run.engine._caches.prefix
    at_parting = run.engine._caches.prefix.nbytes
    for seed in range(300, 340):  # others, that evict what is not used
        assert say(run, family, used + prompt(20, seed)) == 90
        run.engine._caches.prefix.set_limit(at_parting)
    assert say(run, family, unused + prompt(20, 90)) == 0


GROWTH = st.lists(st.tuples(st.integers(0, 99), st.floats(0, 1), st.integers(1, 30)), min_size=3, max_size=9)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5", "jamba", "rwkv7"])
@settings(max_examples=examples(25, by_default=4), deadline=None)
@given(growth=GROWTH)
def test_what_two_prompts_share_is_found_by_the_third(family: str, growth: list[tuple[int, float, int]]) -> None:
    """Prompts are a random tree: each continues a part of an earlier one."""
    run, sent, partings = opened(family), [prompt(60, 91)], list[int]()
    say(run, family, sent[0], max_bytes=2)
    for seed, (parent, share, tail) in enumerate(growth, start=92):
        whole = sent[parent % len(sent)]
        tokens = whole[: int(share * len(whole))] + prompt(tail, seed)
        earlier = [shared_length(tokens, other) for other in sent]
        known = [at for at, shared in zip(partings, earlier[1:], strict=True) if at <= shared]
        assert say(run, family, tokens, max_bytes=2) > max(known, default=0) - CLOSE_TOKENS
        partings.append(min(max(earlier), len(tokens) - 1))
        sent.append(tokens)


@pytest.mark.parametrize(
    "family", ["llama", "qwen3_5", *(pytest.param(each, marks=pytest.mark.slow) for each in ("gemma3", "falcon_h1"))]
)
def test_an_agents_session_finds_what_was_sent_before(family: str) -> None:
    """The shape of a coding agent's requests: turns that grow by tool results, and between them titles and several
    subagents with the same tools, but system prompts of their own. Each conversation continues what it has sent."""
    run, tools = opened(family), prompt(150, 400)
    systems = {name: tools + prompt(50, 401 + number) for number, name in enumerate(["main", *map(str, range(6))])}
    talks, sent, found, shared = dict[str, Tokens](), list[Tokens](), 0, 0
    for turn in range(24):
        for name in ["main", str(turn // 4), *["title"] * (turn % 5 == 0)]:
            start = systems.get(name, prompt(60, 410))
            talk = talks.get(name, start) + prompt(3 + turn % 7, 500 + len(sent))
            cached = say(run, family, talk, len(start), max_bytes=4)
            known = max((shared_length(talk, other) for other in sent), default=0)
            found, shared = found + cached, shared + min(known, len(talk) - 1)
            if name != "title":
                talks[name] = talk + lonely(family, talk, 4)
            sent.append(talk + lonely(family, talk, 4)[:-UNFED])
    assert found >= 0.98 * shared


@pytest.mark.parametrize("family", BY_TOKEN)
def test_long_prompt_is_found_before_its_prefill_ends(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    monkeypatch.setattr(prefill_module, "MAX_SEGMENT_TOKENS", 32)
    run, text = opened(family, step_s=0.0), prompt(110, 68)
    run.add("gone", text, max_tokens=LONG)
    run.until(lambda: any(done > 64 for done in run.engine._prefills.lengths))
    run.engine.remove("gone")
    assert 64 <= say(run, family, text) < 109


@pytest.mark.parametrize("family", [*WINDOWED, "qwen3_5", "mamba2"])
def test_only_windows_that_are_not_full_are_found_at_any_token(family: str) -> None:
    run = opened(family)
    say(run, family, prompt(9, 63), max_bytes=4)
    assert say(run, family, prompt(9, 63)[:6] + prompt(30, 64), max_bytes=4) == (6 if family in WINDOWED else 0)


@MOST
def test_logprobs_after_a_hit_equal_those_without(family: str) -> None:
    run, question = opened(family), SYSTEM + prompt(25, 65)
    for id in "cold", "warm":
        run.add(id, question, max_tokens=ANSWER, boundaries=(40,), top_logprobs=0)
        run.drain()
    assert run.cached == {"cold": 0, "warm": 64}
    expected = [logprob for _, logprob in greedy_with_logprobs(network(family), question, ANSWER)]
    assert run.logprobs["warm"] == pytest.approx(run.logprobs["cold"], abs=1e-4)
    assert run.logprobs["warm"] == pytest.approx(expected, abs=1e-4)


@SOME
@pytest.mark.parametrize("step_s", [0.0, 0.02, 10.0], ids=["in small chunks", "in some", "in one step"])
def test_simultaneous_requests_compute_a_shared_system_prompt_once(family: str, step_s: float) -> None:
    run = opened(family, step_s=step_s)
    question = {str(i): SYSTEM + prompt(20, 70 + i) for i in range(5)}
    for id, tokens in question.items():
        run.add(id, tokens, max_tokens=ANSWER, boundaries=(40,))
    run.drain()
    assert {id: tuple(generated) for id, generated in run.generated.items()} == {
        id: lonely(family, question[id]) for id in question
    }
    assert sorted(run.cached.values()) == [0, 40, 40, 40, 40]


@SOME
def test_prompt_in_prefill_skips_what_another_has_computed_meanwhile(family: str) -> None:
    run = opened(family, step_s=0.0)
    long, short = SYSTEM + prompt(60, 75), SYSTEM + prompt(1, 76)
    run.add("long", long, max_tokens=ANSWER)
    run.step()
    run.add("short", short, max_tokens=ANSWER)
    run.drain()
    assert tuple(run.generated["long"]) == lonely(family, long)
    assert tuple(run.generated["short"]) == lonely(family, short)
    assert run.cached["short"] == 0
    assert 0 < run.cached["long"] < 40


@SOME
def test_namespaces_share_nothing(family: str) -> None:
    run = opened(family)
    assert [say(run, family, SYSTEM, namespace=namespace) for namespace in ("one", "other", "one", "")] == [0, 0, 39, 0]


@SOME
def test_offline_request_caches_its_prompt_but_not_its_answer(family: str) -> None:
    run = opened(family)
    run.add("line", SYSTEM, max_tokens=ANSWER, lane="batch")
    run.drain()
    assert say(run, family, SYSTEM + lonely(family, SYSTEM) + prompt(5, 77)) == 39


def test_nothing_is_cached_without_memory_for_prefixes() -> None:
    run = opened("llama", max_bytes=0)
    assert [say(run, "llama", SYSTEM), say(run, "llama", SYSTEM)] == [0, 0]
    assert run.step().prefix.nbytes == 0


def test_step_reports_queried_and_hit_tokens() -> None:
    run = opened("qwen3_5", step_s=0.0)
    use = list[Any]()
    for tail in 80, 81:
        run.add(str(tail), SYSTEM + prompt(21, tail), max_tokens=2, boundaries=(40,))
        while len(run.engine):
            use.append(run.step().prefix)
    assert (sum(each.queried for each in use), sum(each.hit for each in use)) == (2 * 60, 40)
    assert use[-1].nbytes == run.engine._caches.prefix.nbytes > 0


@SOME
def test_step_reports_evictions(family: str) -> None:
    run = opened(family, max_bytes=1)
    say(run, family, SYSTEM)
    max_bytes = opened(family)
    say(max_bytes, family, SYSTEM)
    run = opened(family, max_bytes=max_bytes.step().prefix.nbytes)
    say(run, family, SYSTEM)
    run.add("other", prompt(40, 82), max_tokens=ANSWER)
    evicted = 0
    while len(run.engine):
        evicted += run.step().prefix.evicted
    assert evicted > 0
    assert say(run, family, SYSTEM) == 0


@SOME
def test_most_recently_found_prefix_is_evicted_last(family: str) -> None:
    run, other = opened(family), prompt(40, 89)
    say(run, family, SYSTEM)
    say(run, family, other)
    assert run.engine._caches.prefix
    run.engine._caches.prefix.load("", SYSTEM)
    run.engine._caches.prefix.set_limit(run.engine._caches.prefix.nbytes // 2)
    assert run.engine._caches.prefix.match_length("", other) < 39
    assert say(run, family, SYSTEM) == 39


def test_prefix_that_is_too_large_for_the_cache_evicts_no_other() -> None:
    measured = opened("llama")
    say(measured, "llama", SYSTEM)
    run = opened("llama", max_bytes=2 * measured.step().prefix.nbytes)
    say(run, "llama", SYSTEM)
    say(run, "llama", prompt(10 * len(SYSTEM), 2))
    assert say(run, "llama", SYSTEM) == len(SYSTEM) - 1


# How rows end


@ALL
def test_answer_of_a_cancelled_row_is_cached(family: str) -> None:
    run = opened(family)
    run.add("gone", SYSTEM, max_tokens=LONG)
    run.until(lambda: len(run.generated["gone"]) == 5)
    run.engine.remove("gone")
    assert say(run, family, SYSTEM + tuple(run.generated["gone"]) + prompt(6, 83)) == 45


@MOST
def test_row_cancelled_before_its_first_token_leaves_its_prompt_cached(family: str) -> None:
    run = opened(family)
    run.add("gone", SYSTEM, max_tokens=LONG)
    run.until(lambda: any(not row.last_unfed for _, row in run.engine._running))
    assert run.generated["gone"] == []
    run.engine.remove("gone")
    assert say(run, family, SYSTEM + prompt(6, 84)) == 40


@MOST
def test_prompt_cancelled_in_prefill_leaves_correct_prefixes(family: str) -> None:
    run, question = opened(family, step_s=0.0), SYSTEM + prompt(60, 85)
    run.add("gone", question, max_tokens=LONG, boundaries=(40,))
    run.until(lambda: any(done > 40 for done in run.engine._prefills.lengths))
    run.engine.remove("gone")
    assert say(run, family, question) == (0 if family in BY_TOKEN else 40)


@SOME
def test_prompt_of_one_token_is_cached(family: str) -> None:
    run, question = opened(family), prompt(1, 86)
    run.add("gone", question, max_tokens=LONG)
    run.until(lambda: len(run.engine._running) == 1)
    known = question + tuple(run.generated["gone"])  # it decodes in the step in which it joins
    run.engine.remove("gone")
    assert say(run, family, known + prompt(20, 87)) == len(known)


@MOST
def test_answer_is_cached_with_its_end_of_sequence(family: str) -> None:
    run = opened(family)
    run.add("ends", SYSTEM, max_tokens=LONG, sampling=Sampling(logit_bias=((EOS, 1000.0),)))
    run.drain()
    assert run.ended["ends"] == "stop"
    assert say(run, family, (*SYSTEM, EOS, *prompt(20, 88))) == 41


@SOME
def test_row_of_a_batch_caches_its_own_tokens(family: str) -> None:
    run = opened(family)
    run.group_by(ONE_GROUP)
    question = {f"neighbour {i}": prompt(12 + 11 * i, 90 + i) for i in range(4)}
    for i, (id, tokens) in enumerate(question.items()):
        run.add(id, tokens, max_tokens=ANSWER + 3 * i)
        run.step()
    run.drain()
    for i, (id, tokens) in enumerate(question.items()):
        talk = tokens + tuple(run.generated[id])
        assert tuple(run.generated[id]) == lonely(family, tokens, ANSWER + 3 * i)
        last = i == len(question) - 1
        assert say(run, family, talk + prompt(8, 95)) == len(talk) - (UNFED if last else 0)


@SOME
def test_row_preempted_without_its_cache_resumes_from_its_cached_prompt(family: str) -> None:
    run = opened(family)
    run.add("parked", SYSTEM, max_tokens=LONG)
    run.until(lambda: len(run.generated["parked"]) == 4)
    run.preempt("parked")
    run.readmit(keep_caches=False)
    run.drain()
    assert tuple(run.generated["parked"]) == lonely(family, SYSTEM, LONG)
    assert run.cached["parked"] == 39


@SOME
def test_row_restored_with_its_cache_caches_its_answer(family: str) -> None:
    run = opened(family)
    run.add("parked", SYSTEM, max_tokens=ANSWER)
    run.until(lambda: len(run.generated["parked"]) == 3)
    run.preempt("parked")
    run.readmit()
    run.drain()
    assert say(run, family, SYSTEM + lonely(family, SYSTEM) + prompt(5, 96)) == 46 - UNFED


@SOME
def test_rows_recomputed_after_a_failed_step_reuse_their_cached_prompts(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    run, other = opened(family), SYSTEM + prompt(20, 97)
    run.add("a", SYSTEM, max_tokens=LONG)
    run.add("b", other, max_tokens=LONG)
    run.until(lambda: min(map(len, run.generated.values())) >= 3)
    monkeypatch.setattr(rows_module, "forward", raising(once(), rows_module.forward))
    run.drain()
    assert {id: tuple(generated) for id, generated in run.generated.items()} == {
        "a": lonely(family, SYSTEM, LONG),
        "b": lonely(family, other, LONG),
    }
    assert run.cached == {"a": 40 if family in BY_TOKEN else 39, "b": 59}


@ALL
def test_resumed_attempt_reuses_what_is_still_cached(family: str) -> None:
    run = opened(family)
    run.add("first", SYSTEM, max_tokens=LONG)
    run.until(lambda: len(run.generated["first"]) == 5)
    run.engine.remove("first")
    for delivered in 4, 5:
        id = f"again {delivered}"
        run.add(id, SYSTEM, max_tokens=LONG, resume_tokens=run.generated["first"][:delivered])
        run.drain()
        assert tuple(run.generated[id]) == lonely(family, SYSTEM, LONG)
    # Snapshots are at the end of both attempts' prompts; that of the second includes delivered tokens.
    assert run.cached["again 4"] == (43 if family in BY_TOKEN else 39)
    assert run.cached["again 5"] == (44 if family in BY_TOKEN else 43)
    talk = SYSTEM + lonely(family, SYSTEM, LONG)
    assert say(run, family, talk + prompt(5, 98)) == len(talk) - UNFED


# What goes wrong


@contextmanager
def poisoned(family: str, token: int) -> Iterator[None]:
    """Set the embedding of a token to NaN while the context is open."""
    inner = network(family).language_model.model if family == "qwen3_5" else network(family).model
    whole = mx.array(inner.embed_tokens.weight)
    inner.embed_tokens.weight[token] = float("nan")
    try:
        yield
    finally:
        inner.embed_tokens.weight = whole


@SOME
@pytest.mark.parametrize("place", [10, 55], ids=["before a boundary", "behind it"])
def test_row_with_non_finite_logits_leaves_no_cached_prefix(family: str, place: int) -> None:
    run, question = opened(family), SYSTEM + prompt(25, 110)
    question = (*question[:place], 4, *question[place + 1 :])
    with poisoned(family, 4):
        run.add("guilty", question, max_tokens=ANSWER, boundaries=(40,))
        run.drain()
    assert run.ended["guilty"] == "faulted"
    found = say(run, family, question, 40)
    assert found <= place
    assert found == (40 if place > 40 and family not in BY_TOKEN else 0)
    assert say(run, family, question, 40) == 64


@SOME
def test_finite_part_of_a_non_finite_prefix_stays_cached(family: str) -> None:
    run, question = opened(family), (*SYSTEM, 4, *prompt(25, 111))
    say(run, family, SYSTEM + prompt(30, 112), 40)
    with poisoned(family, 4):
        run.add("guilty", question, max_tokens=ANSWER, boundaries=(40,))
        run.drain()
    assert (run.ended["guilty"], run.cached["guilty"]) == ("faulted", 40)
    assert say(run, family, question, 40) == 40


@SOME
def test_failure_to_insert_a_prefix_costs_its_row_nothing(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    run = opened(family)
    monkeypatch.setattr(prefix_module, "copy_segment", raising(always, prefix_module.copy_segment))
    assert [say(run, family, SYSTEM, 20), say(run, family, SYSTEM, 20)] == [0, 0]
    monkeypatch.undo()
    assert [say(run, family, SYSTEM, 20), say(run, family, SYSTEM, 20)] == [0, 39]


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
@pytest.mark.parametrize("ending", ["by itself", "cancelled"])
def test_failure_to_read_a_cache_at_the_end_of_a_row_costs_no_row_anything(family: str, ending: str) -> None:
    run, other = opened(family), prompt(30, 113)
    run.add("ends", SYSTEM, max_tokens=ANSWER)
    run.add("stays", other, max_tokens=LONG)
    run.until(lambda: len(run.generated["ends"]) == 3)
    with failing_once("extract"):
        if ending == "cancelled":
            run.engine.remove("ends")
        else:
            run.until(lambda: "ends" in run.ended)
    run.drain()
    assert tuple(run.generated["stays"]) == lonely(family, other, LONG)
    assert tuple(run.generated["ends"]) == lonely(family, SYSTEM)[: len(run.generated["ends"])]


@SOME
def test_failure_to_load_a_prefix_costs_its_own_row_at_most(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    run, other = opened(family), prompt(30, 114)
    say(run, family, SYSTEM)
    run.add("neighbour", other, max_tokens=LONG)
    run.until(lambda: bool(run.generated["neighbour"]))
    monkeypatch.setattr(prefix_module, "restore_cache", raising(once(), prefix_module.restore_cache))
    run.add("unlucky", SYSTEM, max_tokens=ANSWER)
    run.drain()
    assert tuple(run.generated["neighbour"]) == lonely(family, other, LONG)
    assert run.ended["unlucky"] in ("faulted", "length", "stop")
    assert say(run, family, SYSTEM) == 39


def found(run: Run, tokens: Tokens) -> list[mx.array]:
    """All numbers that these tokens would begin with."""
    assert run.engine._caches.prefix
    cache, length = run.engine._caches.prefix.load("", tokens)
    assert length == len(tokens)
    states = [state for layer in layers(cache) for state in layer.state]
    arrays = [each for state in states for each in (state if isinstance(state, list) else [state])]
    return [each for each in arrays if isinstance(each, mx.array)]


@ALL
def test_continuing_from_a_prefix_does_not_change_it(family: str) -> None:
    run = opened(family)
    say(run, family, SYSTEM, max_bytes=2)
    before = found(run, SYSTEM[:39])
    for tail in 120, 121:
        assert say(run, family, SYSTEM + prompt(3, tail), max_bytes=LONG) >= 39
    assert all(mx.array_equal(*each).item() for each in zip(before, found(run, SYSTEM[:39]), strict=True))


# Memory


@SOME
@pytest.mark.parametrize("share", [0.3, 0.6, 1.0, 1.5])
def test_prefix_cache_stays_within_its_limit(monkeypatch: pytest.MonkeyPatch, family: str, share: float) -> None:
    """`share` of what one conversation leaves."""
    monkeypatch.setattr(tree_module, "MAX_SEGMENT_TOKENS", 64)
    run = opened(family)
    run.add("first", prompt(150, 130), max_tokens=2, boundaries=(70,))
    run.drain()
    max_bytes = int(share * run.step().prefix.nbytes)
    run = opened(family, max_bytes=max_bytes)
    for id, tokens in enumerate([prompt(150, 130), prompt(110, 130), prompt(190, 130), prompt(50, 131)]):
        run.add(str(id), tokens, max_tokens=2, boundaries=(70,))
        while len(run.engine):
            assert run.step().prefix.nbytes <= max_bytes


@pytest.fixture
def wide_model() -> Model:
    """Return a model whose weights include what other tests have left in memory."""
    gc.collect()
    built = test_memory.built()
    return replace(built, costs=replace(built.costs, weights_bytes=mx.get_active_memory()))


def beside(wide_model: Model, bytes_: int) -> float:
    """Return the memory in MB, without the weights."""
    return (bytes_ - wide_model.costs.resident_bytes) / 1e6


def test_prefixes_are_evicted_for_rows(wide_model: Model) -> None:
    limit, jobs, highest = test_memory.memory_for(wide_model, 4), 24, 0
    run, sizes = Run(wide_model, memory=limit, prefix_bytes=10**9), list[int]()
    run.add("first", prompt(test_memory.PROMPT, 7), max_tokens=4)
    run.drain()
    held = run.step().prefix.nbytes
    for i in range(jobs):
        run.add(str(i), prompt(test_memory.PROMPT, i % 6), max_tokens=4, lane="batch" if i % 3 else "interactive")
    while len(run.engine):
        report = run.step()
        sizes.append(report.prefix.nbytes)
        highest = max(highest, mx.get_peak_memory())
        assert run.steps < 5000
    assert all(run.generated[str(i)] == test_memory.lonely(i % 6, 4) for i in range(jobs))
    assert min(sizes) < held
    assert beside(wide_model, highest) < beside(wide_model, limit)


def test_regrouped_rows_and_prefixes_stay_within_memory(wide_model: Model) -> None:
    """A group of unlike rows takes more than they did apart, and what they left had gone to prefixes."""
    short = 16
    limit = wide_model.costs.peak_bytes([[1040, *[130] * short]]) + wide_model.costs.row_bytes(1)
    run = Run(wide_model, step_s=1.0, memory=limit, prefix_bytes=10**9)
    run.group_by(EACH_ALONE)
    run.add("long", prompt(1000, 9), max_tokens=60)
    run.until(lambda: len(run.engine._running) == 1)
    for i in range(short):
        run.add(str(i), prompt(30, 140 + i), max_tokens=100)
    run.until(lambda: all(run.generated.values()))
    assert run.engine._caches.prefix
    for i in range(100):  # as by other conversations
        if run.engine._caches.prefix.nbytes < 0.9 * run.engine._admission.free_bytes:
            row = run.engine._active["long"]
            (cache, place), *_ = run.engine._running.cache_of(row)
            run.engine._caches.prefix.insert(f"space {i}", row.cache_key(), cache, place)
    mx.reset_peak_memory()
    run.group_by(ONE_GROUP)
    for _ in range(3):
        run.step()
        assert beside(wide_model, mx.get_peak_memory()) < beside(wide_model, limit)


def test_growing_prefix_cache_does_not_correct_predictions() -> None:
    costs = MemoryModel(weights_bytes=0, kv_layers=(KVLayers(20_000, 10_000),))
    gc.collect()
    entry = AdmissionController(replace(costs, weights_bytes=mx.get_active_memory()), limit=10**10)
    rows = mx.zeros((costs.rectangle_bytes([1280]),), mx.uint8)
    mx.eval(rows)
    prefixes, looked = list[mx.array](), None
    for _ in range(64):
        looked = looked or entry.calibrate([[1000]], 1, sum(prefix.nbytes for prefix in prefixes))
        prefixes.append(mx.zeros((1_000_000,), mx.uint8))
        mx.eval(prefixes)
    assert looked
    predicted, measured = looked
    assert 0.4 * predicted < measured < 1.1 * predicted
    assert entry.calibration.factor < 1.1


def test_cached_prefix_owns_its_memory(wide_model: Model) -> None:
    run = Run(wide_model, prefix_bytes=10**9)
    run.group_by(ONE_GROUP)
    for i in range(6):
        run.add(str(i), prompt(test_memory.PROMPT, i), max_tokens=4, lane="batch" if i else "interactive")
    run.drain()
    held, before = run.step().prefix.nbytes, mx.get_active_memory()
    assert held > 5 * test_memory.PROMPT * 8192
    assert run.engine._caches.prefix
    run.engine._caches.prefix.set_limit(held // 2)
    assert mx.get_active_memory() <= before - held // 2 + 100_000
    run.engine._caches.prefix.set_limit(0)
    assert mx.get_active_memory() == pytest.approx(before - held, abs=100_000)


@SOME
def test_loaded_prefix_is_released_with_its_row(family: str) -> None:
    """Not only when Python collects its garbage."""
    run = opened(family)
    say(run, family, SYSTEM)
    assert run.engine._caches.prefix
    gc.collect()
    gc.disable()
    try:
        before = mx.get_active_memory()
        for _ in range(5):
            run.engine._caches.prefix.load("", SYSTEM)
        assert mx.get_active_memory() == before
        held = run.engine._caches.prefix.nbytes
        run.engine._caches.prefix.set_limit(0)
        assert mx.get_active_memory() <= before - 0.9 * held
    finally:
        gc.enable()


def test_prefixes_of_admitted_requests_are_evicted_last(wide_model: Model) -> None:
    """Room is made when they are admitted, and they have not begun then."""
    tokens, answer = test_memory.PROMPT, 4
    both = wide_model.costs.peak_bytes([[tokens + answer] * 2], 2048)
    run = Run(wide_model, memory=both + 3 * (tokens + answer) * 8192 // 2, prefix_bytes=10**9)  # memory for one more
    for seed in 1, 2:
        run.add(f"first {seed}", prompt(tokens, seed), max_tokens=answer)
        run.drain()
    run.add("hit", prompt(tokens, 1), max_tokens=answer)
    run.add("miss", prompt(tokens, 3), max_tokens=answer)
    run.drain()
    assert (run.cached["hit"], run.cached["miss"]) == (tokens - 1, 0)
    assert run.generated["hit"] == test_memory.lonely(1, answer)
    run.add("late", prompt(tokens, 2), max_tokens=answer)
    run.drain()
    assert run.cached["late"] == 0
