"""Parse the URLs of images."""

import re
from ipaddress import ip_address
from urllib.parse import quote, urljoin, urlsplit

from httpcore2 import URL

from worker.errors import JobFailure

_MAX_URL_CHARACTERS = 8_192
_HOST = re.compile(r"[a-z0-9_.-]{1,253}", re.ASCII)
_IN_PATHS = "/%:@!$&'()*+,;=~?[]|"  # not escaped: allowed in a URL, or accepted by servers
_PORTS = {"http": 80, "https": 443}


def parse_url(url: str) -> URL:
    """Parse an http: or https: URL. Its host is a name in ASCII, or an address without brackets; its target is path and
    query. Raises `JobFailure`."""
    if len(url) > _MAX_URL_CHARACTERS:
        raise JobFailure("invalid_request", f"the URL is longer than {_MAX_URL_CHARACTERS:,} characters.")
    try:
        parts = urlsplit(url)
        if parts.scheme not in _PORTS:
            raise JobFailure("invalid_request", "the URL must begin with https:, http: or data:.")
        host, port = _host(parts.hostname or ""), _PORTS[parts.scheme] if parts.port is None else parts.port
        if port == 0:
            raise JobFailure("invalid_request", "the URL has port 0, which no server has; leave the port out.")
    except ValueError:  # an invalid port, an unclosed bracket, a host that IDNA rejects
        raise JobFailure("invalid_request", "the URL is invalid.") from None
    if parts.username is not None:
        raise JobFailure(
            "invalid_request",
            "the URL contains a user name; remove it, since images are fetched without credentials.",
        )
    path = quote((parts.path or "/") + (parts.query and f"?{parts.query}"), safe=_IN_PATHS)
    return URL(scheme=parts.scheme, host=host, port=port, target=path)


def redirected(url: str, location: str) -> str:
    """Return the URL of a redirect, which may be relative to `url`. Raises `JobFailure`."""
    try:
        return urljoin(url, location)
    except ValueError:  # an unclosed bracket
        raise JobFailure("invalid_request", "the URL redirects to an invalid one.") from None


def host_header(url: URL) -> str:
    """Return the value of the header Host."""
    host = url.host.decode()
    name = f"[{host}]" if ":" in host else host
    return name if url.port == _PORTS[url.scheme.decode()] else f"{name}:{url.port}"


def _host(name: str) -> str:
    """Return the host in ASCII, or an address in its usual notation. Raises ValueError."""
    if ":" in name:
        return str(ip_address(name))
    ascii = name.encode("idna").decode()
    if not _HOST.fullmatch(ascii):
        raise ValueError(name)
    return ascii
