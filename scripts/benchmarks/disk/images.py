"""A restart, and then another question about an image that was encoded before."""

import statistics
from collections.abc import Iterator
from pathlib import Path

from scripts.benchmarks.disk.figures import Figure
from scripts.benchmarks.disk.restart import drop_pages
from scripts.benchmarks.disk.worker import ANSWER, Worker
from scripts.benchmarks.vision import image_prompt, new_image, request_of
from worker.engine.model.load import Model
from worker.schedule.request import ProcessedImage

SIDES = 320, 896  # pixels: 100 and 784 tokens of the benchmark's model


def figures(model: Model, folder: Path, runs: int, sides: tuple[int, ...] = SIDES) -> Iterator[Figure]:
    """Compare the first token about an image whose features are on disk with that about one that is encoded. No other
    part of the prompts is on disk. The files' pages are dropped before each restart."""
    for side in sides:
        pictures = [new_image(model, side) for _ in range(runs)]
        store = Worker(model, folder)
        for seed, picture in enumerate(pictures):
            _first_token_s(model, store, picture, seed)
        store.close()
        drop_pages(sorted(folder.glob("*.safetensors")))
        restarted, without = Worker(model, folder), Worker(model, None)
        loaded, encoded = list[float](), list[float]()
        for seed, picture in enumerate(pictures, start=runs):
            loaded.append(_first_token_s(model, restarted, picture, seed))
            encoded.append(_first_token_s(model, without, picture, seed))
        restarted.abandon()
        loaded_s, encoded_s = statistics.median(loaded), statistics.median(encoded)
        yield Figure(
            f"first token about an image of {pictures[0].tokens} tokens, from disk against encoding",
            loaded_s / encoded_s,
            f"{loaded_s / encoded_s:.2f} ({1000 * loaded_s:,.0f}, {1000 * encoded_s:,.0f} ms)",
        )


def _first_token_s(model: Model, worker: Worker, picture: ProcessedImage, seed: int) -> float:
    request = request_of(model, f"image {seed}", image_prompt(model, picture, seed=seed), ANSWER)
    return worker.run(request).first_token_s
