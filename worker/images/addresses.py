"""Which addresses a worker may be sent to by a request."""

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

# Not public either, though `is_global` says so, in older releases of Python or in all.
_NOT_PUBLIC_4 = (
    IPv4Network("192.0.0.0/24"),  # protocol assignments, RFC 6890: until Python 3.11.9 two small parts of it alone
    IPv4Network("192.88.99.0/24"),  # relays from 6to4, withdrawn by RFC 7526
    IPv4Network("168.63.129.16/32"),  # Azure's host, which hands a machine its certificates and settings
)
_NOT_PUBLIC_6 = (IPv6Network("3fff::/20"),)  # documentation, RFC 9637

# What is given to somebody, of IPv6. All else is nobody's, or wraps an address of IPv4.
_GLOBAL_UNICAST = IPv6Network("2000::/3")
# RFC 6052: how a network without IPv4 writes the addresses of those who have no other.
_NAT64 = IPv6Network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Whether it is on the internet, by the numbers alone: not this machine, its network, a cloud's metadata."""
    ip = ip_address(address)
    if isinstance(ip, IPv4Address):
        return ip.is_global and not ip.is_multicast and not any(ip in network for network in _NOT_PUBLIC_4)
    if inner := _within(ip):
        return is_public(str(inner))
    return ip in _GLOBAL_UNICAST and ip.is_global and not any(ip in network for network in _NOT_PUBLIC_6)


def _within(ip: IPv6Address) -> IPv4Address | None:
    """The address that packets for this one end at."""
    if ip in _NAT64:
        return IPv4Address(int(ip) & 0xFFFF_FFFF)
    return ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
