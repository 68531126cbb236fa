"""What fails while drafts are chosen or verified costs no request its answer."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from tests.engine.driver import Run
from tests.engine.speculation.oracle import Oracle, speculator_of, verify_everything
from tests.engine.speculation.scenarios import guided, joined, plain_of
from tests.engine.tiny import alone, model, network, prompt
from worker.engine.batch.decode_batch import DecodeBatch
from worker.engine.speculation.speculator import Speculator

ANSWER = 16


def failing_once(call: Callable[..., Any], failed: list[object]) -> Callable[..., Any]:
    def replacement(*given: Any, **named: Any) -> Any:
        if not failed:
            failed.append(given)
            raise RuntimeError("on purpose")
        return call(*given, **named)

    return replacement


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("owner", "name"),
    [(DecodeBatch, "verify"), (Speculator, "ask_for_drafts"), (Speculator, "choose_groups"), (Speculator, "prepare")],
)
def test_rows_whose_drafts_fail_answer_as_they_do_alone(
    rows: int, owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify_everything(monkeypatch)
    expected = {str(i): alone(network("qwen3"), prompt(20 + i, i), ANSWER) for i in range(rows)}
    failed = list[object]()
    monkeypatch.setattr(owner, name, failing_once(getattr(owner, name), failed))
    run = Run(model("qwen3"), speculator=speculator_of(model("qwen3"), Oracle(expected)))
    for i in range(rows):
        run.add(str(i), prompt(20 + i, i), max_tokens=ANSWER)
    assert run.drain() == expected
    assert failed
    assert set(run.ended.values()) <= {"length", "stop"}


@pytest.mark.parametrize("is_guided", [False, True], ids=["free", "guided"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_5", "rwkv7"])
def test_a_wrong_token_without_finite_values_changes_no_answer(
    family: str, is_guided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its keys are masked for the tokens before it; but zero times NaN is NaN."""
    verify_everything(monkeypatch)
    without = plain_of(family, guided if is_guided else joined)
    answered = {token for answer in without.generated.values() for token in answer}
    bad = next(token for token in range(3, 10) if token not in answered)  # prompts have none of these
    embed, fed = nn.Embedding.__call__, list[bool]()

    def embed_badly(layer: nn.Embedding, tokens: mx.array) -> mx.array:
        fed.append(bool((tokens == bad).any()))
        return mx.where((tokens == bad)[..., None], mx.nan, embed(layer, tokens))

    monkeypatch.setattr(nn.Embedding, "__call__", embed_badly)

    oracle = Oracle(without.generated, wrong=[bad])
    run = Run(model(family), prefix_bytes=10**8, speculator=speculator_of(model(family), oracle))
    joined(run, guided=is_guided)
    assert (run.generated, run.ended) == (without.generated, without.ended)
    assert any(fed)
