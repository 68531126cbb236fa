"""Decide which addresses a request may send the worker to."""

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

# Not public, although `is_global` is True for them in older releases of Python, or in all.
_NOT_PUBLIC_4 = (
    IPv4Network("192.0.0.0/24"),  # protocol assignments, RFC 6890: before Python 3.11.9 only two small parts of it
    IPv4Network("192.88.99.0/24"),  # relays from 6to4, withdrawn by RFC 7526
    IPv4Network("168.63.129.16/32"),  # Azure's host, which serves a machine its certificates and settings
)
_NOT_PUBLIC_6 = (IPv6Network("3fff::/20"),)  # documentation, RFC 9637

# The allocated part of IPv6. The rest is unassigned, or embeds an IPv4 address.
_GLOBAL_UNICAST = IPv6Network("2000::/3")
# RFC 6052: IPv4 addresses as written in a network without IPv4.
_NAT64 = IPv6Network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """True if the address is on the public internet, by its number: not this machine, its network, or a cloud's
    metadata service. Raises ValueError for text that is not an address."""
    ip = ip_address(address)
    if isinstance(ip, IPv4Address):
        return ip.is_global and not ip.is_multicast and not any(ip in network for network in _NOT_PUBLIC_4)
    if inner := _within(ip):
        return is_public(str(inner))
    return ip in _GLOBAL_UNICAST and ip.is_global and not any(ip in network for network in _NOT_PUBLIC_6)


def _within(ip: IPv6Address) -> IPv4Address | None:
    """Return the IPv4 address at which packets for this address end up, or None."""
    if ip in _NAT64:
        return IPv4Address(int(ip) & 0xFFFF_FFFF)
    return ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
