"""The documents agree with the repository: links lead somewhere, and settings that they name exist."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from sluice.gateway import settings as gateway
from worker.environment import variable
from worker.settings import Settings

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(file for where in ("*.md", "docs/*.md", "examples/**/*.md", "models/**/*.md", "sluice/*.md")
                   for file in ROOT.glob(where))  # fmt: skip
MAX_WORDS = 27998
MAX_TERMS = 48  # of the glossary
CODE = ("docs", "models", "schemas", "scripts", "sluice", "tests", "worker", "examples")
# Variables that no worker reads: of the tests, of scripts/setup, and of `sluice batch`.
OTHER_VARIABLES = {"SLUICE_TEST_REDIS_URL", "SLUICE_PYTHON", "SLUICE_URL", "SLUICE_API_KEY"}

# Names that look like ours and belong to others.
OTHERS_NAMES = {
    "EventSource",  # of browsers
    "GenerationBatch", "PromptProcessingBatch", "make_sampler",  # of mlx-lm
    "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE",  # of Hugging Face
    "KeepAlive", "StartInterval", "stop_grace_period", "redis.conf",  # of launchd, Docker Compose, and Redis
    "Scheduler.schedule()", "gpu_memory_utilization", "max_num_batched_tokens", "max_num_seqs",  # of vLLM
    'api.mount("/llm", gateway(client))',  # of FastAPI, in a sentence about it
    "test_chunk_ends_on_the_checkpoint_grid",  # an example of a name
}  # fmt: skip

pytestmark = pytest.mark.xdist_group("documents")  # one process reads the names of the code, which takes seconds
documents = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: str(file.relative_to(ROOT)))


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def links(document: Path) -> Iterator[tuple[Path, str]]:
    """Yield the file and the anchor of each relative link."""
    for target in re.findall(r"\]\((?![a-z]+:)([^)]+)\)", without_code(document.read_text())):
        path, _, anchor = target.partition("#")
        yield (document.parent / path).resolve() if path else document, anchor


def anchors(document: Path) -> set[str]:
    """Return the anchors that GitHub makes of the headings."""
    titles = re.findall(r"^#+ (.+)$", without_code(document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@documents
def test_every_relative_link_leads_to_a_file_and_a_heading_of_it(document: Path) -> None:
    for path, anchor in links(document):
        assert path.exists(), path
        assert not anchor or anchor in anchors(path), f"{path.name} has no heading for #{anchor}"


@documents
def test_every_setting_that_a_document_names_exists(document: Path) -> None:
    named = set(re.findall(r"\bSLUICE_[A-Z_]*[A-Z]\b", document.read_text()))
    known = {variable(name) for name in Settings.model_fields}
    known |= {gateway.gateway_variable(name) for name in gateway.ServeSettings.model_fields}
    assert named - known - OTHER_VARIABLES == set()


def test_the_readme_and_the_figures_are_short_and_the_readme_leads_to_every_page() -> None:
    readme = ROOT / "README.md"
    assert len(readme.read_text().splitlines()) <= 150
    assert len((ROOT / "docs" / "performance.md").read_text().splitlines()) <= 250
    led_to = {path for path, _ in links(readme)}
    assert set(ROOT.glob("docs/*.md")) | {ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"} <= led_to


def test_the_documents_and_the_glossary_are_short() -> None:
    """Words with a letter or digit, so that a table's borders are none, in what people read to use or change Sluice;
    the changelog apart."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]
    words = [word for page in pages for word in page.read_text().split() if re.search(r"\w", word)]
    assert len(words) <= MAX_WORDS
    glossary = (ROOT / "docs" / "architecture.md").read_text().partition("\n## Glossary\n")[2]
    terms = re.findall(r"^- \*\*(.+?)\*\*:", glossary, re.MULTILINE)
    assert 40 <= len(set(terms)) == len(terms) <= MAX_TERMS


@documents
def test_every_path_that_a_document_names_exists(document: Path) -> None:
    tops = "|".join(("docs", "examples", "models", "schemas", "scripts", "sluice", "tests", "worker"))
    named = set(re.findall(rf"`((?:{tops})/[\w./-]*\w/?)`", document.read_text())) - {
        "worker/x/y.py",
        "tests/x/test_y.py",
    }
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def names_in(document: Path) -> set[str]:
    """Return what stands in backquotes and looks like code of ours: `snake_case`, `CamelCase`, `_private`, `with.dots`,
    or `a_call()`."""
    quoted = set(re.findall(r"`([^`\n]+)`", without_code(document.read_text())))
    code = (
        r"(?=\w+_\w|_\w|[A-Z][a-z0-9]+[A-Z]|[\w.]+\(|[A-Za-z_]\w*\.[A-Za-z_])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?:\(.*\))?"
    )
    return {name for name in quoted if re.fullmatch(code, name)}


@cache
def names_of_the_code() -> frozenset[str]:
    """Return the names in the code, and the words of its strings without a space; no comment and no docstring."""
    found = set[str]()
    for file in (file for top in CODE for file in (ROOT / top).rglob("*") if file != Path(__file__)):
        found.update((file.stem, file.parent.name))
        if file.suffix == ".py":
            found.update(name for node in ast.walk(ast.parse(file.read_text())) for name in _names_of(node))
        elif file.suffix in (".lua", ".js", ".mjs", ".go", ".jinja"):
            found.update(re.findall(r"\w+", file.read_text()))
    return frozenset(found)


def _names_of(node: ast.AST) -> Iterator[str]:
    for field in ("id", "attr", "name", "arg", "asname", "module", "value"):
        if isinstance(text := getattr(node, field, None), str) and " " not in text.strip():
            yield from re.findall(r"\w+", text)


@documents
def test_every_name_of_ours_that_a_document_quotes_exists(document: Path) -> None:
    code = names_of_the_code()
    named = {name for name in names_in(document) if not name.startswith("SLUICE_")} - OTHERS_NAMES
    missing = {name for name in named if not set(name.partition("(")[0].split(".")) <= code}
    assert missing == set()


def test_a_quoted_name_that_no_code_has_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "`_slots_for`, `Gone_By`, `GoneClass`, `gone()`, `sluice.gone`, `plain`, `--flag`, `a/b.py`, `x-y`\n"
    )
    assert names_in(page) == {"_slots_for", "Gone_By", "GoneClass", "gone()", "sluice.gone"}
    assert not {"_slots_for", "GoneClass"} & names_of_the_code()
    assert {"_shared", "SlotArraysCache", "sse"} <= names_of_the_code()


@documents
def test_every_name_that_a_document_locates_in_a_module_is_in_it(document: Path) -> None:
    text = " ".join(without_code(document.read_text()).split())
    for name, path in re.findall(r"`([A-Za-z_]\w*)` (?:(?:in|of) |\()`([\w/]+\.py)`", text):
        modules = [file for top in CODE for file in (ROOT / top).rglob("*.py") if file.as_posix().endswith(f"/{path}")]
        assert any(re.search(rf"\b{name}\b", file.read_text()) for file in modules), (name, path)


@documents
def test_no_document_speaks_of_bold_cells_without_one(document: Path) -> None:
    sections = re.split(r"^#+ ", without_code(document.read_text()), flags=re.MULTILINE)
    for section in (each for each in sections if re.search(r"\bbold\b", each, re.IGNORECASE)):
        assert re.search(r"^\|.*\*\*", section, re.MULTILINE), section[:200]


@documents
def test_no_document_has_the_markers_of_a_merge_conflict(document: Path) -> None:
    assert not re.search(r"^(<{7}|>{7}) ", document.read_text(), re.MULTILINE)
