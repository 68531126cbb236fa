"""What `scripts/bench prefix --disk` measures, with small models and few runs. Its times mean nothing here."""

import argparse
import json
from pathlib import Path

import pytest
from rich.console import Console

from scripts.benchmarks.disk import command, conversations, gaps, hits, images, restart, start, worker
from scripts.benchmarks.disk.figures import at_most
from scripts.benchmarks.models import hybrid_checkpoint, random_checkpoint
from tests.engine.vision.checkpoints import write_checkpoint
from worker.engine.model.load import Model, open_model

TOKENS = 64


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a small model load prefixes too, which it computes faster, and keep places small."""
    monkeypatch.setattr("worker.engine.prefill.queue.load_limit_s", lambda *_, **__: 60.0)
    monkeypatch.setattr(gaps, "SEGMENT_TOKENS", 1)
    monkeypatch.setattr(hits, "_SHARED", 64)
    monkeypatch.setattr(worker, "WARM_UP", 40)


@pytest.fixture(scope="module")
def kv(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return opened(random_checkpoint(tmp_path_factory.mktemp("kv"), hidden=128, layers=1))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return opened(hybrid_checkpoint(tmp_path_factory.mktemp("hybrid"), hidden=128, layers=4))


def opened(checkpoint: Path) -> Model:
    model = open_model(str(checkpoint))
    model.tokenizer.eos_token_ids = []
    return model


@pytest.mark.parametrize("kind", ["kv", "hybrid"])
def test_a_restart_has_three_bars(tmp_path: Path, request: pytest.FixtureRequest, kind: str) -> None:
    found = [*restart.figures(kind, request.getfixturevalue(kind), tmp_path, TOKENS, 1)]
    assert [each.bar for each in found] == ["≤ 0.1", "≤ 1.5", "≤ 2"]
    assert f"{TOKENS} tokens" in found[0].measured


def test_a_conversation_that_is_not_found_voids_the_measurement(tmp_path: Path, kv: Model) -> None:
    conversation = restart._Conversation(kv, tmp_path, TOKENS)
    for file in conversation._files:
        file.write_bytes(b"damaged")
    with pytest.raises(RuntimeError, match="void"):
        conversation.restart()


def test_images_from_disk_are_compared_with_encoding(tmp_path: Path) -> None:
    model = opened(write_checkpoint("qwen3_5", tmp_path / "model"))
    found = [*images.figures(model, tmp_path / "prefixes", 2, sides=(64,))]
    assert len(found) == 1
    assert "tokens, from disk against encoding" in found[0].measured


def test_hits_are_compared_in_pairs(tmp_path: Path, kv: Model) -> None:
    found = hits.figure("KV", kv, tmp_path, 3)
    assert found.bar == "≤ 1.02"
    assert found.value > 0


def test_steps_beside_traffic_are_compared_with_as_many_without(tmp_path: Path, kv: Model) -> None:
    (found,) = gaps.figures(kv, tmp_path, 1)
    assert found.bar == "≤ 1.25"
    assert found.value > 0
    assert len([*tmp_path.glob("*.safetensors")]) == gaps._PHASES


def test_a_start_keeps_foreign_files_and_the_quota(tmp_path: Path) -> None:
    took, quota = start.figures(tmp_path / "folder", foreign_files=20)
    assert (took.bar, quota.bar, quota.holds) == ("≤ 1", "≤ 1", True)
    assert "0 foreign files removed" in quota.text
    assert quota.value > 0.5


def test_conversations_find_more_with_the_disk(tmp_path: Path, kv: Model) -> None:
    alone, with_disk = conversations.figures(kv, tmp_path, 20)  # two fit into memory
    # How much more depends on the machine: what is faster computed than loaded is not loaded.
    assert alone.value < with_disk.value <= 1


@pytest.mark.parametrize(("value", "holds"), [(1.25, True), (1.26, False)])
def test_a_value_above_its_bar_does_not_hold(value: float, holds: bool) -> None:
    assert at_most("a", value, 1.25).holds is holds


def test_the_command_measures_the_chosen_parts_and_writes_them_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = argparse.ArgumentParser()
    command.add_options(parser)
    monkeypatch.setitem(command.PARTS, "gaps", lambda folder, given: iter([at_most("a", given.gigabytes, 1)]))
    file = tmp_path / "figures.json"
    given = parser.parse_args(["--disk", "--parts", "gaps", "--gigabytes", "3", "--json", str(file)])
    assert not command.main(Console(quiet=True), given)
    (figure,) = json.loads(file.read_text())
    assert (figure["measured"], figure["value"], figure["holds"]) == ("a", 3.0, False)
