"""Tokens of an image attend to each other, and no other token attends to more than before."""

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from worker.engine.vision.families import bidirectional


def test_tokens_of_an_image_attend_to_its_later_tokens() -> None:
    cache = KVCache()
    cache.update_and_fetch(mx.zeros((1, 1, 2, 4)), mx.zeros((1, 1, 2, 4)))
    (layer,) = bidirectional([cache], 4, [(1, 3)])
    assert layer.make_mask(4, window_size=None).tolist() == [
        [True, True, True, False, False, False],
        [True, True, True, True, True, False],
        [True, True, True, True, True, False],
        [True, True, True, True, True, True],
    ]


def test_tokens_of_an_image_attend_to_each_other_beyond_the_window() -> None:
    (layer,) = bidirectional([RotatingKVCache(max_size=2)], 4, [(0, 3)])
    assert layer.make_mask(4, window_size=2).tolist() == [
        [True, True, True, False],
        [True, True, True, False],
        [True, True, True, False],
        [False, False, True, True],
    ]


def test_image_of_one_token_needs_no_mask() -> None:
    cache = [KVCache()]
    assert bidirectional(cache, 1, [(0, 1)]) == bidirectional(cache, 1, []) == cache
