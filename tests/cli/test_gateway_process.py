"""What `sluice up` tells about its gateway."""

from pathlib import Path

import pytest

from sluice.cli.commands.up import GatewayProcess
from tests.support.stack import free_port


def test_the_instructions_ask_for_a_key_and_the_address_is_a_url_for_ipv6_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert not GatewayProcess("redis://127.0.0.1", free_port()).needs_key
    monkeypatch.setenv("SLUICE_SERVE_KEYS", "keys.json")
    monkeypatch.setenv("SLUICE_SERVE_HOST", "::1")
    gateway = GatewayProcess("redis://127.0.0.1", port := free_port())
    assert (gateway.needs_key, gateway.base_url) == (True, f"http://[::1]:{port}/v1")
