"""The form in which people report faults."""

import re
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.end_to_end.test_cli import run_here
from tests.support.stack import ROOT

FORM: dict[str, Any] = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/fault.yml").read_text())


def test_it_is_a_form_whose_fields_have_labels_and_ids_of_their_own() -> None:
    assert FORM.keys() == {"name", "description", "body"}
    fields = FORM["body"]
    assert {field["type"] for field in fields} <= {"textarea", "input", "dropdown"}
    assert all(field["attributes"]["label"] for field in fields)
    assert len({field["id"] for field in fields}) == len(fields)


COMMANDS = sorted(set(re.findall(r"`sluice ([^`]+)`", str(FORM))))


@pytest.mark.parametrize("command", COMMANDS)
def test_its_commands_and_options_exist(command: str, tmp_path: Any) -> None:
    name, *args = command.split()
    code, out, _ = run_here(name, "--help", env={"COLUMNS": "80"}, folder=tmp_path)
    assert (code, [arg for arg in args if arg.startswith("-") and arg not in out]) == (0, [])


def test_it_asks_for_the_doctor_and_for_a_capture() -> None:
    assert {"doctor", "capture", "replay"} <= {command.split()[0] for command in COMMANDS}
    assert [field["id"] for field in FORM["body"] if field.get("validations", {}).get("required")] == ["what", "doctor"]
