"""For everybody: keyboard, narrow screens, dark and light, less motion, screen readers, keys."""

import pytest
from axe_playwright_python.async_playwright import Axe

from tests.dashboard.conftest import Look
from tests.dashboard.guard import KEY, guarding
from tests.e2e.stack import Receiver, Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="session")]

RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
UNAUTHORIZED = ("401 (Unauthorized)",)


async def make_addresses(stack: Stack, receiver: Receiver) -> dict[str, str]:
    """Return the address of every page, with something on it, and a text that it then shows."""
    body = {
        "model": "sentiment",
        "items": ["fine", "a rather longer text that has to be broken into lines somewhere " * 3],
        "metadata": {"a-rather-long-key": "and a value without any place to break" * 3},
        "webhook": receiver.url,
    }
    ids = await stack.submit_many([body, {**body, "apply_softmax": True}])
    await stack.finish(ids)
    return {
        "": "Throughput",
        "jobs": "on page 1",
        f"job/{ids[0]}": "Items and scores",
        "bulks": "Bulks",
        f"compare?a={ids[0]}&b={ids[1]}": "Most changed",
        "playground": "curl",
    }


async def test_every_page_is_for_all(look: Look, stack: Stack, receiver: Receiver) -> None:
    """No violation of WCAG 2.2 AA that axe knows, contrast included, in light and in dark."""
    addresses = await make_addresses(stack, receiver)
    found = {}
    for scheme, rules in (("light", RULES), ("dark", ["color-contrast"])):
        sight = await look(color_scheme=scheme, reduced_motion="reduce")
        for address, sign in addresses.items():
            await sight.go(address)
            await sight.see(sign)
            result = await Axe().run(sight.page, options={"runOnly": rules})
            for fault in result.response["violations"]:
                where = [node["html"][:200] for node in fault["nodes"]]
                found[scheme, address, fault["id"]] = where

    assert found == {}


async def test_every_page_fits_a_narrow_screen(
    look: Look, stack: Stack, receiver: Receiver
) -> None:
    """At 360 pixels nothing but a table's own frame scrolls sideways; all of the menu is there."""
    sight = await look(viewport={"width": 360, "height": 740})
    too_wide = {}
    for address, sign in (await make_addresses(stack, receiver)).items():
        await sight.go(address)
        await sight.see(sign)
        width = await sight.page.evaluate("document.documentElement.scrollWidth")
        if width > 360:
            too_wide[address] = width
    last = await sight.page.locator("#nav a").last.bounding_box()

    assert too_wide == {}
    assert last is not None
    assert last["x"] + last["width"] <= 360


async def test_dark_and_light_and_less_motion(look: Look) -> None:
    """As the system wants it."""
    grounds = {}
    for scheme in ("light", "dark"):
        sight = await look(color_scheme=scheme, reduced_motion="reduce")
        await sight.see("Overview")
        color = await sight.page.evaluate("getComputedStyle(document.body).backgroundColor")
        grounds[scheme] = [int(part) for part in color[4:-1].split(",")]
        motion = await sight.page.evaluate(
            "(() => { const mark = document.createElement('span'); mark.className = 'state';"
            " mark.dataset.tone = 'busy'; document.body.append(mark);"
            " return getComputedStyle(mark, '::before').animationName; })()"
        )
        assert motion == "none"

    assert min(grounds["light"]) > 200
    assert max(grounds["dark"]) < 60


async def test_everything_is_reached_by_keyboard(look: Look, stack: Stack) -> None:
    """Skip link, menu, filters, a job, back; the focus is always somewhere and always seen."""
    (job_id,) = await stack.submit_many(
        [{"model": "sentiment", "items": ["a"], "metadata": {"by": "keys"}}]
    )
    await stack.finish([job_id])
    sight = await look("jobs?key=by&value=keys")
    await sight.see("1 job on page 1")
    keyboard = sight.page.keyboard

    async def focused() -> str:
        name = "(e => e.id || e.name || e.title)(document.activeElement)"
        return str(await sight.page.evaluate(name))

    await keyboard.press("Tab")
    first = await focused()
    outline = await sight.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    await keyboard.press("Enter")
    main = await focused()
    names = []
    while (name := await focused()) != job_id:
        names.append(name)
        await keyboard.press("Tab")
        assert len(names) < 20, names
    await keyboard.press("Enter")
    await sight.see("Items and scores")
    after = await focused()
    await sight.page.go_back()
    await sight.see("1 job on page 1")

    assert (first, main, after) == ("skip", "main", "main")
    assert outline != "none"
    assert [
        name
        for name in ("state", "model", "bulk", "key", "value", "limit", "chosen")
        if name not in names
    ] == []


async def test_focus_survives_what_comes_in(look: Look, stack: Stack) -> None:
    """Rows arrive above; whoever stands on a link still stands on it."""
    body = {"model": "sentiment", "items": ["a"], "metadata": {"stands": "here"}}
    (job_id,) = await stack.submit_many([body])
    sight = await look("jobs?key=stands&value=here")
    await sight.page.locator(f"a[title={job_id}]").focus()

    await stack.submit_many([body] * 3)
    await sight.see("4 jobs on page 1")

    assert await sight.page.evaluate("document.activeElement.title") == job_id


async def test_a_key_is_asked_for_kept_in_the_tab_and_sent(look: Look, stack: Stack) -> None:
    """Requests and streams carry it; another tab does not have it; forgotten, it is gone.

    The service is mounted below a path here, as behind a proxy.
    """
    async with guarding(stack.url) as url:
        sight = await look(url=url, tolerates=UNAUTHORIZED)
        await sight.see("This service wants an API key", "#key-dialog")
        await sight.page.get_by_label("Key", exact=True).fill("wrong")
        await sight.page.keyboard.press("Enter")
        await sight.see("This key was refused", "#key-dialog")
        await sight.page.get_by_label("Key", exact=True).fill(KEY)
        await sight.page.keyboard.press("Enter")
        await sight.see("Live", "#live")
        await sight.see("sentiment")
        await sight.go("playground")
        await sight.page.get_by_role("button", name="Score").click()
        await sight.see("succeeded")
        curl = await sight.text("section[aria-labelledby=curl] code")
        kept = await sight.page.evaluate(
            "[sessionStorage.length, localStorage.length, document.cookie]"
        )
        other = await sight.page.context.new_page()
        await other.goto(url + "/")
        await other.get_by_text("This service wants an API key").wait_for()
        await sight.page.get_by_role("button", name="Key set").click()
        await sight.page.get_by_role("button", name="Forget").click()
        await sight.see("This service wants an API key", "#key-dialog")
        left = await sight.page.evaluate("sessionStorage.length")

    assert kept == [1, 0, ""]
    assert left == 0
    assert KEY not in curl
    assert '-H "Authorization: Bearer $SCOREKEEP_KEY"' in curl
