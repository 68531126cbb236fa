"""Chat templates of real models, fetched by the names of packages that carry them; none is in this repository."""

import copy
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from types import MappingProxyType

from tests.text.templated import words
from worker.engine.tokenizer import MLXTokenizer

PACKAGES = {
    "llama-cpp-python": ("0.3.36", "--no-binary", "*/vendor/llama.cpp/models/templates/*.jinja"),
    "trl": ("1.16.0", "--only-binary", "trl/chat_templates/*.jinja"),
    "axolotl": ("0.19.0", "--only-binary", "axolotl/utils/chat_templates/templates/*.jinja"),
}
SUITES = {
    "llama-cpp-python": ("0.3.36", "*/vendor/llama.cpp/tests/test-chat.cpp"),
    "vllm": ("0.33.0", "vllm-*/tests/tool_parsers/*.py"),
}
# Tokens of the checkpoints' vocabularies that their templates do not name, by a text of the template.
_UNNAMED = {"List of tools: ": ["<|tool_call_start|>", "<|tool_call_end|>"]}  # LFM2's
_DELIMITERS = re.compile(r"<\|[^|<>\s]+\|>|<｜[^｜<>\s]+｜>|</?[A-Za-z_:]+>|\[/?[A-Z_]+\]")


def fetch(folder: Path) -> dict[str, str]:
    """Return the templates by package and name, downloaded into `folder` unless they are there."""
    found = {}
    for package, (version, kind, pattern) in PACKAGES.items():
        home = folder / f"{package}-{version}"
        if not home.exists():
            _download(package, version, kind, pattern, home)
        for file in sorted(home.glob("*.jinja")):
            found[f"{package}: {file.stem}"] = file.read_text(encoding="utf-8")
    return found


def fetch_suite(folder: Path, package: str) -> Path:
    """Return the folder with the files of a package's suite, downloaded into `folder` unless it is there."""
    version, pattern = SUITES[package]
    home = folder / f"{package}-suite-{version}"
    if not home.exists():
        _download(package, version, "--no-binary", pattern, home, _build_tools() if package == "vllm" else {})
    return home


def _build_tools() -> dict[str, str]:
    """Install what vLLM's source package needs to tell its own version, which pip demands of it. torch is empty."""
    folder = Path(mkdtemp())
    wanted = ["setuptools>=77,<81", "setuptools-scm", "setuptools-rust", "packaging", "jinja2", "wheel", "regex"]
    command = ["install", "--quiet", "--disable-pip-version-check", "--target", str(folder), *wanted]
    subprocess.run([sys.executable, "-m", "pip", *command], check=True, timeout=600)
    for name, text in (("__init__", "from torch import version, cuda"), ("version", "cuda = hip = None"),
                       ("cuda", "def is_available():\n    return False")):  # fmt: skip
        (folder / "torch").mkdir(exist_ok=True)
        (folder / "torch" / f"{name}.py").write_text(f"__version__ = '2.9.0'\n{text}\n")
    (folder / "torch" / "utils").mkdir()
    (folder / "torch" / "utils" / "cpp_extension.py").write_text("CUDA_HOME = ROCM_HOME = None\n")
    version, _ = SUITES["vllm"]
    return {"PYTHONPATH": str(folder), "VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": version}


def _download(
    package: str,
    version: str,
    kind: str,
    pattern: str,
    home: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> None:
    downloads = Path(mkdtemp(dir=home.parent))
    command = ["download", "--quiet", "--disable-pip-version-check", "--no-deps", kind, package, "-d", str(downloads)]
    command += ["--no-build-isolation"] if environment else []
    subprocess.run(
        [sys.executable, "-m", "pip", *command, f"{package}=={version}"],
        check=True, timeout=600, env={**os.environ, **environment},
    )  # fmt: skip
    (archive,) = downloads.iterdir()
    unpacked = downloads / "templates"
    unpacked.mkdir()
    for name, content in _members(archive, pattern):
        (unpacked / Path(name).name).write_bytes(content)
    with suppress(OSError):  # another test process was first
        unpacked.rename(home)


def _members(archive: Path, pattern: str) -> list[tuple[str, bytes]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return [(name, wheel.read(name)) for name in wheel.namelist() if Path(name).match(pattern)]
    with tarfile.open(archive) as source:
        found = [member for member in source.getmembers() if Path(member.name).match(pattern)]
        return [(member.name, file.read()) for member in found if (file := source.extractfile(member))]


class TemplateTokenizer(MLXTokenizer):
    """The tiny tokenizer with a model's template, and a vocabulary of nothing but the markers that the template has."""

    @property
    def tokens(self) -> list[str]:  # type: ignore[override]
        unnamed = [token for text, tokens in _UNNAMED.items() if text in self.template for token in tokens]
        return sorted({*_DELIMITERS.findall(self.template), *unnamed})

    @property
    def think(self) -> None:  # type: ignore[override]
        return None

    @property
    def tool(self) -> None:  # type: ignore[override]
        return None


def tokenizer(source: str | dict[str, str]) -> TemplateTokenizer:
    """`source`: a template, or several by name."""
    wrapper = copy.copy(words("")._wrapper)
    wrapper._tokenizer = copy.copy(wrapper._tokenizer)
    wrapper._tokenizer.chat_template = source
    wrapper._tokenizer.bos_token = "<s>"  # some templates write it
    return TemplateTokenizer(wrapper)
