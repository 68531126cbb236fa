"""Trains a multi-token-prediction (MTP) head for a trained model, whose own weights stay as they are."""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import mlx_lm
from mlx.utils import tree_flatten
from tokenizers import Tokenizer

from models.training import network
from models.training.batches import Batch, draw_batch
from models.training.checkpoint import Checkpoint, load, save
from models.training.curriculum import Cosine, Lesson
from models.training.export import TOKENIZER, stored
from models.training.plan import Plan
from models.training.train import CLIP, CannotTrain, Step
from worker.engine.speculation.mtp import MTPHead, Trunk
from worker.engine.upstream.decoder_layers import Qwen35Args, Qwen35Layer

HEAD = "mtp.safetensors"
CHECKPOINT = "mtp-checkpoint.safetensors"
STEPS = 800
DEPTH = 3  # drafted tokens that each place learns to predict, the later ones from the head's own output
_DEPTH_WEIGHT = 0.7  # of a depth's loss, relative to the depth before it
_LESSON = Lesson(rows=12, length=192, fillers=6, copying=0.35, learning_rate=0.0)


class HeadPlan(Plan):
    """The parameters that determine a run. All steps are alike but for the learning rate."""

    __slots__ = ()

    def lesson(self, step: int) -> Lesson:
        """Return the parameters of a step."""
        rate = Cosine(begin=0, end=self.steps, peak=3e-3, floor=0.03, warmup=30).at(step)
        return replace(_LESSON, learning_rate=rate)


class HeadTraining:
    """State of a run: the head, its optimizer, and the number of completed steps."""

    def __init__(self, model: Path, plan: HeadPlan) -> None:
        """`model`: folder of the trained model."""
        self.plan, self.done = plan, 0
        self._trunk_network = mlx_lm.load(str(model))[0]
        self._trunk_network.set_dtype(mx.float32)
        self._trunk = Trunk(self._trunk_network)
        self._tokenizer = Tokenizer.from_file(str(model / TOKENIZER))
        mx.random.seed(plan.seed)
        self.head = new_head(self._trunk_network)
        self._optimizer = optim.AdamW(0.0, betas=[0.9, 0.98], weight_decay=0.01, bias_correction=True)
        self._gradient = nn.value_and_grad(self.head, partial(loss, self.head, self._trunk))

    @property
    def finished(self) -> bool:
        """True after the last step."""
        return self.done >= self.plan.steps

    def advance(self) -> Step:
        """Run one step."""
        index, lesson = self.done, self.plan.lesson(self.done)
        batch = draw_batch(self._tokenizer, self.plan.dice(index), lesson)
        with network.trainable():
            hidden = self._trunk.hidden(batch.tokens)
            mx.eval(hidden)
            value, gradient = self._gradient(hidden, batch)
            gradient, _ = optim.clip_grad_norm(gradient, CLIP)
            self._optimizer.learning_rate = lesson.learning_rate
            self._optimizer.update(self.head, gradient)
            mx.eval(value, self.head.parameters(), self._optimizer.state)
        self.done += 1
        return Step(index, lesson.length, lesson.tokens, float(value))

    def save(self, path: Path) -> None:
        """Write a checkpoint."""
        save(path, Checkpoint(self.plan, self.done, self.head.parameters(), self._optimizer.state))

    def resume(self, path: Path) -> None:
        """Load a checkpoint. Raises `CannotTrain` if it belongs to another plan."""
        saved = load(path)
        if asdict(saved.plan) != asdict(self.plan):
            raise CannotTrain(f"{path} belongs to another run: {saved.plan}, and this is {self.plan}.")
        self.head.update(saved.parameters)
        self._optimizer.state = saved.optimizer
        self.done = saved.done


def new_head(trunk: nn.Module) -> MTPHead:
    """Return a head with random weights for a qwen3_5 network."""
    text = trunk.language_model.args
    args = Qwen35Args.from_dict({**vars(text), "full_attention_interval": 1})
    return MTPHead(Qwen35Layer(args, 0), text.hidden_size, text.rms_norm_eps)


def loss(head: MTPHead, trunk: Trunk, hidden: mx.array, batch: Batch) -> mx.array:
    """Return the weighted mean loss over all depths. `hidden`: of all tokens of the batch."""
    tokens, end = batch.tokens, batch.tokens.shape[1]
    total = mx.array(0.0)
    for depth in range(1, DEPTH + 1):
        hidden = head(trunk.embed(tokens[:, depth : end - 1]), hidden[:, : end - 1 - depth])
        losses = nn.losses.cross_entropy(trunk.logits(hidden), tokens[:, depth + 1 :])
        weights = batch.weights[:, depth:]
        total = total + _DEPTH_WEIGHT ** (depth - 1) * (losses * weights).sum() / weights.sum()
    return total


def open_head_training(model: Path, folder: Path, plan: HeadPlan) -> HeadTraining:
    """Return a new run, or the one whose checkpoint is in the folder. Raises `CannotTrain` if that has another plan."""
    folder.mkdir(parents=True, exist_ok=True)
    training = HeadTraining(model, plan)
    if (folder / CHECKPOINT).exists():
        training.resume(folder / CHECKPOINT)
    return training


def run_head_training(
    training: HeadTraining, folder: Path, checkpoint_every: int, show: Callable[[Step], None]
) -> None:
    """Run to the end, save checkpoints, pass each step to `show`, and export the head."""
    while not training.finished:
        show(training.advance())
        if training.finished or training.done % checkpoint_every == 0:
            training.save(folder / CHECKPOINT)
    export_head(training.head, folder / HEAD)


def export_head(head: MTPHead, file: Path) -> None:
    """Write a head with the names that the original checkpoints of Qwen3.5 use."""
    weights = {f"mtp.{name}": stored(value) for name, value in tree_flatten(head.parameters())}
    mx.save_safetensors(str(file), weights, {"format": "mlx"})
