"""The command line: python -m models.training --help"""

import argparse
import sys
from pathlib import Path
from typing import TypeAlias

from models.training import mtp_head
from models.training.evaluate import Score, evaluate
from models.training.plan import CURRICULA, SIZES, Plan
from models.training.progress import Progress
from models.training.tokenizer import train_tokenizer
from models.training.train import CannotTrain, open_training, run

MAIN = """\
Trains the bundled model of one million parameters from scratch, or evaluates such a model.

  python -m models.training train --out DIR --size small    a trial of some seconds; the model learns nothing
  python -m models.training train --out DIR                 the whole run: hours on two cores
  python -m models.training evaluate DIR                    score of each skill
  python -m models.training mtp-head MODEL --out DIR        train an MTP head for a trained model: minutes
"""
_AsWritten = argparse.RawDescriptionHelpFormatter
TRAIN = """\
Trains a tokenizer and a network, and writes the folder that mlx_lm.load opens.

If it is stopped or killed, the same command resumes at the last checkpoint, and ends with the same weights.
A shorter run (--steps, --steps-scale) passes through the same phases in fewer steps: a hundredth of them
shows that the loss falls and how long the whole run would take, but the model learns no answers.

On Linux this computes on the CPU, eight times faster with OpenBLAS, for instance:
  LD_PRELOAD=/usr/lib/x86_64-linux-gnu/openblas-pthread/libblas.so.3 python -m models.training train ...
"""
MTP_HEAD = """\
Trains a multi-token-prediction head for a trained model, and writes it as mtp.safetensors: copied into the model's
folder, it drafts tokens for speculative decoding. The model's own weights stay as they are.

If it is stopped or killed, the same command resumes at the last checkpoint, and ends with the same weights.
"""
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main() -> int:
    """Run the command line, and return the exit code."""
    program = "python -m models.training"
    parser = argparse.ArgumentParser(prog=program, description=MAIN, formatter_class=_AsWritten)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_train(commands)
    _add_tokenizer(commands)
    _add_evaluate(commands)
    _add_mtp_head(commands)
    arguments = parser.parse_args()
    try:
        arguments.do(arguments)
    except CannotTrain as reason:
        print(reason, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _add_train(commands: Commands) -> None:
    about = "train a model, or resume a stopped run"
    command = commands.add_parser("train", help=about, description=TRAIN, formatter_class=_AsWritten)
    add = command.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="folder for the checkpoint and the model")
    _add_length(command)
    add("--size", choices=SIZES, default="full", help="small is for trials")
    add("--seed", type=int, default=0, help="seed of the initial weights and of the chats (default: 0)")
    add(
        "--checkpoint-every",
        type=_positive,
        default=250,
        metavar="N",
        help="save a checkpoint every N steps (default: 250)",
    )
    command.set_defaults(do=_train)


def _add_length(command: argparse.ArgumentParser) -> None:
    steps = ", ".join(f"{size}: {CURRICULA[size].steps}" for size in SIZES)
    either = command.add_mutually_exclusive_group()
    add = either.add_argument
    add("--steps", type=_positive, metavar="N", help=f"length of the run in steps (default: {steps})")
    add("--steps-scale", type=float, default=1.0, metavar="X", help="scale of the number of steps; 0.01: a hundredth")


def _add_tokenizer(commands: Commands) -> None:
    about = "train the tokenizer alone, in seconds"
    command = commands.add_parser("tokenizer", help=about, description=about)
    command.add_argument("--out", type=Path, required=True, metavar="FILE", help="path for tokenizer.json")
    command.set_defaults(do=_tokenizer)


def _add_evaluate(commands: Commands) -> None:
    about = "ask a model new questions, and count the correct answers"
    command = commands.add_parser("evaluate", help=about, description=about)
    add = command.add_argument
    add("folder", type=Path, metavar="DIR", help="folder of a model, such as models/tiny-chat")
    add("--cases", type=_positive, default=20, metavar="N", help="questions for each skill (default: 20)")
    add("--seed", type=int, default=0, help="seed of the questions (default: 0)")
    command.set_defaults(do=_evaluate)


def _add_mtp_head(commands: Commands) -> None:
    about = "train a head that predicts several tokens"
    command = commands.add_parser("mtp-head", help=about, description=MTP_HEAD, formatter_class=_AsWritten)
    add, steps = command.add_argument, mtp_head.STEPS
    add("model", type=Path, metavar="MODEL", help="folder of a trained model, such as models/tiny-chat")
    add("--out", type=Path, required=True, metavar="DIR", help="folder for the checkpoint and the head")
    add("--steps", type=_positive, default=steps, metavar="N", help=f"length of the run (default: {steps})")
    add("--seed", type=int, default=0, help="seed of the initial weights and of the chats (default: 0)")
    add("--checkpoint-every", type=_positive, default=50, metavar="N", help="steps between checkpoints (default: 50)")
    command.set_defaults(do=_mtp_head)


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _train(arguments: argparse.Namespace) -> None:
    plan = _plan(arguments)
    training = open_training(arguments.out, plan)
    run(training, arguments.out, arguments.checkpoint_every, Progress(plan, training.done))
    print(f"{arguments.out} holds the model: python -m models.training evaluate {arguments.out}")


def _plan(arguments: argparse.Namespace) -> Plan:
    if arguments.steps:
        return Plan(arguments.size, arguments.steps, arguments.seed)
    return Plan.scaled(arguments.size, arguments.steps_scale, arguments.seed)


def _tokenizer(arguments: argparse.Namespace) -> None:
    train_tokenizer().save(str(arguments.out))


def _evaluate(arguments: argparse.Namespace) -> None:
    evaluate(arguments.folder, arguments.cases, arguments.seed, _show)


def _mtp_head(arguments: argparse.Namespace) -> None:
    plan = mtp_head.HeadPlan("full", arguments.steps, arguments.seed)
    training = mtp_head.open_head_training(arguments.model, arguments.out, plan)
    progress = Progress(plan, training.done)
    mtp_head.run_head_training(training, arguments.out, arguments.checkpoint_every, progress)
    print(f"{arguments.out / mtp_head.HEAD} holds the head.")


def _show(score: Score) -> None:
    print(f"{score.skill:<38}{score.right:>4}/{score.cases}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
