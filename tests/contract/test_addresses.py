"""The address policy of webhooks: what may be registered, what may be connected to."""

from ipaddress import ip_network

import pytest

from contract.addresses import check_url, is_denied
from contract.errors import AddressRefusedError

DENIED = [
    "0.0.0.0",  # noqa: S104  # listed to be refused
    "0.1.2.3", "10.1.2.3", "100.64.0.1", "127.0.0.1", "127.255.255.254",
    "168.63.129.16", "169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.1",
    "192.0.2.1", "192.88.99.1", "192.168.1.1", "198.18.0.1", "198.51.100.1", "203.0.113.9",
    "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255",
    "::", "::1", "::7f00:1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:0:127.0.0.1",
    "64:ff9b::7f00:1", "64:ff9b:1::1", "100::1", "2001::1", "2001:db8::1", "2002:7f00:1::",
    "fc00::1", "fd00::1", "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1", "4000::1", "name",
]  # fmt: skip
PUBLIC = ["1.1.1.1", "8.8.8.8", "93.184.216.34", "2606:4700:4700::1111", "::ffff:8.8.8.8"]
BAD_URLS = [
    "", "x", "/path", "https://", "https:///path", "ftp://example.org/", "file:///etc/passwd",
    "http://example.org/", "https://user@example.org/", "https://u:p@example.org/",
    "https://example.org/#fragment", "https://example.org:0/", "https://example.org:99999/",
    "https://example.org:x/", "https://exa mple.org/", "https://example.org/\n", "https://[::1/",
    "https://example.org\\@evil.org/", "https://-a/", "https://a..b/", "https://%31/",
    "https://" + "a" * 64 + ".org/", "https://example.org/" + "a" * 2048,
    "https://127.0.0.1/", "https://127.1/", "https://2130706433/", "https://0x7f000001/",
    "https://0177.0.0.1/", "https://127.0.0.1./", "https://0/", "https://1.2.3.4.5/",
    "https://256.0.0.1/", "https://[::1]/", "https://[::ffff:10.0.0.1]/", "https://[fe80::1%25a]/",
    "https://[zz::1]/", "https://localhost/", "https://LOCALHOST./", "https://a.localhost:8080/",
    "https://\uff11\uff12\uff17.0.0.1/", "https://169.254.169.254/latest/meta-data",
    "https://[64:ff9b::a00:1]/",
]  # fmt: skip


@pytest.mark.parametrize("address", DENIED)
def test_private_and_special_addresses_are_denied(address: str) -> None:
    """Nothing that is not a plain public unicast address may be called."""
    assert is_denied(address) is not None


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_allowed(address: str) -> None:
    """Public addresses may be called, also when written as mapped."""
    assert is_denied(address) is None


def test_allowed_networks_win() -> None:
    """A listed subnet may be called, mapped or not; its neighbours may not."""
    networks = [ip_network("127.0.0.0/8"), ip_network("::1/128")]

    assert is_denied("127.0.0.5", networks) is None
    assert is_denied("::ffff:127.0.0.5", networks) is None
    assert is_denied("::1", networks) is None
    assert is_denied("10.0.0.1", networks) == "private"


@pytest.mark.parametrize("url", BAD_URLS)
def test_bad_targets_are_refused_with_the_param(url: str) -> None:
    """Wrong schemes, syntax and literal addresses in any spelling are refused by field name."""
    with pytest.raises(AddressRefusedError) as caught:
        check_url(url, allow_http=False)

    assert caught.value.param == "webhook"


@pytest.mark.parametrize(
    "url",
    [
        "https://example.org/hook?a=1",
        "https://example.org:8443/",
        "https://b\u00fccher.example/",
        "https://8.8.8.8/",
        "https://[2606:4700:4700::1111]:444/x",
        "https://hooks_1.example.org/",
    ],
)
def test_good_targets_are_taken(url: str) -> None:
    """An https URL to a name or a public address is fine, on any port."""
    check_url(url, allow_http=False)


def test_ports_of_other_protocols_are_refused_unless_a_subnet_is_listed() -> None:
    """At registration; where subnets are listed the address decides, when it is connected to."""
    networks = [ip_network("10.0.0.0/8")]

    for url in ("https://example.org:25/", "https://8.8.8.8:6379/"):
        with pytest.raises(AddressRefusedError, match="port"):
            check_url(url, allow_http=False)
    check_url("https://example.org:25/", allow_http=False, allowed_networks=networks)
    check_url("https://10.0.0.1:6379/", allow_http=False, allowed_networks=networks)
    with pytest.raises(AddressRefusedError, match="port"):
        check_url("https://8.8.8.8:6379/", allow_http=False, allowed_networks=networks)


def test_http_and_loopback_only_where_configured() -> None:
    """Plain http needs the setting, loopback needs its subnet."""
    networks = [ip_network("127.0.0.0/8")]

    check_url("http://127.0.0.1:9/x", allow_http=True, allowed_networks=networks)
    check_url("http://localhost:9/x", allow_http=True, allowed_networks=networks)
    with pytest.raises(AddressRefusedError):
        check_url("http://127.0.0.1:9/x", allow_http=True)
    with pytest.raises(AddressRefusedError):
        check_url("http://127.0.0.1:9/x", allow_http=False, allowed_networks=networks)
