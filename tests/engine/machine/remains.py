"""The remains of an engine whose requests have all ended."""

from collections.abc import Iterator
from typing import Any

from worker.engine.cache.segments import is_finite
from worker.engine.engine import Engine
from worker.engine.prefix.tree import Node, PrefixTree


def check_remains(engine: Engine, bad: set[int]) -> None:
    """Assert that no row is left, and that the caches are whole and give back all of their bytes. `bad`: cache keys of
    tokens that make a prefix non-finite."""
    engine.step()  # memory is reserved anew when a step begins
    assert (len(engine), len(engine._running), len(engine._prefills)) == (0, 0, 0)
    assert engine._admission._held_bytes() == 0
    assert engine._admission.reserved_bytes[0] == 0
    caches = engine._caches
    for cache in (caches.prefix, caches.draft.prefix if caches.draft else None):
        if cache is not None:
            check_tree(cache._tree, bad)
    if caches.features is not None:
        assert caches.features.nbytes == sum(each.nbytes for each in caches.features._entries.values())
    caches.set_limit(0)
    assert caches.nbytes == 0


def check_tree(tree: PrefixTree[Any, Any], bad: set[int]) -> None:
    """Assert that a tree counts its bytes, and that each node holds its own tokens, finite if no token is bad."""
    nodes = [found for root in tree._roots.values() for child in root.children.values() for found in walk(child, ())]
    kept = [each for node, _ in nodes for each in (node.segment, node.snapshot) if each is not None]
    assert tree.nbytes == sum(each.nbytes for each in kept)
    assert len(tree._order) == len(kept)
    for node, path in nodes:
        assert node.end == len(path)
        assert all(buffer.shape[2] == len(node.tokens) for buffer in node.segment.buffers)
        if not bad & {*path}:
            assert is_finite(node.segment)
            assert is_finite(node.snapshot)


def walk(node: Node[Any, Any], before: tuple[int, ...]) -> Iterator[tuple[Node[Any, Any], tuple[int, ...]]]:
    """Yield a node and all below it, each with all tokens up to its end."""
    path = (*before, *node.tokens)
    yield node, path
    for child in node.children.values():
        yield from walk(child, path)
