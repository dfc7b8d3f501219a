"""The table of addresses that webhooks must never reach, however a URL spells them.

``python -m tests.worker.address_table`` tries each through the delivery session with a recording
socket factory that raises, and prints what refuses it, and how many sockets were asked for.
"""

import asyncio
import socket
import sys

from aiohttp import ClientError, ClientSession
from aiohttp.connector import AddrInfoType

from contract.addresses import check_url
from contract.config import Settings
from contract.errors import AddressRefusedError
from worker.webhooks import open_session

__all__ = ["ALLOWED", "HOSTS", "Recorder", "try_post"]

#: Forms of hosts that must never be connected to.
HOSTS = [
    # loopback and this host, in every spelling that a resolver takes
    "127.0.0.1", "127.0.0.2", "127.255.255.254", "127.1", "127.0.1", "2130706433", "0x7f000001",
    "0x7f.0.0.1", "0x7f.1", "0177.0.0.1", "017700000001", "0177.1", "127.0.0.01", "0", "0.0.0.0",  # noqa: S104
    "0x0", "0x00000000", "00", "localhost", "LOCALHOST", "0x7F000001",
    "0x07f.00.00.01", "127.0x1", "127.000000000000000000.1", "4294967295", "[::1]",
    "[0:0:0:0:0:0:0:1]", "[::]",
    "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[0:0:0:0:0:ffff:127.0.0.1]", "[::127.0.0.1]",
    "\uff11\uff12\uff17.0.0.1", "\u2460\u2461\u2466.0.0.1", "127\u30020\u30020\u30021",
    # private, shared, link-local and metadata
    "10.0.0.1", "10.1", "167772161", "0xa.1", "012.0.0.1", "172.16.0.1", "172.31.255.255",
    "192.168.0.1", "192.168.1", "0xc0a80001", "100.64.0.1", "100.127.255.254", "100.100.100.200",
    "169.254.169.254", "2852039166", "0xa9fea9fe", "0xa9.0xfe.0xa9.0xfe", "0251.0376.0251.0376",
    "[::ffff:169.254.169.254]", "[::ffff:a9fe:a9fe]", "[fd00:ec2::254]", "168.63.129.16",
    "[fc00::1]", "[fd12:3456::1]", "[fe80::1]", "[fec0::1]",
    # translated and tunnelled: the packet would end elsewhere
    "[64:ff9b::7f00:1]", "[64:ff9b::a9fe:a9fe]", "[64:ff9b:1::1]", "[2002:7f00:1::]",
    "[2002:a9fe:a9fe::1]", "[2001::1]", "[2001:0:53aa:64c::1]", "[::ffff:0:127.0.0.1]",
    "192.88.99.1",
    # nobody's, everybody's, or only for books
    "192.0.0.1", "192.0.2.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1",
    "239.255.255.250", "240.0.0.1", "255.255.255.255", "[ff02::1]", "[ff0e::1]", "[100::1]",
    "[2001:db8::1]", "[3fff::1]", "[5f00::1]", "[4000::1]",
    "192.31.196.1", "192.52.193.1", "192.175.48.1", "[::ffff:0a00:1]", "[2001:20::1]",
    "[2001:0000:4136:e378:8000:63bf:3fff:fdd2]", "[64:ff9b::10.0.0.1]", "[fe80::1%25lo]",
    # user info does not hide the host
    "example.org@127.0.0.1", "example.org:80@[::1]",
]  # fmt: skip


#: Public addresses, which the socket factory must see: what is above proves something.
ALLOWED = {
    "8.8.8.8": "8.8.8.8",
    "[2606:4700:4700::1111]": "2606:4700:4700::1111",
    "0x8080808": "8.8.8.8",
    "0x8.0x8.0x8.0x8": "8.8.8.8",
}


class Recorder:
    """A socket factory that opens nothing."""

    def __init__(self) -> None:
        self.addresses: list[str] = []

    def __call__(self, info: AddrInfoType) -> socket.socket:
        """Record, and fail as an unreachable host does."""
        self.addresses.append(str(info[4][0]))
        message = "no packet leaves a test"
        raise OSError(message)


async def try_post(session: ClientSession, url: str) -> BaseException:
    """POST and return why it failed."""
    try:
        async with session.post(url, data=b"{}", allow_redirects=False):
            pass
    except (ClientError, OSError, ValueError) as error:
        return error
    message = "the request was answered"
    raise AssertionError(message)


def _refuse_registration(host: str) -> str:
    """Return why ``https://host/hook`` cannot be registered; empty where it can."""
    try:
        check_url(f"https://{host}/hook", allow_http=False)
    except AddressRefusedError as error:
        return error.message
    return ""


async def _print_table() -> int:
    refused_early = sockets = 0
    for host in HOSTS:
        reason = _refuse_registration(host)
        recorder = Recorder()
        async with open_session(Settings(webhook_allow_http=True), recorder) as session:
            fault = await try_post(session, f"http://{host}/hook")
        refused_early += bool(reason)
        sockets += len(recorder.addresses)
        shown = reason or f"taken; when connecting: {fault}"
        sys.stdout.write(f"{host.encode('unicode_escape').decode():45} {shown}\n")
    reached = 0
    for host, address in ALLOWED.items():
        recorder = Recorder()
        async with open_session(Settings(), recorder) as session:
            await try_post(session, f"https://{host}/hook")
        reached += recorder.addresses == [address]
    sys.stdout.write(
        f"{len(HOSTS)} denied forms: {refused_early} refused when registered, "
        f"{len(HOSTS) - refused_early} when connecting; {sockets} sockets asked for, 0 packets\n"
        f"{len(ALLOWED)} public forms: {reached} reached the socket factory, which raised\n"
    )
    return 0 if not sockets and reached == len(ALLOWED) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(_print_table()))
