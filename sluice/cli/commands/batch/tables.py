"""Tables in `sluice batch`: the options of `batch run`, the dry run, and the comparison of two prompts."""

import asyncio
import hashlib
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, Self

import typer

from sluice.batch.prompts import Asked, parse_schema
from sluice.batch.table_run import Built, Chosen, Shown, TableRun
from sluice.cli.errors import CliError, connected, sentence
from sluice.cli.options import Remote, integer
from sluice.cli.terminal.table_view import Comparison, PromptScore, print_prompt
from sluice.cli.terminal.view import note
from sluice.contract.batch import Batch
from sluice.errors import BatchRefused, JobFailed
from sluice.wording import counted

Prompt = Annotated[
    Path | None,
    typer.Option("--prompt", metavar="FILE", help="IN is a table, and this the prompt of a row, with {column} in it."),
]
System = Annotated[
    Path | None, typer.Option("--system", metavar="FILE", help="The system prompt of the rows; columns as in --prompt.")
]
Schema = Annotated[
    Path | None,
    typer.Option("--schema", metavar="FILE", help="The JSON Schema of an answer, whose fields become columns."),
]
Image = Annotated[
    str | None,
    typer.Option("--image", metavar="COLUMN", help="A column of images: URLs, or files relative to the table."),
]
ImageDir = Annotated[
    Path | None, typer.Option("--image-dir", metavar="DIR", help="The folder of these files.  [default: the table's]")
]
KeyColumn = Annotated[
    str | None,
    typer.Option(
        "--key-column", metavar="COLUMN", help="Names each row, in messages and files.  [default: its number]"
    ),
]
Param = Annotated[
    list[str] | None,
    typer.Option("--param", metavar="NAME=JSON", help="A field of each request: temperature=0, max_tokens=200."),
]
Rows = Annotated[
    str | None, typer.Option("--rows", metavar="FROM-TO", help="Only these rows, from 1 without the header.")
]
Sample = Annotated[
    int | None, typer.Option("--sample", parser=integer(1), metavar="N", help="Only N of the rows, at random.")
]
SampleSeed = Annotated[
    int, typer.Option("--sample-seed", parser=integer(0), metavar="N", help="The seed that --sample draws with.")
]
Encoding = Annotated[
    str | None, typer.Option("--encoding", metavar="NAME", help="Of a CSV file, such as latin-1.  [default: utf-8]")
]
Delimiter = Annotated[
    str | None,
    typer.Option("--delimiter", metavar="CHAR", help="Of a CSV file; \\t is a tab.  [default: read from the file]"),
]
Prefix = Annotated[str, typer.Option("--prefix", metavar="TEXT", help="Begins the names of the new columns.")]
Details = Annotated[
    bool, typer.Option("--details", help="Add columns with the finish reason and the tokens of each row.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show the first three prompts and the tokens of all, and run nothing.")
]

Ask = Callable[[Path, Path], Batch | None]  # runs a file of requests with this output; None if it is interrupted


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """The options of a table as they were given."""

    prompt: Path | None
    system: Path | None = None
    schema: Path | None = None
    image: str | None = None
    image_dir: Path | None = None
    key_column: str | None = None
    param: list[str] | None = None
    rows: str | None = None
    sample: int | None = None
    sample_seed: int = 0
    encoding: str | None = None
    delimiter: str | None = None
    prefix: str = ""
    details: bool = False
    dry_run: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Return those among the options of a command."""
        return cls(**{name: options[name] for name in cls.__dataclass_fields__ if name in options})

    def chosen(self, model: str | None) -> Chosen:
        """Return what they choose. Raises `CliError`."""
        asked = Asked(
            prompt=_read(self.prompt) if self.prompt else "",
            system=_read(self.system) if self.system else None,
            schema=parse_schema(_read(self.schema), str(self.schema)) if self.schema else None,
            image=self.image,
            params=_params(self.param or []),
            key=self.key_column,
        )
        folder = None if self.image_dir is None else str(self.image_dir.absolute())
        rows, delimiter = _rows(self.rows), _delimiter(self.delimiter)
        return Chosen(asked, model, self.encoding, delimiter, rows, self.sample, self.sample_seed, folder)


@contextmanager
def _refused() -> Iterator[None]:
    """Turn what a table is refused for, and errors of files, into `CliError`."""
    try:
        yield
    except (BatchRefused, ValueError) as error:
        raise CliError(sentence(str(error))) from None
    except OSError as error:
        raise CliError(f"{error.filename}: {error.strerror or error}.") from None


def prepare(file: Path, output: Path, model: str | None, errors: Path | None, given: TableOptions) -> TableRun | None:
    """Return the run of a table whose file of requests is ready; None for a file of requests. Raises `CliError`."""
    if given.prompt is None:
        _refuse_without_prompt(file, given)
        return None
    if errors is not None:
        raise CliError("--errors: a table has its errors in a column; leave the option out.")
    with _refused():
        run = TableRun(file, output, given.chosen(model), Shown(given.prefix, given.details))
        if given.dry_run:
            return run
        run.prepare()
    _note_sample(run, given)
    _note_bad_rows(run.bad_rows)
    return run


def _refuse_without_prompt(file: Path, given: TableOptions) -> None:
    if others := [name for name, value in asdict(given).items() if value]:
        raise CliError(
            f"--{others[0].replace('_', '-')} is for tables: give the prompt of a row, too, with --prompt FILE."
        )
    if is_table(file):
        raise CliError(
            f"{file} is a table: give the prompt of a row with --prompt FILE, in which {{column}} is a cell."
        )


def is_table(file: Path) -> bool:
    """Return True for the name of a file that is a table and nothing else."""
    return file.suffix.lower() in (".csv", ".tsv", ".parquet")


def _note_sample(run: TableRun, given: TableOptions) -> None:
    if given.sample is not None:
        note(f"a sample of {counted(sum(1 for _ in run.rows()), 'row')} (--sample-seed {given.sample_seed})")


def _note_bad_rows(bad_rows: Mapping[int, str]) -> None:
    for number, problem in list(bad_rows.items())[:5]:
        note(f"row {number:,}: {problem}", style="yellow")
    if bad_rows:
        note(f"{counted(len(bad_rows), 'row')} cannot be asked; the column `error` says why.", style="yellow")


def finish(run: TableRun, batch: Batch) -> int:
    """Write the table of a run that has ended, and return the number of its rows without an answer; delete the files of
    a run that was refused. Raises `CliError`."""
    if batch.status == "failed":
        run.discard()
        return 0
    with _refused():
        counts = run.write_to(run.output)
    problems = f", {counts.errors:,} of them with an error" if counts.errors else ""
    note(f"{run.output}: {counted(counts.rows, 'row')}{problems}")
    return counts.errors


def of_answers(answers: str | None) -> TableRun | None:
    """Return the run of a table by the file of its answers; None for a run of a file of requests. Raises `CliError`."""
    with _refused():
        return TableRun.of_answers(Path(answers)) if answers else None


def export(answers: Path, output: Path | None) -> bool:
    """Write the table of a run with the answers so far; to stdout without `output`. False if the run has no table.
    Raises `CliError`."""
    if (run := of_answers(str(answers))) is None:
        return False
    with _refused():
        if output is not None:
            run.write_to(output)
            return True
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / run.output.name
            run.write_to(copy)
            with copy.open("rb") as file:
                shutil.copyfileobj(file, sys.stdout.buffer)
    return True


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CliError(f"{path} is not UTF-8: {error.reason} at byte {error.start + 1:,}.") from None
    except OSError as error:
        raise CliError(f"cannot read {path}: {error.strerror}.") from None


def _params(given: list[str]) -> dict[str, Any]:
    found = dict[str, Any]()
    for each in given:
        name, equals, value = each.partition("=")
        if not (name and equals):
            raise CliError(f"--param {each}: write NAME=VALUE, as in temperature=0.")
        try:
            found[name] = json.loads(value)
        except ValueError:
            raise CliError(f"--param {each}: the value is not JSON; a text stands in quotes: '{name}=\"…\"'.") from None
    return found


def _rows(given: str | None) -> tuple[int, int | None]:
    if given is None:
        return 1, None
    first, dash, last = given.partition("-")
    if not (dash and first.isdecimal() and (last.isdecimal() or not last)) or int(first) < 1:
        raise CliError(f"--rows {given}: write FROM-TO, as in 1-50000, or FROM- for all from there.")
    if last and int(last) < int(first):
        raise CliError(f"--rows {given}: the first row is behind the last.")
    return int(first), int(last) if last else None


def _delimiter(given: str | None) -> str | None:
    delimiter = "\t" if given == "\\t" else given
    if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n '):
        raise CliError(f"--delimiter {given!r}: it must be one character, such as ; or \\t for a tab.")
    return delimiter


def dry_run(run: TableRun, server: str | Remote, model: str | None) -> None:
    """Print the first three prompts, the rows that cannot be asked, and the tokens of all rows. Raises `CliError`."""
    built, drawn = Built(), _Drawn(500)
    characters = 0
    with _refused():
        for row in run.rows():
            if (line := built.add(row, run.requests_of)) is None:
                continue
            body = json.loads(line)["body"]
            characters += _characters(body)
            drawn.add(row.number)
            if built.lines <= 3:
                print_prompt(row.number, body)
        run.refuse(built)
        _note_bad_rows(built.bad_rows)
        bodies = (run.requests_of.body(row) for row in run.rows() if row.number in drawn.numbers)
        tokens = asyncio.run(_tokens_of(server, model or "default", bodies))
    print(f"New columns: {', '.join(run.added)}")
    rows = counted(built.lines, "row")
    if isinstance(tokens, str):
        print(f"{rows}, {characters:,} characters. {sentence(tokens)} A token is often about four English characters.")
    elif built.lines == len(drawn.numbers):
        print(f"{rows}, {tokens:,} prompt tokens.")
    else:
        about = tokens * built.lines // len(drawn.numbers)
        print(f"{rows}, about {about:,} prompt tokens, by {len(drawn.numbers)} rows drawn at random.")


class _Drawn:
    """Numbers drawn at random from a sequence of unknown length; the same ones in each run."""

    def __init__(self, most: int) -> None:
        self.numbers = set[int]()
        self._most, self._seen = most, 0
        self._kept, self._random = list[int](), random.Random(0)

    def add(self, number: int) -> None:
        """Let a number take part."""
        self._seen += 1
        if len(self._kept) < self._most:
            self._kept.append(number)
        elif (place := self._random.randrange(self._seen)) < self._most:
            self._kept[place] = number
        self.numbers = set(self._kept)


def _characters(body: Mapping[str, Any]) -> int:
    contents = [message["content"] for message in body["messages"]]
    texts = [
        [content] if isinstance(content, str) else [part.get("text", "") for part in content] for content in contents
    ]
    return sum(len(text) for text in chain.from_iterable(texts))


async def _tokens_of(server: str | Remote, model: str, bodies: Iterator[dict[str, Any]]) -> int | str:
    """Return the tokens of all requests, as a worker counts them; or why none does. Raises `CliError` for a request
    that a worker refuses."""
    if isinstance(server, Remote):
        return "Their tokens were not counted: --url has no call for it"
    total = 0
    try:
        async with connected(server) as client:
            while group := list(islice(bodies, 16)):  # at once, so that few large requests are in memory
                calls = [
                    client.count_tokens(body, model=model, lane="batch", wait_worker_s=0, timeout=60) for body in group
                ]
                total += sum(await asyncio.gather(*calls))
    except JobFailed as error:
        raise CliError(f"a worker refuses the request: {sentence(error.error.message)}") from None
    except TimeoutError:
        return "No worker counted their tokens within a minute"
    except CliError as error:
        return f"Their tokens were not counted: {error}"
    return total


# Comparing two prompts


def compare(
    file: Path, prompts: list[Path], given: TableOptions, model: str | None, folder: Path | None, ask: Ask
) -> Comparison | Path:
    """Run both prompts over the same rows, and return how the answers differ; the folder with the runs if `ask` was
    interrupted. `folder`: keeps the runs, so that a prompt that was run before is not run again. Raises `CliError`."""
    if len(prompts) != 2:
        raise CliError(f"--prompt: give it twice, once for each of the two files to compare; there are {len(prompts)}.")
    with ExitStack() as stack:
        there = folder or Path(tempfile.mkdtemp(prefix="sluice-compare-"))
        if folder is None:
            stack.callback(shutil.rmtree, there, ignore_errors=True)
        chosen = [replace(given, prompt=prompt).chosen(model) for prompt in prompts]
        if chosen[0] == chosen[1]:
            raise CliError(f"--prompt: {prompts[0]} and {prompts[1]} are the same text; there is nothing to compare.")
        with _refused():
            there.mkdir(parents=True, exist_ok=True)
            runs = [_prompt_run(file, there, *pair) for pair in zip(prompts, chosen, strict=True)]
        _note_sample(runs[0], given)
        _note_bad_rows(runs[0].bad_rows)
        for prompt, run in zip(prompts, runs, strict=True):
            note(f"{prompt}:")
            if ask(run.requests, run.answers) is None:
                stack.pop_all()
                return there
            if folder:
                run.write_to(run.output)
        return _compared(prompts, runs, chosen[0].asked)


def _prompt_run(file: Path, folder: Path, prompt: Path, chosen: Chosen) -> TableRun:
    """Return the prepared run of one prompt. Its files are named for all that is asked, so that another prompt under
    the same name has others."""
    digest = hashlib.sha256(json.dumps(chosen.described(str(file.absolute()))).encode()).hexdigest()[:8]
    try:
        run = TableRun(file, folder / f"{prompt.stem}-{digest}.jsonl", chosen, Shown(f"{prompt.stem}.", True))
    except BatchRefused as error:
        raise BatchRefused(f"{prompt}: {error}") from None
    run.prepare()
    return run


def _compared(prompts: list[Path], runs: list[TableRun], asked: Asked) -> Comparison:
    names = [path.name for path in prompts] if prompts[0].name != prompts[1].name else list(map(str, prompts))
    one, other = (PromptScore(name) for name in names)
    found = Comparison(list(asked.fields()), (one, other))
    with _refused():
        for first, second in zip(runs[0].joined(), runs[1].joined(), strict=True):
            found.add(runs[0].key_of(first[0]), first, second)
    return found
