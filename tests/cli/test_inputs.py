"""What is read from files that the command line names."""

import os
import threading
from pathlib import Path

import pytest

from sluice.cli.errors import CliError
from sluice.cli.terminal import inputs

REQUEST = '{"messages": []}'


def test_a_device_without_an_end_is_refused() -> None:
    with pytest.raises(CliError, match="neither a file nor a pipe"):
        inputs.read_request("/dev/zero")


def test_a_file_of_more_than_the_most_bytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "request.json"
    file.write_text(REQUEST)
    monkeypatch.setattr(inputs, "_MOST_BYTES", len(REQUEST))
    assert inputs.read_request(str(file)) == {"messages": []}
    monkeypatch.setattr(inputs, "_MOST_BYTES", len(REQUEST) - 1)
    with pytest.raises(CliError, match="larger than 15 bytes"):
        inputs.read_request(str(file))


def test_a_pipe_is_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text(REQUEST))
    writer.start()
    assert inputs.read_request(str(pipe)) == {"messages": []}
    writer.join()
