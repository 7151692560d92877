"""Which of the addresses that a joining sidecar names are dialled for it."""

import pytest

from paramd.errors import UsageError
from paramd_service.control.mesh.origin import origin_of, parse_networks

PEER = "ipv4:203.0.113.7:4711"
"""A host that is not this one."""


@pytest.mark.parametrize(
    ("address", "peer", "host"),
    [
        ("203.0.113.7:9000", PEER, "203.0.113.7"),
        ("mtls://203.0.113.7:9000", PEER, "203.0.113.7"),
        ("[2001:db8::7]:9000", "ipv6:%5B2001:db8::7%5D:4711", "2001:db8::7"),
        ("203.0.113.7:9000", "ipv6:%5B::ffff:203.0.113.7%5D:4711", "203.0.113.7"),
        ("127.0.0.1:9000", "ipv4:127.0.0.1:4711", "127.0.0.1"),
        ("127.0.0.1:9000", "ipv6:%5B::1%5D:4711", "127.0.0.1"),
        ("10.1.2.3:9000", PEER, "10.1.2.3"),
    ],
)
async def test_a_sidecar_is_where_it_joins_from_or_where_the_operator_allows(
    address: str, peer: str, host: str
) -> None:
    found = await origin_of(0, address, peer, parse_networks("10.0.0.0/8"))
    assert found == (host, "")


@pytest.mark.parametrize(
    ("address", "peer"),
    [
        ("192.0.2.1:9000", PEER),
        ("127.0.0.1:9000", PEER),
        ("localhost:9000", PEER),
        ("[::1]:9000", PEER),
        ("[::ffff:127.0.0.1]:9000", PEER),
        ("0.0.0.0:9000", PEER),
        ("0.0.0.0:9000", "ipv4:127.0.0.1:4711"),
        ("2130706433:9000", PEER),
        ("192.0.2.1:9000", "ipv4:127.0.0.1:4711"),
        ("169.254.169.254:80", PEER),
        ("169.254.169.254:80", "ipv4:169.254.169.254:4711"),
        ("[fe80::1]:80", "ipv6:%5Bfe80::1%25eth0%5D:4711"),
        ("127.0.0.1:9000", "unix:"),
        ("127.0.0.1:9000", "nonsense"),
        ("no-such-host.invalid:9000", PEER),
    ],
)
async def test_no_other_address_is_dialled(address: str, peer: str) -> None:
    allowed = parse_networks("127.0.0.0/8,169.254.0.0/16,10.0.0.0/8,fe80::/10")
    found = await origin_of(3, address, peer, allowed)
    assert (found.host, "rank 3 says that it listens on" in found.barred) == ("", True)


async def test_what_is_no_address_or_network_is_refused() -> None:
    with pytest.raises(UsageError, match="address"):
        await origin_of(0, "unix:/tmp/x", PEER)
    with pytest.raises(UsageError, match="PARAMD_SIDECAR_NETWORKS"):
        parse_networks("10.0.0.0/99")
