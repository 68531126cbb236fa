"""Load and identify the model that a worker serves, and refuse one at start that it cannot serve correctly."""

import errno
import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from worker.engine import device
from worker.engine.cache.segments import needs_states
from worker.engine.checkpoint import (
    embeds,
    is_path,
    read_config,
    read_json,
    refuse_code,
    similar_folder,
    text_config,
    told_as,
)
from worker.engine.memory import MemoryModel, format_bytes
from worker.engine.model.calibration import calibrated
from worker.engine.model.profile import NO_DRAFTS, Drafting, drafting, profile, weights_bytes, why_not_batched
from worker.engine.speculation.draft_model import DraftNetwork
from worker.engine.speculation.mtp import Head
from worker.engine.upstream.hub import HF_HUB_CACHE, ConnectError, TransportError, hub_errors
from worker.engine.upstream.mlx_lm import DEFAULT_ALLOW_PATTERNS, TokenizerWrapper, download, load_model, load_tokenizer
from worker.engine.vision.load import (
    TEXT_ONLY,
    LanguageModel,
    Vision,
    is_vision_model,
    only_in_mlx_vlm,
    open_language_model,
    open_vision,
    refuse_unlike,
    with_encoder_cost,
)
from worker.errors import CannotStart

EMBEDDING_FILES = ["*.json", "*.safetensors", "*.txt", "*.model"]  # mlx-lm would leave out the weights of 2_Dense
# They resize and normalize images, and compute their features.
_IMAGE_LIBRARIES = "mlx-vlm", "transformers", "pillow"

OnLoaded = Callable[[int], object]  # receives the bytes of each part of the weights when it is in memory


@dataclass(frozen=True, slots=True)
class DraftModel:
    """The draft model of SpecPrefill, which scores the tokens of long prompts."""

    network: nn.Module
    context: int  # tokens
    stateful: bool = False


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model. Only the engine's thread computes with its network and its vision part."""

    network: nn.Module
    tokenizer: TokenizerWrapper
    fingerprint: str  # of weights, config and template; models with equal ones can continue each other's answers
    context: int  # tokens, prompt and answer together
    vocab: int
    generation: dict[str, Any]  # the model's own sampling defaults
    costs: MemoryModel  # predicts memory use, in bytes
    stateful: bool  # a cached prefix can end only at a state snapshot
    draft: DraftModel | None = None
    vision: Vision | None = None  # None if images are not served
    head: Head | None = None  # an MTP head, whose trunk is called instead of the network
    drafter: DraftNetwork | None = None  # a draft model whose drafts are verified
    drafting: Drafting = NO_DRAFTS  # how rows take drafts

    @property
    def cache_fingerprint(self) -> str:
        """Fingerprint of all that KV, states and image features depend on: other releases of the libraries may compute
        others."""
        computed = ("mlx-vlm",) if isinstance(self.network, LanguageModel) else ()
        libraries = ("mlx-lm", *(_IMAGE_LIBRARIES if self.vision else computed))
        return " ".join([self.fingerprint, *(f"{name} {version(name)}" for name in libraries)])


def open_model(
    path_or_hub_id: str,
    *,
    memory: int | None = None,
    vision: bool = True,
    trusted: bool = False,
    on_loaded: OnLoaded | None = None,
) -> Model:
    """Load a model with its weights, and measure its memory use. Blocks; must run on the thread that will compute.
    `memory`: bytes that it may use with its rows; None: what the device offers. `vision`: serve images too, if the
    model supports them. `trusted`: code in its folder may run. Raises `CannotStart` with the reason and what to do,
    before weights are read if `sluice check` has it too."""
    path, with_vision = model_folder(path_or_hub_id, name=f"SLUICE_MODEL={path_or_hub_id}"), False
    refuse_without_weights(path, path_or_hub_id)
    read_config(path, path_or_hub_id)
    with told_as(lambda reason: why_not_loaded(path_or_hub_id, reason, with_vision=with_vision)):
        with_vision = vision and is_vision_model(path)
        network, config, vision_part = open_vision(path, trusted=trusted) if with_vision else open_text(path, trusted)
        with ThreadPoolExecutor(1, "tokenizer") as thread:  # reading weights and forwards need no interpreter
            template, eos_ids = template_of(vision_part), config.get("eos_token_id")
            tokenizer_loaded = thread.submit(load_tokenizer, path, template, eos_token_ids=eos_ids)
            model_profile = profile(network, config)
            costs = model_profile.costs(weights_bytes=weights_bytes(_all_weights(network, vision_part)))
            has_template = bool(template) or _has_template(path) or tokenizer_loaded.result().has_chat_template
            limit = device.memory_limit() if memory is None else memory
            if reasons := why_not_served(network, config, costs, limit, has_template=has_template):
                raise not_served(path_or_hub_id, reasons)
            drafts = drafting(network, model_profile.layers)
            load_weights(_all_weights(network, vision_part), on_loaded)
            costs = _measured(costs, network, vision_part, config, model_profile.vocab)
            tokenizer = tokenizer_loaded.result()
    return Model(
        network=network,
        tokenizer=tokenizer,
        fingerprint=fingerprint(path),
        context=context_of(config),
        vocab=model_profile.vocab,
        generation=read_json(path, "generation_config.json"),
        costs=costs,
        stateful=needs_states(network),
        vision=vision_part,
        drafting=drafts,
    )


def why_not_served(
    network: nn.Module, config: dict[str, Any], costs: MemoryModel, memory: int, *, has_template: bool
) -> tuple[str, ...]:
    """Return why no worker serves the model, and what to do; empty if one does. Reads no weight. `memory`: bytes that
    the model and its rows may use."""
    no_template = None if has_template else "It has no chat template, so it cannot serve chat requests."
    return tuple(filter(None, (why_not_batched(network, config), no_template, why_too_large(costs, memory))))


def why_too_large(costs: MemoryModel, memory: int) -> str | None:
    """Return why the model cannot give any answer within `memory` bytes, and what to do; None if it can."""
    if costs.max_tokens(memory):
        return None
    of_drafts = ", with those of its draft models," if costs.draft_bytes else ""
    return (
        f"Its weights{of_drafts} take {format_bytes(costs.resident_bytes)} of the {format_bytes(memory)} that a worker "
        f"may use on {device.describe()}, which leaves too little for any answer. Serve a conversion with fewer bits, "
        "or a smaller model."
    )


def not_served(path_or_hub_id: str, reasons: Iterable[str]) -> CannotStart:
    """Return the error for a model that no worker serves."""
    return CannotStart(f"{path_or_hub_id} cannot be served. {' '.join(reasons)}")


def refuse_without_weights(folder: Path, path_or_hub_id: str) -> None:
    """Raise `CannotStart` if the folder has no weights that mlx-lm reads."""
    if not any(folder.glob("model*.safetensors")):
        raise CannotStart(f"{path_or_hub_id} has no weights: mlx-lm reads model*.safetensors.")


def _has_template(folder: Path) -> bool:
    """Return True if the files of the folder show a chat template. Without one, the tokenizer may know one yet."""
    return (folder / "chat_template.jinja").is_file() or bool(
        read_json(folder, "tokenizer_config.json").get("chat_template")
    )


def refuse_undraftable(model: Model, name: str) -> None:
    """Raise `CannotStart` if rows of the model take no drafts. `name`: the setting of what would draft, in errors."""
    if not model.drafting.max_draft:
        reason = model.drafting.unsupported_reason
        raise CannotStart(f"{name}: rows of the model take no drafts, since {reason}; leave the setting out.")


def _measured(
    costs: MemoryModel, network: nn.Module, vision: Vision | None, config: dict[str, Any], vocab: int
) -> MemoryModel:
    """Return the memory model corrected by measurements. Blocks."""
    if vision:
        refuse_unlike(vision.network, network, vocab)
    costs = calibrated(costs, network, context_of(config))
    return with_encoder_cost(costs, vision) if vision else costs


def load_weights(network: nn.Module, on_loaded: OnLoaded | None) -> None:
    """Load the weights of a network into memory, in some fifty parts. Blocks."""
    arrays = {id(array): array for _, array in tree_flatten(network.parameters())}
    least = weights_bytes(network) // 50
    part, part_bytes = list[mx.array](), 0
    for number, array in enumerate(arrays.values(), 1):
        part.append(array)
        part_bytes += array.nbytes
        if part_bytes >= least or number == len(arrays):
            mx.eval(part)
            if on_loaded:
                on_loaded(part_bytes)
            part, part_bytes = [], 0


def context_of(config: dict[str, Any]) -> int:
    """Return the context length in tokens, prompt and answer together, by the model's config; if that has none, 4096,
    which is short enough to be safe."""
    return int(text_config(config).get("max_position_embeddings") or 4096)


def open_text(
    path: Path, trusted: bool, *, with_weights: bool = True
) -> tuple[nn.Module, dict[str, Any], Vision | None]:
    """Return the text model and its config, as `open_vision` does: mlx-lm's model, or mlx-vlm's if only that has
    the family. Lazy. `with_weights`: False if the files of the weights are not here. Raises `CannotStart`, and what
    mlx-lm raises while loading."""
    if not trusted:
        refuse_code(path, "model_file")  # neither library reads auto_map of a text model
    described = read_config(path, str(path))
    if not described.get("model_file") and only_in_mlx_vlm(described):
        return *open_language_model(path, described, trusted=trusted, with_weights=with_weights), None
    network, config = load_model(path, lazy=True, strict=with_weights, trust_remote_code=trusted)
    return network, config, None


def why_not_loaded(path_or_hub_id: str, reason: str, *, with_vision: bool) -> str:
    """Return the error message for a model that a library could not load."""
    by, way_out = ("mlx-vlm", f"; {TEXT_ONLY}") if with_vision else ("mlx-lm", "")
    return f"{by} cannot load {path_or_hub_id}: {reason}{way_out}"


def template_of(vision: Vision | None) -> dict[str, str]:
    """Return the tokenizer settings that select the processor's chat template, if there is one."""
    return {"chat_template": vision.template} if vision and vision.template else {}


def _all_weights(network: nn.Module, vision: Vision | None) -> nn.Module:
    """Return the network with all weights: a vision model's includes the language model's, which are the same
    arrays."""
    return vision.network if vision else network


def model_folder(path_or_hub_id: str, *, name: str, only: list[str] | None = None) -> Path:
    """Return the local folder of a model, downloading it from the hub if necessary. Blocks. `name`: its name in errors.
    `only`: patterns of the files to download; None is all. Raises `CannotStart`."""
    folder = Path(path_or_hub_id).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CannotStart(f"{name} is a file, not a folder; give the folder that contains it.")
    similar = similar_folder(path_or_hub_id)
    missing = f"{name}: there is no such folder" + (f"; did you mean {similar}?" if similar else ".")
    if is_path(path_or_hub_id):
        raise CannotStart(missing)
    try:
        return Path(download(path_or_hub_id, allow_patterns=only))
    except (OSError, ValueError, TransportError) as error:
        if similar:  # after the hub, which may have this name although a local folder has a similar one
            raise CannotStart(missing) from error
        raise CannotStart(f"{name} is not a local folder, and {why_not_downloaded(error)}") from error


def files_of(folder: Path, name: str) -> list[str]:
    """Return the patterns of the files that a worker reads of a model. `folder`: with its JSON files; `name`: the hub
    id. Raises `CannotStart` for an embedding model of a type that is not served."""
    return EMBEDDING_FILES if embeds(folder, name) else DEFAULT_ALLOW_PATTERNS


def why_not_downloaded(error: OSError | ValueError | TransportError) -> str:
    """Return why Hugging Face's libraries could not download a model, and what to do: the end of a sentence."""
    match error:
        case hub_errors.GatedRepoError():
            return "Hugging Face asks for a login that may read it: run hf auth login."
        case hub_errors.RepositoryNotFoundError():
            return "Hugging Face has no such public model; check the name."
        case hub_errors.HFValidationError():
            return "no id of Hugging Face, such as mlx-community/Qwen3-4B-4bit; check the name."
        case (
            hub_errors.LocalEntryNotFoundError()
            | hub_errors.OfflineModeIsEnabled()
            | ConnectionError()
            | ConnectError()
        ):
            return "Hugging Face cannot be reached from here; check the name, or give a folder."
        case hub_errors.HfHubHTTPError(response=response):
            return f"Hugging Face answers with {response.status_code}; try again later."
        case TransportError():
            return f"the connection to Hugging Face broke ({error}); try again: the files that have arrived are kept."
        case OSError(errno=errno.ENOSPC):
            return f"the disk is full: {HF_HUB_CACHE}; make room, or give another folder with HF_HUB_CACHE."
    return f"could not be downloaded: {error}"


def fingerprint(path: Path) -> str:
    """Return a hash of the config, the template, and of the name, size and samples of each weight file: its first
    bytes, which hold names, shapes and dtypes in safetensors, its last ones, and some along it, so that an adapter that
    was merged into a few layers shows. Reading all weights would delay the start."""
    digest = hashlib.sha256()
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "chat_template.json",
        "processor_config.json",
        "preprocessor_config.json",
    ):
        if (path / name).is_file():
            digest.update(name.encode() + (path / name).read_bytes())
    for template in sorted(path.glob("additional_chat_templates/*.jinja")):
        digest.update(template.name.encode() + template.read_bytes())
    for weights in sorted(path.glob("model*.safetensors")):
        digest.update(f"{weights.name} {weights.stat().st_size}".encode())
        digest.update(_samples(weights))
    return "fp_" + digest.hexdigest()[:16]


def _samples(path: Path, nbytes: int = 1 << 20, most: int = 1024, sample: int = 512) -> bytes:
    """Return the first and the last bytes of a file, and `most` samples at equal distances."""
    size = path.stat().st_size
    with path.open("rb") as file:
        parts = [file.read(nbytes)]
        for at in range(nbytes, size - nbytes, max(sample, size // most)):
            file.seek(at)
            parts.append(file.read(sample))
        file.seek(max(nbytes, size - nbytes))
        return b"".join([*parts, file.read(nbytes)])
