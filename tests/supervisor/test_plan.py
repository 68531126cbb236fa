import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.embedding import write_checkpoint
from tests.support.hub import serving_hub
from tests.support.stack import ROOT, TINY_CHAT
from worker.engine.model.drafter import with_head
from worker.engine.model.load import open_model
from worker.environment import variable
from worker.errors import CannotStart
from worker.settings import Settings
from worker.supervisor.decision import Plan
from worker.supervisor.plan import plan

PATH = str(TINY_CHAT)


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in map(variable, Settings.model_fields):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLUICE_MEMORY_HEADROOM_GB", "0")
    monkeypatch.chdir(tmp_path)


def config(*models: dict[str, Any], **common: Any) -> dict[str, Any]:
    named = models or ({}, {"name": "b"})
    return {"memory_gb": 0.15, **common, "model": [{"name": "a", "path": PATH, **each} for each in named]}


def refused(given: dict[str, Any]) -> str:
    with pytest.raises(CannotStart) as raised:
        plan(given)
    return str(raised.value)


def test_the_workers_get_their_settings_and_their_share_as_the_limit() -> None:
    given = config(
        {"max_rows": 4, "idle_unload_s": 60},
        {"name": "b", "memory_gb": 0.065},
        max_rows=2,
        redis_url="redis://there:7000/1",
        trust_model_code=False,
        metrics_port=9100,
    )
    found = plan(given)
    assert Plan.read(json.loads(json.dumps({**_fields(found)}))) == found
    a, b = found.models
    assert (found.budget, a.nbytes, b.nbytes) == (150_000_000, 85_000_000, 65_000_000)
    assert (a.idle_unload_s, b.idle_unload_s) == (60.0, None)
    assert a.env == {
        "SLUICE_MODEL": PATH, "SLUICE_MODEL_NAME": "a", "SLUICE_REDIS_URL": "redis://there:7000/1",
        "SLUICE_REDIS_URLS": "",
        "SLUICE_MEMORY_GB": "0.085000000", "SLUICE_MEMORY_HEADROOM_GB": "0", "SLUICE_MAX_ROWS": "4",
        "SLUICE_IDLE_UNLOAD_S": "60", "SLUICE_TRUST_MODEL_CODE": "false", "SLUICE_METRICS_PORT": "9100",
    }  # fmt: skip
    assert (b.env["SLUICE_MAX_ROWS"], b.env["SLUICE_METRICS_PORT"]) == ("2", "9101")


def _fields(found: Plan) -> dict[str, Any]:
    models = [{name: getattr(each, name) for name in each.__slots__} for each in found.models]
    return {name: getattr(found, name) for name in found.__slots__} | {"models": models}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"memory_gb": 1}, "there is no [[model]]; write one for each model"),
        ({"model": "a"}, "there is no [[model]]"),
        (config({"path": ""}), "[[model]] 1 has no path"),
        (config({}, {"name": 7}), "[[model]] 2 has no name"),
        (config({"name": "a b"}), "'a b' cannot be the name of a model; a name matches "),
        (config({}, {}), "two models are called 'a'; give each a name of its own"),
        (config({"max_row": 4}), "model a: max_row is not a setting; did you mean max_rows?"),
        (config(idle_unload=4), "idle_unload is not a setting; did you mean idle_unload_s?"),
        (config(model_name="a"), "model_name cannot be set there: each [[model]] has its name and its path"),
        (config({"redis_url": "redis://a"}), "model a: redis_url cannot be set there: it holds for all models"),
        (config({"worker_name": "w"}), "model a: worker_name cannot be set there: each [[model]] has its name"),
        (config({"max_rows": 0}), "model a: SLUICE_MAX_ROWS=0: it must be at least 1"),
        (config(max_rows="many"), "SLUICE_MAX_ROWS=many: it must be a whole number"),
        (config(idle_unload_s=0), "SLUICE_IDLE_UNLOAD_S=0: it must be more than 0"),
        (config({"memory_gb": 0.2}), "model a: memory_gb = 0.2 is more, and all models together may take 150 MB"),
        (config({"memory_gb": 0.01}), "model a: memory_gb = 0.01 is too little; it needs 61.6 MB for its weights"),
        (config(memory_gb=0.002), f"{PATH} cannot be served. Its weights take 2 MB of the 2 MB"),
        (config({"path": PATH + "x"}), f"{PATH}x: there is no such folder; did you mean {PATH}?"),
    ],
)
def test_a_bad_configuration_is_refused_with_the_place_and_the_remedy(given: dict[str, Any], said: str) -> None:
    assert refused(given).startswith(said)


def test_a_model_needs_room_for_a_row_of_what_the_memory_holds() -> None:
    assert [model.nbytes for model in plan(config(memory_gb=0.01)).models] == [10_000_000, 10_000_000]


@pytest.mark.parametrize(
    ("given", "head"),
    [({}, True), ({"speculation": "off"}, False), ({"mtp_model": PATH}, True), ({"mtp_model": "on/the-hub"}, True)],
)
def test_the_mtp_head_of_a_model_counts_as_the_worker_loads_it(given: dict[str, Any], head: bool) -> None:
    model = open_model(PATH)
    assert (
        plan(config(given)).models[0].weights == (with_head(model, PATH, None) if head else model).costs.weights_bytes
    )


def test_the_models_of_a_supervisor_are_on_one_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    servers = tmp_path / "servers.toml"
    monkeypatch.setenv("SLUICE_REDIS_URLS", str(servers))
    servers.write_text('default = "redis://one"\n[models]\na = "redis://two"\nb = "redis://two"\n')
    found = plan(config())
    assert {found.redis_url, *(each.env["SLUICE_REDIS_URL"] for each in found.models)} == {"redis://two"}
    servers.write_text('default = "redis://one"\n[models]\nb = "redis://two"\n')
    assert refused(config()) == (
        f"{servers} gives models a and b different servers; start a supervisor for the models of each."
    )


def test_an_embedding_model_divides_the_budget_with_chat_models(tmp_path: Path) -> None:
    folder = write_checkpoint("bert", tmp_path / "sentences")
    embedder = {"name": "e", "path": str(folder)}
    weights = (folder / "model.safetensors").stat().st_size
    a, e = plan(config({}, embedder)).models
    assert (e.weights, a.nbytes + e.nbytes, e.nbytes < a.nbytes) == (weights, 149_999_999, True)
    # A forward of one row of its context, 130 tokens.
    least = weights + 130 * (4 * (16 * 64 + 6 * 96) + 16 * 4 * 130)
    assert e.nbytes > least
    assert plan(config({}, {**embedder, "memory_gb": (least + 1) / 1e9})).models[1].nbytes >= least
    assert refused(config({}, {**embedder, "memory_gb": (least - 1) / 1e9})).startswith("model e: memory_gb = 0.0")
    assert refused(config(embedder, memory_gb=weights / 1e9)).startswith("model e: it needs ")


def test_the_weights_of_an_embedding_model_on_the_hub_are_counted_and_not_downloaded(tmp_path: Path) -> None:
    folder = write_checkpoint("bert", tmp_path / "sentences")
    with serving_hub(sentences=folder) as hub:
        done = subprocess.run(
            [sys.executable, "-m", "worker.supervisor.plan"],
            input=json.dumps(config({}, {"name": "e", "path": "tests/sentences"})),
            env={**os.environ, "PYTHONPATH": str(ROOT), "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    weights = (folder / "model.safetensors").stat().st_size
    assert json.loads(done.stdout)["models"][1]["weights"] == weights, done.stderr
    assert not [*tmp_path.glob("home/**/*.safetensors")]


def test_what_an_embedding_model_cannot_have_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint("bert", tmp_path / "sentences")
    embedder = {"name": "e", "path": str(folder)}
    (tmp_path / "prompts.json").write_text('["Be brief."]')
    warmed = {"prefix_warm": str(tmp_path / "prompts.json")}
    assert refused(config({}, embedder, **warmed)).startswith("model e: it is an embedding model, without prefixes; ")
    assert [each.name for each in plan(config(warmed, embedder)).models] == ["a", "e"]
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "auto_map": {"AutoModel": "code.Model"}}))
    assert "names Python code" in refused(config({}, embedder))
    del described["intermediate_size"]
    (folder / "config.json").write_text(json.dumps(described))
    assert "intermediate_size" in refused(config({}, embedder))
    (folder / "model.safetensors").unlink()
    assert refused(config({}, embedder)).startswith(f"{folder} has no weights: ")
