"""Client library for backends: submit a chat, stream its tokens, fetch its result, cancel it; run files of chats
offline.

`Client` is for asyncio, `SyncClient` for threads; `sse` streams a job to a browser, `openai` to OpenAI clients.

Needs redis-py and nothing else; the daemon's packages `worker` and `schemas` are never imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from sluice.public import *  # noqa: F403
    from sluice.public import __all__ as __all__
else:

    def __getattr__(name: str) -> object:
        """Import the library at the first use of one of its names: a worker, which needs the contract alone, starts
        sooner."""
        if not name.startswith("__") or name == "__all__":
            library = import_module("sluice.public")
            if hasattr(library, name):
                return getattr(library, name)
        raise AttributeError(f"module 'sluice' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
