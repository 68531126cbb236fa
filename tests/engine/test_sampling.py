"""A row's draw at the ends of what a request may ask."""

import mlx.core as mx
import pytest

from worker.engine.sampling import SeededSampler
from worker.schedule.sequence import Sampling


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize(
    "sampling",
    [{"temperature": least} for least in (1e-3, 1e-5, 1e-9, 1e-39, 1e-320)] + [{"temperature": 1.0, "top_p": 1e-300}],
    ids=str,
)
def test_the_sharpest_draw_is_the_best_token(sampling: dict[str, float], dtype: mx.Dtype) -> None:
    logprobs = mx.array([[-3.0, -0.5, -1.5, -7.0]]).astype(dtype)
    drawn = [SeededSampler(Sampling(seed=seed, **sampling), 4)(logprobs).item() for seed in range(8)]  # type: ignore[arg-type]
    assert drawn == [1] * 8
