"""The training of the MTP head of the bundled model. Runs here are of a few short steps."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from models.training.curriculum import Lesson
from models.training.mtp_head import CHECKPOINT, HEAD, HeadPlan, open_head_training, run_head_training
from models.training.train import CannotTrain, Step
from tests.support.stack import ROOT, TINY_CHAT


class ShortPlan(HeadPlan):
    """Steps of two short rows."""

    __slots__ = ()

    def lesson(self, step: int) -> Lesson:
        return replace(HeadPlan.lesson(self, step), rows=2, length=24, fillers=0)


PLAN = ShortPlan("full", 4, 1)


def train(folder: Path, plan: HeadPlan = PLAN, stop_after: int = 4) -> list[Step]:
    """Train until the end, or until a run is killed after this many steps."""
    training, steps = open_head_training(TINY_CHAT, folder, plan), list[Step]()

    def show(step: Step) -> None:
        if step.index == stop_after:
            raise KeyboardInterrupt
        steps.append(step)

    run_head_training(training, folder, 1, show)
    return steps


def test_a_resumed_run_ends_with_the_head_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "stopped", stop_after=2)
    resumed = train(tmp_path / "stopped")
    assert [step.index for step in resumed] == [2, 3]
    assert [step.loss for step in resumed] == pytest.approx([step.loss for step in whole[2:]], rel=1e-4)
    assert weights(tmp_path / "whole").keys() == weights(tmp_path / "stopped").keys()


def weights(folder: Path) -> dict[str, mx.array]:
    loaded = mx.load(str(folder / HEAD))
    assert isinstance(loaded, dict)
    return loaded


def test_training_leaves_the_trunk_as_it_is(tmp_path: Path) -> None:
    before = (TINY_CHAT / "model.safetensors").read_bytes()
    train(tmp_path)
    assert (TINY_CHAT / "model.safetensors").read_bytes() == before
    assert all(name.startswith("mtp.") for name in weights(tmp_path))


def test_a_checkpoint_of_another_plan_is_refused(tmp_path: Path) -> None:
    train(tmp_path)
    assert (tmp_path / CHECKPOINT).exists()
    with pytest.raises(CannotTrain, match="another run"):
        train(tmp_path, ShortPlan("full", 5, 1))


@pytest.mark.slow
def test_the_command_explains_itself() -> None:
    command = [sys.executable, "-m", "models.training", "mtp-head", "--help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "mtp.safetensors" in shown
    assert "--checkpoint-every" in shown
