"""Jobs: one with everything about it, and very many of them."""

import json
import time

import pytest

from tests.dashboard.conftest import Look
from tests.e2e.stack import Receiver, Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="session")]

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"
NOT_FOUND = ("404 (Not Found)",)


async def test_a_job_shows_scores_timeline_deliveries_and_receipt(
    look: Look, stack: Stack, receiver: Receiver
) -> None:
    """Bars and numbers are the API's; the failed item says why; the webhook can be sent again."""
    body = {
        "model": "short",
        "items": ["fits", "this one is longer than sixteen bytes", "ok"],
        "apply_softmax": True,
        "webhook": receiver.url,
        "metadata": {"customer": "4711"},
    }
    (job_id,) = await stack.submit_many([body])
    job = (await stack.finish([job_id]))[job_id]
    _, _, scores = await stack.get(f"/v1/jobs/{job_id}/scores")
    sight = await look(f"job/{job_id}")
    await sight.see("delivered")

    rows = sight.page.locator(".results tbody tr")
    values = await rows.nth(0).locator(".score-value").all_inner_texts()
    widths = [
        float(await bar.get_attribute("width") or "")
        for bar in await rows.nth(0).locator(".bar-value").all()
    ]
    sent_before = len(receiver.received)
    await sight.page.get_by_role("button", name="Send again").click()
    await sight.see("Attempt 2")

    assert await sight.text("h1") == job_id
    assert await rows.count() == 3
    assert [float(value) for value in values] == pytest.approx(scores["scores"][0], abs=1e-4)
    assert widths == pytest.approx([100 * value for value in scores["scores"][0]], abs=0.5)
    assert "input_too_long" in await rows.nth(1).inner_text()
    assert job["receipt"]["fingerprint"] in await sight.text("section[aria-label=Receipt]")
    assert "4711" in await sight.text(".facts")
    timeline = await sight.text(".timeline")
    assert [word in timeline for word in ("Submitted", "Taken", "partial", "204")] == [True] * 4
    assert len(receiver.received) == sent_before + 1


async def test_a_job_ends_before_the_readers_eyes(look: Look, stack: Stack) -> None:
    """Cancelled elsewhere, the stream tells; no reload. The list changes too."""
    (job_id,) = await stack.submit_many([{"model": "later", "items": ["a"]}])
    sight = await look(f"job/{job_id}")
    await sight.see("queued")
    jobs = await look("jobs?model=later")
    state = jobs.page.locator(f"tr[data-key={job_id}] .state")
    await state.get_by_text("queued").wait_for()

    await sight.page.get_by_role("button", name="Cancel").click()
    await sight.see("cancelled")
    await state.get_by_text("cancelled").wait_for()

    assert await sight.page.get_by_role("button", name="Cancel").count() == 0
    assert (await stack.get(f"/v1/jobs/{job_id}"))[2]["state"] == "cancelled"


async def test_a_job_that_is_not_there_is_said(look: Look) -> None:
    """With the error's words, its request id and a way on."""
    sight = await look(f"job/job_{'0' * 32}", tolerates=NOT_FOUND)
    await sight.see("(job_not_found)")

    notice = await sight.text(".notice")
    await sight.page.get_by_role("link", name="Back to the jobs").click()
    await sight.see("Jobs")

    assert f"there is no job job_{'0' * 32}" in notice
    assert "req_" in notice


async def test_hostile_texts_stay_texts(look: Look, stack: Stack) -> None:
    """Items, query, labels and metadata with markup are shown as they are, and run nothing."""
    body = {
        "model": "judge",
        "query": HOSTILE,
        "items": [HOSTILE, "'\"></td>{{7*7}}\u202e javascript:alert(3)"],
        "labels": [HOSTILE, " No"],
        "metadata": {HOSTILE[:64]: HOSTILE},
    }
    (job_id,) = await stack.submit_many([body])
    await stack.finish([job_id])
    sight = await look(f"job/{job_id}")
    sight.page.on("dialog", lambda dialog: sight.errors.append(f"dialog: {dialog.message}"))
    await sight.see("Items and scores")

    items = await sight.page.locator("td.text").all_inner_texts()
    label = await sight.text(".score-label")
    await sight.go(f"jobs?key={HOSTILE[:64]}&value={HOSTILE}".replace("#", "%23"))
    await sight.see("1 job on page 1")
    mark = await sight.text(".mark")
    await sight.go(f"job/{HOSTILE.replace('/', '%2F')}")
    await sight.wait("document.querySelector('.notice.bad') !== null")
    sight.errors = [error for error in sight.errors if NOT_FOUND[0] not in error]

    assert items == body["items"]
    assert label == HOSTILE
    assert HOSTILE in mark
    assert await sight.text("h1") == f"Job {HOSTILE}"
    assert await sight.count("#main img, #main script") == 0


async def test_a_thousand_jobs_are_listed_filtered_and_paged(look: Look, stack: Stack) -> None:
    """All on one page in time; filters and pages by the address; the newest come by themselves."""
    items = [f"text {number}" for number in range(5)]
    bodies = [
        {
            "model": "sentiment",
            "items": items[: 1 + n % 5],
            "metadata": {"run": f"thousand-{n % 4}"},
        }
        for n in range(1000)
    ]
    ids = await stack.submit_many(bodies)
    await stack.finish(ids[-1:])
    started_at = time.monotonic()
    sight = await look("jobs?limit=1000&model=sentiment")
    await sight.wait("document.querySelectorAll('tbody tr').length === 1000")
    took_s = time.monotonic() - started_at

    await sight.go("jobs?limit=200&key=run&value=thousand-1")
    await sight.see("200 jobs on page 1")
    first = await sight.page.locator("tbody tr").nth(0).get_attribute("data-key")
    await sight.page.get_by_role("button", name="Older").click()
    await sight.see("50 jobs on page 2")
    address = sight.page.url
    again = await look(address.partition("#/")[2])
    await again.see("50 jobs on page 2")
    await sight.page.get_by_role("button", name="Newer").click()
    await sight.see("200 jobs on page 1")
    newest = await sight.page.locator("tbody tr").nth(0).get_attribute("data-key")
    (fresh,) = await stack.submit_many([bodies[1]])
    await sight.wait(f"document.querySelector('tbody tr').dataset.key === {json.dumps(fresh)}")
    await sight.page.get_by_label("State").select_option("failed")
    await sight.see("No job fits these filters")

    assert took_s < 20  # on a machine with nothing else to do: about one
    assert first == newest == max(ids[1::4])  # 50 were submitted at once
    assert "cursor=" in address
    assert "state=failed" in sight.page.url


async def test_two_jobs_are_chosen_and_compared(look: Look, stack: Stack) -> None:
    """Ticked in the list; figures and receipts are the API's; a job and a bulk are no pair."""
    texts = ["one", "two", "three"]
    bodies = [
        {
            "model": "sentiment",
            "items": texts,
            "metadata": {"pair": "yes"},
            "apply_softmax": softmax,
        }
        for softmax in (True, False)
    ]
    ids = await stack.submit_many(bodies)
    await stack.finish(ids)
    sight = await look("jobs?key=pair&value=yes&state=succeeded")
    for job_id in ids:
        await sight.page.get_by_label(f"Compare {job_id}").check()
    await sight.page.get_by_role("button", name="Compare the two chosen").click()
    await sight.see("Most changed")
    _, _, expected = await stack.get(f"/v1/jobs/{ids[0]}/compare/{ids[1]}")

    figures = await sight.text(".facts")
    receipts = await sight.text("section[aria-labelledby=receipts] tbody")
    rows = await sight.count("section[aria-labelledby=changed] tbody tr")
    await sight.page.get_by_label("Second (b)").fill("blk_" + "0" * 32)
    await sight.page.get_by_role("button", name="Compare").click()
    await sight.see("these are one of each")

    assert f"{expected['max_difference']:.4f}" in figures
    assert "activation" in receipts
    assert rows == len(expected["changed"]) == 3
