"""What is written into a file."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deferred:
    """Bytes that are computed when they are written."""

    nbytes: int
    compute: Callable[[], memoryview | bytes]  # called on the writer's thread; raises OSError if it fails

    def __len__(self) -> int:
        return self.nbytes


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor's bytes in row-major order. `dtype`: as safetensors names it."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview | bytes | Deferred

    def content(self) -> memoryview | bytes:
        """Return the bytes. Computes them if they are deferred, each time; raises OSError if that fails."""
        return self.data.compute() if isinstance(self.data, Deferred) else self.data


@dataclass(frozen=True, slots=True)
class StoredSegment:
    """Content of one file: the KV of tokens `start` to `end` (exclusive) of a prefix, and the state after them."""

    namespace: str
    tokens: tuple[int, ...]  # start to end
    layout: str  # JSON: what the tensors are; the engine's own
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(len(tensor.data) for tensor in self.tensors)
