"""A model is loaded with the MTP head of its folder, or of another one, and its memory counts."""

import logging
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from tests.engine.speculation.mtp.checkpoints import MTP_CONFIGS, head_tensors, write_head_alone, write_with_head
from tests.engine.tiny import build, model_of, write_checkpoint
from worker.engine.model.drafter import with_head
from worker.engine.model.load import Model
from worker.engine.model.profile import weights_bytes
from worker.errors import CannotStart

QWEN = "qwen3_5"


def model(name: str = QWEN) -> Model:
    return model_of(build(MTP_CONFIGS[name]), MTP_CONFIGS[name])


@pytest.mark.parametrize("name", [*MTP_CONFIGS])
def test_a_head_in_the_model_s_own_folder_is_loaded(name: str, tmp_path: Path) -> None:
    head = with_head(model(name), str(write_with_head(name, tmp_path)), None).head
    assert head is not None
    assert head.trunk.hidden(mx.array([[5, 6]])).shape == (1, 2, 64)


def test_a_head_of_the_original_checkpoint_is_loaded(tmp_path: Path) -> None:
    folder = write_checkpoint(MTP_CONFIGS[QWEN], tmp_path / "model")
    original = write_head_alone(QWEN, tmp_path / "original", head_tensors(QWEN))
    assert with_head(model(), str(folder), str(original)).head is not None


def test_a_model_without_a_head_stays_as_it_is(tmp_path: Path) -> None:
    before = model()
    assert with_head(before, str(write_checkpoint(MTP_CONFIGS[QWEN], tmp_path)), None) is before


def test_a_damaged_head_in_the_model_s_own_folder_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_with_head(QWEN, tmp_path)
    mx.save_safetensors(str(folder / "mtp.safetensors"), {"mtp.fc.weight": mx.zeros((2, 2))})
    with caplog.at_level(logging.WARNING):
        assert with_head(model(), str(folder), None).head is None
    assert "MTP head is incomplete" in caplog.text


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [({}, "it has no MTP head"), ({"mtp.fc.weight": mx.zeros((2, 2))}, "incomplete")],
)
def test_a_checkpoint_without_a_whole_head_is_refused(
    tensors: dict[str, mx.array], reason: str, tmp_path: Path
) -> None:
    folder = write_checkpoint(MTP_CONFIGS[QWEN], tmp_path / "model")
    other = write_head_alone(QWEN, tmp_path / "other", {"model.norm.weight": mx.zeros((64,)), **tensors})
    with pytest.raises(CannotStart, match=rf"SLUICE_MTP_MODEL=.*{reason}"):
        with_head(model(), str(folder), str(other))


def test_the_head_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(MTP_CONFIGS[QWEN], tmp_path / "model")
    other = write_head_alone("glm4_moe", tmp_path / "other", head_tensors("glm4_moe"))
    with pytest.raises(CannotStart, match="belongs to another model"):
        with_head(model(), str(folder), str(other))


def test_the_memory_of_a_head_counts_its_weights_and_a_layer_more(tmp_path: Path) -> None:
    before = model()
    after = with_head(before, str(write_with_head(QWEN, tmp_path)), None)
    assert after.head is not None
    assert after.costs.weights_bytes - before.costs.weights_bytes == weights_bytes(after.head.network)
    each = 2 * 2 * 16 * 4  # keys and values of two heads, float32
    (ours,), (theirs,) = after.costs.kv_layers, before.costs.kv_layers
    assert ours.token_bytes - theirs.token_bytes == each
    assert after.costs == replace(
        before.costs,
        weights_bytes=after.costs.weights_bytes,
        kv_layers=(ours,),
        chunk_token_bytes=before.costs.chunk_token_bytes + 64 * 4,
    )
