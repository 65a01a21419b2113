"""`def` handlers: in threads, like any other handler but for what a thread cannot do."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest

from streamfw import (
    Ack,
    App,
    Attempt,
    Backoff,
    Batch,
    DeadLetter,
    Drop,
    Header,
    Message,
    Next,
    NotRunning,
    PartialFailure,
    Retry,
    State,
    SyncPublisher,
    subscriber,
)
from streamfw.memory import MemoryBroker
from streamfw.runtime import crew
from tests.helpers import eventually, eventually_blocking
from tests.unit.rig import FakeSource, prepared, pumping, quick

ROOT = Path(__file__).parents[2]
SOON = 20.0  # seconds: the most that a test waits for what happens at once


class Order(msgspec.Struct):
    id: int


class Pool:
    pass


async def letters(app: App, name: str, count: int = 1) -> list[str]:
    """The reasons of the dead letters at `name`, once there are so many."""
    dead = await app.connection().dead_letters(name)

    async def found() -> list[str]:
        reasons = [one.headers["streamfw-error"] for one in await dead.list()]
        return reasons if len(reasons) >= count else []

    return await eventually(found)


# ------------------------------------------------------------------ the same as any other handler


async def test_it_takes_what_any_handler_takes_and_runs_in_a_thread() -> None:
    seen: list[tuple[Any, ...]] = []
    pool = Pool()

    async def lifespan() -> AsyncIterator[Pool]:
        yield pool

    @subscriber("orders", publishes="receipts")
    def handle(
        order: Order,
        message: Message,
        attempt: Annotated[int, Attempt],
        mine: Annotated[Pool, State],
        *,
        tenant: Annotated[str, Header("tenant")],
    ) -> Order:
        seen.append((order.id, message.key, attempt, mine, tenant, threading.current_thread()))
        return Order(order.id + 1)

    receipts: list[int] = []

    @subscriber("receipts")
    def receive(order: Order) -> None:
        receipts.append(order.id)

    async with App(handle, receive, lifespan=lifespan).running() as app:
        await app.publish("orders", Order(1), key="k", headers={"tenant": "acme"})
        await eventually(lambda: receipts)
    ((*arguments, thread),) = seen
    assert arguments == [1, "k", 1, pool, "acme"]
    assert receipts == [2]
    assert thread is not threading.main_thread()


async def test_outcomes_returned_and_raised() -> None:
    calls: list[tuple[int, int]] = []

    @subscriber("orders", attempts=2, backoff=Backoff(first=0.001), on_error={KeyError: DeadLetter})
    def handle(order: Order, attempt: Annotated[int, Attempt]) -> object:
        calls.append((order.id, attempt))
        match order.id:
            case 1:
                return Drop()
            case 2:
                raise DeadLetter("raised")
            case 3 if attempt == 1:
                raise Retry(after=0)
            case 4:
                raise KeyError("a rule")
            case 5:
                raise ValueError("twice")
            case 6:
                raise StopIteration
        return Ack()

    async with App(handle).running() as app:
        for number in range(7):
            await app.publish("orders", Order(number))
        await eventually(lambda: app.pumps[0].counters.settled == 10)
        assert sorted(calls) == sorted([*((n, 1) for n in range(7)), (3, 2), (5, 2), (6, 2)])
        reasons = await letters(app, "orders.dead", 4)
    kinds = sorted(reason.partition(":")[0] for reason in reasons)
    assert kinds == ["KeyError", "RuntimeError", "ValueError", "raised"]


async def test_a_batch_and_its_partial_failure() -> None:
    sizes: list[int] = []

    @subscriber("orders", batch=Batch(3, wait=5), attempts=1)
    def handle(orders: list[Order]) -> None:
        sizes.append(len(orders))
        raise PartialFailure({1: ValueError("the second")})

    async with App(handle).running() as app:
        for number in range(3):
            await app.publish("orders", Order(number))
        await eventually(lambda: app.pumps[0].counters.settled == 3)
        assert await letters(app, "orders.dead") == ["ValueError: the second"]
    assert sizes == [3]


async def test_order_by_key_holds_over_a_retry() -> None:
    seen: list[int] = []
    failed = threading.Event()

    def handle(order: Order) -> None:
        if order.id == 0 and not failed.is_set():
            failed.set()
            raise ValueError
        seen.append(order.id)

    source = FakeSource(prepared(12, key=lambda number: "k"))
    app = App()
    call = _offloaded(app, handle)
    async with pumping(call, source, workers=4, ordered=True, policy=quick()) as rig:
        await rig.all_ended(12)
    assert seen == list(range(12))


def _offloaded(app: App, handle: Any) -> Any:
    """`handle` as the app's own machinery runs it, for a pump over a source of the test's."""
    offload = app.build().offload
    run = offload._in_thread(handle, "handle('orders')")
    assert offload._threads is not None
    offload._threads.open()

    async def call(order: Order) -> Any:
        return await run(order)

    return call


async def test_middleware_is_around_it_and_gives_it_its_context() -> None:
    tenant: ContextVar[str] = ContextVar("tenant", default="none")
    seen: list[str] = []

    async def around(message: Message, call_next: Next) -> object:
        token = tenant.set(f"tenant of {message.message_id}")
        try:
            return await call_next(message)
        finally:
            seen.append(tenant.get())
            tenant.reset(token)

    @subscriber("orders")
    def handle(order: Order) -> None:
        seen.append(tenant.get())
        tenant.set("set in the thread")

    async with App(handle, middleware=[around]).running() as app:
        for number in range(3):
            await app.publish("orders", Order(number), message_id=f"m{number}")
        await eventually(lambda: len(seen) == 6)
        assert not app.pumps[0].crew.isolated, "nothing leaks from a thread"
    assert seen == [f"tenant of m{number}" for number in range(3) for _ in range(2)]


async def test_a_function_that_returned_a_coroutine_has_failed() -> None:
    async def inner() -> None: ...

    @subscriber("orders", attempts=1)
    def handle(order: Order) -> Any:
        return inner()

    async with App(handle).running() as app:
        await app.publish("orders", Order(1))
        await eventually(lambda: app.pumps[0].counters.dead == 1)
        (reason,) = await letters(app, "orders.dead")
    assert "returned a coroutine: make it `async def`" in reason


# ------------------------------------------------------------------ how many


async def test_eight_workers_run_at_the_same_time() -> None:
    together = threading.Barrier(8, timeout=SOON)
    done: list[int] = []

    @subscriber("orders", workers=8, attempts=1)
    def handle(order: Order) -> None:
        together.wait()  # passes only where eight are here
        done.append(order.id)

    async with App(handle).running() as app:
        for number in range(32):
            await app.publish("orders", Order(number))
        await eventually(lambda: len(done) == 32, SOON)
        assert app.pumps[0].counters.dead == 0


async def test_the_app_has_so_many_threads_and_no_more() -> None:
    lock = threading.Lock()
    running, most, done = [0], [0], [0]
    together = threading.Barrier(3, timeout=SOON)

    def count(order: Order) -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        together.wait()  # with fewer than three at a time nobody passes
        with lock:
            running[0] -= 1
            done[0] += 1

    @subscriber("a", workers=3)
    def one(order: Order) -> None:
        count(order)

    @subscriber("b", workers=3)
    def other(order: Order) -> None:
        count(order)

    async with App(one, other, threads=3).running() as app:
        for number in range(12):
            await app.publish("a" if number % 2 else "b", Order(number))
        await eventually(lambda: done[0] == 12, SOON)
    assert most == [3]


# ------------------------------------------------------------------ publishing


async def test_it_publishes_and_asks_by_a_publisher_that_blocks() -> None:
    seen: list[Any] = []

    @subscriber("orders")
    def handle(order: Order, receipts: Annotated[SyncPublisher[Order], "receipts"]) -> None:
        identity = receipts.publish(Order(order.id), key="k", headers={"tenant": "acme"})
        seen.append(("published", identity))
        answers: list[Order] = []
        asking = threading.Thread(target=lambda: answers.append(receipts.request(Order(7), Order)))
        asking.start()  # from a thread of its own, too
        asking.join(SOON)
        seen.append(("answered", answers))

    @subscriber("receipts")
    async def receive(order: Order, message: Message) -> Order:
        seen.append(("received", order.id, message.message_id, message.key))
        return Order(order.id * 2)

    async with App(handle, receive).running() as app:
        await app.publish("orders", Order(1))
        await eventually(lambda: any(one[0] == "answered" for one in seen), SOON)
    assert ("answered", [Order(14)]) in seen
    (identity,) = [one[1] for one in seen if one[0] == "published"]
    assert ("received", 1, identity, "k") in seen


async def test_a_publisher_that_blocks_does_so_nowhere_else() -> None:
    kept: list[SyncPublisher[Order]] = []

    @subscriber("orders")
    def handle(order: Order, out: Annotated[SyncPublisher[Order], "out"]) -> None:
        kept.append(out)

    async with App(handle).running() as app:
        await app.publish("orders", Order(1))
        await eventually(lambda: kept)
        with pytest.raises(RuntimeError, match="would block the event loop"):
            kept[0].publish(Order(1))
    with pytest.raises(NotRunning):
        await asyncio.to_thread(kept[0].publish, Order(1))


# ------------------------------------------------------------------ what cannot be cancelled


async def test_a_timeout_counts_when_the_thread_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    go, runs = threading.Event(), threading.Event()

    @subscriber("orders", timeout=0.05, attempts=1)
    def handle(order: Order) -> None:
        runs.set()
        assert go.wait(SOON)  # and returns well: too late

    async with App(handle).running() as app:
        await app.publish("orders", Order(1), message_id="m1")
        await eventually(lambda: "message m1 was cancelled" in caplog.text)
        assert runs.is_set()
        counters = app.pumps[0].counters
        assert (counters.settled, counters.dead) == (0, 0), "it is ours as long as the thread lives"
        go.set()
        await eventually(lambda: counters.settled == 1)
        (reason,) = await letters(app, "orders.dead")
    assert reason.startswith("TimeoutError")
    assert "cannot be: its handler is waited for" in caplog.text


async def test_waiting_for_a_thread_is_not_the_handlers_time() -> None:
    go, first, done = threading.Event(), threading.Event(), threading.Event()

    @subscriber("slow")
    def slow(order: Order) -> None:
        first.set()
        assert go.wait(SOON)

    @subscriber("quick", timeout=0.05, attempts=1)
    def handle(order: Order) -> None:
        done.set()

    @subscriber("clock", timeout=0.05, attempts=1)
    async def clock(order: Order) -> None:
        await asyncio.sleep(SOON)

    async with App(slow, handle, clock, threads=1).running() as app:
        await app.publish("slow", Order(1))
        await eventually(first.is_set)
        await app.publish("quick", Order(1))
        await eventually(lambda: app.pumps[1].crew.running == 1)
        await app.publish("clock", Order(1))
        await eventually(lambda: app.pumps[2].counters.dead == 1)  # a timeout like the other's has passed
        assert not done.is_set()
        go.set()
        await eventually(done.is_set)
        await eventually(lambda: app.pumps[1].counters.acked == 1)


async def test_a_drain_waits_for_a_thread_and_settles_what_it_did(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(crew, "GRACE", 0.05)
    go, runs = threading.Event(), threading.Event()
    handled: list[int] = []

    @subscriber("orders", workers=2)
    def handle(order: Order) -> None:
        runs.set()
        assert go.wait(SOON)
        handled.append(order.id)

    broker = MemoryBroker("memory://")
    app = App(handle, brokers={"default": broker}, drain_timeout=0.05)

    async def live() -> None:
        async with app.running():
            await app.publish("orders", Order(1), message_id="m1")
            await eventually(runs.is_set)

    living = asyncio.create_task(live())
    await eventually(lambda: "1 handlers still run in threads, which cannot be cancelled: messages m1" in caplog.text)
    late = asyncio.get_running_loop().time() + 1.5  # beyond the grace, whatever the pace of the drain's looks
    await eventually(lambda: asyncio.get_running_loop().time() > late)
    assert not living.done()
    go.set()
    await living
    assert handled == [1]
    async with app.running():
        await app.publish("orders", Order(2))
        await eventually(lambda: len(handled) == 2)
    assert handled == [1, 2], "what was done was acknowledged"


async def test_a_drain_calls_off_what_no_thread_has_begun() -> None:
    go, runs = threading.Event(), threading.Event()
    handled: list[int] = []

    @subscriber("orders", workers=2)
    def handle(order: Order) -> None:
        handled.append(order.id)

    @subscriber("slow")
    def slow(order: Order) -> None:
        runs.set()
        assert go.wait(SOON)

    broker = MemoryBroker("memory://")
    app = App(handle, slow, brokers={"default": broker}, drain_timeout=0.05, threads=2)
    threads = app.build().offload._threads
    assert threads is not None

    async with app.running():
        await app.publish("slow", Order(1))
        await eventually(runs.is_set)
        taken = object()
        threads._limiter.acquire_on_behalf_of_nowait(taken)
        await app.publish("orders", Order(1))
        await eventually(lambda: app.pumps[0].crew.running == 1)
        asyncio.get_running_loop().call_later(0.5, go.set)
    assert handled == []
    async with app.running():
        await eventually(lambda: handled == [1])


async def test_a_drain_that_may_leave_threads_keeps_their_deliveries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `App.run` does: the process is about to end, and its source stays open until then."""
    monkeypatch.setattr(crew, "GRACE", 0.05)
    go = threading.Event()

    def handle(order: Order) -> None:
        if order.id == 0:
            assert go.wait(SOON)

    source = FakeSource(prepared(4))
    async with pumping(_offloaded(App(), handle), source, workers=2) as rig:
        await eventually(lambda: len(source.ended) == 3)
        rig.drained = True
        await rig.pump.drain(asyncio.get_running_loop().time() + 0.05, leave_threads=True)
        assert rig.pump.stuck
        assert "close" not in source.calls
        assert [one.position for one in source.out.values()] == [0]
        go.set()  # the test ends well: the app would have ended the process
        await eventually(lambda: not rig.pump.crew.slots)
        await source.close()


SHOP = """
import sys, time
from pathlib import Path
from streamfw import App, subscriber

@subscriber("orders")
def stuck(order: dict[str, int]) -> None:
    Path("runs").touch()
    time.sleep(600)

async def lifespan(app: App):
    yield
    print("the lifespan was closed")

app = App(stuck, drain_timeout=0.1, lifespan=lifespan)

if __name__ == "__main__":
    import asyncio, threading
    def publish() -> None:
        while True:
            try:
                loop, connection = app._life._host.get_loop(), app.connection()
            except Exception:
                time.sleep(0.01)
                continue
            asyncio.run_coroutine_threadsafe(app.publish("orders", {"id": 1}, message_id="m1"), loop).result()
            return
    threading.Thread(target=publish, daemon=True).start()
    app.run()
"""


def test_run_ends_the_process_with_what_runs_in_threads(tmp_path: Path) -> None:
    """One deadline and its grace, then the process ends: nothing is closed under a handler that lives."""
    (tmp_path / "shop.py").write_text(SHOP)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "shop.py"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            eventually_blocking((tmp_path / "runs").exists, SOON)
            process.send_signal(signal.SIGTERM)
            out, log = process.communicate(timeout=SOON)
        finally:
            process.kill()
    assert process.returncode == 1, log
    assert "1 handlers still run in threads, which cannot be cancelled: messages m1" in log
    assert "ending the process; their messages come again" in log
    assert "the lifespan was closed" not in out


def test_no_thread_is_left_behind() -> None:
    before = set(threading.enumerate())
    done: list[int] = []

    @subscriber("orders", workers=4)
    def handle(order: Order) -> None:
        done.append(order.id)

    async def main() -> None:
        async with App(handle).running() as app:
            for number in range(20):
                await app.publish("orders", Order(number))
            await eventually(lambda: len(done) == 20)

    asyncio.run(main())
    eventually_blocking(lambda: set(threading.enumerate()) <= before)
