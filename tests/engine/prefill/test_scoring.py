"""Scores of a prompt's tokens: the attention that they are, how they are computed, and the models that can be
drafts."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.tiny import CANNOT_BATCH, FAMILIES, VOCAB, build, network, prompt
from tests.selection import examples
from tests.support.stack import TINY_CHAT
from worker.engine.prefill.scoring import LOOKAHEAD, DraftScorer, Scores, attention, probe_attention, why_not_draft
from worker.engine.tokenizer import MLXTokenizer
from worker.engine.upstream.mlx_lm import load_model, load_tokenizer, make_prompt_cache

WORDS = [f"w{token}" for token in range(VOCAB)]
FULL = "with full attention, such as a small Qwen3 or Llama."
REFUSED = {
    "mamba2": "it has no attention",
    "rwkv7": "it has no attention",
    "recurrent_gemma": "none of its layers attends to all tokens of a long prompt",
    "deepseek_v32": "none of its layers attends to all tokens of a long prompt",  # of 12 tokens that it searches for
}
DRAFTS = [family for family in FAMILIES if family not in REFUSED]
PROMPT = prompt(100, 1)


def draft(family: str, *, prefix_bytes: int = 10**9) -> DraftScorer:
    return DraftScorer(network(family), prefix_bytes)


def scored(draft: DraftScorer, tokens: tuple[int, ...] = PROMPT, *, chunk: int = 10**6, namespace: str = "") -> Scores:
    scoring = draft.scoring(namespace, tokens)
    while scoring.remaining:
        scoring.advance(chunk)
    assert scoring.scores is not None
    return scoring.scores


@pytest.mark.parametrize("family", DRAFTS)
def test_each_token_gets_a_score_for_any_chunks(family: str) -> None:
    whole = scored(draft(family))
    assert len(whole) == len(PROMPT)
    assert min(whole) > 0
    assert scored(draft(family), chunk=13) == pytest.approx(whole, rel=1e-3)


def test_skipped_tokens_score_zero_and_do_not_change_other_scores() -> None:
    with_images = (*PROMPT[:20], *[VOCAB + 7] * 30, *PROMPT[20:60], VOCAB + 7, *PROMPT[60:])
    blind = DraftScorer(network("llama"), 10**9, skip_token_id=VOCAB + 7)
    scoring = blind.scoring("", with_images, (20, 40, 60, 130))
    assert (scoring.remaining, scoring._request.boundaries) == (len(PROMPT) - 1 + LOOKAHEAD, (20, 20, 30, 99))
    scores, whole = scored(blind, with_images), scored(draft("llama"))
    assert list(scores) == [*whole[:20], *[0.0] * 30, *whole[20:60], 0.0, *whole[60:]]
    assert scored(blind) == whole


@pytest.mark.parametrize("tokens", [2, 12, 13, 14])
def test_short_prompts_have_scores(tokens: int) -> None:
    assert len(scored(draft("llama"), prompt(tokens, 1))) == tokens


@pytest.mark.parametrize("family", DRAFTS)
def test_recorded_attention_equals_the_models(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attend, cache, compared = mx.fast.scaled_dot_product_attention, make_prompt_cache(network(family)), []

    def compare(q: mx.array, k: mx.array, v: mx.array, **how: Any) -> mx.array:
        out = attend(q, k, v, **how)
        each = mx.repeat(v[0], q.shape[1] // v.shape[1], axis=0)  # (heads, keys, width)
        compared.append((out[0, :, 0], (attention(q, k, **how)[:, None] @ each)[:, 0]))
        return out

    network(family)(mx.array([PROMPT]), cache=cache)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", compare)
    network(family)(mx.array([[5]]), cache=cache)
    assert compared
    assert all(mx.allclose(theirs, ours, rtol=1e-3, atol=1e-5) for theirs, ours in compared)


@pytest.mark.parametrize(("family", "layers"), [("llama", 3), ("gpt_oss", 2), ("gemma3", 2), ("qwen3_5", 2)])
def test_layers_with_a_window_shorter_than_the_prompt_are_ignored(family: str, layers: int) -> None:
    cache = make_prompt_cache(network(family))
    network(family)(mx.array([PROMPT]), cache=cache)
    with probe_attention(len(PROMPT) + 1) as watch:
        network(family)(mx.array([[5]]), cache=cache)
    assert [given.shape for given in watch.weights] == [(len(PROMPT) + 1,)] * layers


@pytest.mark.parametrize("family", DRAFTS)
def test_with_a_cached_prefix_only_the_rest_is_computed_and_scores_are_equal(family: str) -> None:
    growing, longer = draft(family), PROMPT + prompt(60, 2)
    scored(growing)
    scoring = growing.scoring("", longer)
    new = len(longer) - len(PROMPT) + LOOKAHEAD  # a prompt's last token is not cached
    assert scoring.remaining == new
    scoring.advance(7)
    assert scoring.remaining == new - 7
    assert scored(growing, longer, chunk=13) == pytest.approx(scored(draft(family), longer), rel=1e-3)


def test_prefixes_and_scores_of_another_namespace_are_not_found() -> None:
    shared = draft("llama")
    scored(shared, namespace="one")
    assert shared.scoring("other", PROMPT).remaining == len(PROMPT) - 1 + LOOKAHEAD


def test_an_identical_prompt_is_not_scored_again() -> None:
    busy = DraftScorer(Counted(network("llama")), prefix_bytes=0)
    first, computed = scored(busy), busy.network.computed
    assert scored(busy) == first
    assert busy.network.computed == computed


def test_scores_of_the_most_recent_prompts_are_kept() -> None:
    busy, others = draft("llama", prefix_bytes=0), [prompt(4, seed) for seed in range(2, 17)]
    for tokens in [PROMPT, *others, PROMPT, prompt(4, 17)]:
        scored(busy, tokens)
    assert busy.scoring("", PROMPT).remaining == 0
    assert busy.scoring("", others[0]).remaining > 0


class Counted:
    """A network, and how many tokens it was given."""

    def __init__(self, network: Any) -> None:
        self._network, self.layers, self.computed = network, network.layers, 0

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        self.computed += tokens.shape[1]
        return self._network(tokens, cache=cache)


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(2, 60), st.lists(st.integers(0, 40), max_size=12))
def test_each_step_computes_at_most_its_tokens(tokens: int, steps: list[int]) -> None:
    counted = Counted(network("llama"))
    scoring = DraftScorer(counted, prefix_bytes=0).scoring("", prompt(tokens, 3))
    assert scoring.total == scoring.remaining
    for step in steps:
        before, remaining = counted.computed, scoring.remaining
        scoring.advance(step)
        assert counted.computed - before == remaining - scoring.remaining
        assert min(step, remaining, 1) <= counted.computed - before <= step + (remaining > 0)
    assert (scoring.scores is None) == (scoring.remaining > 0)


@pytest.mark.parametrize("advanced", [0, 50, len(PROMPT) - 1, len(PROMPT) + 3])
def test_dropped_scoring_frees_its_memory(advanced: int) -> None:
    busy, attend, before = draft("llama", prefix_bytes=0), mx.fast.scaled_dot_product_attention, mx.get_active_memory()
    scoring = busy.scoring("", PROMPT)
    scoring.advance(advanced)
    del scoring
    assert mx.fast.scaled_dot_product_attention is attend
    assert mx.get_active_memory() == before
    assert busy.scoring("", PROMPT).remaining == len(PROMPT) - 1 + LOOKAHEAD


def test_failed_forward_restores_mlx_s_attention() -> None:
    attend = mx.fast.scaled_dot_product_attention
    replaced = []

    def fails() -> None:
        with probe_attention(3):
            replaced.append(mx.fast.scaled_dot_product_attention is not attend)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert replaced == [True]
    assert mx.fast.scaled_dot_product_attention is attend


def test_recording_attention_changes_no_result() -> None:
    def logits(watched: bool) -> mx.array:
        cache = make_prompt_cache(network("llama"))
        network("llama")(mx.array([PROMPT]), cache=cache)
        if not watched:
            return network("llama")(mx.array([[5]]), cache=cache)
        with probe_attention(len(PROMPT) + 1):
            return network("llama")(mx.array([[5]]), cache=cache)

    assert mx.array_equal(logits(True), logits(False))


def test_non_finite_scores_raise_and_are_not_cached() -> None:
    broken = build(FAMILIES["llama"])
    broken.model.embed_tokens.weight[PROMPT[50]] = mx.nan
    asked = DraftScorer(broken, prefix_bytes=10**9)
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="not finite"):
            scored(asked)
        assert asked.prefix.match_length("", PROMPT) == 0
    assert len(scored(asked, PROMPT[:50])) == 50


def test_relevant_sentence_scores_highest() -> None:
    chat, tokenizer = load_model(TINY_CHAT)[0], load_tokenizer(TINY_CHAT)
    chat.set_dtype(mx.float32)
    needle = "The secret code of Oslo is 4 6 8 8."
    fillers = "The red key was left in the garden. Ada and Grace walked until the map was found. " * 6
    text = f"{fillers}The secret code of Lima is 3 1 9 0. {needle} {fillers}Question: what is the secret code of Oslo?"
    asked = [{"role": "user", "content": text}]
    tokens = tuple(tokenizer.apply_chat_template(asked, add_generation_prompt=True))
    scores = scored(DraftScorer(chat, prefix_bytes=0), tokens)
    end = next(at for at in range(len(tokens)) if needle in tokenizer.decode(tokens[:at]))
    question = len(tokens) - 20
    best = max(range(20, question), key=scores.__getitem__)
    assert end - 16 <= best < end


@pytest.mark.parametrize("family", DRAFTS)
def test_models_with_full_attention_can_be_drafts(family: str) -> None:
    assert why_not_draft(WORDS, WORDS, network(family)) is None


@pytest.mark.parametrize(("family", "why"), REFUSED.items())
def test_models_without_full_attention_are_refused_by_name(family: str, why: str) -> None:
    assert why_not_draft(WORDS, WORDS, network(family)) == f"{family} cannot be a draft: {why}. Choose a model {FULL}"


def test_attention_not_computed_by_mlx_is_refused_by_name() -> None:
    why = "gemma2 cannot be a draft: mlx-lm implements its attention without MLX's function, so it cannot be recorded."
    assert why_not_draft(WORDS, WORDS, build(CANNOT_BATCH["gemma2"])) == f"{why} Choose a model {FULL}"


@pytest.mark.parametrize("family", ["llama4", "dynamic_ntk"])
def test_model_that_cannot_batch_can_be_a_draft(family: str) -> None:
    built = build(CANNOT_BATCH[family])
    assert why_not_draft(WORDS, WORDS, built) is None
    growing, longer = DraftScorer(built, 10**9), PROMPT + prompt(60, 2)
    scored(growing)
    assert scored(growing, longer, chunk=13) == pytest.approx(scored(DraftScorer(built, 0), longer), rel=1e-3)


def test_checking_a_draft_computes_nothing() -> None:
    built = network("llama")
    mx.eval(built.parameters())
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    why_not_draft(WORDS, WORDS, built)
    assert mx.get_peak_memory() - before < 100_000


def why_not(change: Callable[[list[str]], None], *, of: str) -> str | None:
    target, its = list(WORDS), list(WORDS)
    change(its if of == "draft" else target)
    return why_not_draft(target, its, network("llama"))


FAMILY = "Choose a draft of the model's own family, which shares its tokens."


def test_token_with_another_text_is_refused() -> None:
    assert why_not(lambda words: words.__setitem__(7, "<s>"), of="draft") == (
        f"Token 7 is 'w7' in the model and '<s>' in its draft. {FAMILY}"
    )


def test_special_tokens_must_agree_too() -> None:
    words = MLXTokenizer(load_tokenizer(TINY_CHAT)).tokens
    other = [word.replace("im_end", "eot_id") for word in words]
    assert why_not_draft(words, words, network("llama")) is None
    assert why_not_draft(words, other, network("llama")) == (
        f"Token 2 is '<|im_end|>' in the model and '<|eot_id|>' in its draft. {FAMILY}"
    )


@pytest.mark.parametrize("of", ["target", "draft"])
def test_token_without_text_in_one_vocabulary_is_accepted(of: str) -> None:
    assert why_not(lambda words: words.__setitem__(7, ""), of=of) is None
    assert why_not(lambda words: words.__delitem__(slice(1000, None)), of=of) is None


def test_token_beyond_the_drafts_vocabulary_is_refused() -> None:
    assert why_not(lambda words: words.append("w1024"), of="target") == (
        f"The draft has 1,024 tokens, and the model's token 1024 is 'w1024'. {FAMILY}"
    )
    assert why_not(lambda words: words.append(""), of="target") is None
