"""Report how a worker would serve a model, from its config, its tokenizer and the headers of its weight files."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.engine import device
from worker.engine.checkpoint import read_config, tensor_names, text_config, told_as
from worker.engine.memory import MemoryModel
from worker.engine.model.drafter import costs_with_head
from worker.engine.model.load import (
    model_folder,
    open_text,
    refuse_without_weights,
    template_of,
    why_not_loaded,
    why_not_served,
)
from worker.engine.model.profile import Drafting, ModelProfile, drafting, profile, weights_bytes, why_not_batched
from worker.engine.speculation.mtp_load import HeadReport, report_head
from worker.engine.tokenizer import MLXTokenizer
from worker.engine.upstream.mlx_lm import load_tokenizer
from worker.engine.vision.load import Vision, open_vision, refuse_unready, vision_unsupported_reason
from worker.errors import CannotStart

# The files to download from a hub: all that are read here, and no weights.
_TEXTS = ["*.json", "*.jinja", "*.txt", "*.tiktoken", "tokenizer.model", "tiktoken.model"]
_NO_BATCH = "its rows cannot share a batch"
_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The report on one model."""

    config: dict[str, Any]
    profile: ModelProfile
    costs: MemoryModel
    costs_with_head: MemoryModel  # and with the MTP head that a worker adds
    drafting: Drafting
    batches: bool
    device: str
    limit: int  # bytes of memory that a worker may use
    tokenizer: MLXTokenizer
    mtp: HeadReport
    vision_unsupported_reason: str | None  # why images are not served; None if they are
    encoder_bytes: int  # weights of the vision encoder; 0 if unknown
    blockers: tuple[str, ...]  # why no worker would serve it, and what to do

    @property
    def context(self) -> int | None:
        """Context length in tokens; None if the config has none."""
        tokens: int | None = text_config(self.config).get("max_position_embeddings")
        return tokens

    @property
    def bits(self) -> int | None:
        """Bits per quantized weight; None if the model is not quantized."""
        bits: int | None = (self.config.get("quantization") or {}).get("bits")
        return bits


@dataclass(frozen=True, slots=True)
class _Files:
    """Files of the weights."""

    local: bool
    names: list[str] | None  # of all tensors; None if no local file lists them
    nbytes: int = 0  # by the index file, if only that is local


def check_model(
    folder_or_hub_id: str,
    *,
    memory: int,
    vision: bool = True,
    trusted: bool = False,
    mtp_model: str | None = None,
) -> ModelReport:
    """Report on a model without reading a weight; from the hub, only small files are downloaded. `memory`: bytes that a
    worker may use. `mtp_model`: see `with_head`. The other parameters: see `open_model`. Blocks. Raises
    `CannotStart` if the model cannot be examined."""
    folder = model_folder(folder_or_hub_id, name=folder_or_hub_id, only=_TEXTS)
    if Path(folder_or_hub_id).expanduser().is_dir():
        refuse_without_weights(folder, folder_or_hub_id)
    described, with_vision = read_config(folder, folder_or_hub_id), False
    with told_as(lambda reason: why_not_loaded(folder_or_hub_id, reason, with_vision=with_vision)):
        files = _files(folder)
        no_vision = vision_unsupported_reason(described, files.names) or (None if vision else "SLUICE_VISION is off.")
        with_vision = no_vision is None
        network, config, vision_part, refused = _opened(folder, files, with_vision=with_vision, trusted=trusted)
        tokenizer = load_tokenizer(folder, template_of(vision_part), eos_token_ids=config.get("eos_token_id"))
        if not tokenizer.get_vocab():
            raise ValueError("its tokenizer has no tokens; fetch the model's own tokenizer.json again")
        found = profile(network, config)
        no_batch = why_not_batched(network, config)
        no_vision = no_vision or refused
        encoder_bytes = 0 if no_vision else _encoder_bytes(network, vision_part, files)
        costs = found.costs(weights_bytes=weights_bytes(network) + encoder_bytes)
        reasons = why_not_served(network, config, costs, memory, has_template=tokenizer.has_chat_template)
        way = drafting(network, found.layers) if no_batch is None else Drafting(unsupported_reason=_NO_BATCH)
        return ModelReport(
            config=config,
            profile=found,
            costs=costs,
            costs_with_head=_with_head(network, costs, config, folder, files, mtp_model) if way.max_draft else costs,
            drafting=way,
            batches=no_batch is None,
            device=device.describe(),
            limit=memory,
            tokenizer=MLXTokenizer(tokenizer),
            mtp=report_head(config, files.names or []),
            vision_unsupported_reason=no_vision,
            encoder_bytes=encoder_bytes,
            blockers=(*([refused] if refused else []), *reasons),
        )


def open_tokenizer(folder_or_hub_id: str) -> MLXTokenizer:
    """Open a model's tokenizer alone, with its chat template; from the hub, only small files are downloaded. Blocks.
    Raises `CannotStart`."""
    folder = model_folder(folder_or_hub_id, name=folder_or_hub_id, only=_TEXTS)
    ends = read_config(folder, folder_or_hub_id).get("eos_token_id")
    with told_as(lambda reason: why_not_loaded(folder_or_hub_id, reason, with_vision=False)):
        return MLXTokenizer(load_tokenizer(folder, eos_token_ids=ends))


def _files(folder: Path) -> _Files:
    if files := sorted(folder.glob("*.safetensors")):  # mlx-lm reads model*, and a head may be in another
        return _Files(True, [name for file in files for name in tensor_names(file)])
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return _Files(False, None)
    listed = json.loads(index.read_text("utf-8"))
    return _Files(False, [*listed["weight_map"]], int(listed.get("metadata", {}).get("total_size", 0)))


def _opened(
    folder: Path, files: _Files, *, with_vision: bool, trusted: bool
) -> tuple[nn.Module, dict[str, Any], Vision | None, str | None]:
    """Open the model as a worker does. The last value is why a worker would refuse it; the others are then as complete
    as possible."""
    refused = None
    if with_vision:
        try:
            if files.local:
                return *open_vision(folder, trusted=trusted), None
            refuse_unready(folder, trusted=trusted)
        except CannotStart as error:
            refused = str(error)
    network, config, _ = open_text(folder, trusted, with_weights=files.local)
    if not files.local:
        _set_dtypes(network, config)
    return network, config, None, refused


def _encoder_bytes(network: nn.Module, vision_part: Vision | None, files: _Files) -> int:
    all_bytes = weights_bytes(vision_part.network) if vision_part else files.nbytes
    return max(0, all_bytes - weights_bytes(network))


def _with_head(
    network: nn.Module, costs: MemoryModel, config: dict[str, Any], folder: Path, files: _Files, mtp_model: str | None
) -> MemoryModel:
    """Return the memory model with the MTP head that `drafter.with_head` loads."""
    if mtp_model is not None:
        given = Path(mtp_model).expanduser()
        return costs_with_head(network, costs, config, given if given.is_dir() else None)
    if report_head(config, files.names or []).status != "yes":
        return costs
    try:
        return costs_with_head(network, costs, config, folder if files.local else None)
    except (CannotStart, ValueError, KeyError, TypeError):  # the worker leaves it out, with a warning
        return costs


def _set_dtypes(network: nn.Module, config: dict[str, Any]) -> None:
    """Set dtypes and quantization by the config, for a network whose weight files are not here."""
    text = text_config(config)
    dtypes = (part.get(name) for part in (config, text) for name in ("dtype", "torch_dtype"))
    network.set_dtype(_DTYPES.get(next(filter(None, dtypes), ""), mx.bfloat16))
    if (quantization := config.get("quantization")) is None:
        return
    nn.quantize(
        network,
        group_size=quantization["group_size"],
        bits=quantization["bits"],
        mode=quantization.get("mode", "affine"),
        class_predicate=lambda path, layer: (
            hasattr(layer, "to_quantized")
            and quantization.get(path, layer.weight.shape[-1] % quantization["group_size"] == 0)
        ),
    )
