"""Bulks while they run, and the playground's request in three languages."""

import asyncio
import json
import re
import sys
from typing import Any

import aiohttp
import pytest

from tests.dashboard.conftest import Look
from tests.e2e.stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="session")]


async def start_bulk(stack: Stack, lines: list[dict[str, Any]], **fields: Any) -> str:
    """Upload the lines, start a bulk on them and return its id."""
    form = aiohttp.FormData()
    form.add_field("purpose", "batch")
    text = "".join(json.dumps(line) + "\n" for line in lines)
    form.add_field("file", text.encode(), filename="in.jsonl")
    _, _, file = await stack.request("POST", "/v1/files", data=form)
    status, _, bulk = await stack.post("/v1/bulks", {"input_file_id": file["id"], **fields})
    assert status == 202, bulk
    return str(bulk["id"])


async def test_a_bulk_moves_before_the_readers_eyes(look: Look, stack: Stack) -> None:
    """Paused and resumed from its page; its lines are counted to the last, its jobs listed."""
    lines = [{"custom_id": f"row-{n}", "item": f"text {n}"} for n in range(900)]
    bulk_id = await start_bulk(stack, lines, model="later", metadata={"set": "<b>all</b>"})
    sight = await look(f"bulk/{bulk_id}")
    await sight.see("running")
    bulks = await look("bulks")
    await sight.page.get_by_role("button", name="Pause").click()
    await sight.see("paused")
    await sight.page.get_by_role("button", name="Resume").click()
    await sight.see("running")
    before = await sight.text(".panel strong")
    asked: list[str] = []
    sight.page.on("request", lambda request: asked.append(request.url))
    _, _, jobs = await stack.get(f"/v1/jobs?bulk={bulk_id}")

    worker = await stack.start_worker("--model=later")
    await stack.finish([jobs["data"][0]["id"]], timeout_s=120)
    await sight.see("900 of 900 lines · 100 %")
    await sight.see("completed")
    read_again = [url for url in asked if url.endswith(f"/v1/bulks/{bulk_id}")]
    row = bulks.page.locator(f"tr[data-key={bulk_id}]")
    await row.get_by_text("900 / 900").wait_for()
    await stack.stop(worker)
    await sight.page.get_by_role("link", name="Its jobs").click()
    await sight.wait("document.querySelectorAll('tbody tr').length > 0")

    assert read_again == []  # its stream says all
    assert before == "0 of 900 lines · 0 %"
    assert "<b>all</b>" in await row.inner_text()
    assert await sight.count("tbody tr") == len(jobs["data"]) > 1
    assert {job["bulk"] for job in jobs["data"]} == {bulk_id}


async def test_a_refused_bulk_names_its_lines(look: Look, stack: Stack) -> None:
    """Each with its number and the reason."""
    lines = [{"custom_id": "a", "item": "x"}, {"custom_id": "a", "item": "y"}]
    bulk_id = await start_bulk(stack, lines, model="sentiment")
    sight = await look(f"bulk/{bulk_id}")
    await sight.see("failed")
    await sight.see("Refused")

    assert "2" in await sight.text("section[aria-labelledby=refusals] tbody td")


async def run(*command: str, cwd: str) -> str:
    """Run a command as a reader would, and return what it printed."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=cwd
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    return out.decode()


async def test_the_playground_shows_scores_and_code_that_gives_the_same(
    look: Look, stack: Stack
) -> None:
    """What it shows is what the displayed ``curl`` and Python print, quotes and all."""
    sight = await look("playground")
    await sight.page.get_by_label("Model").select_option("judge")
    await sight.page.get_by_label("Query").fill('It\'s "so" \\ $HOME `x`')
    await sight.page.get_by_label("Instruction").fill("It's {query}")
    await sight.page.get_by_label("Items, one").fill("Pâté 😀\nno 'quote' is \"safe\"")
    await sight.page.get_by_label("Labels").fill(" Yes| No| Maybe")
    await sight.page.get_by_role("button", name="Score").click()
    await sight.see("succeeded")

    shown = [float(text) for text in await sight.page.locator(".score-value").all_inner_texts()]
    labels = await sight.page.locator(".score-label").all_inner_texts()
    curl = await sight.text("section[aria-labelledby=curl] code")
    python = await sight.text("section[aria-labelledby=python] code")
    folder = str(stack.folder)
    from_curl = json.loads(await run("sh", "-c", curl, cwd=folder))["scores"]
    from_python = await run(sys.executable, "-c", python, cwd=folder)

    assert "It's {query}" in python
    assert labels == ["Yes", "No", "Maybe"] * 2
    assert shown == pytest.approx([value for row in from_curl for value in row], abs=1e-4)
    printed = [float(number) for number in re.findall(r"\d\.\d+(?:e-\d+)?", from_python)]
    assert printed == pytest.approx(shown, abs=1e-4)


async def test_the_playground_says_what_was_wrong(look: Look) -> None:
    """The service's own words; the form keeps what was typed."""
    sight = await look("playground", tolerates=("422 (Unprocessable Entity)",))
    await sight.page.get_by_label("Model").select_option("short")
    await sight.page.get_by_label("Items, one").fill("far longer than the sixteen that fit")
    await sight.page.get_by_role("button", name="Score").click()
    await sight.see("the model's limit is 16")

    assert await sight.page.get_by_label("Items, one").input_value() == (
        "far longer than the sixteen that fit"
    )
    assert await sight.page.get_by_role("button", name="Score").is_enabled()
