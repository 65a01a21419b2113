"""Tasks that run until they are cancelled end, whatever becomes of the first cancellation."""

from __future__ import annotations

import asyncio

import pytest

from streamfw import ending
from streamfw.ending import ended, to_its_end


async def stubborn(lives: int) -> str:
    """Goes on, `lives` times, as a task does whose driver has swallowed the cancellation."""
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            if not lives:
                raise
            lives -= 1


async def begun(*lives: int) -> list[asyncio.Task[str]]:
    tasks = [asyncio.create_task(stubborn(each)) for each in lives]
    await asyncio.sleep(0)
    return tasks


async def test_who_swallows_a_cancellation_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "AGAIN", 0.01)
    tasks = await begun(0, 1, 3)
    await ended(tasks)
    assert all(task.cancelled() for task in tasks)


async def test_who_was_cancelled_already_may_clean_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "AGAIN", 10.0)
    cleaned = False

    async def cleans() -> None:
        nonlocal cleaned
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.01)
            cleaned = True

    task = asyncio.create_task(cleans())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    await ended([task])
    assert cleaned


async def test_who_does_not_end_is_waited_for_no_longer_than_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "AGAIN", 0.04)
    tasks = await begun(0, 5)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await ended(tasks, timeout=0.1)
    assert loop.time() - began >= 0.1
    assert [task.done() for task in tasks] == [True, False]
    await ended(tasks)
    assert tasks[1].cancelled()


async def test_what_ended_by_itself_is_left_alone() -> None:
    async def fails() -> None:
        raise LookupError

    task = asyncio.create_task(fails())
    await asyncio.wait([task])
    await ended([task])
    assert isinstance(task.exception(), LookupError)
    await ended([])


async def test_what_must_end_ends_and_the_cancellation_goes_on() -> None:
    steps: list[str] = []

    async def closing() -> None:
        await asyncio.sleep(0.01)
        steps.append("closed")

    async def leaves() -> None:
        await to_its_end(closing())
        steps.append("not cancelled")

    task = asyncio.create_task(leaves())
    await asyncio.sleep(0)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    await asyncio.wait([task])
    assert task.cancelled()
    assert steps == ["closed"]
    await leaves()
    assert steps == ["closed", "closed", "not cancelled"]
