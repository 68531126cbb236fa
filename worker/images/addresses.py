"""Which addresses a worker may be sent to by a request."""

from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

# What is given to somebody, of IPv6. All else is nobody's, or wraps an address of IPv4.
_GLOBAL_UNICAST = IPv6Network("2000::/3")
# RFC 6052: how a network without IPv4 writes the addresses of those who have no other.
_NAT64 = IPv6Network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Whether it is on the internet, by the numbers alone: not this machine, its network, a cloud's metadata."""
    ip = ip_address(address)
    if isinstance(ip, IPv4Address):
        return ip.is_global and not ip.is_multicast
    if inner := _within(ip):
        return is_public(str(inner))
    return ip in _GLOBAL_UNICAST and ip.is_global


def _within(ip: IPv6Address) -> IPv4Address | None:
    """The address that packets for this one end at."""
    if ip in _NAT64:
        return IPv4Address(int(ip) & 0xFFFF_FFFF)
    return ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
