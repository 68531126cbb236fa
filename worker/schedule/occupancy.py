"""Predicted memory of active rows to which others are added."""

from collections.abc import Iterable
from typing import Protocol

from worker.schedule.memory import NO_IMAGES, ImageDemand, MemoryModel, Shape, cells


class Occupant(Protocol):
    """A row as `Occupancy` needs it."""

    @property
    def tokens(self) -> int:
        """Length at its end in tokens, prompt and answer together."""

    @property
    def group(self) -> int:
        """Number of the group that it decodes in, or will decode in."""

    @property
    def images(self) -> ImageDemand:
        """Images that are not yet computed."""


class Occupancy:
    """Active rows, by group. Peaks are those of `MemoryModel.peak_bytes` for the same rows.

    A peak never falls when a row is added or becomes longer, so a row that does not fit does not fit later either,
    unless rows leave.
    """

    def __init__(self, costs: MemoryModel, rows: Iterable[Occupant] = ()) -> None:
        self._costs = costs
        self._groups = dict[int, Shape]()
        self._images = NO_IMAGES
        self._rows = 0  # number of rows
        self._longest = 0  # tokens of the longest row at its end
        self._total = 0  # tokens of all rows, if each were as long as the longest of its group
        for row in rows:
            self._count(row)
        self._bytes = {group: costs.group_bytes(*shape) for group, shape in self._groups.items()}
        self._cached_bytes = sum(cached_bytes for cached_bytes, _ in self._bytes.values())  # of all buffers
        self._copy_bytes = max((copied for _, copied in self._bytes.values()), default=0)  # while one of them grows

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._rows

    def copy(self) -> "Occupancy":
        """Return an independent copy."""
        other = Occupancy(self._costs)
        other._groups = dict(self._groups)
        other._bytes = dict(self._bytes)
        other._images = self._images
        other._rows = self._rows
        other._longest = self._longest
        other._total = self._total
        other._cached_bytes, other._copy_bytes = self._cached_bytes, self._copy_bytes
        return other

    def add(self, row: Occupant) -> None:
        """Add an active row."""
        self._bytes[row.group], self._cached_bytes, self._copy_bytes = self._joined(row)
        self._count(row)

    def peak_with(self, row: Occupant) -> int:
        """Return the predicted peak bytes with one more row."""
        costs, images = self._costs, self._with_images(row)
        _, cached_bytes, copied = self._joined(row)
        longest = max(self._longest, row.tokens)
        chunk = min(costs.chunk_with(images), self._total_with(row))
        drawn = costs.most_drawn(self._rows + 1)
        working_bytes = costs.step_bytes(cached_bytes, copied, longest, chunk, images, drawn)
        return costs.corrected_bytes(working_bytes, images)

    def _count(self, row: Occupant) -> None:
        self._total = self._total_with(row)
        self._groups[row.group] = self._shape_with(row)
        self._rows += 1
        self._longest = max(self._longest, row.tokens)
        self._images = self._with_images(row)

    def _shape_with(self, row: Occupant) -> Shape:
        rows, longest = self._groups.get(row.group, (0, 0))
        return rows + 1, max(longest, row.tokens)

    def _total_with(self, row: Occupant) -> int:
        return self._total - cells(self._groups.get(row.group, (0, 0))) + cells(self._shape_with(row))

    def _joined(self, row: Occupant) -> tuple[tuple[int, int], int, int]:
        """Return the bytes of the row's group with the row, of all buffers then, and of the largest copy."""
        after = self._costs.group_bytes(*self._shape_with(row))
        before, _ = self._bytes.get(row.group, (0, 0))
        return after, self._cached_bytes - before + after[0], max(self._copy_bytes, after[1])

    def _with_images(self, row: Occupant) -> ImageDemand:
        return self._images if row.images is NO_IMAGES else self._images + row.images
