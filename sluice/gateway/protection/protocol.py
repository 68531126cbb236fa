"""The HTTP protocol of the server: on httptools if it is installed, else on h11, as uvicorn chooses. httptools parses a
request in a fraction of the time, and has to be told what h11 does by itself."""

import asyncio
import sys

from uvicorn.protocols.http.h11_impl import H11Protocol

from sluice.gateway.protection.client_limits import BAD_REQUEST, ClientLimits


def protocol(timeout_s: float) -> type[asyncio.Protocol]:
    """Return the class to pass to uvicorn as `http`."""
    return type("ClientProtocol", (_fastest(),), {"timeout_s": timeout_s})


def _fastest() -> type[asyncio.Protocol]:
    try:
        from sluice.gateway.protection.httptools_protocol import HttptoolsClient
    except ImportError:
        return H11Client
    return HttptoolsClient


class H11Client(ClientLimits, H11Protocol):
    """The protocol on h11."""

    def refused_status(self) -> int:
        """Return the status that h11 proposes."""
        return getattr(sys.exception(), "error_status_hint", BAD_REQUEST)
