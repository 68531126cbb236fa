"""What `sluice up` prints when all parts are ready."""

from pathlib import Path

import pytest

from sluice.cli.commands.up import GatewayProcess, _clients, _print_instructions
from tests.support.stack import free_port


@pytest.mark.parametrize("has_keys", [True, False])
@pytest.mark.parametrize("embedding_model", [None, "sentences"])
def test_no_line_for_clients_is_longer_than_80_columns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_keys: bool, embedding_model: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLUICE_SERVE_KEYS", raising=False)
    if has_keys:
        monkeypatch.setenv("SLUICE_SERVE_KEYS", "keys.json")
    gateway = GatewayProcess("redis://127.0.0.1", free_port())
    gateway.serves = True
    printed = _clients(gateway, embedding_model)
    assert max(map(len, printed.splitlines())) <= 80
    assert ("SLUICE_SERVE_KEYS" in printed) is has_keys


@pytest.mark.parametrize("embeds", [True, False])
def test_who_serves_an_embedding_model_is_not_told_to_chat(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], embeds: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    gateway = GatewayProcess("redis://127.0.0.1", free_port())
    gateway.serves = True
    worker = {"model": "sentences", **({"embeddings": "yes"} if embeds else {})}
    _print_instructions("redis://127.0.0.1", worker, gateway)
    printed = capsys.readouterr().err
    assert ("chat" in printed, ".embed(" in printed, "/embeddings" in printed) == (not embeds, embeds, embeds)
