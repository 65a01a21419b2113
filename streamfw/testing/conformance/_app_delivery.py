"""Handlers in an app: who gets what, in which order, and what a drain keeps."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from streamfw.app import App
from streamfw.broker import Broker, Capabilities, Order
from streamfw.errors import BuildError, NotRunning, PartialFailure, Rejected
from streamfw.message import Message
from streamfw.subscriber import Batch, subscriber

from ._app_kit import AT_ONCE, AppKit

Handled = list[tuple[str | None, int]]


class AppDeliveryConformance(AppKit):
    async def test_a_handler_gets_what_the_app_published(self, broker: Broker, name: str) -> None:
        seen: list[Message] = []

        @subscriber(name)
        async def handle(message: Message, body: dict[str, int]) -> None:
            assert body == {"id": 1}
            seen.append(message)

        app = self.app(broker, handle)
        async with app.running():
            published = await app.publish(
                name, {"id": 1}, key="k", headers={"tenant": b"\xff"}, correlation_id="c", reply_to="r"
            )
            await self.until(lambda: seen, "the handler is called")
            assert app.health().ok
        (message,) = seen
        assert (message.message_id, message.key, message.name) == (published, "k", name)
        assert message.headers.raw("tenant") == b"\xff"
        assert (message.correlation_id, message.reply_to, message.attempt) == ("c", "r", 1)
        with pytest.raises(NotRunning):
            await app.publish(name, {"id": 2})

    async def test_two_processes_of_a_group_share_the_work(self, broker: Broker, name: str) -> None:
        seen: list[int] = []

        @subscriber(name, workers=4)
        async def handle(number: int) -> None:
            await asyncio.sleep(0.001)
            seen.append(number)

        first, second = self.app(broker, handle), self.app(self.another(broker), handle)
        async with first.running(), second.running():
            for number in range(100):
                await first.publish(name, number, key=f"key-{number}")
            await self.until(lambda: len(seen) >= 100, "all are handled")
            await self.still(seen, 100)
        assert sorted(seen) == list(range(100))

    async def test_every_group_handles_every_message(self, broker: Broker, name: str) -> None:
        seen: dict[str, list[int]] = {"shop": [], "audit": []}

        @subscriber(name)
        async def ship(number: int) -> None:
            seen["shop"].append(number)

        @subscriber(name, group="audit")
        async def audit(number: int) -> None:
            seen["audit"].append(number)

        app = self.app(broker, ship, audit)
        async with app.running():
            for number in range(20):
                await app.publish(name, number, key="one")
            await self.until(lambda: all(len(numbers) >= 20 for numbers in seen.values()), "both have all")
        assert seen == {"shop": list(range(20)), "audit": list(range(20))}

    @pytest.mark.parametrize("order", ["key", "partition"])
    async def test_order_over_workers_processes_and_failures(
        self, broker: Broker, name: str, capabilities: Capabilities, order: Order
    ) -> None:
        """3 keys, 8 workers in each of two processes, and one message that fails twice; or the build refuses."""
        handled: Handled = []
        failures: list[int] = []

        @subscriber(name, workers=8, ordered_by=order, attempts=5, backoff=AT_ONCE)
        async def handle(number: int, message: Message) -> None:
            await asyncio.sleep(0.001 * (number % 3))
            if number == 40 and len(failures) < 2:
                failures.append(message.attempt)
                raise ValueError("fails twice")
            handled.append((message.key, number))

        first, second = self.app(broker, handle), self.app(self.another(broker), handle)
        if order not in capabilities.ordered_by:
            with pytest.raises(ExceptionGroup) as caught:
                first.build()
            (error,) = caught.value.exceptions
            assert isinstance(error, BuildError)
            assert "ordered_by" in str(error)
            return
        async with first.running(), second.running():
            for number in range(90):
                await first.publish(name, number, key=f"key-{number % 3}")
            await self.until(lambda: len(handled) >= 90, "all are handled")
            await self.still(handled, 90)
        assert failures == [1, 2]
        for key in range(3):
            assert [number for k, number in handled if k == f"key-{key}"] == list(range(key, 90, 3))

    async def test_a_batch_is_never_larger_than_asked(self, broker: Broker, name: str) -> None:
        batches: list[list[int]] = []
        failed: list[int] = []

        @subscriber(name, batch=Batch(16, wait=0.01), workers=2, attempts=5, backoff=AT_ONCE)
        async def handle(numbers: list[int]) -> None:
            batches.append(numbers)
            if 5 in numbers and not failed:
                failed.append(5)
                raise PartialFailure({numbers.index(5): ValueError("once")})

        app = self.app(broker, handle)
        async with app.running():
            await asyncio.gather(*(app.publish(name, number, key=f"key-{number}") for number in range(100)))
            await self.until(lambda: sum(map(len, batches)) >= 101, "all are handled, one of them twice")
        assert max(map(len, batches)) <= 16
        assert sorted(number for batch in batches for number in batch) == sorted([*range(100), 5])

    async def test_a_drain_loses_nothing(self, broker: Broker, name: str, capabilities: Capabilities) -> None:
        """An app ends in the middle of its work; the next one does the rest, and nothing of what was done."""
        handled: list[int] = []

        @subscriber(name, workers=4)
        async def handle(number: int) -> None:
            await asyncio.sleep(0.002)
            handled.append(number)

        app = self.app(broker, handle)
        async with app.running():
            for number in range(200):
                await app.publish(name, number, key=f"key-{number % 10}")
            await self.until(lambda: len(handled) >= 40, "some are handled")
        before = list(handled)
        async with self.app(self.another(broker), handle).running():
            await self.until(lambda: set(handled) >= set(range(200)), "the next process handles the rest")
        again = len(handled) - 200
        # A position says nothing of what was settled beyond the first open one.
        assert again == 0 if capabilities.settlement != "positional" else again <= len(before)

    async def test_a_cancelled_handler_settles_nothing(self, broker: Broker, name: str) -> None:
        """One that does not end in time is cancelled: its message is neither acknowledged nor counted as failed."""
        begun: list[int] = []
        attempts: list[int] = []

        @subscriber(name, attempts=1)
        async def hang(message: Message) -> None:
            begun.append(message.attempt)
            await asyncio.Event().wait()

        @subscriber(name, attempts=1)
        async def handle(message: Message) -> None:
            attempts.append(message.attempt)

        app = self.app(broker, hang, drain_timeout=0.1)
        async with app.running():
            await app.publish(name, 1)
            await self.until(lambda: begun, "the handler hangs")
        async with self.app(self.another(broker), handle).running():
            await self.until(lambda: attempts, "it comes back")
        assert (begun, attempts) == ([1], [1])

    async def test_an_app_survives_a_cut(self, broker: Broker, name: str) -> None:
        handled: list[int] = []

        @subscriber(name, workers=4)
        async def handle(number: int) -> None:
            await asyncio.sleep(0.002)
            handled.append(number)

        app = self.app(broker, handle)
        async with app.running():
            for number in range(100):
                await app.publish(name, number, key=f"key-{number % 10}")
            await self.until(lambda: len(handled) >= 20, "some are handled")
            await self.interrupt(broker)
            await self.until(lambda: set(handled) >= set(range(100)), "all are handled in spite of the cut")
            await self.until(lambda: app.health().ok, "the app is well again")

    async def test_a_delayed_publish(self, broker: Broker, name: str, capabilities: Capabilities) -> None:
        handled: list[float] = []

        @subscriber(name)
        async def handle(number: int) -> None:
            handled.append(time.monotonic())

        app = self.app(broker, handle)
        async with app.running():
            before = time.monotonic()
            if capabilities.delay is None:
                with pytest.raises(Rejected):
                    await app.publish(name, 1, delay=0.5)
                await self.still(handled, 0)
                return
            await app.publish(name, 1, delay=0.5)
            after = time.monotonic()
            await self.until(lambda: handled, "it comes")
        assert handled[0] - before >= 0.5, "never early"
        assert handled[0] - after <= 0.5 + capabilities.delay + self.grace, "nor much too late"

    async def test_what_is_not_declared_is_refused_at_build(
        self, broker: Broker, name: str, capabilities: Capabilities
    ) -> None:
        """Every mistake at once, and before any I/O."""

        class Foreign:
            pass

        Foreign.name = name  # type: ignore[attr-defined]

        async def handle(number: int) -> None:
            raise AssertionError("nothing is published")

        app = App(name="shop", brokers={"default": broker})
        app.subscriber(Foreign())(handle)
        expected = 1
        for order in ("key", "partition"):
            if order not in capabilities.ordered_by:
                app.subscriber(f"{name}.{order}", ordered_by=order)(handle)
                expected += 1
        if not capabilities.transactions:
            app.subscriber(f"{name}.transactional", transactional=True)(handle)
            expected += 1
        with pytest.raises(ExceptionGroup) as caught:
            app.build()
        assert len(caught.value.exceptions) == expected
        assert all(isinstance(error, BuildError) for error in caught.value.exceptions)

    async def test_a_transactional_handler(self, broker: Broker, name: str, capabilities: Capabilities) -> None:
        attempts: list[int] = []

        @subscriber(name, transactional=capabilities.transactions, attempts=3, backoff=AT_ONCE)
        async def handle(message: Message) -> None:
            attempts.append(message.attempt)
            if len(attempts) == 1:
                raise ValueError("once")

        app = self.app(broker, handle)
        async with app.running():
            await app.publish(name, 1)
            await self.until(lambda: len(attempts) >= 2, "it is tried again")
            await self.still(attempts, 2)
        assert attempts == [1, 2]

    async def test_the_same_app_runs_again(self, broker: Broker, name: str) -> None:
        handled: list[int] = []

        @subscriber(name)
        async def handle(number: int) -> None:
            handled.append(number)

        app = self.app(broker, handle)
        for number in range(2):
            async with app.running():
                await app.publish(name, number)
                await self.until(lambda: len(handled) > number, "it is handled")  # noqa: B023 - awaited at once
        assert handled == [0, 1]

    async def test_an_error_in_the_body_still_drains(self, broker: Broker, name: str) -> None:
        handled: list[int] = []

        @subscriber(name)
        async def handle(number: int) -> None:
            await asyncio.sleep(0.01)
            handled.append(number)

        app = self.app(broker, handle)
        with contextlib.suppress(ZeroDivisionError):
            async with app.running():
                for number in range(3):
                    await app.publish(name, number, key="one")
                await self.until(lambda: handled, "one is handled")
                raise ZeroDivisionError
        async with self.app(self.another(broker), handle).running():
            await self.until(lambda: len(handled) >= 3, "the rest follows")
        assert handled == [0, 1, 2]
