"""The connector that webhooks go through: no socket is opened to an address that is denied.

The check sits in aiohttp's socket factory because that sees the final address of every attempt;
a resolver of our own would not see a URL that holds the address itself.
"""

import socket
from collections.abc import Callable, Iterable
from typing import Any

from aiohttp import TCPConnector
from aiohttp.connector import AddrInfoType

from contract.addresses import Network, is_denied

__all__ = ["AddressDeniedError", "SocketFactory", "create_connector", "create_socket_factory"]

SocketFactory = Callable[[AddrInfoType], socket.socket]


class AddressDeniedError(OSError):
    """The name led to an address that must not be called.

    An ``OSError``, so that aiohttp treats it as a failed connection and tries the name's next
    address, which is checked in turn.
    """


def create_connector(
    networks: Iterable[Network], *, limit: int, open_socket: SocketFactory | None = None
) -> TCPConnector:
    """Return a connector that reaches public addresses and those in ``networks``.

    Connections are not kept: the address is checked at every attempt. Resolved names are not
    kept either.
    """
    return TCPConnector(
        socket_factory=create_socket_factory(networks, open_socket or _open_socket),
        limit=limit,
        force_close=True,
        use_dns_cache=False,
    )


def create_socket_factory(networks: Iterable[Network], open_socket: SocketFactory) -> SocketFactory:
    """Return a factory that calls ``open_socket`` only for an address that may be called.

    It raises ``AddressDeniedError`` for the others, before there is a socket.
    """
    allowed = tuple(networks)

    def open_checked(info: AddrInfoType) -> socket.socket:
        address, port = _address_of(info[4])
        reason = is_denied(address, allowed, port=port)
        if reason is not None:
            message = f"webhooks may not call this address ({reason})"
            raise AddressDeniedError(message)
        return open_socket(info)

    return open_checked


def _open_socket(info: AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = info
    return socket.socket(family=family, type=kind, proto=protocol)


def _address_of(where: tuple[Any, ...]) -> tuple[str, int]:
    return str(where[0]), int(where[1])
