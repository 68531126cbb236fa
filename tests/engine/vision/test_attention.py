"""Tokens of an image see one another, and nothing else sees more than before."""

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from worker.engine.vision.attention import bidirectional


def test_an_image_s_tokens_see_the_later_ones_of_it() -> None:
    cache = KVCache()
    cache.update_and_fetch(mx.zeros((1, 1, 2, 4)), mx.zeros((1, 1, 2, 4)))
    (layer,) = bidirectional([cache], 4, [(1, 3)])
    assert layer.make_mask(4, window_size=None).tolist() == [
        [True, True, True, False, False, False],
        [True, True, True, True, True, False],
        [True, True, True, True, True, False],
        [True, True, True, True, True, True],
    ]


def test_an_image_s_tokens_see_one_another_from_further_than_a_window_reaches() -> None:
    (layer,) = bidirectional([RotatingKVCache(max_size=2)], 4, [(0, 3)])
    assert layer.make_mask(4, window_size=2).tolist() == [
        [True, True, True, False],
        [True, True, True, False],
        [True, True, True, False],
        [False, False, True, True],
    ]


def test_one_token_sees_itself_anyway() -> None:
    cache = [KVCache()]
    assert bidirectional(cache, 1, [(0, 1)]) == bidirectional(cache, 1, []) == cache
