"""Images: in one batch with text against one by one, their cost for running rows, and the cost of cached ones."""

import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_vlm.generate import generate_step
from PIL.Image import fromarray
from rich.console import Console
from rich.table import Table

from scripts.benchmarks.engine import Line, ratio
from tests.engine.vision.cases import as_one_prompt
from tests.engine.vision.checkpoints import CONFIGS, build, write_checkpoint
from worker.engine.engine import Engine
from worker.engine.model.load import Model, open_model
from worker.engine.tokenizer import MLXTokenizer
from worker.schedule.outcomes import Encoded, Outcome, Sampled
from worker.schedule.request import GenerationRequest, ProcessedImage
from worker.schedule.step.gap import longest_gap_s

RUNS = 3
ROWS = 8
TOKENS = 48
TEXT = 48
SIDE = 320  # pixels: 100 tokens
_seeds = count()  # of images: features are cached, so every image is new


def main(console: Console) -> bool:
    """Run the benchmark, print its table, and return True if every value is within its limit."""
    with tempfile.TemporaryDirectory() as folder:
        model = open_model(str(vision_checkpoint(Path(folder))))
    model.tokenizer.eos_token_ids = []  # a random model may sample one at any time
    table = Table("measured", "bar", "came to", "holds", title="Images", title_justify="left")
    holds = True
    for part in (throughput, gaps, repeated):
        for label, limit, value, within in part(model):
            table.add_row(label, limit, value, {True: "[green]yes", False: "[red]no", None: ""}[within])
            holds = holds and within is not False
    console.print(table)
    return holds


def vision_checkpoint(folder: Path) -> Path:
    """Write a qwen3_5 in fp32 with a vision encoder of eight layers, and return the folder. A step takes some 30 to
    60 ms on two cores."""
    config = json.loads(json.dumps(CONFIGS["qwen3_5"]))
    config["text_config"] |= {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8, "full_attention_interval": 4,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
        "linear_num_value_heads": 16, "linear_num_key_heads": 8, "linear_key_head_dim": 64,
        "linear_value_head_dim": 64, "max_position_embeddings": 32768,
    }  # fmt: skip
    config["vision_config"] |= {
        "depth": 8, "hidden_size": 256, "intermediate_size": 1024, "num_heads": 4, "out_hidden_size": 1024,
        "patch_size": 16, "spatial_patch_size": 16, "num_position_embeddings": 1024,
    }  # fmt: skip
    write_checkpoint("qwen3_5", folder)
    weights = dict(tree_flatten(build(config, seed=0).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    file = folder / "preprocessor_config.json"
    sizes = {"patch_size": 16, "size": {"shortest_edge": 32**2, "longest_edge": 4096**2}}
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | sizes), "utf-8")
    return folder


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens of a prompt, and its images."""

    tokens: tuple[int, ...]
    images: tuple[ProcessedImage, ...] = ()


def text_tokens(tokens: int, seed: int) -> tuple[int, ...]:
    """Return random text tokens."""
    dice = Random(seed)
    return tuple(dice.randrange(256) for _ in range(tokens))


def new_image(model: Model, side: int = SIDE) -> ProcessedImage:
    """Return a random image that is in no cache. `side`: in pixels."""
    assert model.vision is not None
    number = next(_seeds)
    pixels = np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)
    return model.vision.image_processor.preprocess(fromarray(pixels), number.to_bytes(4))


def image_prompt(model: Model, image: ProcessedImage, *, seed: int, text: int = TEXT) -> Prompt:
    """Return a prompt of `text` tokens with an image in the middle."""
    before, after = text_tokens(text // 2, seed), text_tokens(text // 2, seed + 1000)
    return Prompt((*before, *MLXTokenizer(model.tokenizer).encode(image.text), *after), (image,))


def request_of(model: Model, id: str, prompt: Prompt, tokens: int) -> GenerationRequest:
    """Return the request for a prompt."""
    assert model.vision is not None
    prompt_images = model.vision.image_processor.prompt_images(prompt.tokens, prompt.images)
    return GenerationRequest(id, prompt.tokens, tokens, images=prompt_images)


# Throughput: all requests are present from the start


def throughput(model: Model) -> Iterator[Line]:
    """Compare all requests in one batch with one by one. Runs once, since it takes minutes."""
    with_images, plain = mixed(model)
    for warm in (with_images[0], plain[0]):
        engine_s(model, [warm], tokens=2), upstream_s(model, warm, tokens=2)
    together_s = engine_s(model, [*with_images, *plain])
    alone = [(upstream_s(model, each), engine_s(model, [each])) for each in (*with_images, *plain)]
    together_s = (together_s + engine_s(model, [*with_images, *plain])) / 2
    for label, each_s in zip(("mlx-vlm's generation", "this engine"), zip(*alone, strict=True), strict=True):
        speed, token_s = sum(each_s) / together_s, sum(each_s) / (2 * ROWS * TOKENS)
        yield (
            f"{ROWS} with images and {ROWS} of text together, against {label} one by one",
            "≥ 2",
            f"{speed:.2f} ({2 * ROWS * TOKENS / together_s:,.0f} tokens/s; {token_s * 1000:.0f} ms a token alone)",
            speed >= 2,
        )


def mixed(model: Model) -> tuple[list[Prompt], list[Prompt]]:
    """Return prompts with images, and prompts of text only."""
    with_images = [image_prompt(model, new_image(model), seed=seed) for seed in range(ROWS)]
    return with_images, [Prompt(text_tokens(TEXT, 100 + seed)) for seed in range(ROWS)]


def engine_s(model: Model, prompts: Sequence[Prompt], tokens: int = TOKENS) -> float:
    """Return the seconds that the engine takes for all prompts, without caches."""
    engine = Engine(model, step_s=10.0, prefix_bytes=0)
    began = time.perf_counter()
    for at, prompt in enumerate(prompts):
        engine.add(request_of(model, str(at), prompt, tokens))
    while len(engine):
        engine.step()
    return time.perf_counter() - began


def upstream_s(model: Model, prompt: Prompt, tokens: int = TOKENS) -> float:
    """Return the seconds that mlx-vlm takes for one prompt."""
    assert model.vision is not None
    pixels, extra = as_one_prompt(prompt.images)
    began = time.perf_counter()
    ids = mx.array([prompt.tokens])
    steps = generate_step(
        ids, model.vision.network, pixels, mx.ones_like(ids), max_tokens=tokens, temperature=0.0, **extra
    )
    for _ in zip(range(tokens), steps, strict=False):
        pass
    return time.perf_counter() - began


# The cost for running rows

RUNNING = 4
BUDGET = 3  # the step target, in decode steps of these rows


def gaps(model: Model) -> Iterator[Line]:
    """Measure the longest gap of running rows while images are encoded and prefilled."""
    step_s = BUDGET * decode_s(model)
    engine = running(model, step_s)
    learning, *rounds = [longest_gaps(model, engine) for _ in range(RUNS + 1)]  # the first round is a warm-up
    alone_s = statistics.median(alone for *_, alone in rounds)
    for at, phase in enumerate(("encoded", "prefilled")):
        value = statistics.median(longest[at] for longest in rounds)
        yield (
            f"longest gap of {RUNNING} rows while {ROWS} images are {phase}, for a step of {step_s * 1000:.0f} ms",
            f"≤ {longest_gap_s(step_s, 0.0) * 1000:.0f} ms",
            f"{value * 1000:.0f} ms (the first ever {learning[at] * 1000:.0f}, without any {alone_s * 1000:.0f})",
            value <= longest_gap_s(step_s, 0.0),
        )


def running(model: Model, step_s: float) -> Engine:
    """Return an engine whose rows decode."""
    engine = Engine(model, step_s=step_s, prefix_bytes=0)
    for at in range(RUNNING):
        engine.add(GenerationRequest(f"running {at}", text_tokens(32, at), 30_000))
    while engine.step().rows < RUNNING:
        pass
    return engine


def decode_s(model: Model) -> float:
    """Return the median seconds of a step of these rows."""
    engine = running(model, 10.0)
    return statistics.median(engine.step().seconds for _ in range(20))


def longest_gaps(model: Model, engine: Engine) -> tuple[float, float, float]:
    """Return the longest step in which an image was encoded, the longest other one until all have answered, and the
    longest of as many steps with only the running rows."""
    for at in range(ROWS):
        engine.add(request_of(model, str(at), image_prompt(model, new_image(model), seed=at), 4))
    encoded, others = list[float](), list[float]()
    while len(engine) > RUNNING:
        began, outcomes = time.perf_counter(), engine.step().outcomes
        num_encoded = any(isinstance(each, Encoded) for each in outcomes)
        (encoded if num_encoded else others).append(time.perf_counter() - began)
    alone = [engine.step().seconds for _ in (*encoded, *others)]
    return max(encoded), max(others), max(alone)


# Cached features

KNOWN = 640  # pixels a side: 400 tokens


def repeated(model: Model) -> Iterator[Line]:
    """Measure requests with an image whose features are cached."""
    engine = Engine(model, step_s=10.0, prefix_bytes=1 << 30)
    rounds = list[tuple[float, float, float]]()
    parts = 0
    for at in range(RUNS + 1):
        first = image_prompt(model, new_image(model, KNOWN), seed=at)
        second = Prompt((*first.tokens, *text_tokens(TEXT, 7000 + at)), first.images)
        elsewhere = image_prompt(model, first.images[0], seed=50 + at)
        first_s, _ = first_token(engine, request_of(model, "first", first, 1))
        second_s, num_encoded = first_token(engine, request_of(model, "second", second, 1))
        elsewhere_s, num_encoded_elsewhere = first_token(engine, request_of(model, "elsewhere", elsewhere, 1))
        parts += num_encoded + num_encoded_elsewhere
        rounds.append((first_s, second_s, elsewhere_s))
    new, second_turn, known = ([*column] for column in zip(*rounds[1:], strict=True))
    yield f"an image of {KNOWN}×{KNOWN} cached: parts of it encoded again", "0", f"{parts}", parts == 0
    share = ratio(second_turn, new)
    yield (
        f"  the first token of the next turn, of {TEXT} tokens, against the first turn's",
        "≤ 0.5",
        f"{share:.2f} ({statistics.median(second_turn) * 1000:.0f} ms of {statistics.median(new) * 1000:,.0f})",
        share <= 0.5,
    )
    value = f"{ratio(known, new):.2f} ({statistics.median(known) * 1000:,.0f} ms)"
    yield "  the first token in another conversation, whose prompt is computed", "< 1", value, ratio(known, new) < 1


def first_token(engine: Engine, sequence: GenerationRequest) -> tuple[float, int]:
    """Return the seconds to the first token, and the number of image parts encoded."""
    engine.add(sequence)
    began, outcomes = time.perf_counter(), list[Outcome]()
    while not any(isinstance(each, Sampled) for each in outcomes):
        outcomes += engine.step().outcomes
    return time.perf_counter() - began, sum(isinstance(each, Encoded) for each in outcomes)
