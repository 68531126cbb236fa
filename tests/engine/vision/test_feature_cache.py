"""Features of images survive on disk: what is loaded equals what was encoded, and no image is encoded twice."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models.tiny_vision import CONFIGS
from tests.engine.prefix.test_disk import Worker, settled, settled_writes
from tests.engine.vision import cases
from tests.engine.vision.cases import Prompt
from tests.engine.vision.test_encoder import counted
from worker.engine.prefill.load import LoadImages
from worker.engine.prefill.task import PromptTask
from worker.engine.vision.feature_cache import FeatureCache, Features
from worker.outcomes import Outcome, PromptProgress
from worker.prefix_store.listing import Listing
from worker.prefix_store.names import IMAGE_FEATURES
from worker.prefix_store.reader import ChainReading, Reader

ALL = pytest.mark.parametrize("family", [*CONFIGS])
ANSWER = 8
IMAGE = (4, 64, 56)
OTHER = (5, 64, 56)
LIMIT = "worker.engine.prefill.queue.load_limit_s"


@pytest.fixture(autouse=True)
def only_images_are_worthwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no prefix from disk stands in for an image."""
    monkeypatch.setattr(LIMIT, lambda load, compute_s, **more: 60.0 if more else None)


class Seeing(Worker):
    """A worker with a vision model, which keeps the progress of its loads."""

    def __init__(self, family: str, folder: Path, **options: Any) -> None:
        self.family = family
        self.loads: list[PromptProgress] = []
        super().__init__(family, folder, opened=cases.model(family), **options)

    def receive(self, outcome: Outcome) -> None:
        super().receive(outcome)
        if isinstance(outcome, PromptProgress) and outcome.phase == "loading":
            self.loads.append(outcome)

    def look(self, given: Prompt, **more: Any) -> None:
        """Answer to the end, and as mlx-vlm does."""
        id = f"row {len(self.generated)}"
        self.submit(cases.image_request(self.family, id, given, ANSWER, **more))
        while len(self.engine):
            self.step()
        assert self.generated[id] == cases.alone(self.family, given, ANSWER)

    @property
    def features(self) -> FeatureCache:
        found = self.engine._caches.features
        assert found is not None
        return found


def about(family: str, *images: tuple[int, int, int], seed: int) -> Prompt:
    """Return a prompt about images; with another seed it shares no prefix."""
    return cases.prompt(family, 6, *images, 5, seed=seed)


def store_features(folder: Path, **more: Any) -> None:
    """Let a worker answer about an image, and end. `more`: of the request."""
    run = Seeing("qwen2_vl", folder)
    run.look(about("qwen2_vl", IMAGE, seed=1), **more)
    run.close()


def raw(features: Features) -> list[tuple[object, ...]]:
    return [(array.dtype, array.shape, memoryview(array).tobytes()) for array in features.arrays]  # type: ignore[arg-type]


def held(run: Seeing) -> dict[bytes, list[tuple[object, ...]]]:
    return {digest: raw(features) for (_, digest), features in run.features._entries.items()}


@ALL
def test_after_a_restart_no_image_is_encoded_again_and_no_bit_differs(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = counted(family, monkeypatch)
    first = Seeing(family, tmp_path)
    first.look(about(family, IMAGE, OTHER, seed=1))
    encoded = held(first)
    first.close()
    assert len(looked) == 2
    again = Seeing(family, tmp_path)
    again.look(about(family, OTHER, IMAGE, seed=2))
    assert len(looked) == 2
    assert held(again) == encoded
    tokens = sum(features.tokens for features in again.features._entries.values())
    assert (again.loads[-1].done, again.loads[-1].total) == (tokens, tokens)
    again.close()


@ALL
def test_evicted_features_come_back_from_disk(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = counted(family, monkeypatch)
    run = Seeing(family, tmp_path)
    run.look(about(family, IMAGE, seed=1))
    run.engine._caches.set_limit(0)
    settled(run)
    run.engine._caches.set_limit(10**9)
    run.look(about(family, IMAGE, seed=2))
    assert len(looked) == 1
    run.close()


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_features_that_a_third_prompt_uses_survive_a_crash(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = counted(family, monkeypatch)
    run = Seeing(family, tmp_path)
    for seed in (1, 2, 3):
        assert not features_on_disk(tmp_path)
        run.look(about(family, IMAGE, seed=seed))
    settled_writes(run)
    assert len(features_on_disk(tmp_path)) == 1
    after_crash = Seeing(family, tmp_path)  # while the first one has not ended
    after_crash.look(about(family, IMAGE, seed=4))
    assert len(looked) == 1
    after_crash.close()
    run.close()


def readings_of(task: PromptTask) -> list[ChainReading]:
    stages = (stage for stage in task._first if isinstance(stage, LoadImages))
    return [reading for stage in stages for _, reading in stage._readings]


def features_on_disk(folder: Path) -> list[Path]:
    def tokens(path: Path) -> Any:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return json.loads(header["__metadata__"]["tokens"])

    def is_image(path: Path) -> bool:
        first = tokens(path)[0]
        return (first[0] if isinstance(first, list) else first) >= IMAGE_FEATURES

    return [path for path in folder.glob("*.safetensors") if is_image(path)]


def test_an_image_that_the_prefix_has_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMIT, lambda *_, **__: 60.0)
    given = cases.prompt("qwen2_vl", 40, IMAGE, 30)
    first = Seeing("qwen2_vl", tmp_path)
    first.look(given)
    first.close()
    again = Seeing("qwen2_vl", tmp_path)
    again.look(replace(given, tokens=(*given.tokens, *range(60, 70))))
    assert {load.total for load in again.loads} == {len(given.tokens) - 1}
    assert not held(again)
    again.close()


def test_tenants_do_not_find_each_others_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = counted("qwen2_vl", monkeypatch)
    store_features(tmp_path, namespace="a")
    again = Seeing("qwen2_vl", tmp_path)
    for namespace in ("a", "b"):
        again.look(about("qwen2_vl", IMAGE, seed=2), namespace=namespace)
    assert len(looked) == 2
    again.close()


def test_a_bad_file_is_removed_and_the_image_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looked = counted("qwen2_vl", monkeypatch)
    store_features(tmp_path)
    (path,) = features_on_disk(tmp_path)
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    again = Seeing("qwen2_vl", tmp_path)
    again.look(about("qwen2_vl", IMAGE, seed=2))
    assert len(looked) == 2
    assert "a checksum differs" in caplog.text
    again.close()


def test_an_image_is_encoded_when_the_folder_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = counted("qwen2_vl", monkeypatch)
    store_features(tmp_path)
    read_segment = Reader._read_segment

    def hang(*arguments: Any) -> Any:
        time.sleep(0.5)
        return read_segment(*arguments)

    monkeypatch.setattr(Reader, "_read_segment", hang)
    monkeypatch.setattr(LIMIT, lambda load, compute_s, **more: 0.05 if more else None)
    again = Seeing("qwen2_vl", tmp_path)
    again.look(about("qwen2_vl", IMAGE, seed=2))
    assert len(looked) == 2
    again.close()


def test_an_image_that_is_encoded_faster_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = counted("qwen2_vl", monkeypatch)
    store_features(tmp_path)
    monkeypatch.undo()
    looked = counted("qwen2_vl", monkeypatch)
    again = Seeing("qwen2_vl", tmp_path)
    for _ in range(50):
        again.engine._prefills._costs["encoding"].observe_chunk(1_000_000, 0, 1e-3)
    again.look(about("qwen2_vl", IMAGE, seed=2))
    assert len(looked) == 1
    again.close()


def test_features_that_are_not_finite_are_forgotten_on_disk_too(tmp_path: Path) -> None:
    first = Seeing("qwen2_vl", tmp_path)
    given = about("qwen2_vl", IMAGE, seed=1)
    first.look(given)
    first.close()
    again = Seeing("qwen2_vl", tmp_path)
    images = cases.image_request("qwen2_vl", "a", given, 1).images
    assert again.features.stored is not None
    assert again.features.stored.find("", images[0])
    again.features.forget_non_finite("", images)
    assert again.features.stored.find("", images[0]) is None
    again.close()
    assert not features_on_disk(tmp_path)


def test_8_bits_leave_features_exact(tmp_path: Path) -> None:
    first = Seeing("qwen2_vl", tmp_path, bits=8)
    first.look(about("qwen2_vl", IMAGE, seed=1))
    encoded = held(first)
    first.close()
    again = Seeing("qwen2_vl", tmp_path, bits=8)
    again.look(about("qwen2_vl", IMAGE, seed=2))
    assert held(again) == encoded
    assert again.loads
    again.close()


def test_encrypted_features_are_found_with_the_key_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography")
    looked = counted("qwen2_vl", monkeypatch)
    key = os.urandom(32)
    for run_key, seed, encoded in ((key, 1, 1), (key, 2, 1), (os.urandom(32), 3, 2)):
        run = Seeing("qwen2_vl", tmp_path, key=run_key)
        run.look(about("qwen2_vl", IMAGE, seed=seed))
        run.close()
        assert len(looked) == encoded


def test_the_list_tells_images_from_prefixes(tmp_path: Path) -> None:
    run = Seeing("qwen2_vl", tmp_path)
    given = about("qwen2_vl", IMAGE, seed=1)
    run.look(given)
    run.close()
    listing = Listing(tmp_path)
    kinds = {each.tokens: content.kind for each in listing.prefixes if (content := listing.content(each))}
    (image,) = cases.image_request("qwen2_vl", "a", given, 1).images
    assert kinds.pop(image.tokens) == "image"
    assert {*kinds.values()} == {"prefix"}


def test_files_of_images_for_waiting_requests_are_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_features(tmp_path)
    again = Seeing("qwen2_vl", tmp_path)
    again.submit(cases.image_request("qwen2_vl", "a", about("qwen2_vl", IMAGE, seed=2), ANSWER))
    (ahead,) = again.engine._prefills._ahead["a"]
    assert ahead.chain.tokens[0] >= IMAGE_FEATURES
    again.drain()
    assert not again.engine._prefills._ahead
    again.close()


def test_prompts_that_share_a_reading_compute_nothing_unplanned_when_it_ends(tmp_path: Path) -> None:
    store_features(tmp_path)
    again = Seeing("qwen2_vl", tmp_path)
    given = {str(seed): about("qwen2_vl", IMAGE, seed=seed) for seed in range(2, 8)}
    for id, each in given.items():
        again.submit(cases.image_request("qwen2_vl", id, each, ANSWER))
    again.step()
    readings = [reading for task in again.engine._prefills._tasks.values() for reading in readings_of(task)]
    assert len(readings) == len(given)
    while not all(reading.done for reading in readings):
        time.sleep(0.001)
    before = dict(again.chunks)
    again.step()
    assert dict(again.chunks) == before  # the step took the features, and computed no prompt
    again.drain()
    assert all(again.generated[id] == cases.alone("qwen2_vl", each, ANSWER) for id, each in given.items())
    again.close()


def test_a_conversation_with_an_image_in_its_prefix_writes_no_features(tmp_path: Path) -> None:
    run = Seeing("qwen2_vl", tmp_path)
    given = cases.prompt("qwen2_vl", 40, IMAGE, 30)
    for turn in range(4):
        tokens = (*given.tokens, *range(60, 60 + 5 * turn))
        run.look(replace(given, tokens=tokens))
    settled_writes(run)
    assert not features_on_disk(tmp_path)
    run.close()


def test_forgetting_an_image_ends_its_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Seeing("qwen2_vl", tmp_path)
    given = about("qwen2_vl", IMAGE, seed=1)
    first.look(given)
    first.close()
    again = Seeing("qwen2_vl", tmp_path)
    images = cases.image_request("qwen2_vl", "a", given, 1).images
    stored = again.features.stored
    assert stored is not None
    chain = stored.find("", images[0])
    assert chain is not None
    reading = stored.store.reader.read(chain)
    again.features.forget_non_finite("", images)
    assert reading.done
    assert not reading.segments
    again.close()
