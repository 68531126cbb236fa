"""Requests are read from files and pipes up to a limit, and from no devices."""

import json
import os
import threading
from pathlib import Path

import pytest

from sluice.cli.errors import CliError
from sluice.cli.terminal import inputs
from worker.settings import Settings

REQUEST = '{"messages": []}'


def test_a_device_without_an_end_is_refused() -> None:
    with pytest.raises(CliError, match="neither a file nor a pipe"):
        inputs.read_request_file("/dev/zero")


def test_a_file_of_more_than_the_most_bytes_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "request.json"
    file.write_text(REQUEST)
    assert inputs.read_request_file(str(file), len(REQUEST)) == {"messages": []}
    with pytest.raises(CliError, match="the limit of 15 bytes"):
        inputs.read_request_file(str(file), len(REQUEST) - 1)


def test_what_is_no_request_is_refused_and_a_list_of_messages_is_one(tmp_path: Path) -> None:
    file = tmp_path / "request.json"
    message = {"role": "user", "content": "Hello"}
    file.write_text(json.dumps([message]))
    assert inputs.read_request_file(str(file)) == {"messages": [message]}
    for other in ("[1, 2]", "[]", "null", '"Hello"', "{}"):
        file.write_text(other)
        with pytest.raises(CliError, match="is not a request: .*list of such messages"):
            inputs.read_request_file(str(file))
    file.write_text("\n")
    with pytest.raises(CliError, match="is empty"):
        inputs.read_request_file(str(file))


def test_broken_json_is_shown_where_it_breaks(tmp_path: Path) -> None:
    file = tmp_path / "request.json"
    long = "x" * 1000
    file.write_text(f'{{"stop": "{long}",\n"user": "ann",}}\n{long}')
    with pytest.raises(CliError) as refused:
        inputs.read_request_file(str(file))
    said = str(refused.value)
    assert "at line 2 column 15: " in said  # as in a body of the gateway and a line of a batch
    assert '"ann",' in said
    assert len(said.partition(" is not JSON")[2]) < 150


def test_a_pipe_is_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text(REQUEST))
    writer.start()
    assert inputs.read_request_file(str(pipe)) == {"messages": []}
    writer.join()


# Images


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    file = tmp_path / "a.png"
    file.write_bytes(b"12345")
    return file


def test_an_image_of_the_most_bytes_is_read(picture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_IMAGE_MAX_BYTES", "5")
    assert inputs.read_image(str(picture)) == "data:image/png;base64,MTIzNDU="


def test_a_larger_image_is_refused_with_the_limit_and_the_way_out(
    picture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_IMAGE_MAX_BYTES", "4")
    with pytest.raises(CliError, match="larger than 4 bytes.*make it smaller.*SLUICE_IMAGE_MAX_BYTES"):
        inputs.read_image(str(picture))


def test_the_limit_is_that_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLUICE_IMAGE_MAX_BYTES", raising=False)
    assert inputs._max_image_bytes() == Settings.model_fields["image_max_bytes"].default


def test_no_more_than_the_limit_is_read_of_a_huge_image(tmp_path: Path) -> None:
    huge = tmp_path / "huge.png"
    with huge.open("wb") as file:
        file.truncate(1 << 40)  # a terabyte, of which nothing is on the disk
    with pytest.raises(CliError, match="larger than"):
        inputs.read_image(str(huge))


@pytest.mark.parametrize("given", ["", "x", "1.5", "-1", "9" * 5000])
def test_a_limit_that_is_no_number_is_told(picture: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("SLUICE_IMAGE_MAX_BYTES", given)
    if given:
        with pytest.raises(CliError, match="SLUICE_IMAGE_MAX_BYTES must be a number of bytes"):
            inputs.read_image(str(picture))
    else:
        assert inputs.read_image(str(picture))


def test_a_device_and_a_pipe_are_no_images(tmp_path: Path) -> None:
    device, pipe = tmp_path / "zero.png", tmp_path / "pipe.png"
    device.symlink_to("/dev/zero")
    os.mkfifo(pipe)
    for path in device, pipe:
        with pytest.raises(CliError, match="is not a regular file"):
            inputs.read_image(str(path))


def test_an_image_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path, picture: Path) -> None:
    folder = tmp_path / "folder.png"
    folder.mkdir()
    for path, why in (
        (folder, "Is a directory"),
        (tmp_path / "missing.png", "No such file"),
        (picture / "a.png", "Not a directory"),
        (tmp_path / ("x" * 300 + ".png"), "File name too long"),
    ):
        with pytest.raises(CliError, match=f"cannot read .*{why}"):
            inputs.read_image(str(path))
