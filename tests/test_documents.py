"""The documents agree with the repository: links lead somewhere, and settings that they name exist."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.gateway import settings as gateway
from worker.environment import variable
from worker.settings import Settings

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(file for where in ("*.md", "docs/*.md", "examples/**/*.md", "models/**/*.md", "sluice/*.md")
                   for file in ROOT.glob(where))  # fmt: skip
# Variables that no worker reads: of the tests, and of scripts/setup.
OTHER_VARIABLES = {"SLUICE_TEST_REDIS_URL", "SLUICE_PYTHON"}

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
    known |= {gateway.variable(name) for name in gateway.ServeSettings.model_fields}
    assert named - known - OTHER_VARIABLES == set()


def test_the_readme_is_short_and_leads_to_every_page() -> None:
    readme = ROOT / "README.md"
    assert len(readme.read_text().splitlines()) <= 200
    led_to = {path for path, _ in links(readme)}
    assert set(ROOT.glob("docs/*.md")) | {ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"} <= led_to


@documents
def test_every_path_that_a_document_names_exists(document: Path) -> None:
    tops = "|".join(("docs", "examples", "models", "schemas", "scripts", "sluice", "tests", "worker"))
    named = set(re.findall(rf"`((?:{tops})/[\w./-]*\w/?)`", document.read_text())) - {
        "worker/x/y.py",
        "tests/x/test_y.py",
    }
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


@documents
def test_no_document_has_the_markers_of_a_merge_conflict(document: Path) -> None:
    assert not re.search(r"^(<{7}|>{7}) ", document.read_text(), re.MULTILINE)
