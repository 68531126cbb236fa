"""How rows of each family take drafts, decided without computing anything."""

from typing import Any

import mlx.core as mx
import pytest

from tests.engine.tiny import EVERY_FAMILY, network
from worker.engine.cache.recurrent import Recurrence, Replay, Stepping
from worker.engine.model import profile as module
from worker.engine.model.profile import Drafting, drafting, profile
from worker.outcomes import MAX_DRAFT

REPLAYED = "qwen3_5", "mamba2", "falcon_h1", "qwen3_next", "nemotron_h", "granitemoehybrid", "lfm2"
STEPPED = "jamba", "recurrent_gemma", "rwkv7", "mamba"
LATENT = "deepseek_v3", "deepseek_v32", "kimi_linear"
PLAIN = [family for family in EVERY_FAMILY if family not in (*REPLAYED, *STEPPED, *LATENT)]


def found(family: str) -> Drafting:
    return drafting(network(family), profile(network(family), EVERY_FAMILY[family]).layers)


@pytest.mark.parametrize("family", PLAIN)
def test_rows_with_keys_and_values_alone_take_the_longest_drafts(family: str) -> None:
    assert found(family) == Drafting(MAX_DRAFT, "none")
    assert type(found(family).recurrence(network(family))) is Recurrence


@pytest.mark.parametrize("family", REPLAYED)
def test_known_recurrences_are_replayed(family: str) -> None:
    assert found(family) == Drafting(MAX_DRAFT, "replay")
    assert isinstance(found(family).recurrence(network(family)), Replay)


@pytest.mark.parametrize("family", STEPPED)
def test_unknown_recurrences_are_stepped(family: str) -> None:
    assert found(family) == Drafting(MAX_DRAFT, "stepping")
    assert isinstance(found(family).recurrence(network(family)), Stepping)


@pytest.mark.parametrize("family", LATENT)
def test_latent_attention_takes_no_drafts(family: str) -> None:
    assert found(family).max_draft == 0
    assert "latent attention" in str(found(family).unsupported_reason)


def test_states_that_cannot_be_advanced_take_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError

    monkeypatch.setattr(module, "_two_rows", refuse)
    assert found("qwen3_5").max_draft == 0
    assert "recurrent states" in str(found("qwen3_5").unsupported_reason)


@pytest.mark.parametrize(("fused", "longest"), [(8, 7), (4, 3), (2, 1), (1, 0), (0, 7)])
def test_a_draft_is_at_most_as_long_as_attention_stays_fused(
    fused: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that fuses no attention, a draft costs no more than its tokens."""
    monkeypatch.setattr(module, "fused_attention", lambda queries, *_, sinks: queries[2] <= fused)
    assert found("qwen3").max_draft == longest


@pytest.mark.parametrize("family", ["qwen3_5", "rwkv7"])
def test_no_array_of_the_cache_is_computed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network(family)  # built once for all tests of a process, which computes its weights
    computed = list[Any]()
    for name in "eval", "async_eval":
        monkeypatch.setattr(mx, name, lambda *given: computed.append(given))
    found(family)
    assert computed == []
