"""Every row of a batch, through Redis, draws the tokens that `mlx_lm` draws of the same prompt alone."""

import asyncio
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten, tree_map

from sluice import Cancelled, Client, Delta, Finished
from tests.engine.tiny import CONFIGS, write_checkpoint
from tests.support.stack import TINY_CHAT, WorkerProcess

# The bundled model is a qwen3_5 with trained weights; tests/engine compares the others without Redis.
OTHERS = "qwen3", "qwen3_5", "gpt_oss", "gemma3"
FAMILIES = "tiny_chat", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)
WORDS = "red key lamp river market 4 6 8 日本 🚀 é count capital Oslo Petra".split()


def checkpoint(family: str, folder: Path) -> Path:
    if family != "tiny_chat":
        return write_checkpoint(CONFIGS[family], folder)
    write_checkpoint(CONFIGS["qwen3"], folder)  # for the tokenizer's files
    network, _ = mlx_lm.load(str(TINY_CHAT))
    weights = tree_flatten(tree_map(lambda w: w.astype(mx.float32), network.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(weights), metadata={"format": "mlx"})
    (folder / "config.json").write_bytes((TINY_CHAT / "config.json").read_bytes())
    return folder


def conversation(i: int) -> list[dict[str, str]]:
    """Mixed lengths: from a word to some three hundred tokens."""
    turns = [{"role": "user", "content": f"Count to {i + 3}." if i % 2 else "What is my name?"}]
    if i % 3 == 0:
        text = " ".join(WORDS[(i + k * k) % len(WORDS)] for k in range(20 * i))
        turns = [{"role": "user", "content": f"Repeat after me: {text}"}]
    if i % 4 == 1:
        turns = [{"role": "system", "content": "Always mention NWP58."}, *turns]
    return turns


def alone(model: Any, i: int, max_tokens: int) -> list[int]:
    network, tokenizer = model
    prompt = tokenizer.apply_chat_template(conversation(i), add_generation_prompt=True)
    steps = mlx_lm.stream_generate(network, tokenizer, prompt, max_tokens=max_tokens)
    return [step.token for step in steps if step.token not in tokenizer.eos_token_ids]


@pytest.mark.parametrize("family", FAMILIES)
async def test_rows_say_what_they_say_alone(family: str, redis_url: str, client: Client, tmp_path: Path) -> None:
    folder = checkpoint(family, tmp_path)
    limits = {i: 10 + 4 * i for i in range(14)} | {4: 20_000, 9: 20_000}
    cancelled = (4, 9)
    no_end = {"logit_bias": {"2": -100}}  # those to be cancelled must not end by themselves

    async def ask(i: int) -> tuple[list[int], str]:
        await asyncio.sleep(0.03 * i)
        request = {"messages": conversation(i), "max_tokens": limits[i], "temperature": 0}
        job = await client.submit(request | no_end if i in cancelled else request)
        tokens, ending = list[int](), ""
        async for event in client.stream(job.id):
            match event:
                case Delta(token_ids=drawn):
                    if i in cancelled and len(tokens) < 8 <= len(tokens) + len(drawn):
                        await client.cancel(job.id)
                    tokens += drawn
                case Finished(finish_reason=ending):
                    pass
                case Cancelled():
                    ending = "cancelled"
        return tokens, ending

    with WorkerProcess(redis_url, model=folder, max_rows=8, step_ms=20):
        answers = await asyncio.wait_for(asyncio.gather(*(ask(i) for i in range(14))), 180)
    model = mlx_lm.load(str(folder))
    for i, (tokens, ending) in enumerate(answers):
        if i in cancelled:
            assert ending == "cancelled"
        else:
            assert tokens == alone(model, i, limits[i]), f"row {i}"
