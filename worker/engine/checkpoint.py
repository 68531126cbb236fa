"""Read the JSON files of a model's folder, and refuse code that it brings along."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from worker.engine.memory import format_bytes
from worker.errors import CannotStart

_CONFIG_FILES = "config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json"


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Return the content of a JSON file in the folder; empty if there is no such file. Raises ValueError if it is not
    JSON."""
    file = folder / name
    return json.loads(file.read_text("utf-8")) if file.is_file() else {}


def read_config(folder: Path, name: str) -> dict[str, Any]:
    """Return the content of config.json. `name`: of the model, in errors. Raises `CannotStart` if there is none, or if
    a field that the libraries rely on is of a wrong kind."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except FileNotFoundError:
        raise CannotStart(f"{name}: there is no config.json; fetch the model's own.") from None
    except OSError as error:
        raise CannotStart(f"{name}: config.json cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise CannotStart(f"{name}: config.json is not JSON ({error}); fetch the model's own again.") from error
    if wrong := _why_malformed(config):
        raise CannotStart(f"{name}: config.json: {wrong}; compare it with the model's own.")
    return cast(dict[str, Any], config)


def embeds(folder: Path, name: str) -> bool:
    """Return True if the model in the folder is an embedding model. `name`: the folder or the hub id, as it was given.

    Encoders are. A model of another type that chat models have too is one if its files say so, or, since conversions
    leave these files out, its name does. Raises `CannotStart` for one of a type that is not served, and as
    `read_config` does."""
    config = read_config(folder, name)
    kind = config["model_type"]
    if kind in ("bert", "xlm-roberta", "modernbert", "llama_bidirec"):
        return True
    of_sentences = any((folder / file).is_file() for file in ("modules.json", "config_sentence_transformers.json"))
    if kind in ("qwen3", "gemma3_text"):
        is_named = "embed" in name.rstrip("/").rpartition("/")[2].lower()
        return of_sentences or is_named or config.get("use_bidirectional_attention") is True
    if of_sentences:
        raise CannotStart(
            f"{name} is an embedding model of the type {kind[:40]!r}, which is not served; choose one of the type "
            "bert, xlm-roberta, modernbert, llama_bidirec, qwen3 or gemma3_text."
        )
    return False


def _why_malformed(config: Any) -> str | None:
    if not isinstance(config, dict):
        return "it must be an object"
    if not isinstance(config.get("model_type"), str):
        return "model_type must be a text, such as qwen3"
    for name in ("text_config", "vision_config", "quantization"):
        if not isinstance(config.get(name), dict | None):
            return f"{name} must be an object"
    quantization = config.get("quantization") or {}
    if quantization and not all(_is_count(quantization.get(name)) for name in ("bits", "group_size")):
        return "bits and group_size of quantization must be numbers"
    for part in (config, text_config(config)):
        if (context := part.get("max_position_embeddings")) is not None and not _is_count(context):
            return "max_position_embeddings must be a positive whole number"
        ends = part.get("eos_token_id")
        if not all(isinstance(id, int | None) for id in (ends if isinstance(ends, list) else [ends])):
            return "eos_token_id must be a number or a list of numbers"
    return _why_too_many(config)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _why_too_many(config: dict[str, Any]) -> str | None:
    """Return which number of layers or experts could not be built in any time; None if there is none."""
    for name, value in config.items():
        if isinstance(value, dict) and (found := _why_too_many(value)):
            return found
        # The libraries build each in a loop. The most of published models: 128 layers, 1,024 experts.
        if re.search("layer|expert|block|depth", name) and isinstance(value, int | float) and value > 10_000:
            return f"{name} is {value:,}, and no model has that many"
    return None


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config that describes the language model."""
    text: dict[str, Any] = config.get("text_config") or config
    return text


@contextmanager
def told_as(sentence: Callable[[str], str]) -> Iterator[None]:
    """Raise what a library raises on a model's files as `CannotStart`. `sentence`: returns its message for the
    reason."""
    try:
        yield
    except CannotStart:
        raise
    except SystemExit as error:  # as mlx-lm's olmo ends without its package
        raise CannotStart(sentence("it ended the process, as if a package that it needs is missing")) from error
    except Exception as error:  # the border of a model's files: its code may raise whatever Python does
        reason = str(error) or type(error).__name__
        if not isinstance(error, ValueError | OSError | ImportError | RuntimeError):
            reason = f"{type(error).__name__}: {reason}; a field of config.json may be missing or wrong"
        raise CannotStart(sentence(reason)) from error


def is_path(path_or_hub_id: str) -> bool:
    """Return True if the name can only be a local path: a hub id has at most one slash."""
    return path_or_hub_id.startswith((".", "/", "~")) or path_or_hub_id.endswith("/") or path_or_hub_id.count("/") > 1


def similar_folder(path: str) -> Path | None:
    """Return the sibling of a missing folder with the most similar name, or None. Blocks on the file system."""
    missing = Path(path).expanduser()
    try:
        siblings = [each.name for each in missing.parent.iterdir() if each.is_dir()]
    except OSError:
        return None
    similar = get_close_matches(missing.name, siblings, n=1)
    return missing.parent / similar[0] if similar else None


def refuse_code(folder: Path, *fields: str) -> None:
    """Raise `CannotStart` if one of these fields in a JSON file of the folder names Python code."""
    for name in _CONFIG_FILES:
        for field in fields:
            if named := read_json(folder, name).get(field):
                raise CannotStart(
                    f"{folder / name} names Python code ({field}: {json.dumps(named)}) that would run on this machine. "
                    "If you trust it, allow it with SLUICE_TRUST_MODEL_CODE=true."
                )


def tensor_names(file: Path) -> Iterator[str]:
    """Yield the names of all tensors in a safetensors file. Raises ValueError if it is not one or is truncated."""
    yield from tensor_shapes(file)


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors in a safetensors file by name, from its header. Raises ValueError if it is not
    one or is truncated."""
    with file.open("rb") as opened:
        length, size = int.from_bytes(opened.read(8), "little"), file.stat().st_size
        if 8 + length > size:
            raise ValueError(
                f"{file.name} is not a safetensors file, or is truncated; if it is a git-lfs pointer, fetch the file"
            )
        header = json.loads(opened.read(length))
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    expected = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    if expected > size:
        raise ValueError(f"{file.name} is truncated: {format_bytes(size)} of {format_bytes(expected)}")
    return {name: tuple(entry["shape"]) for name, entry in tensors.items()}
