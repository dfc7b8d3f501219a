"""No socket is opened to an address that must not be called, however the URL spells it.

The socket factory given here records and raises: no packet leaves this process.
"""

import socket
from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp import ClientSession, ClientTimeout
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.connector import AddrInfoType

from contract.config import Settings
from contract.webhooks import create_secret
from tests.worker.address_table import ALLOWED, HOSTS, Recorder, try_post
from tests.worker.harness import receive, reply
from worker.addresses import AddressDeniedError, create_connector, create_socket_factory
from worker.webhooks import open_session, post

SECRET = create_secret()


class Resolver(AbstractResolver):
    """Answers with these addresses, in turn, as a hostile name server would."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self._answers = list(answers)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Give the next answer."""
        return [
            ResolveResult(hostname=host, host=address, port=port, family=family, proto=0, flags=0)
            for address in self._answers.pop(0)
        ]

    async def close(self) -> None:
        """Nothing to close."""


@pytest.mark.parametrize("host", HOSTS)
async def test_no_socket_for_a_denied_address(host: str) -> None:
    """Whatever form the address takes, the check sees what the socket would."""
    recorder = Recorder()
    settings = Settings(webhook_allow_http=True)
    async with open_session(settings, recorder) as session:
        await try_post(session, f"http://{host}/hook")
        await try_post(session, f"https://{host}:8443/hook")

    assert recorder.addresses == []


def test_the_table_is_long_enough() -> None:
    """At least sixty forms are tried."""
    assert len(set(HOSTS)) >= 60


@pytest.mark.parametrize(("host", "address"), ALLOWED.items())
async def test_public_addresses_reach_the_socket(host: str, address: str) -> None:
    """The recorder would see a socket: the table above proves something."""
    recorder = Recorder()
    async with open_session(Settings(), recorder) as session:
        await try_post(session, f"https://{host}/hook")

    assert recorder.addresses == [address]


@pytest.mark.parametrize("host", ["134744072", "8.8.2056", "8.526344", "010.8.8.8", "8.8.8.08"])
async def test_odd_decimal_forms_reach_nothing(host: str) -> None:
    """The client itself refuses digits and dots that are no canonical address, public or not.

    Such a delivery ends at once: no later attempt could succeed.
    """
    recorder = Recorder()
    async with open_session(Settings(), recorder) as session:
        attempt = await post(
            session, Settings(), url=f"https://{host}/hook", event_id="e", body=b"", secrets=[]
        )

    assert recorder.addresses == []
    assert attempt.final
    assert attempt.error


async def test_an_allowed_network_is_reached_on_any_port() -> None:
    """What a self-hoster lists is let through, mapped or not, and its neighbours are not."""
    recorder = Recorder()
    settings = Settings(webhook_allow_http=True, webhook_allowed_networks="10.0.0.0/8,::1/128")
    async with open_session(settings, recorder) as session:
        for host in ("10.1.2.3:1234", "[::1]:9", "[::ffff:10.0.0.1]:5", "11.0.0.1", "127.0.0.1"):
            await try_post(session, f"http://{host}/hook")

    assert recorder.addresses == ["10.1.2.3", "::1", "::ffff:a00:1", "11.0.0.1"]


async def post_through(
    resolver: Resolver, recorder: Recorder, times: int, host: str = "name.example"
) -> list[BaseException]:
    """POST to a name that ``resolver`` answers for."""
    connector = create_connector([], limit=4, open_socket=recorder)
    connector._resolver = resolver
    async with ClientSession(connector=connector, timeout=ClientTimeout(total=5)) as session:
        return [await try_post(session, f"http://{host}/") for _ in range(times)]


async def test_rebinding_is_seen_at_every_attempt() -> None:
    """A name that was public a moment ago is checked again, because nothing is remembered."""
    recorder = Recorder()

    await post_through(Resolver(["8.8.8.8"], ["127.0.0.1"]), recorder, 2)

    assert recorder.addresses == ["8.8.8.8"]


@pytest.mark.parametrize("host", ["localhost.", "127.0.0.1.", "metadata.google.internal"])
async def test_names_that_resolvers_know_are_checked_as_addresses(host: str) -> None:
    """However a resolver reads them: their answer is what is judged."""
    recorder = Recorder()

    await post_through(Resolver(["127.0.0.1"], ["169.254.169.254"]), recorder, 2, host)

    assert recorder.addresses == []


async def test_of_several_answers_the_bad_one_is_never_connected() -> None:
    """One public answer does not vouch for the private one beside it."""
    recorder = Recorder()

    await post_through(Resolver(["10.0.0.1", "8.8.8.8", "169.254.169.254"]), recorder, 1)

    assert set(recorder.addresses) == {"8.8.8.8"}


@pytest.mark.parametrize("port", [22, 25, 53, 6379, 5432, 2375, 11211])
async def test_ports_of_other_protocols_are_never_connected(port: int) -> None:
    """A public address may not be made to speak SMTP or Redis; one that is listed may."""
    recorder = Recorder()
    async with open_session(Settings(), recorder) as session:
        await try_post(session, f"https://8.8.8.8:{port}/hook")
    listed = Settings(webhook_allowed_networks="8.8.8.0/24")
    async with open_session(listed, recorder) as session:
        await try_post(session, f"https://8.8.8.8:{port}/hook")

    assert recorder.addresses == ["8.8.8.8"]


async def test_a_redirect_to_the_inside_opens_no_socket() -> None:
    """The receiver's Location is never looked at."""
    async with receive(reply(307, location="http://169.254.169.254/")) as receiver:
        opened: list[str] = []

        def open_socket(info: AddrInfoType) -> socket.socket:
            opened.append(str(info[4][0]))
            return socket.socket(info[0], info[1], info[2])

        settings = Settings(webhook_allow_http=True, webhook_allowed_networks="127.0.0.0/8")
        async with open_session(settings, open_socket) as session:
            attempt = await post(
                session, settings, url=receiver.url, event_id="e", body=b"{}", secrets=[SECRET]
            )

    assert (attempt.status, opened) == (307, ["127.0.0.1"])


def test_the_refusal_names_the_reason_not_the_address() -> None:
    """The log of a webhook's owner learns why, and nothing about our network."""
    info: Any = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 80))

    with pytest.raises(AddressDeniedError, match=r"\(private\)"):
        create_socket_factory([], Recorder())(info)
