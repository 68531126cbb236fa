"""One forward for all rows of a batch."""

from typing import Any

import mlx.core as mx
import pytest

from worker.engine.batch.row import Row, forward
from worker.request import GenerationRequest, Sampling

BIASED = Sampling(logit_bias=((3, 100.0),))


@pytest.mark.parametrize("places", [(), (0,), (4,), (1, 3), (0, 1, 4), (0, 1, 2, 3, 4)])
def test_only_rows_with_processors_are_changed_by_them(places: tuple[int, ...]) -> None:
    logits = mx.random.normal((5, 1, 16), key=mx.random.key(0))
    network: Any = lambda tokens, cache: logits  # noqa: E731
    best: Any = mx.argmax(logits[:, 0], axis=-1).tolist()
    rows = [Row.of(GenerationRequest(str(i), (5,), 9, BIASED if i in places else Sampling())) for i in range(5)]
    drawn: Any = forward(network, [], rows, mx.zeros(5, mx.int32)).tokens.tolist()
    assert 3 not in best
    assert drawn == [3 if i in places else best[i] for i in range(5)]
