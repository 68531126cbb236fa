"""What fails while drafts are chosen or verified costs no request its answer."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.driver import Run
from tests.engine.speculation.oracle import Oracle, speculator_of, verify_everything
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
@pytest.mark.parametrize(("owner", "name"), [(DecodeBatch, "verify"), (Speculator, "is_worthwhile")])
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
