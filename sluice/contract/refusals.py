"""Meanings of a server's error replies, and which of them end by themselves."""

from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    TryAgainError,
)

# Codes of replies that redis-py raises as classes of their own, without the code.
_CODES: dict[type[Exception], str] = {
    AuthenticationError: "NOAUTH",
    AuthorizationError: "NOAUTH",
    BusyLoadingError: "LOADING",
    MasterDownError: "MASTERDOWN",
    ClusterDownError: "CLUSTERDOWN",
    NoPermissionError: "NOPERM",
    OutOfMemoryError: "OOM",
    ReadOnlyError: "READONLY",
    TryAgainError: "TRYAGAIN",
}
# The server's words, which redis-py compares likewise: this reply has no code of its own.
_MAX_CLIENTS = "max number of clients reached"
MAX_CLIENTS = "MAXCLIENTS"

_CLUSTER = "it is a node of a cluster, which Sluice cannot use; give the URL of a server without cluster mode"
_REASONS = {
    "MISCONF": "it cannot write to its disk and refuses all writes; free space there, or see its log for the reason",
    "OOM": "it is out of memory; wait for jobs to end, or raise its maxmemory",
    "READONLY": "it is a replica, which refuses all writes; give the URL of its primary",
    "LOADING": "it is loading its data from disk; wait until that has ended",
    "MASTERDOWN": "it is a replica that has lost its primary; give the URL of the primary",
    "NOREPLICAS": "it refuses all writes until it has more replicas; start them, or lower its min-replicas-to-write",
    "BUSY": "a script of another client occupies it; wait, or run SCRIPT KILL",
    "CLUSTERDOWN": _CLUSTER,
    "TRYAGAIN": _CLUSTER,
    "MOVED": _CLUSTER,
    "CROSSSLOT": _CLUSTER,
    MAX_CLIENTS: "all its connections are taken; close idle clients, or raise its maxclients",
    "NOAUTH": "it requires a password, or refuses the one it was given; correct the URL",
    "DENIED": "it is in protected mode and serves its own machine alone; give it a password, and put that in the URL",
    "NOPERM": "it denies a command to this user; docs/operations.md has the ACL SETUSER line of each role under Users",
}
# Replies for a time: to be sent again. The server of a failover is a replica for a moment.
_TRANSIENT = frozenset(
    {"READONLY", "LOADING", "MASTERDOWN", "NOREPLICAS", "BUSY", "CLUSTERDOWN", "TRYAGAIN", MAX_CLIENTS}
)
# Replies of a server without room, in memory or on disk: it has room again when jobs or an operator have made some.
_FULL = frozenset({"OOM", "MISCONF"})


def code_of(error: BaseException) -> str:
    """Return the code of an error reply; a word without a meaning for another error."""
    for kind, code in _CODES.items():
        if isinstance(error, kind):
            return code
    # redis-py puts the number and the text of the command in front of an error of a pipeline.
    text = str(error).rpartition("of pipeline caused error: (")[2].lstrip("'\"")
    return MAX_CLIENTS if text == _MAX_CLIENTS else text.partition(" ")[0]


def reason_of(error: BaseException) -> str | None:
    """Return what is wrong with the server and what to do, as a clause about "it"; None if neither the error nor what
    caused it is an error reply with such a meaning."""
    cause = error.__cause__
    return (reason_of(cause) if cause is not None else None) or _REASONS.get(code_of(error))


def is_temporary(error: BaseException) -> bool:
    """Return True for an error reply that ends by itself."""
    return code_of(error) in _TRANSIENT


def is_full(error: BaseException) -> bool:
    """Return True if the server refuses writes because its memory or its disk has no room."""
    return code_of(error) in _FULL
