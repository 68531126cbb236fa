import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.network import is_public

NOT_PUBLIC = """
0.0.0.0 0.1.2.3 10.0.0.1 100.64.0.1 100.127.255.255 127.0.0.1 127.255.255.254 169.254.169.254 172.16.0.1
172.31.255.255 192.0.0.1 192.0.2.1 192.168.0.1 198.18.0.1 198.51.100.1 203.0.113.1 224.0.0.1 239.255.255.255 240.0.0.1
255.255.255.255
192.0.0.0 192.0.0.8 192.0.0.9 192.0.0.192 192.0.0.255 192.88.99.0 192.88.99.1 192.88.99.255 168.63.129.16
::ffff:192.0.0.192 ::ffff:192.88.99.1 ::ffff:168.63.129.16 2002:c000:c0:: 2002:c058:6301:: 2002:a83f:8110::1
64:ff9b::192.0.0.192 64:ff9b::192.88.99.1 64:ff9b::168.63.129.16 2001:0:5ef5:79fd:0:0:57c0:7eef
3fff::1 3fff:fff:ffff::1
:: ::1 ::7f00:1 ::127.0.0.1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:169.254.169.254 ::ffff:0:127.0.0.1
64:ff9b::7f00:1 64:ff9b::a00:1 64:ff9b:1::1 100::1 2001:db8::1 2001::1 2001:10::1 2002:7f00:1:: 2002:a00:1::
2002:c0a8:1:: 5f00::1 fc00::1 fd00:ec2::254 fe80::1 fe80::1%eth0 fec0::1 ff02::1 4000::1
2001:0:5ef5:79fd:0:0:80ff:fffe
""".split()

PUBLIC = """
1.1.1.1 8.8.8.8 93.184.216.34 172.15.255.255 172.32.0.1 100.63.255.255 100.128.0.1 192.169.0.1 223.255.255.254
192.0.1.1 192.88.98.255 192.88.100.0 168.63.129.15 168.63.129.17
2606:4700:4700::1111 2a00:1450:4001::1 ::ffff:8.8.8.8 64:ff9b::808:808 2002:808:808::
""".split()


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_an_address_of_a_machine_a_network_or_nobody_is_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_an_address_of_the_internet_is_public(address: str) -> None:
    assert is_public(address)


@given(st.ip_addresses(v=4))
def test_an_address_of_ipv4_is_no_more_public_inside_of_one_of_ipv6(inner: object) -> None:
    number = int(inner)  # type: ignore[call-overload]
    high, low = f"{number >> 16:x}", f"{number & 0xFFFF:x}"
    for address in (f"::ffff:{inner}", f"64:ff9b::{high}:{low}", f"2002:{high}:{low}::1"):
        assert is_public(address) == is_public(str(inner))
    assert not is_public(f"::{inner}")


@given(st.ip_addresses())
def test_every_address_is_one_or_the_other(address: object) -> None:
    assert is_public(str(address)) in (True, False)
