"""`sluice models pull`, `list` and `rm` with the real huggingface_hub, against a server with the hub's routes."""

import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.contract import keys
from tests.end_to_end.test_cli import Command
from tests.support.hub import SHA, Hub, serving_hub
from tests.support.stack import TINY_CHAT, WorkerProcess

CHUNK = 10 * 1024 * 1024  # bytes that huggingface_hub gathers before it writes them
WEIGHTS = 3 * CHUNK


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A hub with `tests/tiny`, with `tests/large`, whose weights take three chunks, with `tests/strange`, which
    no worker serves, and with `tests/embedding`, which is an embedding model by its name alone."""
    folders = {name: tmp_path / name for name in ("tiny", "large", "strange", "embedding")}
    for folder in folders.values():
        shutil.copytree(TINY_CHAT, folder)
        (folder / "README.md").unlink()  # which no worker reads
    (folders["large"] / "model-2.safetensors").write_bytes(os.urandom(WEIGHTS))
    (folders["strange"] / "config.json").write_text('{"model_type": "unheard_of"}', "utf-8")
    (folders["embedding"] / "config.json").write_text('{"model_type": "qwen3", "max_position_embeddings": 9}', "utf-8")
    (folders["embedding"] / "2_Dense").mkdir()
    shutil.copyfile(TINY_CHAT / "mtp.safetensors", folders["embedding"] / "2_Dense" / "model.safetensors")
    with serving_hub(**folders) as hub:
        yield hub


@pytest.fixture
def sluice(redis_url: str, tmp_path: Path, hub: Hub) -> Command:
    command = Command(redis_url, tmp_path)
    command.env.update(HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "home"))
    return command


def cached(sluice: Command, name: str) -> list[Path]:
    """The files of the model's snapshot."""
    return sorted(Path(sluice.env["HF_HOME"]).glob(f"hub/models--tests--{name}/snapshots/*/*"))


def test_a_model_is_pulled_listed_served_and_deleted_when_nobody_serves_it(sluice: Command, hub: Hub) -> None:
    code, out, err = sluice.process("models", "pull", "tests/tiny")
    assert (code, out) == (0, ""), err
    assert [file.read_bytes() for file in cached(sluice, "tiny")] == [
        file.read_bytes() for file in sorted(hub.models["tests/tiny"].iterdir()) if file.name != "mtp.safetensors"
    ]
    given = {"HF_HOME": sluice.env["HF_HOME"], "HF_ENDPOINT": hub.url}
    url = sluice.env["SLUICE_REDIS_URL"]
    with WorkerProcess(url, model="tests/tiny", model_name="mine", lease_s=2, more_env=given) as worker:
        served, *there = map(json.loads, sluice.process("models", "list", "--json")[1].splitlines())
        assert (served["name"], served["workers"]) == ("mine", 1)
        (found,) = [each for each in there if each["checkpoint"] == "tests/tiny"]
        assert (found["family"], found["servable"], found["workers"]) == ("qwen3_5", True, [worker.name])
        assert found["bytes"] == sum(file.stat().st_size for file in cached(sluice, "tiny"))
        assert worker.name in sluice.process("models", "list")[1]
        code, _, err = sluice.process("models", "rm", "tests/tiny", "--yes")
        assert (code, f"drain {worker.name}" in err) == (2, True), err
        assert cached(sluice, "tiny")
    code, _, err = sluice.process("models", "rm", "tests/tiny")  # nobody answers the question
    assert (code, "--yes" in err, bool(cached(sluice, "tiny"))) == (2, True, True)
    assert "2.1 MB in 5 files" in err
    assert sluice.process("models", "rm", "tests/tiny", "--yes")[0] == 0
    assert cached(sluice, "tiny") == []
    code, _, err = sluice.process("models", "rm", "tests/tiny", "--yes")
    assert (code, "there is no model 'tests/tiny'" in err) == (2, True), err


@pytest.mark.parametrize("reset", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_download_goes_on_where_a_broken_connection_left_it(sluice: Command, hub: Hub, reset: bool) -> None:
    hub.cuts, hub.cut_bytes, hub.reset = 2, CHUNK + 1000, reset
    code, _, err = sluice.process("models", "pull", "tests/large", "--force")
    assert code == 0, err
    (whole,) = [file for file in cached(sluice, "large") if file.name == "model-2.safetensors"]
    assert whole.read_bytes() == (hub.models["tests/large"] / "model-2.safetensors").read_bytes()
    assert f"bytes={CHUNK}-" in hub.ranges


@pytest.mark.slow
def test_the_files_that_have_not_arrived_are_fetched_by_the_same_command(sluice: Command, hub: Hub) -> None:
    (hub.models["tests/large"] / "model-2.safetensors").rename(hub.models["tests/large"] / "model-gone.safetensors")
    hub.missing.add("model-gone.safetensors")
    code, _, err = sluice.process("models", "pull", "tests/large", "--force")
    assert (code, "Traceback" in err) == (2, False), err
    (listed,) = map(json.loads, sluice.process("models", "list", "--json")[1].splitlines())
    assert (listed["servable"], "sluice models pull tests/large" in listed["problem"]) == (False, True)
    hub.missing.clear()
    hub.ranges.clear()
    code, _, err = sluice.process("models", "pull", "tests/large", "--force")
    assert (code, hub.ranges) == (0, [""]), "only that file is fetched"
    assert not list(Path(sluice.env["HF_HOME"]).glob("hub/**/*.incomplete"))


def test_all_weights_of_an_embedding_model_are_pulled_and_it_is_checked_as_one(sluice: Command) -> None:
    code, _, err = sluice.process("models", "pull", "tests/embedding", "--force")
    assert code == 0, err
    dense = next(Path(sluice.env["HF_HOME"]).glob("hub/models--tests--embedding/snapshots/*")) / "2_Dense"
    assert (dense / "model.safetensors").is_file()
    (listed,) = map(json.loads, sluice.process("models", "list", "--json")[1].splitlines())
    assert listed["family"] == "qwen3"
    assert "mlx-embeddings" in (listed["problem"] or "it has mlx-embeddings")
    (dense / "model.safetensors").unlink()
    (listed,) = map(json.loads, sluice.process("models", "list", "--json")[1].splitlines())
    assert "sluice models pull tests/embedding" in listed["problem"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["tests/unheard"], "no such public model"),
        pytest.param(["a b"], "no id of Hugging Face", marks=pytest.mark.slow),
        ([str(TINY_CHAT)], "is a folder"),
        (["tests/strange"], "would not serve it here"),
    ],
)
def test_what_cannot_be_pulled_is_refused_before_weights_are_fetched(
    sluice: Command, hub: Hub, args: list[str], says: str
) -> None:
    code, out, err = sluice.process("models", "pull", *args)
    assert (code, out, hub.ranges) == (2, "", [])
    assert says in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_gated_model_a_full_disk_and_a_hub_that_is_away_are_told(sluice: Command, hub: Hub) -> None:
    hub.extra_bytes = 10**15
    code, _, err = sluice.process("models", "pull", "tests/tiny", "--force")
    assert (code, "has room for" in err, hub.ranges) == (2, True, []), err
    hub.extra_bytes = 0
    hub.gated.add("tests/large")
    code, _, err = sluice.process("models", "pull", "tests/large")
    assert (code, "run hf auth login" in err) == (2, True), err
    hub.status = 503
    assert "503" in sluice.process("models", "pull", "tests/strange")[2]
    with socket.create_server(("127.0.0.1", 0)) as closed:
        sluice.env["HF_ENDPOINT"] = f"http://127.0.0.1:{closed.getsockname()[1]}"
    code, _, err = sluice.process("models", "pull", "tests/strange")
    assert (code, "cannot be reached" in err, "Traceback" in err) == (2, True, False), err


@pytest.mark.slow
def test_a_worker_of_an_earlier_version_and_a_missing_server_keep_a_model(sluice: Command, hub: Hub) -> None:
    assert sluice.process("models", "pull", "tests/tiny")[0] == 0
    sluice.db.hset("sluice:worker:old", mapping={"name": "old", "model": "default", "host": socket.gethostname()})
    code, _, err = sluice.process("models", "rm", "tests/tiny", "--yes")
    assert (code, "earlier version" in err) == (2, True), err
    sluice.db.hset("sluice:worker:old", "host", "elsewhere")
    code, _, err = sluice.process("models", "rm", "tests/tiny", "--yes", "--redis-url", "redis://127.0.0.1:1/0")
    assert (code, "no server answers" in err, bool(cached(sluice, "tiny"))) == (2, True, True)
    assert sluice.process("models", "rm", "tests/tiny", "--yes")[0] == 0


def test_a_supervisor_that_has_its_folder_and_a_server_of_the_map_that_is_down_keep_a_model(
    sluice: Command, hub: Hub, tmp_path: Path
) -> None:
    repo = Path(sluice.env["HF_HOME"]) / "hub" / "models--tests--tiny"
    snapshot = shutil.copytree(hub.models["tests/tiny"], repo / "snapshots" / SHA)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(SHA, "utf-8")
    model = {
        "path": str(snapshot),
        "bytes": 1,
        "state": "unloaded",
        "since": 1,
        "weights": 1,
        "worker": "",
        "problem": "",
    }
    key = keys.models(f"{socket.gethostname()}-1")
    sluice.db.hset(key, "mine", json.dumps(model))
    code, _, err = sluice.process("models", "rm", "tests/tiny", "--yes")
    assert (code, "the supervisor" in err, snapshot.is_dir()) == (2, True, True), err
    sluice.db.delete(key)
    servers = tmp_path / "servers.toml"
    servers.write_text(f'default = "{sluice.env.pop("SLUICE_REDIS_URL")}"\n[models]\nbig = "redis://127.0.0.1:1/0"\n')
    sluice.env["SLUICE_REDIS_URLS"] = str(servers)
    code, _, err = sluice.process("models", "rm", "tests/tiny", "--yes")
    assert (code, "127.0.0.1:1/0 of big" in err, snapshot.is_dir()) == (2, True, True), err
