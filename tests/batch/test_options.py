from pathlib import Path

import pytest

from sluice.batch.source import RunPaths
from sluice.errors import BatchRefused


def test_a_folder_as_the_output_is_named_in_the_error() -> None:
    with pytest.raises(ValueError, match=r"output: \. is a folder; give the path of a file"):
        RunPaths.next_to_output(Path("in.jsonl"), Path("."))


def test_a_link_to_nothing_is_refused_before_a_file_is_made(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.symlink_to(tmp_path / "absent" / "out.jsonl")
    with pytest.raises(BatchRefused):
        RunPaths.next_to_output(tmp_path / "in.jsonl", output).refuse_to_overwrite()
