"""`sluice models pull` and `rm`, and the checkpoints of this machine for `sluice models list`."""

import asyncio
import os
import shutil
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.commands.models import checkpoints_of, is_here
from sluice.cli.errors import CliError, confirm, connected, needs_worker, sentence
from sluice.cli.options import REDIS_URL, RedisUrl
from sluice.cli.terminal.view import note
from sluice.wording import counted

if TYPE_CHECKING:
    from sluice.client import Client
    from worker.engine.upstream.hub import CachedRepoInfo, HFCacheInfo

HubId = Annotated[str, typer.Argument(help="Id of the model on Hugging Face.", metavar="HUB_ID")]


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """A model's files on this machine. `name`: its hub id, or its folder as it was given."""

    name: str
    path: Path
    nbytes: int
    complete: bool = True  # all files have arrived that a worker reads


def checkpoints(named: Collection[str]) -> list[dict[str, Any]]:
    """Return the checkpoints in the cache of Hugging Face, and those in folders that are `named` or that settings name,
    as `sluice check` finds them. Takes up to some seconds for each."""
    from worker.engine.upstream.hub import scan_cache
    from worker.environment import read_unchecked
    from worker.settings import Settings

    written = read_unchecked(Settings)
    given = (written.get(field) for field in ("model", "mtp_model", "draft_model", "specprefill_draft_model"))
    folders = {Path(each).expanduser().resolve() for each in (*given, *named) if each}
    found = [
        *_in_cache(scan_cache()),
        *(_Checkpoint(str(each), each, _size(each)) for each in folders if each.is_dir()),
    ]
    return [_described(each) for each in sorted(found, key=lambda each: each.name)]


def _in_cache(cache: "HFCacheInfo | None") -> Iterator[_Checkpoint]:
    for repo in _models(cache):
        newest = max(repo.revisions, key=lambda each: ("main" in each.refs, each.last_modified), default=None)
        if newest is not None:
            yield _Checkpoint(
                repo.repo_id, newest.snapshot_path, repo.size_on_disk, _is_complete(repo, newest.snapshot_path)
            )


def _is_complete(repo: "CachedRepoInfo", folder: Path) -> bool:
    from worker.engine.upstream.hub import hub_errors, snapshot_download

    try:
        snapshot_download(repo.repo_id, allow_patterns=_patterns(folder, repo.repo_id), local_files_only=True)
    except hub_errors.LocalEntryNotFoundError:
        return False
    return True


def _patterns(folder: Path, name: str) -> list[str]:
    """Return the patterns of a model's files. `folder`: with those that describe it."""
    from worker.engine.model.load import files_of
    from worker.errors import CannotStart

    try:
        return files_of(folder, name)
    except (CannotStart, ValueError, RecursionError):  # what is not served may be an embedding model of another type
        return ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


def _models(cache: "HFCacheInfo | None") -> "list[CachedRepoInfo]":
    return [repo for repo in cache.repos if repo.repo_type == "model"] if cache else []


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _described(checkpoint: _Checkpoint) -> dict[str, Any]:
    """Return what `sluice check` says of a checkpoint, in short; `problem` is why this version would not serve it."""
    from worker.cli.check import blockers_of
    from worker.engine.checkpoint import read_config
    from worker.errors import CannotStart

    family, problem = None, None
    try:
        family = read_config(checkpoint.path, checkpoint.name)["model_type"]
        blockers = blockers_of(str(checkpoint.path), checkpoint.name)
        problem = " ".join(blockers) or None
    except CannotStart as error:
        problem = str(error).replace(str(checkpoint.path), checkpoint.name)
    if not checkpoint.complete:
        problem = f"not all of its files are here: sluice models pull {checkpoint.name}"
    return {
        "checkpoint": checkpoint.name,
        "path": str(checkpoint.path),
        "bytes": checkpoint.nbytes,
        "family": family,
        "servable": problem is None,
        "problem": problem,
    }


def pull(
    model: HubId,
    force: Annotated[bool, typer.Option("--force", help="Also a model that a worker would not serve here.")] = False,
) -> None:
    """Download a model from Hugging Face, into its cache.

    The small files come first: what a worker would not serve is refused before its weights are fetched. Then the size
    is compared with the room on the disk. A broken connection is made again, for ten minutes, and a file goes on where
    it was. After that, or Ctrl-C, the same command fetches the files that have not arrived as a whole. Exit codes: 0,
    or 2 if it is not downloaded.

    \b
    Examples:
      sluice models pull mlx-community/Qwen3-4B-4bit
      HF_HUB_CACHE=/Volumes/big/hub sluice models pull mlx-community/Qwen3-4B-4bit
    """
    with needs_worker():
        from worker.engine.checkpoint import is_path
        from worker.engine.memory import format_bytes
    if is_path(model) or Path(model).is_dir():
        raise CliError(f"{model} is a folder; give the id of a model on Hugging Face: mlx-community/Qwen3-4B-4bit.")
    _dry_run(model, ["config.json"])
    patterns = _patterns(_describing(model), model)
    sizes = _dry_run(model, patterns)
    if not force:
        _refuse_unservable(model)
    missing = sum(nbytes for nbytes, is_here in sizes if not is_here)
    total = format_bytes(sum(nbytes for nbytes, _ in sizes))
    if not missing:
        note(f"{model}: all is here, {total} in {counted(len(sizes), 'file')}")
    else:
        _refuse_without_room(model, missing)
        note(f"{model}: {total} in {counted(len(sizes), 'file')}, {format_bytes(missing)} of it to download")
    note(f"{model} is in {_download(model, patterns)}")


def _describing(model: str) -> Path:
    """Return the folder with the files that describe a model, from the hub. Raises `CliError`."""
    from worker.engine.model.load import model_folder
    from worker.errors import CannotStart

    try:
        with _silent():
            return model_folder(model, name=model, only=["*.json"])
    except CannotStart as error:
        raise CliError(str(error)) from None


def _dry_run(model: str, patterns: list[str]) -> list[tuple[int, bool]]:
    """Return the bytes of each file of the model, and True if it is here. Raises `CliError`."""
    from worker.engine.model.load import why_not_downloaded
    from worker.engine.upstream.hub import TransportError, hub_errors, snapshot_download

    try:
        with _silent():
            files = snapshot_download(model, allow_patterns=patterns, dry_run=True)
    except hub_errors.DryRunError as error:
        cause = error.__cause__
        reason = cause if isinstance(cause, OSError | ValueError | TransportError) else error
        raise CliError(f"{model}: {why_not_downloaded(reason)}") from None
    except (OSError, ValueError, TransportError) as error:
        raise CliError(f"{model}: {why_not_downloaded(error)}") from None
    return [(file.file_size or 0, not file.will_download) for file in files]


@contextmanager
def _silent() -> Iterator[None]:
    """Show no progress bars of the library inside the block: it fetches small files."""
    from worker.engine.upstream.hub import disable_progress_bars, enable_progress_bars

    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _refuse_unservable(model: str) -> None:
    from worker.cli.check import blockers_of
    from worker.errors import CannotStart

    try:
        with _silent():
            blockers = blockers_of(model)
    except CannotStart as error:
        blockers = [str(error)]
    if blockers:
        raise CliError(f"{model}: a worker would not serve it here: {' '.join(blockers)} --force downloads it anyway.")


def _refuse_without_room(model: str, missing: int) -> None:
    from worker.engine.memory import format_bytes
    from worker.engine.upstream.hub import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE)
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if (free := shutil.disk_usage(there).free) < missing:
        raise CliError(
            f"{model}: {format_bytes(missing)} are to be downloaded, and {folder} has room for {format_bytes(free)}. "
            "Make room (sluice models list shows sizes), or give a folder on another disk with HF_HUB_CACHE."
        )


def _download(model: str, patterns: list[str]) -> str:
    """Download a model, with the progress bars of the library, and return its folder. Raises `CliError`."""
    from worker.engine.model.load import why_not_downloaded
    from worker.engine.upstream.hub import TransportError, resume_downloads, snapshot_download

    resume_downloads()
    try:
        return str(snapshot_download(model, allow_patterns=patterns))
    except (OSError, ValueError, TransportError) as error:
        raise CliError(f"{model}: {why_not_downloaded(error)}") from None
    except KeyboardInterrupt:
        raise CliError(f"stopped; the files that have arrived are kept: sluice models pull {model} goes on.") from None


def rm(
    model: HubId,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    redis_url: RedisUrl = REDIS_URL,
) -> None:
    """Delete a model from the cache of Hugging Face on this machine.

    Says what goes and how large it is, and asks. A model that a worker of this machine serves, or a draft model of one,
    is never deleted; the server is asked for that. Exit codes: 0, or 2 if it is not deleted.

    \b
    Example:
      sluice models rm mlx-community/Qwen3-4B-4bit
    """
    with needs_worker():
        from worker.engine.memory import format_bytes
        from worker.engine.upstream.hub import scan_cache
    cache = scan_cache()
    found = next((repo for repo in _models(cache) if repo.repo_id == model), None)
    if cache is None or found is None:
        raise CliError(_why_not_found(model))
    _refuse_served(found, *_users_here(redis_url))
    partial = sum(file.stat().st_size for file in found.repo_path.glob("blobs/*.incomplete"))
    size = format_bytes(found.size_on_disk + partial)
    files = counted(len({file.blob_path for each in found.revisions for file in each.files}), "file")
    if not yes:
        confirm(
            f"Delete {model}, {size} in {files}, from {found.repo_path}?",
            refusal="nothing was deleted; --yes deletes without asking.",
        )
        _refuse_served(found, *_users_here(redis_url))  # one may have started meanwhile
    shutil.rmtree(found.repo_path)
    note(f"{model} is deleted: {size} are free")


def _why_not_found(model: str) -> str:
    from worker.engine.upstream.hub import HF_HUB_CACHE

    if Path(model).expanduser().is_dir():
        return f"{model} is a folder of yours, which is not deleted here; rm -r does it."
    return f"there is no model {model!r} in {HF_HUB_CACHE}; sluice models list shows what there is."


def _users_here(url: str) -> tuple[list[dict[str, str]], dict[str, set[str]]]:
    """Return the workers of this machine, and what its supervisors may load. Raises `CliError`."""

    async def read() -> tuple[list[dict[str, str]], dict[str, set[str]]]:
        async with connected(url) as client:
            workers = [worker for worker in await client.workers() if worker.get("host") == socket.gethostname()]
            _refuse_absent(client)
            supervised = (await client.supervised_models()).items()
            _refuse_absent(client)
        return workers, {id: {each["path"] for each in models.values()} for id, models in supervised if is_here(id)}

    try:
        return asyncio.run(read())
    except CliError as error:
        raise CliError(
            f"{error} Without it nobody knows what workers here serve; hf cache rm deletes all the same."
        ) from None


def _refuse_absent(client: "Client") -> None:
    """Raises `CliError` if a server of a map did not answer: the last list is without its workers."""
    if client.absent:
        raise CliError(sentence("; ".join(client.absent)))


def _refuse_served(
    repo: "CachedRepoInfo", workers: Sequence[Mapping[str, str]], supervisors: Mapping[str, Collection[str]]
) -> None:
    """Raises `CliError` if a worker of this machine has the model open, or does not say what it has, or if a supervisor
    may load it."""

    def is_among(opened: Collection[str]) -> bool:
        folders = (Path(os.path.expanduser(each)).resolve() for each in opened)
        return repo.repo_id in opened or any(each.is_relative_to(repo.repo_path.resolve()) for each in folders)

    for id, paths in supervisors.items():
        if is_among(paths):
            raise CliError(f"{repo.repo_id} is in use: the supervisor {id} loads it when a job comes. Stop it first.")
    for worker in workers:
        name = worker.get("name", "")
        opened = checkpoints_of(worker)
        if opened is None:
            raise CliError(
                f"{name} is a worker of an earlier version, which does not say what it serves; stop it first."
            )
        if is_among(opened):
            raise CliError(f"{repo.repo_id} is in use: {name} serves it. First: sluice workers drain {name}")
