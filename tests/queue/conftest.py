import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _nothing_fell_through(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """An exception in a callback or a forgotten task reaches nobody but the event loop's handler."""
    yield
    said = [record for when in ("setup", "call") for record in caplog.get_records(when) if record.name == "asyncio"]
    assert [record.getMessage() for record in said if record.levelno >= logging.ERROR] == []
