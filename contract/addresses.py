"""Which addresses a webhook may reach: the only place for that policy. Pure, it resolves nothing.

The API checks a URL when it is registered, the worker every address it is about to connect to.
"""

import re
import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import NoReturn
from urllib.parse import SplitResult, urlsplit

from contract.errors import AddressRefusedError

__all__ = ["Address", "Network", "check_url", "is_denied"]

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_MAX_URL_CHARACTERS = 2048
_GLOBAL_UNICAST = IPv6Network("2000::/3")
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_][A-Za-z0-9_-]*)*")
_NUMERIC_LABEL = re.compile(r"0[xX][0-9a-fA-F]*|[0-9]+")
#: ``ipaddress.is_global`` of Python 3.11 calls several of these global: each is written out.
_DENIED: tuple[tuple[Network, str], ...] = tuple(
    (ip_network(network), reason)
    for network, reason in (
        ("0.0.0.0/8", "this host"),
        ("10.0.0.0/8", "private"),
        ("100.64.0.0/10", "shared address space"),
        ("127.0.0.0/8", "loopback"),
        ("168.63.129.16/32", "cloud platform"),
        ("169.254.0.0/16", "link-local"),
        ("172.16.0.0/12", "private"),
        ("192.0.0.0/24", "protocol assignments"),
        ("192.0.2.0/24", "documentation"),
        ("192.31.196.0/24", "AS112"),
        ("192.52.193.0/24", "AMT"),
        ("192.88.99.0/24", "6to4 relay"),
        ("192.168.0.0/16", "private"),
        ("192.175.48.0/24", "AS112"),
        ("198.18.0.0/15", "benchmarking"),
        ("198.51.100.0/24", "documentation"),
        ("203.0.113.0/24", "documentation"),
        ("224.0.0.0/4", "multicast"),
        ("240.0.0.0/4", "reserved"),
        ("::/128", "unspecified"),
        ("::1/128", "loopback"),
        ("::/96", "IPv4-compatible"),
        ("::ffff:0:0:0/96", "IPv4-translated"),
        ("64:ff9b::/96", "NAT64"),
        ("64:ff9b:1::/48", "NAT64"),
        ("100::/64", "discard"),
        ("2001::/23", "protocol assignments"),
        ("2001:db8::/32", "documentation"),
        ("2002::/16", "6to4"),
        ("3fff::/20", "documentation"),
        ("5f00::/16", "segment routing"),
        ("fc00::/7", "private"),
        ("fe80::/10", "link-local"),
        ("fec0::/10", "site-local"),
        ("ff00::/8", "multicast"),
    )
)

#: Ports of other protocols, which a request in HTTP might be made to speak: the list of browsers
#: (https://fetch.spec.whatwg.org/#port-blocking) and what else listens on servers.
_DENIED_PORTS = frozenset(
    (
        *(0, 1, 7, 9, 11, 13, 15, 17, 19, 20, 21, 22, 23, 25, 37, 42, 43, 53, 69, 77, 79, 87, 95),
        *(101, 102, 103, 104, 109, 110, 111, 113, 115, 117, 119, 123, 135, 137, 139, 143, 161, 179),
        *(389, 427, 445, 465, 512, 513, 514, 515, 526, 530, 531, 532, 540, 548, 554, 556, 563, 587),
        *(601, 636, 873, 989, 990, 993, 995, 1433, 1521, 1719, 1720, 1723, 2049, 2375, 2376, 2379),
        *(3306, 3389, 3659, 4045, 4190, 5060, 5061, 5432, 5672, 5900, 6000, 6379, 6443, 6566),
        *(6665, 6666, 6667, 6668, 6669, 6679, 6697, 9042, 9200, 9300, 10080, 10250, 11211, 27017),
    )
)


def is_denied(
    address: Address | str, allowed_networks: Iterable[Network] = (), *, port: int | None = None
) -> str | None:
    """Return why ``address`` must not be called, or None where it may.

    An IPv4 address mapped into IPv6 is judged as the IPv4 address. ``allowed_networks`` win, with
    any port. What is not an address at all is denied.
    """
    try:
        judged = _unmap(ip_address(address))
    except ValueError:
        return "not an address"
    if any(judged in network for network in allowed_networks):
        return None
    if port in _DENIED_PORTS:
        return f"port {port}"
    for network, reason in _DENIED:
        if judged in network:
            return reason
    if isinstance(judged, IPv6Address) and judged not in _GLOBAL_UNICAST:
        return "not a public address"
    return None


def check_url(
    url: str,
    *,
    allow_http: bool,
    allowed_networks: Iterable[Network] = (),
    param: str | None = "webhook",
) -> None:
    """Raise ``AddressRefusedError`` unless ``url`` may be registered as a webhook target.

    Checks scheme and syntax, and hosts that are addresses in any spelling that a resolver would
    take (``127.1``, ``0x7f000001``, ``[::ffff:10.0.0.1]``). Names are checked when connecting.
    """
    parts = _split_url(url, param)
    schemes = {"https", "http"} if allow_http else {"https"}
    if parts.scheme not in schemes:
        _refuse(f"the URL must start with {' or '.join(sorted(schemes))}://", param)
    if "@" in parts.netloc:
        _refuse("the URL must not hold a user name or password", param)
    if parts.fragment:
        _refuse("the URL must not have a fragment", param)
    host = _normalise_host(parts.hostname or "", param)
    networks = tuple(allowed_networks)
    address = _literal_address(host, param)
    if address is not None and (reason := is_denied(address, networks, port=parts.port)):
        _refuse(f"the URL's address is not allowed ({reason})", param)
    if not networks and parts.port in _DENIED_PORTS:  # where any are listed, the address decides
        _refuse(f"the URL's port is not allowed (port {parts.port})", param)
    if host == "localhost" or host.endswith(".localhost"):
        loopback = (IPv4Address("127.0.0.1"), IPv6Address("::1"))
        if all(is_denied(candidate, networks) for candidate in loopback):
            _refuse("the URL's address is not allowed (loopback)", param)


def _unmap(address: Address) -> Address:
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        return IPv6Address(int(address))  # drops the zone, which no network contains
    return address


def _split_url(url: str, param: str | None) -> SplitResult:
    if len(url) > _MAX_URL_CHARACTERS:
        _refuse(f"the URL is longer than {_MAX_URL_CHARACTERS} characters", param)
    if "\\" in url or any(ord(character) <= 32 or ord(character) == 127 for character in url):
        _refuse("the URL holds a space, a control character or a backslash", param)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        _refuse(f"the URL is malformed: {error}", param)
    if port == 0:
        _refuse("the URL's port is 0", param)
    return parts


def _normalise_host(host: str, param: str | None) -> str:
    """Return the ASCII form that would be looked up: full-width digits become digits."""
    if ":" in host:
        return host
    try:
        plain = host.encode("idna").decode("ascii").lower().removesuffix(".")
    except UnicodeError:
        _refuse("the URL's host is not a valid name", param)
    if not _HOST.fullmatch(plain):
        _refuse("the URL's host is missing or not a valid name", param)
    return plain


def _literal_address(host: str, param: str | None) -> Address | None:
    if ":" in host:
        try:
            return IPv6Address(host)
        except ValueError:
            _refuse("the URL's host is not a valid address", param)
    if not _NUMERIC_LABEL.fullmatch(host.rpartition(".")[2]):
        return None
    try:
        return IPv4Address(socket.inet_aton(host))  # reads 127.1 as resolvers do
    except OSError:
        _refuse("the URL's host is not a valid address", param)


def _refuse(message: str, param: str | None) -> NoReturn:
    raise AddressRefusedError(message, param=param)
