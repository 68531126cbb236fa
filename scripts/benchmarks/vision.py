"""Images: served together with text against one by one, what they cost those who decode, and what they cost again."""

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
from tests.engine.vision.checkpoints import CONFIGS, build, write_checkpoint
from worker.engine.engine import Engine
from worker.engine.model.load import Model, open_model
from worker.engine.tokenizer import MLXTokenizer
from worker.schedule.outcomes import Encoded, Outcome, Sampled
from worker.schedule.request import GenerationRequest as Asked
from worker.schedule.request import ProcessedImage

RUNS = 3
ROWS, TOKENS, TEXT = 8, 48, 48
SIDE = 320  # pixels: 100 tokens
_fresh = count()  # images: they are remembered, so each is a new one


def main(console: Console) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        model = open_model(str(seeing_checkpoint(Path(folder))))
    model.tokenizer.eos_token_ids = []  # a random model may end anywhere
    table = Table("measured", "bar", "came to", "holds", title="Images", title_justify="left")
    holds = True
    for part in (throughput, gaps, again):
        for what, bar, came_to, held in part(model):
            table.add_row(what, bar, came_to, {True: "[green]yes", False: "[red]no", None: ""}[held])
            holds = holds and held is not False
    console.print(table)
    return holds


def seeing_checkpoint(folder: Path) -> Path:
    """A qwen3_5 in fp32, with a step of some 30 to 60 ms on two cores, beside a tower of eight layers."""
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
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "preprocessor_config.json"
    sizes = {"patch_size": 16, "size": {"shortest_edge": 32**2, "longest_edge": 4096**2}}
    file.write_text(json.dumps(json.loads(file.read_text()) | sizes))
    return folder


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: tuple[int, ...]
    sights: tuple[ProcessedImage, ...] = ()


def of_text(tokens: int, seed: int) -> tuple[int, ...]:
    dice = Random(seed)
    return tuple(dice.randrange(256) for _ in range(tokens))


def picture(model: Model, side: int = SIDE) -> ProcessedImage:
    """A new one."""
    assert model.vision is not None
    number = next(_fresh)
    pixels = np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)
    return model.vision.image_processor.preprocess(fromarray(pixels), number.to_bytes(4))


def about(model: Model, sight: ProcessedImage, *, seed: int, text: int = TEXT) -> Prompt:
    """A prompt of so much text with an image in the middle."""
    before, after = of_text(text // 2, seed), of_text(text // 2, seed + 1000)
    return Prompt((*before, *MLXTokenizer(model.tokenizer).encode(sight.text), *after), (sight,))


def asked(model: Model, id: str, prompt: Prompt, tokens: int) -> Asked:
    assert model.vision is not None
    pictures = model.vision.image_processor.prompt_images(prompt.tokens, prompt.sights)
    return Asked(id, prompt.tokens, tokens, images=pictures)


# Throughput: all requests are there from the beginning


def throughput(model: Model) -> Iterator[Line]:
    """Once: it takes minutes, and in each of them the same is done both ways."""
    pictured, plain = mixed(model)
    for warm in (pictured[0], plain[0]):
        engine_s(model, [warm], tokens=2), upstream_s(model, warm, tokens=2)
    together_s = engine_s(model, [*pictured, *plain])
    alone = [(upstream_s(model, each), engine_s(model, [each])) for each in (*pictured, *plain)]
    together_s = (together_s + engine_s(model, [*pictured, *plain])) / 2
    for what, each_s in zip(("mlx-vlm's generation", "this engine"), zip(*alone, strict=True), strict=True):
        speed, token_s = sum(each_s) / together_s, sum(each_s) / (2 * ROWS * TOKENS)
        yield (
            f"{ROWS} with images and {ROWS} of text together, against {what} one by one",
            "≥ 2",
            f"{speed:.2f} ({2 * ROWS * TOKENS / together_s:,.0f} tokens/s; {token_s * 1000:.0f} ms a token alone)",
            speed >= 2,
        )


def mixed(model: Model) -> tuple[list[Prompt], list[Prompt]]:
    pictured = [about(model, picture(model), seed=seed) for seed in range(ROWS)]
    return pictured, [Prompt(of_text(TEXT, 100 + seed)) for seed in range(ROWS)]


def engine_s(model: Model, prompts: Sequence[Prompt], tokens: int = TOKENS) -> float:
    """Nothing is known of the images."""
    engine, began = Engine(model, step_s=10.0, prefix_bytes=0), time.perf_counter()
    for at, prompt in enumerate(prompts):
        engine.add(asked(model, str(at), prompt, tokens))
    while len(engine):
        engine.step()
    return time.perf_counter() - began


def upstream_s(model: Model, prompt: Prompt, tokens: int = TOKENS) -> float:
    assert model.vision is not None
    seen, began = [sight.pixel_inputs for sight in prompt.sights], time.perf_counter()
    ids = mx.array([prompt.tokens])
    pixels = mx.array(seen[0]["pixel_values"]) if seen else None
    how = {"image_grid_thw": mx.array(seen[0]["image_grid_thw"])} if seen else {}
    steps = generate_step(
        ids, model.vision.network, pixels, mx.ones_like(ids), max_tokens=tokens, temperature=0.0, **how
    )
    for _ in zip(range(tokens), steps, strict=False):
        pass
    return time.perf_counter() - began


# Those who decode meanwhile

RUNNING = 4
BUDGET = 3  # steps of theirs, in which there is time for others


def gaps(model: Model) -> Iterator[Line]:
    step_s = BUDGET * decode_s(model)
    engine = running(model, step_s)
    learning, *rounds = [longest_gaps(model, engine) for _ in range(RUNS + 1)]  # it learns how fast it is
    alone_s = statistics.median(alone for *_, alone in rounds)
    for at, phase in enumerate(("encoded", "prefilled")):
        came_to = statistics.median(longest[at] for longest in rounds)
        yield (
            f"longest gap of {RUNNING} rows while {ROWS} images are {phase}, for a step of {step_s * 1000:.0f} ms",
            f"≤ {1.25 * step_s * 1000:.0f} ms",
            f"{came_to * 1000:.0f} ms (the first ever {learning[at] * 1000:.0f}, without any {alone_s * 1000:.0f})",
            came_to <= 1.25 * step_s,
        )


def running(model: Model, step_s: float) -> Engine:
    engine = Engine(model, step_s=step_s, prefix_bytes=0)
    for at in range(RUNNING):
        engine.add(Asked(f"running {at}", of_text(32, at), 30_000))
    while engine.step().rows < RUNNING:
        pass
    return engine


def decode_s(model: Model) -> float:
    """Of a step of these rows."""
    engine = running(model, 10.0)
    return statistics.median(engine.step().seconds for _ in range(20))


def longest_gaps(model: Model, engine: Engine) -> tuple[float, float, float]:
    """In steps that looked at an image, in the others until all have answered, and in as many when nobody else is
    there."""
    for at in range(ROWS):
        engine.add(asked(model, str(at), about(model, picture(model), seed=at), 4))
    encoded, others = list[float](), list[float]()
    while len(engine) > RUNNING:
        began, outcomes = time.perf_counter(), engine.step().outcomes
        looked = any(isinstance(each, Encoded) for each in outcomes)
        (encoded if looked else others).append(time.perf_counter() - began)
    alone = [engine.step().seconds for _ in (*encoded, *others)]
    return max(encoded), max(others), max(alone)


# What is known is not looked at again

KNOWN = 640  # pixels a side: 400 tokens


def again(model: Model) -> Iterator[Line]:
    engine, rounds = Engine(model, step_s=10.0, prefix_bytes=1 << 30), list[tuple[float, float, float]]()
    parts = 0
    for at in range(RUNS + 1):
        first = about(model, picture(model, KNOWN), seed=at)
        second = Prompt((*first.tokens, *of_text(TEXT, 7000 + at)), first.sights)
        elsewhere = about(model, first.sights[0], seed=50 + at)
        first_s, _ = first_token(engine, asked(model, "first", first, 1))
        second_s, looked = first_token(engine, asked(model, "second", second, 1))
        elsewhere_s, looked_too = first_token(engine, asked(model, "elsewhere", elsewhere, 1))
        parts += looked + looked_too
        rounds.append((first_s, second_s, elsewhere_s))
    new, second_turn, known = ([*column] for column in zip(*rounds[1:], strict=True))
    yield f"an image of {KNOWN}×{KNOWN} known: parts of it looked at again", "0", f"{parts}", parts == 0
    share = ratio(second_turn, new)
    yield (
        f"  the first token of the next turn, of {TEXT} tokens, against the first turn's",
        "≤ 0.5",
        f"{share:.2f} ({statistics.median(second_turn) * 1000:.0f} ms of {statistics.median(new) * 1000:,.0f})",
        share <= 0.5,
    )
    came_to = f"{ratio(known, new):.2f} ({statistics.median(known) * 1000:,.0f} ms)"
    yield "  the first token in another conversation, whose prompt is computed", "< 1", came_to, ratio(known, new) < 1


def first_token(engine: Engine, sequence: Asked) -> tuple[float, int]:
    """Seconds, and how many parts of images were looked at."""
    engine.add(sequence)
    began, outcomes = time.perf_counter(), list[Outcome]()
    while not any(isinstance(each, Sampled) for each in outcomes):
        outcomes += engine.step().outcomes
    return time.perf_counter() - began, sum(isinstance(each, Encoded) for each in outcomes)
