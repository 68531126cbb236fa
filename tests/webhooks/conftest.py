from collections.abc import Iterator

import pytest

from tests.queue.conftest import _nothing_fell_through as _nothing_fell_through
from tests.webhooks.receiver import Receiver, receiving


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver
