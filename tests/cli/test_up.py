"""What `sluice up` prints when all parts are ready."""

from pathlib import Path

import pytest

from sluice.cli.commands.up import GatewayProcess, _clients
from tests.support.stack import free_port


@pytest.mark.parametrize("has_keys", [True, False])
def test_no_line_for_clients_is_longer_than_80_columns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_keys: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLUICE_SERVE_KEYS", raising=False)
    if has_keys:
        monkeypatch.setenv("SLUICE_SERVE_KEYS", "keys.json")
    gateway = GatewayProcess("redis://127.0.0.1", free_port())
    gateway.serves = True
    printed = _clients(gateway)
    assert max(map(len, printed.splitlines())) <= 80
    assert ("SLUICE_SERVE_KEYS" in printed) is has_keys
