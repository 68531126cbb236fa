"""URLs of Redis servers: checks them, redacts their passwords, and reads the map of several servers."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qsl

from sluice.contract.keys import is_model_name

_SENTINEL_SCHEMES = ("redis+sentinel", "rediss+sentinel")
_SCHEMES = ("redis", "rediss", "unix", *_SENTINEL_SCHEMES)
_HOST = r"(?P<host>[^\s/?#@:\[\],]*|\[[0-9A-Fa-f:.]+\])"
_SERVER = re.compile(_HOST + r"(?::(?P<port>\d*))?")
_SERVICE = r"[A-Za-z0-9._-]+"  # as `sentinel monitor` permits
_OTHER_SCHEMES = ("http", "https", "tcp", "valkey", "valkeys")
_HOST_AND_PORT = re.compile(r"[^\s/?#@:\[\]]+:\d{1,5}(?:/\d{0,4})?")

UNREADABLE = "it cannot be read: in a password / is written as %2F, ? as %3F, # as %23, @ as %40, [ as %5B"
_NO_SERVICE = (
    "after the sentinels it needs the name of the service that they watch, as in "
    "redis+sentinel://HOST1:26379,HOST2:26379/SERVICE; only the number of a database may follow"
)
BAD_OPTION = "an option after the ? is unknown to redis-py, or has a bad value"


def url_error(url: str) -> str | None:
    """Return the problem of the URL without quoting it, or None if redis-py can use the URL.

    The errors of redis-py and urllib quote text that they cannot parse, which may be a part of a password.
    """
    scheme, found, rest = url.partition("://")
    if not found or scheme not in _SCHEMES:
        return "it must begin with redis://, rediss://, unix:// or redis+sentinel://"
    rest, _, query = rest.partition("?")
    if scheme != "unix" and (error := _server_error(rest, sentinels=scheme in _SENTINEL_SCHEMES)):
        return error
    try:
        parse_qsl(query, strict_parsing=bool(query), keep_blank_values=True)
    except ValueError:
        return UNREADABLE
    return None


def _server_error(rest: str, *, sentinels: bool) -> str | None:
    authority, slash, path = rest.partition("/")
    if "@" in path or "#" in rest or not authority.isprintable():
        return UNREADABLE
    for one in authority.rpartition("@")[2].split("," if sentinels else None) or [""]:
        server = _SERVER.fullmatch(one)
        if server is None or int(server["port"] or 0) > 65_535:
            return "the port must be a number up to 65535"
        if sentinels and not server["host"]:
            return "each sentinel needs a host, as in redis+sentinel://HOST1:26379,HOST2:26379/SERVICE"
    if sentinels:
        return None if re.fullmatch(rf"{_SERVICE}(/\d*)?", path) else _NO_SERVICE
    if slash and not re.fullmatch(r"\d*/?", path):
        return "only the number of a database may follow the host"
    return None


@dataclass(frozen=True, slots=True)
class Sentinels:
    """Sentinels that name the primary of a service, as a URL gives them."""

    addresses: tuple[tuple[str, int], ...]
    service: str
    server: str  # URL with the credentials, database and options of the service's servers, and a sentinel's address


def sentinels_of(url: str) -> Sentinels | None:
    """Return the sentinels of a URL that begins with redis+sentinel:// or rediss+sentinel://; None for another.
    `url_error` must have found no problem."""
    scheme, _, rest = url.partition("://")
    if scheme not in _SENTINEL_SCHEMES:
        return None
    rest, _, query = rest.partition("?")
    authority, _, path = rest.partition("/")
    user, at, servers = authority.rpartition("@")
    found = [match for match in map(_SERVER.fullmatch, servers.split(",")) if match]
    addresses = tuple((match["host"].strip("[]"), int(match["port"] or 26_379)) for match in found)
    service, _, database = path.partition("/")
    server = f"{scheme.partition('+')[0]}://{user}{at}{found[0][0]}/{database}?{query}"
    return Sentinels(addresses, service, server)


def redacted(url: str) -> str:
    """Return the URL without user, password and query. Text that might be a part of a password becomes `***`."""
    scheme, found, rest = url.partition("://")
    if not found or scheme.lower() not in (*_SCHEMES, *_OTHER_SCHEMES):
        return _redacted_without_scheme(url)
    before, at, server = rest.rpartition("@")
    hidden = "***@" if at else ""
    if "?" in before:  # the last @ may be in a password that is an option
        return f"{scheme}://***"
    server = re.split(r"[?#]", server)[0]
    if scheme == "unix":
        return f"unix://{hidden}{server if server.startswith('/') else '***'}"
    if scheme.lower() in _SENTINEL_SCHEMES:
        servers, _, path = server.partition("/")
        public = path if re.fullmatch(rf"{_SERVICE}(/\d{{0,4}})?", path) else "***"
        return f"{scheme}://{hidden}{','.join(map(_redacted_server, servers.split(',')))}/{public}"
    return f"{scheme}://{hidden}{_redacted_server(server)}"


def _redacted_without_scheme(url: str) -> str:
    """Return the URL if it is certain to be a host and a port, as in `localhost:6379`; else `***`."""
    before, at, server = url.rpartition("@")
    if not url or ("?" not in before and _HOST_AND_PORT.fullmatch(server)):
        return f"***@{server}" if at else server
    return "***"


def _redacted_server(server: str) -> str:
    server, slash, database = server.partition("/")
    host, _, port = server.rpartition(":") if re.search(r":[^\]]*$", server) else (server, "", "")
    public = host if re.fullmatch(_HOST, host) else "***"
    if port:
        public += f":{port}" if re.fullmatch(r"\d{1,5}", port) else ":***"
    if slash:
        public += f"/{database}" if re.fullmatch(r"\d{0,4}", database) else "/***"
    return public


def credentials_error(*, has_user: bool, has_password: bool, is_open: bool) -> str:
    """Return the problem of a URL whose credentials the server refused. `is_open`: the server needs no password."""
    if not has_user and not has_password:
        return "it requires a password; put it into the URL, as in redis://:PASSWORD@HOST:PORT/0"
    if not is_open:
        return "it refuses the user or the password in the URL; correct them"
    if has_user:
        return "it refuses the user or the password in the URL, but needs none; correct or remove them"
    return "it has no password, and refuses the one in the URL; remove it from the URL"


class MapFile(str):
    """The path of a map of servers, if it stands where else the URL of one server does."""


@dataclass(frozen=True, slots=True)
class Servers:
    """The servers over which models are spread."""

    file: str
    default: str  # URL for the models that are not named
    models: Mapping[str, str]  # URL by model

    @classmethod
    def read(cls, file: str | Path) -> Self:
        """Read a TOML file: `default`, and a table `models`. Raises ValueError, which names the file and never quotes a
        password."""
        try:
            return cls._parse(str(file), tomllib.loads(Path(file).read_text("utf-8")))
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{file}: it is no TOML, or has a name twice: {error}") from None
        except UnicodeDecodeError:
            raise ValueError(f"{file}: it is no text in UTF-8") from None
        except OSError as error:
            raise ValueError(f"{file}: it cannot be read: {error.strerror}") from None

    @classmethod
    def _parse(cls, file: str, given: dict[str, Any]) -> Self:
        models = given.get("models", {})
        if unknown := sorted(given.keys() - {"default", "models"}):
            raise ValueError(f"{file}: {_name(unknown[0])} is unknown; there are `default` and the table [models]")
        if "default" not in given:
            raise ValueError(f"{file}: `default` is missing: the URL of the server for all models that are not named")
        if not isinstance(models, dict):
            raise ValueError(f"{file}: `models` must be a table: [models], and below it a line for each model")
        for model, url in models.items():
            if isinstance(url, dict):
                raise ValueError(f'{file}: {_name(model)} is a table; a name with a point needs quotes: "qwen3.5" = …')
            if not is_model_name(model):
                raise ValueError(f"{file}: {_name(model)} is not a model's name, which has letters, digits, . _ and -")
        for name, url in [("default", given["default"]), *models.items()]:
            if not isinstance(url, str):
                raise ValueError(f'{file}: {name} must be the URL of a server, as in "redis://localhost:6379/0"')
            if problem := url_error(url):
                raise ValueError(f"{file}: {name} is not the URL of a server: {problem}")
        return cls(file, given["default"], models)

    def of_model(self, model: str) -> str:
        """Return the URL of the server of a model."""
        return self.models.get(model, self.default)

    @property
    def urls(self) -> tuple[str, ...]:
        """The URL of each server, the default one first."""
        return tuple(dict.fromkeys([self.default, *self.models.values()]))

    def describe(self, url: str) -> str:
        """Return a noun phrase for a server, with its models and without its password."""
        models = sorted(model for model, own in self.models.items() if own == url)
        listed = [*(["all models that are not named"] if url == self.default else []), *models[:5]]
        more = f" and {len(models) - 5} more" if len(models) > 5 else ""
        return f"the server {redacted(url)} of {', '.join(listed)}{more}"


def _name(text: str) -> str:
    """Return a name of the file in quotes; `***` if it might be a URL with a password."""
    return "***" if ":" in text or "@" in text else repr(text[:80])
