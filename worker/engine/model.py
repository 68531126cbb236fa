"""The model a worker serves: loaded, identified, and refused at start where it cannot do what we promise."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.engine.cache import cannot_batch
from worker.engine.upstream import (
    PromptProcessingBatch,
    TokenizerWrapper,
    download,
    load_model,
    load_tokenizer,
    make_prompt_cache,
)
from worker.errors import CannotStart

_UNKNOWN_CONTEXT = 4096  # where a config does not say: short enough to be safe


@dataclass(frozen=True, slots=True)
class Model:
    network: nn.Module
    tokenizer: TokenizerWrapper
    fingerprint: str  # of the weights and what they mean; equal fingerprints continue each other's answers
    context: int  # tokens, prompt and answer together
    vocab: int
    generation: dict[str, Any]  # the model's own defaults for sampling


def open_model(path_or_hub_id: str) -> Model:
    """Must run on the thread that will compute. Raises `CannotStart` with the reason."""
    path = _folder(path_or_hub_id)
    try:
        network, config = load_model(path)
        tokenizer = load_tokenizer(path, eos_token_ids=config.get("eos_token_id"))
    except (ValueError, OSError, KeyError, TypeError, ImportError, RuntimeError) as error:
        raise CannotStart(f"mlx-lm cannot load {path_or_hub_id}: {error}") from error
    if not tokenizer.has_chat_template:
        raise CannotStart(f"{path_or_hub_id} has no chat template, so it cannot answer chats.")
    check_batching(network)
    text = config.get("text_config", config)
    return Model(
        network=network,
        tokenizer=tokenizer,
        fingerprint=fingerprint(path),
        context=text.get("max_position_embeddings") or _UNKNOWN_CONTEXT,
        vocab=text["vocab_size"],
        generation=_generation_config(path),
    )


def _folder(path_or_hub_id: str) -> Path:
    if Path(path_or_hub_id).expanduser().is_dir():
        return Path(path_or_hub_id).expanduser()
    if Path(path_or_hub_id).expanduser().exists():
        raise CannotStart(f"SLUICE_MODEL={path_or_hub_id} is a file; give the folder that it lies in.")
    if path_or_hub_id.startswith((".", "/", "~")):
        raise CannotStart(f"SLUICE_MODEL={path_or_hub_id}: there is no such folder.")
    try:
        return Path(download(path_or_hub_id))
    except (OSError, ValueError) as error:
        raise CannotStart(
            f"SLUICE_MODEL={path_or_hub_id} is no folder here, and the hub did not give it: {error}"
        ) from error


def check_batching(network: nn.Module) -> None:
    """Raises `CannotStart` for a model whose rows cannot share a batch."""
    cache = make_prompt_cache(network)
    if kinds := cannot_batch(cache):
        raise CannotStart(
            f"This model keeps its context in {', '.join(kinds)}, which mlx-lm cannot batch. "
            "Serve another model or another conversion of this one."
        )
    try:
        _try_two_rows(network)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise CannotStart(
            f"Two rows of different length do not run together through this model ({error}). "
            "Dynamic-NTK rope scaling is one such case: set a fixed rope_scaling in its config.json."
        ) from error


def _try_two_rows(network: nn.Module) -> None:
    """The cheapest proof: prefill one and two tokens, join the rows, decode once."""
    rows = []
    for uid, tokens in enumerate(([1], [1, 1])):
        prefill = PromptProcessingBatch(network, [uid], [make_prompt_cache(network)], samplers=[None], max_tokens=[2])
        prefill.logits_processors = [()]
        rows.append(prefill.generate([tokens]))
    rows[0].extend(rows[1])
    rows[0].next()
    mx.synchronize()


def fingerprint(path: Path) -> str:
    """Of the config, the template, and each weight file's name, size and head (where safetensors keeps names,
    shapes and types) and tail: reading every gigabyte would hold up the start."""
    digest = hashlib.sha256()
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ):
        if (path / name).is_file():
            digest.update(name.encode() + (path / name).read_bytes())
    for weights in sorted(path.glob("model*.safetensors")):
        digest.update(f"{weights.name} {weights.stat().st_size}".encode())
        digest.update(_ends(weights))
    return "fp_" + digest.hexdigest()[:16]


def _ends(path: Path, most: int = 1 << 20) -> bytes:
    with path.open("rb") as file:
        head = file.read(most)
        file.seek(max(most, path.stat().st_size - most))
        return head + file.read(most)


def _generation_config(path: Path) -> dict[str, Any]:
    file = path / "generation_config.json"
    return json.loads(file.read_text()) if file.is_file() else {}
