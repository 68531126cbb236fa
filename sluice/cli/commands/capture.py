"""`sluice capture` and `sluice replay`: record jobs for a report of a fault, and run them again."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from sluice.capture.file import Capture, CapturedJob, CaptureWriter, read_capture
from sluice.capture.recorder import Recorder, Wanted
from sluice.capture.redaction import redacted
from sluice.capture.replay import Outcome, replay, to_submit
from sluice.cli.errors import CliError, connected, refuse_bad_id, sentence
from sluice.cli.options import (
    REDIS_URL,
    ApiKey,
    AsJson,
    GatewayUrl,
    ModelName,
    RedisUrl,
    Remote,
    integer,
    is_given,
    server_of,
)
from sluice.cli.terminal.follow import mention_missing_worker, on_interrupt
from sluice.cli.terminal.output import print_json
from sluice.cli.terminal.view import note, notes, printable
from sluice.contract.keys import DEFAULT_MODEL, is_model_name
from sluice.wording import counted


def capture(
    context: typer.Context,
    count: Annotated[
        int, typer.Option("--next", parser=integer(1, 1000), metavar="N", help="Record so many jobs.")
    ] = 1,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="A new file.  [default: sluice-capture-DATE.jsonl]",
            show_default=False,
        ),
    ] = None,
    ids: Annotated[
        list[str] | None,
        typer.Option("--id", metavar="ID", help="Record this job, in place of the next ones; can be repeated."),
    ] = None,
    tenant: Annotated[str | None, typer.Option(metavar="NAME", help="Only jobs of this tenant.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only jobs that fail.")] = False,
    redact: Annotated[
        bool,
        typer.Option("--redact", help="Replace words by x, and keep structure, lengths and seeds. Not to be replayed."),
    ] = False,
    model: ModelName = None,
    redis_url: RedisUrl = REDIS_URL,
) -> None:
    """Record jobs in a private file, for a report of a fault.

    The file holds requests, with their prompts and images, all events, results, versions and settings; passwords and
    keys of the worker are not in it. Only its owner can read it. It prints the file's name.

    Jobs that are submitted from now on are recorded, each when it ends. Ctrl-C ends the recording; the file keeps what
    there is, also of jobs that run. The request of a job is deleted when it ends: with --id an ended job is recorded
    without it.

    Exit codes: 0 something was recorded, 2 nothing was.

    \b
    Examples:
      sluice capture --next 5 --model big
      sluice capture --failed --tenant acme --redact
      sluice replay $(sluice capture --id report-7)
    """
    for each in ids or ():
        refuse_bad_id(each)
    if ids and (failed or tenant is not None or is_given(context, "count")):
        raise CliError("--id: it names the jobs, so leave --next, --tenant and --failed out.")
    if model is not None and not is_model_name(model):
        raise CliError(f"--model: {model!r} is not the name of a model.")
    path = output or Path(time.strftime("sluice-capture-%Y%m%d-%H%M%S.jsonl"))
    try:
        with CaptureWriter(path, redacted=redact) as writer:
            _warn(path, redact=redact)
            wanted = Wanted(model or DEFAULT_MODEL, tenant, failed)
            asyncio.run(_capture(redis_url, writer, wanted, ids or [], count, redact=redact))
    except FileExistsError:
        raise CliError(f"{path} exists already: give another name with -o.") from None
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}.") from None
    if not writer.jobs:
        raise CliError("nothing was recorded, so there is no file.")
    print(path)


def _warn(path: Path, *, redact: bool) -> None:
    holds = "shapes of prompts and answers without their words" if redact else "prompts and answers in plain text"
    note(f"{path} will hold {holds}: read it before you pass it on, and delete it afterwards.", style="yellow")


async def _capture(
    url: str, writer: CaptureWriter, wanted: Wanted, ids: list[str], count: int, *, redact: bool
) -> None:
    async with connected(url) as client:
        wanted = Wanted((await client.aliases()).get(wanted.model, wanted.model), wanted.tenant, wanted.failed_only)
        recorder = Recorder(client)
        if not ids:
            await client.of_model(wanted.model).ping()  # of several servers another one may have answered
            await mention_missing_worker(client, wanted.model, waits="its jobs wait")
        jobs = recorder.record_known(ids) if ids else recorder.record_next(wanted, count)
        total = len(set(ids)) if ids else count

        def write(job: CapturedJob) -> None:
            writer.write(redacted(job) if redact else job)
            note(f"recorded {job.id}: {job.state or 'no trace of its end'}, {counted(len(job.events), 'event')}"
                 f"{'' if job.request is not None else ', without its request'}")  # fmt: skip

        def state() -> str:
            return f"{writer.jobs} of {counted(total, 'job')} recorded, {recorder.following} not ended; Ctrl-C ends it"

        with on_interrupt() as interrupted, notes.status(state(), spinner_style="dim") as status:
            if not notes.is_terminal:
                note(state())
            async for job in _until(interrupted, jobs, lambda: status.update(state())):
                write(job)
            if interrupted.is_set() and not wanted.failed_only:
                for job in await recorder.record_unfinished():
                    write(job)
        if recorder.skipped:
            note(f"{counted(recorder.skipped, 'job')} came while too many were held.", style="yellow")


async def _until(
    interrupted: asyncio.Event, jobs: AsyncGenerator[CapturedJob], tick: Callable[[], None]
) -> AsyncIterator[CapturedJob]:
    """Yield the jobs until the event is set. `tick` is called twice a second."""
    stopping = asyncio.create_task(interrupted.wait())
    async with aclosing(jobs):
        while True:
            following = asyncio.ensure_future(anext(jobs))
            while not (following.done() or stopping.done()):
                await asyncio.wait([following, stopping], timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
                tick()
            if not following.done():
                following.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await following
                return
            try:
                yield following.result()
            except StopAsyncIteration:
                stopping.cancel()
                return


def replay_jobs(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file of `sluice capture`.")],
    jobs: Annotated[
        list[str] | None,
        typer.Option("--job", metavar="ID_OR_N", help="Only this job, by its id or its place; can be repeated."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="Submit to this model.  [default: the recorded one]")
    ] = None,
    redis_url: RedisUrl = REDIS_URL,
    url: GatewayUrl = None,
    key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Run the jobs of a capture again, and compare their answers.

    A job without a seed gets the one that was drawn. Answers are compared by tokens and characters, or over --url by
    characters alone; jobs that had not ended as far as they were recorded. Each line is equal, differs with the first
    difference, or skipped; with --json an object {"job", "verdict", "text", "id"}. Answers are only equal for the same
    model on an alike device: the fingerprint tells.

    Exit codes: 0 all are equal, 1 one differs, 2 none could be compared.

    \b
    Examples:
      sluice replay sluice-capture-20261224-220000.jsonl
      sluice replay capture.jsonl --job report-7 --model candidate
      sluice replay capture.jsonl --url http://localhost:8000
    """
    server = server_of(context, redis_url, url, key)
    if model is not None and not is_model_name(model):
        raise CliError(f"--model: {model!r} is not the name of a model.")
    chosen = _chosen(_read(file), jobs or [])
    outcomes = list[Outcome]()

    def show(job: CapturedJob, outcome: Outcome) -> None:
        outcomes.append(outcome)
        if as_json:
            print_json({"job": job.id, **asdict(outcome)})
        else:
            print(printable(f"{job.id}  {outcome.verdict}: {outcome.text}"), flush=True)

    asyncio.run(_replay(server, chosen, model, show))
    verdicts = {each.verdict for each in outcomes}
    if "differs" in verdicts:
        raise typer.Exit(1)
    if "equal" not in verdicts:
        raise CliError("no job could be compared.")


def _read(file: Path) -> Capture:
    try:
        if not file.is_file():
            raise CliError(f"{file} is not a file: give one that `sluice capture` wrote.")
        found = read_capture(file)
    except OSError as error:
        raise CliError(f"cannot read {file}: {error.strerror}.") from None
    except ValueError as error:
        raise CliError(f"{file}: {sentence(str(error))}") from None
    for problem in found.problems:
        note(f"{file}: {sentence(problem)}", style="yellow")
    if found.redacted:
        raise CliError(f"{file} is redacted: its prompts have no words, so their answers cannot be compared.")
    return found


def _chosen(found: Capture, names: list[str]) -> list[CapturedJob]:
    """Return the jobs of these ids or places from 1 on; all without a name. Raises `CliError`."""
    if not found.jobs:
        raise CliError("the file holds no whole job.")
    by_name = {str(place): job for place, job in enumerate(found.jobs, 1)} | {job.id: job for job in found.jobs}
    for name in names:
        if name not in by_name:
            ids = ", ".join(job.id for job in found.jobs[:10])
            raise CliError(f"--job {name}: there is no such job; the file has {counted(len(found.jobs), 'job')}: {ids}")
    return [by_name[name] for name in dict.fromkeys(names)] if names else found.jobs


async def _replay(
    server: str | Remote, jobs: list[CapturedJob], model: str | None, show: Callable[[CapturedJob, Outcome], None]
) -> None:
    async with _replaying(server) as run:
        for job in jobs:
            request = to_submit(job, model)
            with notes.status(f"running {job.id} again", spinner_style="dim"):
                outcome = await _outcome(run, job, request, model or job.model)
            show(job, outcome)


Run = Callable[[CapturedJob, dict[str, Any], str], Awaitable[Outcome]]


async def _outcome(run: Run, job: CapturedJob, request: dict[str, Any] | str, model: str) -> Outcome:
    if isinstance(request, str):
        return Outcome("skipped", request)
    try:
        return await run(job, request, model)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        return Outcome("skipped", f"its events or its result were changed ({type(error).__name__}: {error})")


@contextlib.asynccontextmanager
async def _replaying(server: str | Remote) -> AsyncIterator[Run]:
    """Yield what runs a job again. Its errors inside the block become `CliError`."""
    if not isinstance(server, Remote):
        async with connected(server) as client:
            yield partial(replay, client)
        return
    try:
        from sluice.capture.remote import GatewayError, replay_remotely
    except ImportError as missing:
        raise CliError(f"--url needs httpx ({missing}): pip install 'httpx>=0.27'") from None
    try:
        yield partial(replay_remotely, server.url, server.key)
    except GatewayError as error:
        raise CliError(sentence(str(error))) from None
