"""The options of `scripts/bench serve`, and what they stand for."""

import argparse
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from models.random_checkpoints import hybrid_checkpoint, non_word_tokens, random_checkpoint
from scripts.benchmarks.serve import servers, trace
from scripts.benchmarks.serve.scenarios import DEFAULT, SCENARIOS, Options
from scripts.benchmarks.serve.servers import MLX_SERVER, Contender
from scripts.benchmarks.serve.workload import Mix


def dense(folder: Path) -> Path:
    """Write a dense model of 83 million parameters, and return the folder."""
    return random_checkpoint(folder, hidden=768, layers=12, kv_heads=4, never_sampled=non_word_tokens())


def hybrid(folder: Path) -> Path:
    """Write a model of 29 million parameters with one attention layer in four, and return the folder."""
    return hybrid_checkpoint(folder, never_sampled=non_word_tokens())


def large(folder: Path) -> Path:
    """Write a dense model of 1.4 billion parameters in bfloat16 (the layers of Qwen3-1.7B), and return the folder."""
    return random_checkpoint(folder, hidden=2048, layers=28, dtype=mx.bfloat16, never_sampled=non_word_tokens())


MODELS: dict[str, Callable[[Path], Path]] = {"plain": dense, "hybrid": hybrid, "large": large}
DEFAULT_MODELS = ("plain", "hybrid")


SUMMARY = "chats of real clients: bursts and open arrival, next to other servers"
_RETURNING = 20  # texts that all prompts are drawn from
EXAMPLES = """\
examples:
  scripts/bench serve --against mlx_lm.server
      bursts, single chats, prompts and open arrival, both models, three runs (hours on two cores)
  scripts/bench serve --scenario burst --chats 8 --runs 1 --model hybrid --against mlx_lm.server
      a first impression in a minute
  scripts/bench serve --scenario open --loads 0.5 1 --seconds 60 --json out.json
      good answers, first tokens and gaps at half load and at full load
  scripts/bench serve --scenario burst open --baseline ../before
      the effect of a change, against another checkout
  scripts/bench serve --against-command "vllm-mlx=/venv/bin/vllm-mlx serve {model} --port {port} --continuous-batching"
      a server of another environment, started for each run
  scripts/bench serve --scenario agents --runs 2 --against mlx_lm.server
      conversations of agents over HTTP, our worker through its gateway

Every server runs alone, one after the other, with one BLAS thread; our worker with SLUICE_MAX_ROWS=32 and defaults.
Load 1 is the rate at which the bare forwards of mlx-lm's model (prompts packed, 32 rows decoding) need all the time.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    listed = "\n".join(f"  {name:<8} {text}" for name, text in SCENARIOS.items())
    parser.description = f"{SUMMARY}.\n\nscenarios:\n{listed}"
    parser.epilog = EXAMPLES
    _add_what(parser.add_argument_group("what is measured"))
    _add_against(parser.add_argument_group("against"))
    _add_arrival(parser.add_argument_group("open arrival (open, mixed, highest, chats)"))


def _add_what(group: Any) -> None:
    defaults = Options()
    group.add_argument("--model", type=_model, nargs="+", default=[*DEFAULT_MODELS], metavar="MODEL",
                       help="plain, hybrid, large (1.4 billion parameters, for a GPU), or the folder of a checkpoint; "
                            "default: plain hybrid")  # fmt: skip
    group.add_argument("--scenario", choices=SCENARIOS, nargs="+", metavar="NAME",
                       help=f"default: {' '.join(DEFAULT)}, or trace if a trace is given")  # fmt: skip
    group.add_argument("--chats", type=positive, nargs="+", default=[*defaults.chats], metavar="N",
                       help="chats of a burst; default: 32 8 4")  # fmt: skip
    group.add_argument("--tokens", type=positive, default=defaults.tokens, metavar="N",
                       help="tokens of each answer of a burst; default: %(default)s")  # fmt: skip
    group.add_argument("--agents", type=positive, nargs="+", default=[*defaults.agents], metavar="N",
                       help="conversations of agents at once; default: 4 8")  # fmt: skip
    group.add_argument("--runs", type=positive, default=3, metavar="N", help="default: 3; figures are their medians")
    group.add_argument("--seed", default="0", metavar="TEXT", help="the same seed gives the same chats; default: 0")
    group.add_argument("--timeout", type=above_0, default=600.0, metavar="S",
                       help="seconds after which a turn counts as failed; default: 600")  # fmt: skip
    group.add_argument("--json", type=new_file, metavar="FILE", help="write all figures of all runs to this file")


def _add_against(group: Any) -> None:
    group.add_argument("--against", nargs="+", action="extend", default=[], metavar="SERVER",
                       help=f"{MLX_SERVER}, or the URL of any OpenAI server that serves the same model")  # fmt: skip
    group.add_argument("--against-command", action="append", default=[], metavar="NAME=COMMAND",
                       help="start this server; {model} and {port} in the command are replaced")  # fmt: skip
    group.add_argument("--against-model", metavar="NAME",
                       help="the model's name at a URL; default: the first that it lists")  # fmt: skip
    group.add_argument("--against-key", metavar="VARIABLE",
                       help="the environment variable with the API key for a URL")  # fmt: skip
    group.add_argument("--baseline", type=checkout, metavar="PATH", help="compare with this checkout of the project")


def _add_arrival(group: Any) -> None:
    defaults = Options()
    group.add_argument("--loads", type=above_0, nargs="+", default=[*defaults.loads], metavar="X",
                       help="rates as shares of what the bare forwards can do; default: 0.5 0.75 1 1.5 2")  # fmt: skip
    group.add_argument("--rates", type=above_0, nargs="+", default=[], metavar="X",
                       help="arrivals per second, instead of --loads")  # fmt: skip
    group.add_argument("--seconds", type=above_0, default=defaults.seconds, metavar="S",
                       help="of arrivals for each rate; default: 40")  # fmt: skip
    group.add_argument("--prompts", choices=["unseen", "returning"], default="unseen",
                       help=f"returning: all prompts are among {_RETURNING} that the server has seen")  # fmt: skip
    group.add_argument("--think", type=above_0, default=defaults.think_s, metavar="S",
                       help="median pause before a later turn of a chat; default: 3")  # fmt: skip
    group.add_argument("--tenants", type=positive, default=1, metavar="N",
                       help="tenants; the first sends most, tenant k one k-th of it; default: 1")  # fmt: skip
    group.add_argument("--offline", type=positive, default=0, metavar="N",
                       help="chats of the batch lane that run all the time; other servers have no lanes")  # fmt: skip
    group.add_argument("--trace", type=Path, metavar="FILE", help=f"replay recorded arrivals. {trace.HELP}")


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def above_0(text: str) -> float:
    """Parse a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def checkout(text: str) -> Path:
    """Parse the path of a checkout of this project."""
    path = Path(text).resolve()
    if not (path / "worker" / "__main__.py").is_file():
        raise argparse.ArgumentTypeError(f"{text} is not a checkout of this project: it has no worker/__main__.py")
    return path


def new_file(text: str) -> Path:
    """Parse the path of a file that will be written."""
    if not Path(text).absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: its folder does not exist; create it first")
    return Path(text)


def _model(text: str) -> str:
    if text not in MODELS and not (Path(text) / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(MODELS)}, nor a folder with a config.json")
    return text


def contenders_of(given: argparse.Namespace) -> list[Contender]:
    """Return the servers in the order in which they are measured. Raises ValueError for a bad option."""
    found = [servers.worker(servers.BASELINE, given.baseline)] if given.baseline else []
    found.append(servers.worker())
    key = os.environ.get(given.against_key) if given.against_key else None
    if given.against_key and not key:
        raise ValueError(f"--against-key: the environment has no {given.against_key}; export it, or leave it out")
    for name in given.against:
        is_mlx = name == MLX_SERVER
        found.append(servers.mlx_server() if is_mlx else _endpoint(name, given.against_model, key))
    found += [servers.command(text, start_s=300.0) for text in given.against_command]
    names = [contender.name for contender in found]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"--against: {min(repeated)} is given twice; give each server one name of its own")
    return found


def _endpoint(url: str, model: str | None, key: str | None) -> Contender:
    try:
        return servers.endpoint(url, model, key)
    except ValueError as error:
        raise ValueError(f"--against: {error}; give {MLX_SERVER} or a URL") from None


def options_of(given: argparse.Namespace) -> Options:
    """Return the sizes of the scenarios. Raises BadTrace."""
    mix = Mix(tenants=given.tenants, returning=_RETURNING if given.prompts == "returning" else 0)
    options = Options(
        chats=tuple(given.chats),
        agents=tuple(given.agents),
        tokens=given.tokens,
        loads=tuple(given.loads),
        rates=tuple(given.rates),
        seconds=given.seconds,
        mix=mix,
        think_s=given.think,
        offline=given.offline,
    )
    return replace(options, trace=tuple(trace.read(given.trace))) if given.trace else options


def scenarios_of(given: argparse.Namespace) -> list[str]:
    """Return the names of the scenarios, each once. Raises ValueError for a trace that is missing or unused."""
    names = list(dict.fromkeys(given.scenario or (["trace"] if given.trace else DEFAULT)))
    if ("trace" in names) != bool(given.trace):
        raise ValueError("--trace FILE and --scenario trace belong together; give both, or the file alone")
    return names
