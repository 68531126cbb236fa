"""The kinds of layers. A new one is a file beside these, and its line in `KINDS`."""

from typing import Any

from worker.engine.cache.kv import KV
from worker.engine.cache.layers import LayerKind
from worker.engine.cache.recurrent import Recurrent
from worker.engine.cache.rotating import Rotating

KINDS: tuple[LayerKind, ...] = KV(), Rotating(), Recurrent()
_OTHER = LayerKind()
_BY_CLASS = {each: kind for kind in KINDS for each in kind.classes}


def kind_of(layer: Any) -> LayerKind:
    """Return the kind of a layer, by its exact class."""
    return _BY_CLASS.get(type(layer), _OTHER)
