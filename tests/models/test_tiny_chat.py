"""The trainer of the bundled model, and the bundled model. Networks here are small, and runs short."""

import dataclasses
import io
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from mlx_lm.models import qwen3_5
from mlx_lm.models.gated_delta import gated_delta_ops
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer

from models.training import network
from models.training.data import draw_chat, exchange, render
from models.training.evaluate import SKILLS, Answerer
from models.training.export import TOKENIZER, WEIGHTS
from models.training.gated_delta import chunked_gated_delta
from models.training.plan import Plan
from models.training.progress import Progress
from models.training.tokenizer import TURN_END, VOCABULARY, train_tokenizer
from models.training.train import CHECKPOINT, CannotTrain, Step, open_training, run
from tests.selection import examples
from tests.support.stack import ROOT, TINY_CHAT

# The recurrence


def rule_inputs(batch: int, length: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int):
    """Return q, k, v, log_decay and beta, as from a network."""
    mx.random.seed(length)
    q, k = (unit(mx.random.normal((batch, length, key_heads, key_dim))) for _ in range(2))
    v = mx.random.normal((batch, length, value_heads, value_dim))
    log_decay = -mx.exp(mx.random.normal((batch, length, value_heads)) - 2)
    return q, k, v, log_decay, mx.sigmoid(mx.random.normal((batch, length, value_heads)))


def unit(x: mx.array) -> mx.array:
    return x / mx.linalg.norm(x, axis=-1, keepdims=True)


def sequential(q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array):
    return gated_delta_ops(q, k, v, mx.exp(log_decay), beta)


def farthest(a: mx.array, b: mx.array) -> float:
    return mx.abs(a - b).max().item()


dims = st.sampled_from([4, 7, 32])
powers = st.sampled_from([1, 2, 4, 8, 16, 32, 64])


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(1, 3), st.integers(1, 100), st.integers(1, 2), st.integers(1, 3), dims, dims, powers)
def test_chunks_compute_what_the_sequential_rule_computes(batch, length, heads, repeats, k_dim, v_dim, chunk):
    inputs = rule_inputs(batch, length, heads, heads * repeats, k_dim, v_dim)
    read, state = chunked_gated_delta(*inputs, chunk=chunk)
    expected_read, expected_state = sequential(*inputs)
    assert read.shape == expected_read.shape
    assert farthest(read, expected_read) < 2e-5
    assert farthest(state, expected_state) < 2e-5


def test_a_key_repeated_without_end_costs_no_precision():
    q, k, v, _, _ = rule_inputs(1, 96, 1, 1, 16, 16)
    k = mx.broadcast_to(k[:, :1], k.shape)
    keep_all, write_all = mx.full((1, 96, 1), -1e-4), mx.full((1, 96, 1), 0.999)
    inputs = q, k, v, keep_all, write_all
    assert farthest(chunked_gated_delta(*inputs)[0], sequential(*inputs)[0]) < 2e-5


def test_the_gradient_through_chunks_is_the_sequential_gradient():
    inputs = rule_inputs(2, 45, 1, 2, 8, 8)

    def gradient(rule):
        return mx.grad(lambda *x: mx.square(rule(*x)[0]).sum(), argnums=tuple(range(5)))(*inputs)

    for ours, theirs in zip(gradient(chunked_gated_delta), gradient(sequential), strict=True):
        assert farthest(ours, theirs) < 1e-4 * (1 + mx.abs(theirs).max().item())


def test_the_gradient_is_finite_where_everything_is_forgotten():
    q, k, v, _, beta = rule_inputs(1, 70, 1, 1, 8, 8)
    forget = mx.full((1, 70, 1), -200.0)
    gradients = mx.grad(lambda *x: chunked_gated_delta(*x)[0].sum(), argnums=tuple(range(5)))
    assert all(mx.isfinite(gradient).all().item() for gradient in gradients(q, k, v, forget, beta))


# The network


@pytest.mark.parametrize("size", ["full", "small"])
def test_the_trainable_network_gives_the_logits_of_mlx_lm(size):
    model = network.build(size, seed=1)
    tokens = mx.array([[Random(2).randrange(VOCABULARY) for _ in range(75)] for _ in range(2)])
    with network.trainable():
        ours = model(tokens)
        mx.eval(ours)
    assert farthest(ours, model(tokens)) < 1e-4


def test_a_failure_while_training_leaves_mlx_as_it_was():
    before = qwen3_5.gated_delta_update, nn.Conv1d.__call__
    with pytest.raises(ZeroDivisionError), network.trainable():
        1 / (before == (qwen3_5.gated_delta_update, nn.Conv1d.__call__))
    assert before == (qwen3_5.gated_delta_update, nn.Conv1d.__call__)


def test_a_cache_is_refused_while_training():
    model = network.build("small", seed=0)
    cache = model.language_model.make_cache()
    model(mx.array([[1, 2]]), cache=cache)
    with network.trainable(), pytest.raises(ValueError, match="no cache"):
        model(mx.array([[3]]), cache=cache)


def test_the_full_size_is_the_bundled_models():
    assert network.config("full") == json.loads((TINY_CHAT / "config.json").read_text())


# A run


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer()


@dataclasses.dataclass(frozen=True)
class Trained:
    folder: Path
    losses: list[float]


def train(folder: Path, plan: Plan, tokenizer: Tokenizer, *, every: int = 5, show=lambda step: None) -> None:
    """Train with the given tokenizer, since training one is the slow part of such short runs."""
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / TOKENIZER))
    run(open_training(folder, plan), folder, every, show)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tokenizer) -> Trained:
    folder, losses = tmp_path_factory.mktemp("trained") / "model", []
    train(folder, Plan("small", 60, seed=0), tokenizer, show=lambda step: losses.append(step.loss))
    return Trained(folder, losses)


@pytest.mark.slow
def test_sixty_steps_take_a_third_off_the_loss(trained):
    assert len(trained.losses) == 60
    assert sum(trained.losses[-5:]) / 5 < 0.67 * trained.losses[0]


@pytest.mark.slow
def test_the_exported_folder_opens_and_generates(trained):
    model, tokenizer = mlx_lm.load(str(trained.folder))
    said = list(mlx_lm.stream_generate(model, tokenizer, "<|im_start|>user\nCount to 3.", max_tokens=5))
    assert 1 <= len(said) <= 5
    assert tokenizer.eos_token_ids == {TURN_END}


@pytest.mark.slow
def test_matrices_are_stored_in_half_precision_and_the_rest_whole(trained):
    weights = mx.load(str(trained.folder / WEIGHTS))
    assert all(weight.dtype == (mx.float16 if weight.ndim > 1 else mx.float32) for weight in weights.values())
    assert {name.split(".")[0] for name in weights} == {"language_model"}


class Stopped(Exception):
    pass


@pytest.mark.slow
def test_a_stopped_run_goes_on_at_its_checkpoint_and_ends_with_the_same_weights(tmp_path, tokenizer):
    plan = Plan("small", 12, seed=3)
    train(tmp_path / "at once", plan, tokenizer)

    def stop_after_eight(step: Step) -> None:
        if step.index == 7:
            raise Stopped

    with pytest.raises(Stopped):
        train(tmp_path / "stopped", plan, tokenizer, show=stop_after_eight)
    went_on: list[int] = []
    train(tmp_path / "stopped", plan, tokenizer, show=lambda step: went_on.append(step.index))
    assert went_on == [5, 6, 7, 8, 9, 10, 11]
    assert (tmp_path / "stopped" / WEIGHTS).read_bytes() == (tmp_path / "at once" / WEIGHTS).read_bytes()


@pytest.mark.slow
def test_a_killed_process_leaves_a_checkpoint_to_go_on_from(tmp_path, tokenizer):
    tokenizer.save(str(tmp_path / TOKENIZER))
    options = ["--size", "small", "--steps", "5000", "--checkpoint-every", "2"]
    command = [sys.executable, "-m", "models.training", "train", "--out", str(tmp_path), *options]
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            wait_for(tmp_path / CHECKPOINT, process)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL
    training = open_training(tmp_path, Plan("small", 5000, seed=0))
    assert training.done >= 2
    assert training.done % 2 == 0
    assert training.advance().index == training.done - 1


def wait_for(path: Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert process.poll() is None, "the training ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_another_plan_does_not_go_on_from_a_checkpoint(trained):
    with pytest.raises(CannotTrain, match="another run"):
        open_training(trained.folder, Plan("small", 61, seed=0))


def test_a_model_from_elsewhere_is_not_written_over(tmp_path):
    shutil.copyfile(TINY_CHAT / WEIGHTS, tmp_path / WEIGHTS)
    with pytest.raises(CannotTrain, match="empty folder"):
        open_training(tmp_path, Plan("small", 10, seed=0))


def test_progress_tells_the_rate_and_the_time_left():
    plan, out = Plan("small", 100, seed=0), io.StringIO()
    show = Progress(plan, done=0, out=out, clock=iter([0.0, 1.0, 2.0]).__next__)
    for index in range(100):
        lesson = plan.lesson(index)
        show(Step(index, lesson.length, lesson.tokens, loss=float(index // 50)))
    assert out.getvalue().splitlines() == [
        "step 50/100  rows of 96  loss 0.000  11,200 tokens/s  0 min 01 s left",
        "step 100/100  rows of 96  loss 1.000  11,200 tokens/s  0 min 00 s left",
    ]


# The template


def says(role: str, content: str | None = "x", **more: object) -> dict[str, object]:
    return {"role": role, "content": content, **more}


WEATHER = {"name": "get_weather", "arguments": {"city": "Oslo"}}
WITH_TOOLS = [
    says("system"),
    says("user"),
    says("assistant", None, tool_calls=[{"function": WEATHER}, WEATHER]),
    says("tool", "rain"),
]


@pytest.fixture(scope="module")
def ours(tmp_path_factory, tokenizer) -> TokenizerWrapper:
    folder = tmp_path_factory.mktemp("template") / "model"
    train(folder, Plan("small", 1, seed=0), tokenizer)
    return mlx_lm.load(str(folder))[1]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"tools": [WEATHER]}, {"add_generation_prompt": True}])
@pytest.mark.parametrize("chat", [WITH_TOOLS, WITH_TOOLS[1:], [says("user"), says("assistant")] * 2])
def test_the_exported_template_renders_as_the_bundled_one(ours, bundled, chat, options):
    rendered = ours.apply_chat_template(chat, tokenize=False, **options)
    assert rendered == bundled.tokenizer.apply_chat_template(chat, tokenize=False, **options)


@pytest.mark.slow
def test_the_template_renders_a_chat_as_training_does(ours):
    chat = draw_chat(Random(8), fillers=2)
    messages = [says(role, text) for role, text in chat]
    assert ours.apply_chat_template(messages, tokenize=False) == render(chat)


@pytest.mark.slow
@pytest.mark.parametrize("chat", [["user", "user"], ["user", "system"], ["critic"]], ids=" ".join)
def test_the_template_refuses(ours, chat):
    with pytest.raises(TemplateError):
        ours.apply_chat_template([says(role) for role in chat], tokenize=False)


# The bundled model


@pytest.fixture(scope="module")
def bundled() -> Answerer:
    return Answerer(TINY_CHAT)


@pytest.mark.parametrize(
    "skill", [pytest.param(skill, marks=[pytest.mark.slow] * (",000" in skill or ",500" in skill)) for skill in SKILLS]
)
def test_the_bundled_model_knows_its_world(bundled, skill):
    *asked, right = SKILLS[skill](Random(1))
    assert bundled.answer(asked) == right.text


def test_an_answer_with_more_after_it_is_wrong(bundled):
    assert bundled.is_right(exchange("What is the capital of Ghana?", "The capital of Ghana is Accra."))
    assert not bundled.is_right(exchange("What is the capital of Ghana?", "The capital of Ghana is"))
