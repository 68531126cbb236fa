"""Reports to systemd that a process serves and is alive, if it runs as a unit of `Type=notify`: sd_notify(3)."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


@asynccontextmanager
async def serving() -> AsyncIterator[None]:
    """Report that this process serves, and for as long as the block runs that its event loop is alive. Nothing is sent
    unless systemd asked this process for it: it names the unit's main process."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        yield  # a process of a worker, gateway or supervisor that is the unit's
        return
    _send("READY=1")
    alive = asyncio.create_task(_keep_alive())
    try:
        yield
    finally:
        alive.cancel()


async def _keep_alive() -> None:
    """Report twice in the time that systemd waits for, until cancelled."""
    while microseconds := os.environ.get("WATCHDOG_USEC"):
        await asyncio.sleep(int(microseconds) / 2e6)
        _send("WATCHDOG=1")


def _send(state: str) -> None:
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.setblocking(False)
        notified.sendto(state.encode(), f"\0{address[1:]}" if address[0] == "@" else address)
