import json

import pytest

from sluice.contract import keys, models

MODEL = models.Model(
    path="m/a", bytes=7, state="loading", since=1.5, weights=5, loaded_bytes=2, worker="mac-1-a", problem=""
)


def test_a_supervisor_s_hash_is_told_from_its_commands() -> None:
    named = [keys.models("mac-1.local-7"), keys.model_commands("mac-1.local-7"), "sluice:model:default"]
    assert [models.is_supervisor(name.encode()) for name in named] == [True, False, False]


def test_a_model_is_read_as_it_was_written() -> None:
    assert models.read_model(json.dumps(MODEL)) == MODEL
    assert models.read_model(json.dumps({**MODEL, "added": [1]}).encode()) == {**MODEL, "added": [1]}
    earlier = {name: value for name, value in MODEL.items() if name != "loaded_bytes"}
    assert models.read_model(json.dumps(earlier)) == {**MODEL, "loaded_bytes": 0}


@pytest.mark.parametrize(("loaded_bytes", "weights", "share"), [(2, 5, 0.4), (9, 5, 1.0), (-1, 5, 0.0), (0, 0, 0.0)])
def test_the_loaded_share_is_between_0_and_1_whatever_is_written(loaded_bytes: int, weights: int, share: float) -> None:
    assert models.loaded_share({**MODEL, "loaded_bytes": loaded_bytes, "weights": weights}) == share


@pytest.mark.parametrize(
    "value", ["", "7", "[]", "{}", json.dumps({**MODEL, "state": "lost"}), json.dumps({**MODEL, "bytes": "7"}), b"\xff"]
)
def test_a_foreign_value_is_no_model(value: bytes | str) -> None:
    assert models.read_model(value) is None


@pytest.mark.parametrize(
    "value", ["", "7", "{}", '{"do": "drop", "model": "a"}', '{"do": "load", "model": 7}', b"\xff"]
)
def test_a_foreign_value_is_no_command(value: bytes | str) -> None:
    assert models.read_command(value) is None


def test_a_command_is_read() -> None:
    assert models.read_command(b'{"do": "unload", "model": "a"}') == {"do": "unload", "model": "a"}
