"""The first page: live numbers, what needs attention, the service away, nothing there yet."""

import asyncio
import re

import pytest

from tests.dashboard.conftest import HOSTILE_MODEL, Look
from tests.e2e.stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="session")]

UNREACHABLE = ("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING", "ERR_CONNECTION_RESET")


async def test_it_shows_queue_workers_and_throughput_as_they_move(look: Look, stack: Stack) -> None:
    """A job that nobody can take appears in the queue; scored items appear in the chart."""
    sight = await look()
    await sight.see("Live", "#live")
    await sight.see("sentiment")
    (left,) = await stack.submit_many([{"model": "later", "items": ["a"], "priority": "bulk"}])
    await stack.finish(await stack.submit_many([{"model": "sentiment", "items": ["a", "b"]}]))

    lane = sight.page.locator("tr", has_text="later").locator("td").nth(3)
    await sight.wait("document.querySelectorAll('.chart .column').length > 0")
    await lane.get_by_text("·").wait_for()
    chart = await sight.page.locator(".chart svg").get_attribute("aria-label")
    workers = await sight.text("section[aria-labelledby=workers] tbody")

    assert re.match(r"1 · [\d.]+ (ms|s)", (await lane.inner_text()).replace("\n", " "))
    assert re.match(r"items in the last 15 minutes: [1-9]", chart or "")
    assert "alive" in workers
    assert re.search(r"\d+ MB", workers)
    await stack.post(f"/v1/jobs/{left}/cancel", {})
    await lane.get_by_text("·").wait_for(state="detached")


async def test_the_measure_of_the_chart_stays_while_numbers_move(look: Look, stack: Stack) -> None:
    """Chosen by keyboard; the next overviews keep the choice and the focus."""
    (left,) = await stack.submit_many([{"model": "later", "items": ["a"], "priority": "bulk"}])
    sight = await look()
    lane = sight.page.locator("tr", has_text="later").locator("td").nth(3)
    await lane.get_by_text("·").wait_for()

    await sight.page.get_by_role("radio", name="items").focus()
    await sight.page.keyboard.press("ArrowRight")
    await sight.wait("document.querySelector('.chart svg').ariaLabel.startsWith('tokens')")
    before = await lane.inner_text()  # the age of what waits: it grows
    async with asyncio.timeout(20):
        while await lane.inner_text() == before:  # noqa: ASYNC110  # a page sends no signal
            await asyncio.sleep(0.05)
    chosen = await sight.page.evaluate("document.activeElement.value")
    await stack.post(f"/v1/jobs/{left}/cancel", {})

    assert chosen == "tokens"


async def test_nothing_there_yet_says_what_to_do(bare: Stack, look: Look) -> None:
    """Each empty list names a command, which one button copies; a hostile name stays a name."""
    sight = await look(url=bare.url)
    sight.page.on("dialog", lambda dialog: sight.errors.append(f"dialog: {dialog.message}"))
    await sight.see("No worker is running")
    shown = await sight.text("section[aria-labelledby=queue] tbody th")
    start = await sight.text("section[aria-labelledby=workers] code")
    await sight.go("jobs")
    await sight.see("No jobs yet")
    await sight.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await sight.page.get_by_role("button", name="Copy: submit a job").click()
    await sight.see("Copied")
    copied = await sight.page.evaluate("navigator.clipboard.readText()")
    await sight.go("bulks")
    await sight.see("No bulks yet")

    assert shown == HOSTILE_MODEL
    assert start == "scorekeep worker"
    assert copied.startswith(f"curl -s '{bare.url}/v1/jobs' \\\n")


async def test_a_service_that_went_away_is_said_and_comes_back(bare: Stack, look: Look) -> None:
    """What was read last stays on the screen; nobody has to reload."""
    sight = await look(url=bare.url, tolerates=UNREACHABLE)
    await sight.see("No worker is running")
    api = bare._started[-1]

    await bare.stop(api)
    await sight.see("Reconnecting", "#live")
    await sight.see(f"The service at 127.0.0.1:{bare.port} does not answer.")
    kept = await sight.text("section[aria-labelledby=queue] tbody th")
    await bare.start("api")
    await sight.see("Live", "#live")

    assert kept == HOSTILE_MODEL
    assert await sight.count(".notice.bad") == 0
