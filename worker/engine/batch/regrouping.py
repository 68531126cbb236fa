"""Which batch takes which rows when these are grouped anew."""

from collections.abc import Callable, Iterator

from worker.engine.batch.decode_batch import DecodeBatch
from worker.engine.batch.row import Row


def destinations(
    targets: list[list[Row]], groups: list[DecodeBatch], create: Callable[[], DecodeBatch]
) -> Iterator[tuple[DecodeBatch, list[Row]]]:
    """Yield the batch for each target group: of the present `groups` the one that holds most of its rows, or a new one
    by `create`."""
    for members in sorted(targets, key=len, reverse=True):
        destination = max(groups, key=lambda group: sum(row in group.rows for row in members), default=None)
        if destination is None or not any(row in destination.rows for row in members):
            destination = create()
        else:
            groups = [group for group in groups if group is not destination]
        yield destination, members
