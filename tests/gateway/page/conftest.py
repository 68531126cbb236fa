from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.gateways import HttpGateway
from tests.gateway.page.asking import ObedientChat, do
from tests.gateway.page.browser import BROWSERS, Browser, browser

# test_browser.py skips, and names the reason.
collect_ignore = [] if BROWSERS else ["test_page.py", "test_page_models.py"]


@pytest.fixture
def chat() -> ObedientChat:
    return ObedientChat()


@pytest.fixture
def chromium(tmp_path: Path) -> Iterator[Browser]:
    with browser(BROWSERS[0], tmp_path / "profile") as started:
        yield started
    assert started.complaints == []


@pytest.fixture
async def page(chromium: Browser, fake_worker: None, gateway: HttpGateway) -> Browser:
    await do(chromium.open, gateway.url)
    return chromium
