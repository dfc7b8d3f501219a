"""What the tests of the dashboard share: the browser, and a page that keeps what went wrong."""

import asyncio
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.async_api import Browser, ConsoleMessage, Page, Request

__all__ = ["REQUIRE", "Sight", "find_chromium", "open_sight"]

#: Where it is 1, as on CI, a missing browser is a failure. (SCOREKEEP_… names settings only.)
REQUIRE = "TEST_REQUIRE_CHROMIUM"
_NAMES = ("chromium", "chromium-browser", "google-chrome")
#: How long the page may take to show what it should.
TIMEOUT_MS = 60_000


def find_chromium() -> str:
    """Return the browser's path; skip the test where there is none, unless it is demanded."""
    found = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if found is not None:
        return found
    message = f"none of {', '.join(_NAMES)} is installed: apt-get install chromium"
    if os.environ.get(REQUIRE) == "1":
        pytest.fail(message)
    pytest.skip(message)


@dataclass
class Sight:
    """A page of the dashboard, and what a test must not find: errors, and requests elsewhere."""

    page: Page
    url: str
    errors: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)

    async def go(self, address: str = "") -> None:
        """Open ``#/address`` anew."""
        await self.page.goto(f"{self.url}/#/{address}")

    async def text(self, selector: str) -> str:
        """Return the text of the first element that ``selector`` finds, once it is there."""
        return await self.page.locator(selector).first.inner_text()

    async def see(self, text: str, within: str = "#main") -> None:
        """Return once ``text`` is visible."""
        await self.page.locator(within).get_by_text(text).first.wait_for()

    async def count(self, selector: str) -> int:
        """Return how many elements there are now."""
        return await self.page.locator(selector).count()

    async def wait(self, condition: str) -> None:
        """Return once a JavaScript expression is true.

        Asked from outside: Playwright's own ``wait_for_function`` evaluates in the page, which the
        Content-Security-Policy forbids.
        """
        async with asyncio.timeout(TIMEOUT_MS / 1000):
            while not await self.page.evaluate(condition):  # noqa: ASYNC110  # it sends no signal
                await asyncio.sleep(0.05)

    def on_console(self, message: ConsoleMessage) -> None:
        """Keep errors and warnings; violations of the Content-Security-Policy come as errors."""
        if message.type in {"error", "warning"}:
            self.errors.append(f"{message.type}: {message.text} {message.location}")

    def on_request(self, request: Request) -> None:
        """Keep what goes to another origin."""
        if urlsplit(request.url).netloc != urlsplit(self.url).netloc:
            self.elsewhere.append(request.url)


async def open_sight(browser: Browser, url: str, **options: Any) -> Sight:
    """Return a new page in a context of its own; ``options`` are those of a Playwright context."""
    settings: Mapping[str, Any] = {"viewport": {"width": 1280, "height": 800}} | options
    context = await browser.new_context(**settings)
    context.set_default_timeout(TIMEOUT_MS)
    page = await context.new_page()
    sight = Sight(page, url)
    page.on("console", sight.on_console)
    page.on("pageerror", lambda error: sight.errors.append(f"uncaught: {error}"))
    page.on("request", sight.on_request)
    return sight
