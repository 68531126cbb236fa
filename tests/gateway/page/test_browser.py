"""The browser that the other tests of this folder need; without one they are not collected."""

from pathlib import Path

import pytest

from tests.gateway.page.browser import BROWSERS, browser


@pytest.mark.skipif(not BROWSERS, reason="no Chromium: apt-get install chromium")
def test_a_browser_on_path_opens_the_pages_of_these_tests(tmp_path: Path) -> None:
    with browser(BROWSERS[0], tmp_path / "profile") as started:
        assert started.open("data:text/html,<p>seen</p>").text("p") == "seen"
