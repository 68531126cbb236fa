"""Every name borrowed from huggingface_hub, and from httpx2, on which it stands. Written against huggingface_hub 2.4.0.
`tests/end_to_end/test_hub.py` runs it against a server with the hub's routes.

It goes on with a file if the server ends the body early, but not if the connection is reset or the network is away for
six seconds; then the file begins again in the next call. `resume_downloads` makes it go on there too."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from httpx2 import (
    Client,
    ConnectError,
    ReadError,
    RemoteProtocolError,
    Request,
    Response,
    SyncByteStream,
    TransportError,
)
from huggingface_hub import errors as hub_errors
from huggingface_hub import set_client_factory, snapshot_download
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.utils._http import default_client_factory
from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, HFCacheInfo


class _Body(SyncByteStream):
    """A body whose connection, if it is reset, counts as ended by the server."""

    def __init__(self, body: SyncByteStream) -> None:
        self._body = body

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from self._body
        except ReadError as error:
            raise RemoteProtocolError(str(error)) from error

    def close(self) -> None:
        self._body.close()


class _PatientClient(Client):
    def __init__(self, outage_s: float) -> None:
        super().__init__(event_hooks=default_client_factory().event_hooks, follow_redirects=True, timeout=None)
        self._outage_s = outage_s

    def send(self, request: Request, **options: Any) -> Response:
        """Send a request. One for the rest of a file waits until the network is back."""
        until = time.monotonic() + (self._outage_s if "Range" in request.headers else 0.0)
        while True:
            try:
                response = super().send(request, **options)
            except TransportError:
                if time.monotonic() >= until:
                    raise
                time.sleep(1.0)
            else:
                if isinstance(response.stream, SyncByteStream):
                    response.stream = _Body(response.stream)
                return response


def scan_cache() -> "HFCacheInfo | None":
    """Return what the cache of this machine holds; None if there is no cache."""
    from huggingface_hub import scan_cache_dir  # 15 ms, which no worker needs

    try:
        return scan_cache_dir()
    except hub_errors.CacheNotFound:
        return None


def resume_downloads(outage_s: float = 600.0) -> None:
    """Let downloads of this process go on after a broken connection, and wait as long for the network to be back."""
    set_client_factory(lambda: _PatientClient(outage_s))


__all__ = [
    "HF_HUB_CACHE",
    "CachedRepoInfo",
    "ConnectError",
    "HFCacheInfo",
    "TransportError",
    "disable_progress_bars",
    "enable_progress_bars",
    "hub_errors",
    "resume_downloads",
    "scan_cache",
    "snapshot_download",
]
