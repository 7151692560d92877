"""Which address a rank takes, and what is refused before any certificate is made."""

import socket

import pytest

from paramd.errors import UsageError
from paramd.trainer.attaching import addresses
from paramd.trainer.attaching.addresses import HostAddress, HostView, choose, needs_own_tls

HERE = ("10.0.0.1", "192.168.7.1", "2001:db8::1")


@pytest.fixture(autouse=True)
def our_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """This host has the addresses above, and names that resolve to some of them."""
    names = {"gpu-1": "10.0.0.1", "old": "127.0.1.1", "elsewhere": "10.0.0.9"}
    monkeypatch.setattr(addresses, "_resolve", lambda name: names.get(name, _literal(name)))
    real = addresses._usable
    monkeypatch.setattr(addresses, "_usable", lambda ip: ip in HERE or (_other(ip) and real(ip)))


def _literal(name: str) -> str:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, name)
        except OSError:
            continue
        return name
    return ""


def _other(ip: str) -> bool:
    return not ip.startswith(("10.", "192.168.", "2001:"))


def view(number: int, **more: object) -> HostView:
    return HostView(host_id=f"kernel{number}/1", hostname=f"host{number}", **more)  # type: ignore[arg-type]


def chosen(**more: object) -> HostAddress:
    return choose(0, [view(0, **more), view(1, master="10.0.0.1")])


@pytest.mark.parametrize(
    ("seen", "ip"),
    [
        ({"from_here": "192.168.7.1"}, "192.168.7.1"),
        ({"from_here": "192.168.7.1", "interface": "10.0.0.1"}, "10.0.0.1"),
        ({"from_here": "192.168.7.1", "wanted": "gpu-1"}, "10.0.0.1"),
        ({"from_here": "2001:db8::1"}, "2001:db8::1"),
        # Rank 0's own host, where MASTER_ADDR is its name and means loopback.
        ({"from_here": "127.0.0.1", "master": "127.0.1.1"}, "10.0.0.1"),
    ],
)
def test_the_address_is_the_one_that_the_process_group_uses(seen: dict[str, str], ip: str) -> None:
    assert chosen(**seen).ip == ip


def test_a_name_that_is_wanted_is_what_others_are_told() -> None:
    assert chosen(wanted="gpu-1") == HostAddress("gpu-1", "10.0.0.1", "PARAMD_ADDRESS")


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        ({"wanted": "elsewhere"}, "no address of this host"),
        ({"wanted": "nobody"}, "does not resolve here"),
        ({"wanted": "127.0.0.1"}, "no address of this host"),
    ],
)
def test_a_wanted_address_that_cannot_be_is_refused(seen: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=rf"rank 0 on host host0: PARAMD_ADDRESS.*{words}"):
        chosen(**seen)


def test_loopback_is_never_taken_when_nothing_else_is_known() -> None:
    views = [view(0, from_here="127.0.0.1", master="127.0.1.1"), view(1, master="10.0.0.9")]
    with pytest.raises(UsageError, match=r"rank 0 on host host0: no address.*set PARAMD_ADDRESS"):
        choose(0, views)
    views[0] = view(0, from_here="fe80::1", master="fe80::2")
    with pytest.raises(UsageError, match="set PARAMD_ADDRESS"):
        choose(0, views)


def test_tls_of_its_own_is_for_several_hosts_without_files() -> None:
    assert not needs_own_tls([view(0), view(0)])
    assert needs_own_tls([view(0), view(1)])
    assert not needs_own_tls([view(0, own_files=True), view(1, own_files=True)])
    with pytest.raises(UsageError, match=r"set on host host1 \(rank 1\), but not on host0"):
        needs_own_tls([view(0), view(1, own_files=True)])
