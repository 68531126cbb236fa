"""docs/settings.md and .env.example are generated from the settings and the metrics."""

import re
import sys
from pathlib import Path

import pytest
from pydantic.fields import FieldInfo

from docs import settings_page
from sluice.gateway.settings import ServeSettings, gateway_variable
from worker.environment import variable
from worker.settings import Settings

FIELDS = {
    **{variable(name): field for name, field in Settings.model_fields.items()},
    **{gateway_variable(name): field for name, field in ServeSettings.model_fields.items()},
}


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, Path]:
    """Return the paths of the files that the command writes; neither exists."""
    paths = tmp_path / ".env.example", tmp_path / "settings.md"
    monkeypatch.setattr(settings_page, "ENV_EXAMPLE", paths[0])
    monkeypatch.setattr(settings_page, "PAGE", paths[1])
    return paths


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["settings_page", *arguments])
    return settings_page.main()


def rows() -> dict[str, list[str]]:
    """Return what the page says of each setting: its default with the values, and its description."""
    lines = re.findall(r"^- `(SLUICE_\w+)` \((.*?)\): (.*)$", settings_page.PAGE.read_text(), re.MULTILINE)
    return {name: [default, description] for name, default, description in lines}


def test_the_files_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "--check") == 0


def test_the_check_fails_until_both_files_are_written(
    monkeypatch: pytest.MonkeyPatch, files: tuple[Path, Path]
) -> None:
    assert run(monkeypatch, "--check") == 1
    assert not any(path.exists() for path in files), "a check writes nothing"
    assert run(monkeypatch) == 0
    assert run(monkeypatch, "--check") == 0
    for path in files:
        text = path.read_text()
        path.write_text(text + "\n")
        assert run(monkeypatch, "--check") == 1
        path.write_text(text)


def test_the_page_lists_every_setting_with_its_default_and_a_description() -> None:
    assert sorted(rows()) == sorted(FIELDS)
    for name, field in FIELDS.items():
        default, description = rows()[name]
        assert len(description) > 20
        if field.default is not None and field.default_factory is None and not field.is_required():
            shown = default.partition("; ")[0].strip("`")
            assert type(field.default)(shown if shown != "false" else "") == field.default


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("SLUICE_MAX_ROWS", "1 … 512"),
        ("SLUICE_STEP_MS", "above 0"),
        ("SLUICE_SPECPREFILL_KEEP_PCT", "0.1 … 1"),
        ("SLUICE_MAX_REQUEST_BYTES", "1,000 or more"),
        ("SLUICE_VISION", "`auto`, `off`"),
        ("SLUICE_IMAGE_URLS", ""),
        ("SLUICE_MODEL", ""),
        ("SLUICE_SERVE_PORT", "0 … 65,535"),
    ],
)
def test_the_page_shows_the_values_that_a_setting_takes(name: str, values: str) -> None:
    assert rows()[name][0].partition("; ")[2] == values


def optional(field: FieldInfo) -> bool:
    return not field.is_required() and (field.default is None or field.default_factory is not None)


def test_each_setting_is_in_one_group_and_a_dozen_come_first() -> None:
    grouped = [name for names in settings_page.GROUPS.values() for name in names.split()]
    ours = [*Settings.model_fields, *(f"serve_{name}" for name in ServeSettings.model_fields)]
    assert sorted(grouped) == sorted(ours)
    assert len(next(iter(settings_page.GROUPS.values())).split()) == 12


def test_a_setting_without_a_fixed_default_names_its_default_in_words() -> None:
    for name, field in FIELDS.items():
        assert bool(re.search(r" Default: [^.]+\.$", field.description or "")) == optional(field), name
