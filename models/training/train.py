"""A training run: the plan determines each step, and a checkpoint stores its state."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from tokenizers import Tokenizer

from models.training import network
from models.training.batches import Batch, draw_batch
from models.training.checkpoint import Checkpoint, load, save
from models.training.export import TOKENIZER, WEIGHTS, export
from models.training.plan import Plan
from models.training.tokenizer import train_tokenizer

CHECKPOINT = "checkpoint.safetensors"
CLIP = 1.0


class CannotTrain(ValueError):
    """The folder cannot be used with this plan."""


@dataclass(frozen=True, slots=True)
class Step:
    """The results of one step."""

    index: int
    length: int  # tokens of a row
    tokens: int
    loss: float  # weighted mean per token


class Training:
    """State of a run: network, optimizer, and number of completed steps."""

    def __init__(self, plan: Plan, tokenizer: Tokenizer) -> None:
        self.plan = plan
        self.tokenizer = tokenizer
        self.done = 0  # steps
        self.network = network.build(plan.size, plan.seed)
        self._optimizer = optim.AdamW(0.0, betas=[0.9, 0.98], weight_decay=0.02, bias_correction=True)
        self._gradient = nn.value_and_grad(self.network, partial(loss, self.network))

    @property
    def finished(self) -> bool:
        """True after the last step."""
        return self.done >= self.plan.steps

    def advance(self) -> Step:
        """Run one step."""
        index, lesson = self.done, self.plan.lesson(self.done)
        batch = draw_batch(self.tokenizer, self.plan.dice(index), lesson)
        self._optimizer.learning_rate = lesson.learning_rate
        with network.trainable():
            value = self._learn(batch)
        self.done += 1
        return Step(index, lesson.length, lesson.tokens, value)

    def _learn(self, batch: Batch) -> float:
        value, gradient = self._gradient(batch)
        gradient, _ = optim.clip_grad_norm(gradient, CLIP)
        self._optimizer.update(self.network, gradient)
        mx.eval(value, self.network.parameters(), self._optimizer.state)
        return float(value)

    def save(self, path: Path) -> None:
        """Write a checkpoint."""
        save(path, Checkpoint(self.plan, self.done, self.network.parameters(), self._optimizer.state))

    def resume(self, path: Path) -> None:
        """Load a checkpoint. Raises `CannotTrain` if it belongs to another plan."""
        saved = load(path)
        if saved.plan != self.plan:
            raise CannotTrain(f"{path} belongs to another run: {saved.plan}, and this is {self.plan}.")
        self.network.update(saved.parameters)
        self._optimizer.state = saved.optimizer
        self.done = saved.done


def loss(model: nn.Module, batch: Batch) -> mx.array:
    """Return the weighted mean loss of a batch."""
    logits = model(batch.tokens[:, :-1])
    losses = nn.losses.cross_entropy(logits, batch.tokens[:, 1:])
    mean: mx.array = (losses * batch.weights).sum() / batch.weights.sum()
    return mean


def open_training(folder: Path, plan: Plan) -> Training:
    """Return a new run, or the one whose checkpoint is in the folder. Raises `CannotTrain` if the folder has another
    model."""
    checkpoint = folder / CHECKPOINT
    if (folder / WEIGHTS).exists() and not checkpoint.exists():
        raise CannotTrain(f"{folder} holds a model without a checkpoint. Choose an empty folder.")
    folder.mkdir(parents=True, exist_ok=True)
    training = Training(plan, _tokenizer(folder / TOKENIZER))
    if checkpoint.exists():
        training.resume(checkpoint)
    return training


def _tokenizer(path: Path) -> Tokenizer:
    if not path.exists():
        train_tokenizer().save(str(path))
    return Tokenizer.from_file(str(path))


def run(training: Training, folder: Path, checkpoint_every: int, show: Callable[[Step], None]) -> None:
    """Run to the end, save checkpoints, pass each step to `show`, and export the model."""
    while not training.finished:
        show(training.advance())
        if training.finished or training.done % checkpoint_every == 0:
            training.save(folder / CHECKPOINT)
    export(training.network, network.config(training.plan.size), training.tokenizer, folder)
