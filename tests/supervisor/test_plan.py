import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.stack import TINY_CHAT
from worker.environment import variable
from worker.errors import CannotStart
from worker.settings import Settings
from worker.supervisor.plan import plan
from worker.supervisor.planned import Plan

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
        {"name": "b", "memory_gb": 0.06},
        max_rows=2,
        redis_url="redis://there:7000/1",
        trust_model_code=False,
        metrics_port=9100,
    )
    found = plan(given)
    assert Plan.read(json.loads(json.dumps({**_fields(found)}))) == found
    a, b = found.models
    assert (found.budget, a.nbytes, b.nbytes) == (150_000_000, 90_000_000, 60_000_000)
    assert (a.idle_unload_s, b.idle_unload_s) == (60.0, None)
    assert a.env == {
        "SLUICE_MODEL": PATH, "SLUICE_MODEL_NAME": "a", "SLUICE_REDIS_URL": "redis://there:7000/1",
        "SLUICE_REDIS_URLS": "",
        "SLUICE_MEMORY_GB": "0.090000000", "SLUICE_MEMORY_HEADROOM_GB": "0", "SLUICE_MAX_ROWS": "4",
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
        (config({"memory_gb": 0.01}), "model a: memory_gb = 0.01 is too little; it needs 56.8 MB for its weights"),
        (config(memory_gb=0.002), f"{PATH} cannot be served. Its weights take 2 MB of the 2 MB"),
        (config({"path": PATH + "x"}), f"{PATH}x: there is no such folder; did you mean {PATH}?"),
    ],
)
def test_a_bad_configuration_is_refused_with_the_place_and_the_remedy(given: dict[str, Any], said: str) -> None:
    assert refused(given).startswith(said)


def test_a_model_needs_room_for_a_row_of_what_the_memory_holds() -> None:
    assert [model.nbytes for model in plan(config(memory_gb=0.01)).models] == [10_000_000, 10_000_000]


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
