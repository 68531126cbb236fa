"""`sluice batch compare`: runs two prompts over the same rows of a table."""

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.commands.batch import tables
from sluice.cli.commands.batch.run import run_file_at, stoppable
from sluice.cli.options import REDIS_URL, ApiKey, AsJson, GatewayUrl, RedisUrl, server_of
from sluice.cli.terminal.batch_view import print_problems
from sluice.cli.terminal.output import print_json
from sluice.cli.terminal.table_view import print_comparison
from sluice.cli.terminal.view import note
from sluice.contract.batch import Batch


def compare_prompts(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="TABLE", help="The table: .csv, .tsv, .jsonl or .parquet.")],
    prompt: Annotated[
        list[Path], typer.Option("--prompt", metavar="FILE", help="A prompt for a row; give two.", show_default=False)
    ],
    sample: tables.Sample = 20,
    sample_seed: tables.SampleSeed = 0,
    system: tables.System = None,
    schema: tables.Schema = None,
    image: tables.Image = None,
    image_dir: tables.ImageDir = None,
    key_column: tables.KeyColumn = None,
    param: tables.Param = None,
    rows: tables.Rows = None,
    encoding: tables.Encoding = None,
    delimiter: tables.Delimiter = None,
    model: Annotated[str | None, typer.Option("--model", metavar="NAME", help="The model that answers.")] = None,
    folder: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="Keep the answers here, and use those of earlier calls."),
    ] = None,
    redis_url: RedisUrl = REDIS_URL,
    url: GatewayUrl = None,
    key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Run two prompts over rows of a table, and compare the answers.

    It prints the sums of both, how many rows have equal values in each field, and the rows that differ; with --json all
    of them as one object. Exit codes as those of `batch run`.

    \b
    Examples:
      sluice batch compare reviews.csv --prompt short.txt --prompt long.txt
      sluice batch compare reviews.csv --prompt a.txt --prompt b.txt --schema answer.json --sample 50 -o compared
    """
    given = tables.TableOptions.of({**locals(), "prompt": None})
    server = server_of(context, redis_url, url, key)

    def ask(requests: Path, answers: Path) -> Batch | None:
        options = {"models": None if model is None else {"*": model}, "served_only": True}
        batch = asyncio.run(stoppable(run_file_at(server, requests, answers, options)))
        if batch and batch.errors:
            print_problems(batch)
            raise typer.Exit(2)
        return batch

    found = tables.compare(file, prompt, given, model, folder, ask)
    if isinstance(found, Path):
        note(f"interrupted. To go on, run the same command again{'' if folder else f' with -o {found}'}.")
        raise typer.Exit(3)
    if as_json:
        print_json(asdict(found))
    else:
        print_comparison(found)
    raise typer.Exit(1 if any(score.errors for score in found.scores) else 0)
