"""What holds for the queue's tests holds for the client's."""

from tests.queue.conftest import _nothing_fell_through as _nothing_fell_through
