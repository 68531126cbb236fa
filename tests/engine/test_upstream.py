"""Every name, signature and behaviour of mlx-lm that we borrow. When an upgrade fails, it fails here first."""

import inspect
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import pytest

from scripts.stack import TINY_CHAT
from tests.engine.tiny import CONFIGS, prompt, write_checkpoint
from worker.engine import upstream
from worker.engine.cache import layers


def parameters(callable_: Any) -> list[str]:
    return list(inspect.signature(callable_).parameters)


def test_the_version_is_the_one_that_these_tests_were_written_against() -> None:
    assert version("mlx-lm") == "0.32.2"


def test_prefill_batches_take_what_we_give_them() -> None:
    assert parameters(upstream.PromptProcessingBatch) == [
        "model", "uids", "caches", "tokens", "prefill_step_size", "samplers", "fallback_sampler",
        "logits_processors", "stop_sequences", "max_tokens",
    ]  # fmt: skip
    assert parameters(upstream.PromptProcessingBatch.prompt) == ["self", "tokens"]
    assert parameters(upstream.PromptProcessingBatch.generate) == ["self", "tokens"]


def test_generation_batches_have_what_we_use() -> None:
    batch = upstream.GenerationBatch
    assert parameters(batch.empty) == ["model", "fallback_sampler"]
    assert parameters(batch.extend) == ["self", "batch"]
    assert parameters(batch.filter) == ["self", "keep"]
    assert parameters(batch.next) == ["self"]
    assert list(inspect.get_annotations(batch.Response)) == [
        "uid", "token", "logprobs", "finish_reason", "prompt_cache", "all_tokens"
    ]  # fmt: skip


def test_the_loaders_take_what_we_give_them() -> None:
    assert parameters(upstream.load_model)[:1] == ["model_path"]
    assert parameters(upstream.load_tokenizer) == ["model_path", "tokenizer_config_extra", "eos_token_ids"]
    assert parameters(upstream.download)[:1] == ["path_or_hf_repo"]
    assert parameters(upstream.make_prompt_cache)[:1] == ["model"]
    assert parameters(upstream.StopSequences) == ["stop_sequences"]


def test_the_sampling_filters_take_what_we_give_them() -> None:
    assert parameters(upstream.apply_top_p) == ["logprobs", "top_p"]
    assert parameters(upstream.apply_min_p)[:2] == ["logprobs", "min_p"]
    assert parameters(upstream.apply_top_k) == ["logprobs", "top_k"]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return upstream.load_model(write_checkpoint(CONFIGS["qwen3_5"], tmp_path_factory.mktemp("m")))[0]


def started(network: Any, uid: str, tokens: tuple[int, ...], max_tokens: int = 5) -> Any:
    prefill = upstream.PromptProcessingBatch(
        network, [uid], [upstream.make_prompt_cache(network)], tokens=[[]], samplers=[upstream.greedy_sampler],
        logits_processors=[()], stop_sequences=[upstream.StopSequences([(2,)])], max_tokens=[max_tokens],
    )  # fmt: skip
    return prefill.generate([list(tokens)])


def test_a_sampler_is_called_once_for_each_token_beginning_with_the_first(network: Any) -> None:
    calls: list[int] = []

    def counting(logprobs: mx.array) -> mx.array:
        calls.append(logprobs.shape[0])
        return mx.argmax(logprobs, axis=-1)

    batch = upstream.PromptProcessingBatch(
        network, ["a"], [upstream.make_prompt_cache(network)], tokens=[[]], samplers=[counting],
        logits_processors=[()], stop_sequences=[upstream.StopSequences()], max_tokens=[3],
    ).generate([[5, 6]])  # fmt: skip
    assert calls == [1]
    batch.next()
    assert calls == [1, 1]


def test_a_processor_sees_the_whole_prompt_and_then_each_token(network: Any) -> None:
    seen: list[list[int]] = []

    def watching(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())
        return logits

    batch = upstream.PromptProcessingBatch(
        network, ["a"], [upstream.make_prompt_cache(network)], tokens=[[]], samplers=[upstream.greedy_sampler],
        logits_processors=[(watching,)], stop_sequences=[upstream.StopSequences()], max_tokens=[3],
    )  # fmt: skip
    batch.prompt([[5, 6]])
    row = batch.generate([[7]])
    first = row.next()[0].token
    assert seen == [[5, 6, 7], [5, 6, 7, first]]


def test_a_finished_row_leaves_the_batch_in_the_same_step(network: Any) -> None:
    batch = started(network, "a", prompt(4, 1), max_tokens=1)
    batch.extend(started(network, "b", prompt(9, 2), max_tokens=3))
    assert [(r.uid, r.finish_reason) for r in batch.next()] == [("a", "length"), ("b", None)]
    assert batch.uids == ["b"]


def test_merged_recurrent_layers_carry_a_padding_until_they_are_finalized(network: Any) -> None:
    batch = upstream.PromptProcessingBatch(network, ["a"], [upstream.make_prompt_cache(network)])
    recurrent = [c for c in layers(batch.prompt_cache) if isinstance(c, upstream.ArraysCache)]
    assert recurrent
    assert all(c.left_padding is not None for c in recurrent), "end_prefill has nothing to do any more"
    for layer in recurrent:
        layer.finalize()
    assert all(c.left_padding is None for c in recurrent)


def test_the_tokenizer_wrapper_has_what_the_words_use(network: Any) -> None:
    wrapper = upstream.TokenizerWrapper
    for name in (
        "detokenizer", "eos_token_ids", "apply_chat_template", "has_thinking", "think_start", "think_end",
        "has_tool_calling", "tool_call_start", "tool_call_end", "tool_parser", "response_initial_state",
    ):  # fmt: skip
        assert name in vars(wrapper)
    loaded = upstream.load_tokenizer(TINY_CHAT)
    assert {"_tokenizer", "_chat_template", "_thinking_kwarg"} <= set(vars(loaded))
    assert isinstance(loaded.detokenizer, upstream.BPEStreamingDetokenizer)
    assert loaded.init_kwargs["tool_parser_type"] == "json_tools"


def test_the_wrapper_switches_thinking_on_by_itself() -> None:
    """Which is why templates are rendered without it."""
    loaded = upstream.load_tokenizer(TINY_CHAT)
    loaded._tokenizer.chat_template = "{{ enable_thinking }}"
    assert loaded.apply_chat_template([{"role": "user", "content": ""}], tokenize=False) == "True"


def test_a_detokenizer_gives_each_text_once() -> None:
    detokenizer = upstream.load_tokenizer(TINY_CHAT).detokenizer
    assert parameters(detokenizer.add_token) == ["token"]
    detokenizer.add_token(40)
    detokenizer.finalize()
    assert (detokenizer.last_segment != "", detokenizer.last_segment) == (True, "")


def test_the_state_machine_cuts_text_at_markers_and_holds_back_what_may_become_one() -> None:
    machine = upstream.TextStateMachine({"normal": [("<a>", "other")], "other": [("</a>", "normal")]})
    state, segments = upstream.TextStateMachine.split(machine.make_state("normal"), "x<a>y</")
    assert segments == [("normal", "x"), ("other", "y")]
    state, text, name = upstream.TextStateMachine.flush(state)
    assert (text, name) == ("</", "other")


def test_the_inferred_state_machine_knows_the_model_s_markers() -> None:
    machine = upstream.make_text_state_machine(upstream.load_tokenizer(TINY_CHAT))
    state, said = machine.make_state("normal"), []
    for text in ("a<think>b</think>c", "<tool_call>d</tool_call>e"):
        state, segments = upstream.TextStateMachine.split(state, text)
        said += segments
    assert [pair for pair in said if pair[1]] == [
        ("normal", "a"), ("reasoning", "b"), ("normal", "c"), ("tool", "d"), ("normal", "e"),
    ]  # fmt: skip
