"""The watchdog of the event loop: who blocks it, on what message, at which line; once a block, and its end."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import threading
import time
from typing import Any

import msgspec
import pytest

from streamfw import App, Batch, subscriber
from tests.helpers import eventually

THRESHOLD = 0.1  # seconds


class Order(msgspec.Struct):
    id: int


def hold_up(seconds: float) -> None:
    time.sleep(seconds)  # the line that is told


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "event loop" in record.getMessage()]


async def test_it_names_the_handler_the_message_and_the_line(caplog: pytest.LogCaptureFixture) -> None:
    @subscriber("orders")
    async def blocks(order: Order) -> None:
        hold_up(5 * THRESHOLD)

    async with App(blocks, watchdog=THRESHOLD).running() as app:
        await app.publish("orders", Order(1), message_id="m1")
        await eventually(lambda: len(said(caplog)) == 2)
    begins, ends = said(caplog)
    assert begins.startswith(
        "test_it_names_the_handler_the_message_and_the_line.<locals>.blocks('orders'), message m1: "
    )
    assert "blocks the event loop, for more than 0.1 s now" in begins
    lines = begins.splitlines()
    assert lines[-1].strip() == "time.sleep(seconds)  # the line that is told"
    assert "in hold_up" in lines[-2]
    assert "in blocks" in lines[-4]
    assert len(lines) == 5, "the stack begins with the handler"
    assert ends.startswith("test_it_names_the_handler_the_message_and_the_line.<locals>.blocks('orders'), message m1: ")
    assert "goes on, after at least 0." in ends
    assert [record.levelno for record in caplog.records if "event loop" in record.getMessage()] == [logging.WARNING] * 2


async def test_once_for_each_block(caplog: pytest.LogCaptureFixture) -> None:
    @subscriber("orders", workers=2)
    async def blocks(order: Order) -> None:
        hold_up(5 * THRESHOLD)
        await asyncio.sleep(2 * THRESHOLD)

    async with App(blocks, watchdog=THRESHOLD).running() as app:
        for number in range(3):
            await app.publish("orders", Order(number), message_id=f"m{number}")
            await eventually(lambda: app.pumps[0].counters.acked == number + 1)  # noqa: B023
    told = [text for text in said(caplog) if "blocks the event loop" in text]
    assert [f"message m{number}" in text for number, text in enumerate(told)] == [True] * 3
    assert len(said(caplog)) == 6


async def test_a_batch_is_named_by_the_first_of_its_messages(caplog: pytest.LogCaptureFixture) -> None:
    @subscriber("orders", batch=Batch(7, wait=5))
    async def blocks(orders: list[Order]) -> None:
        hold_up(5 * THRESHOLD)

    async with App(blocks, watchdog=THRESHOLD).running() as app:
        for number in range(7):
            await app.publish("orders", Order(number), message_id=f"m{number}")
        await eventually(lambda: len(said(caplog)) == 2)
    assert "message m0, m1, m2, m3, m4 and 2 more: " in said(caplog)[0]


async def test_what_is_no_worker_is_named_as_what_it_is(caplog: pytest.LogCaptureFixture) -> None:
    release = asyncio.Event()

    @subscriber("orders")
    async def waits(order: Order) -> None:
        await release.wait()

    async with App(waits, watchdog=THRESHOLD).running() as app:
        await app.publish("orders", Order(1), message_id="m1")
        await eventually(lambda: app.pumps[0].crew.running == 1)

        async def mine() -> None:
            hold_up(5 * THRESHOLD)

        await asyncio.create_task(mine(), name="mine")
        await eventually(lambda: len(said(caplog)) == 2)
        asyncio.get_running_loop().call_soon(time.sleep, 5 * THRESHOLD)
        await eventually(lambda: len(said(caplog)) == 4)
        release.set()
    first, _, second, _ = said(caplog)
    who = "test_what_is_no_worker_is_named_as_what_it_is.<locals>.waits('orders'), message m1"
    assert first.startswith(f"the task 'mine' (handlers that run: {who}): blocks")
    assert "in mine" in first
    assert second.startswith(f"a callback (handlers that run: {who}): blocks")


async def test_who_keeps_the_interpreter_is_told_afterwards(caplog: pytest.LogCaptureFixture) -> None:
    keeps: Any = ctypes.PyDLL(None).usleep  # calls through PyDLL do not let other threads run
    release = asyncio.Event()

    @subscriber("orders")
    async def blocks(order: Order) -> None:
        keeps(500_000)
        await release.wait()

    async with App(blocks, watchdog=THRESHOLD).running() as app:
        await app.publish("orders", Order(1), message_id="m1")
        await eventually(lambda: said(caplog))
        release.set()
    assert "message m1" in said(caplog)[0]


async def test_handlers_that_wait_block_nothing(caplog: pytest.LogCaptureFixture) -> None:
    @subscriber("orders", workers=2)
    async def waits(order: Order) -> None:
        await asyncio.sleep(4 * THRESHOLD)

    @subscriber("threads", workers=2)
    def waits_in_a_thread(order: Order) -> None:
        time.sleep(4 * THRESHOLD)

    async with App(waits, waits_in_a_thread, watchdog=10 * THRESHOLD).running() as app:
        for name in ("orders", "threads"):
            await app.publish(name, Order(1))
        await eventually(lambda: all(pump.counters.acked == 1 for pump in app.pumps))
    assert said(caplog) == []


@pytest.mark.parametrize("watchdog", [None, 0])
async def test_it_can_be_switched_off(watchdog: float | None) -> None:
    async with App(watchdog=watchdog).running():
        assert "streamfw-watchdog" not in [thread.name for thread in threading.enumerate()]


async def test_it_ends_with_the_app() -> None:
    for _ in range(2):
        async with App().running():
            assert [thread.name for thread in threading.enumerate()].count("streamfw-watchdog") == 1
        assert "streamfw-watchdog" not in [thread.name for thread in threading.enumerate()]
