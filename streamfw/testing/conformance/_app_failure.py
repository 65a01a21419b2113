"""Handlers in an app that fail: attempts, retries, dead letters. The same on every broker, whoever does it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from streamfw.broker import Broker, Capabilities, Order
from streamfw.errors import TooLarge
from streamfw.message import (
    ERROR,
    ERROR_TYPE,
    LEFT_OUT,
    ORIGIN,
    ORIGIN_ATTEMPT,
    ORIGIN_GROUP,
    ORIGIN_OFFSET,
    ORIGIN_PARTITION,
    Headers,
    Message,
)
from streamfw.outcome import Backoff, DeadLetter, Drop, Retry
from streamfw.subscriber import subscriber

from ._app_kit import AT_ONCE, AppKit
from ._kit import errors_of, outgoing

WHERE = (ORIGIN_PARTITION, ORIGIN_OFFSET)  # which a log tells as well


class AppFailureConformance(AppKit):
    async def test_attempts_end_in_the_dead_letter(self, broker: Broker, name: str) -> None:
        await self._attempts_end(broker, name, None)

    async def test_attempts_in_an_order_end_in_the_dead_letter(
        self, broker: Broker, name: str, capabilities: Capabilities
    ) -> None:
        """A message of an ordered subscriber is tried again in place, with those behind it waiting."""
        for order in sorted(capabilities.ordered_by):
            await self._attempts_end(broker, f"{name}.{order}", order)

    async def _attempts_end(self, broker: Broker, name: str, order: Order | None) -> None:
        attempts: list[int] = []
        letters: list[Message] = []

        @subscriber(name, attempts=3, backoff=AT_ONCE, ordered_by=order)
        async def fail(message: Message) -> None:
            attempts.append(message.attempt)
            raise LookupError("no such item")

        @subscriber(f"{name}.dead")
        async def bury(message: Message) -> None:
            letters.append(message)

        app = self.app(broker, fail, bury)
        async with app.running():
            published = await app.publish(name, {"id": 1}, key="k", headers={"tenant": b"acme", "raw": b"\xff"})
            await self.until(lambda: letters, "the dead letter comes")
            await self.still(letters, 1)
        assert attempts == [1, 2, 3]
        (letter,) = letters
        assert (letter.body, letter.key, letter.message_id, letter.attempt) == (b'{"id":1}', "k", published, 1)
        told = {header: value for header, value in letter.headers.pairs if header not in WHERE}
        assert told == {
            "tenant": b"acme",
            "raw": b"\xff",
            ERROR: b"LookupError: no such item",
            ERROR_TYPE: b"LookupError",
            ORIGIN: name.encode(),
            ORIGIN_GROUP: b"shop",
            ORIGIN_ATTEMPT: b"3",
        }

    async def test_headers_as_large_as_can_be_cost_neither_a_retry_nor_the_dead_letter(
        self, broker: Broker, name: str
    ) -> None:
        """With what they have besides they may be too large to be published again; then a dead letter leaves out some,
        and says which."""
        attempts: list[tuple[int, int]] = []
        letters: list[Message] = []

        @subscriber(name)
        async def fail(message: Message) -> None:
            attempts.append((message.attempt, len(message.headers["large"])))
            raise Retry(after=1.0) if message.attempt == 1 else DeadLetter("broken")

        @subscriber(f"{name}.dead")
        async def bury(message: Message) -> None:
            letters.append(message)

        size = 200_000
        async with self.app(broker, fail, bury).running() as app:
            while True:
                try:
                    await app.publish(name, 1, headers={"tenant": b"acme", "large": bytes(size)})
                    break
                except TooLarge as error:
                    if not error.headers_over:
                        raise
                    size -= error.headers_over
            await self.until(lambda: letters, "the dead letter comes")
            await self.still(letters, 1)
        assert attempts == [(1, size), (2, size)]
        headers = letters[0].headers
        assert (letters[0].body, headers["tenant"], headers[ERROR]) == (b"1", "acme", "broken")
        assert headers.raw("large") == bytes(size) or headers[LEFT_OUT] == "large"

    async def test_a_handler_that_is_cancelled_by_itself_or_by_what_it_waits_for_has_failed(
        self, broker: Broker, name: str, capabilities: Capabilities
    ) -> None:
        """Left uncounted it would come again for ever. Only what the app cancels is unsettled."""
        attempts: list[tuple[str, str, int]] = []
        letters: list[Message] = []

        async def handle(message: Message, how: str) -> None:
            attempts.append((message.name, how, message.attempt))
            task = asyncio.current_task()
            assert task is not None
            if how == "leaks":
                task = asyncio.create_task(asyncio.sleep(60))
            if how != "well":
                task.cancel()
                await (task if how == "leaks" else asyncio.sleep(60))

        options: dict[str, Any] = {"attempts": 2, "backoff": AT_ONCE, "dead_letter": f"{name}.dead"}
        app = self.app(broker)
        app.subscriber(name, **options)(handle)
        app.subscriber(f"{name}.tx", transactional=capabilities.transactions, **options)(handle)

        @app.subscriber(f"{name}.dead")
        async def bury(message: Message) -> None:
            letters.append(message)

        names, cancelled = (name, f"{name}.tx"), ("itself", "leaks")
        async with app.running():
            for where in names:
                for how in (*cancelled, "well"):
                    await app.publish(where, how, key=how)
            await self.until(lambda: len(letters) >= 4 and len(attempts) >= 10, "four end as dead letters, two well")
            await self.still(letters, 4)
        failed = [(where, how, attempt) for where in names for how in cancelled for attempt in (1, 2)]
        assert sorted(attempts) == sorted([*failed, *((where, "well", 1) for where in names)])
        assert {letter.headers[ERROR_TYPE] for letter in letters} == {"CancelledError"}

    async def test_what_cannot_be_decoded_is_put_aside_as_it_is(self, broker: Broker, name: str) -> None:
        handled: list[int] = []
        letters: list[Message] = []

        @subscriber(name, attempts=3, backoff=AT_ONCE)
        async def handle(number: int) -> None:
            handled.append(number)

        @subscriber(f"{name}.dead")
        async def bury(message: Message) -> None:
            letters.append(message)

        app = self.app(broker, handle, bury)
        async with app.running():
            bad = outgoing(name, b"\xff\x00 not JSON", headers=Headers([("a", b"\x80")]))
            wrong_type = outgoing(name, b'"text"')
            assert errors_of(await app.connection().publish([bad, outgoing(name, b"7"), wrong_type])) == []
            await self.until(lambda: len(letters) >= 2 and handled, "two are put aside, one is handled")
        assert handled == [7]
        by_id = {letter.message_id: letter for letter in letters}
        assert set(by_id) == {bad.message_id, wrong_type.message_id}
        assert by_id[bad.message_id].body == bad.body, "its raw bytes"
        assert by_id[bad.message_id].headers.raw("a") == b"\x80"
        assert by_id[bad.message_id].headers[ORIGIN_ATTEMPT] == "1", "trying again would not help"

    async def test_a_handler_that_asks_for_a_pause(self, broker: Broker, name: str, capabilities: Capabilities) -> None:
        times: list[float] = []

        @subscriber(name, attempts=3)
        async def handle(message: Message) -> None:
            times.append(time.monotonic())
            if message.attempt == 1:
                raise Retry(after=0.6)

        app = self.app(broker, handle)
        async with app.running():
            await app.publish(name, 1)
            await self.until(lambda: len(times) >= 2, "it is tried again")
            await self.still(times, 2)
        pause = times[1] - times[0]
        assert pause >= 0.6, "never early"
        assert pause <= 0.6 + (capabilities.delay or 0.0) + self.grace, "nor much too late"

    async def test_a_retry_holds_up_nobody_else(self, broker: Broker, name: str) -> None:
        handled: list[int] = []

        @subscriber(name, attempts=2, backoff=Backoff(first=30.0, jitter=False))
        async def handle(number: int) -> None:
            if number == 0:
                raise ValueError("waits for half a minute")
            handled.append(number)

        app = self.app(broker, handle)
        async with app.running():
            for number in range(20):
                await app.publish(name, number, key=f"key-{number}")
            await self.until(lambda: len(handled) >= 19, "the others are handled meanwhile")
        assert sorted(handled) == list(range(1, 20))

    async def test_what_waits_for_a_retry_survives_a_drain(self, broker: Broker, name: str) -> None:
        failed: list[int] = []
        handled: list[int] = []

        @subscriber(name, backoff=Backoff(first=1.0, jitter=False))
        async def fail(message: Message) -> None:
            failed.append(message.attempt)
            raise ValueError("not in this process")

        @subscriber(name)
        async def handle(message: Message) -> None:
            handled.append(message.attempt)

        app = self.app(broker, fail)
        async with app.running():
            await app.publish(name, 1)
            await self.until(lambda: failed, "it fails")
        async with self.app(self.another(broker), handle).running():
            await self.until(lambda: handled, "another process gets it")
            await self.still(handled, 1)

    async def test_outcomes_by_value(self, broker: Broker, name: str) -> None:
        """Returned or raised, `Drop` discards, `DeadLetter` puts aside, and with neither the message is done."""
        handled: list[int] = []
        letters: list[Message] = []

        @subscriber(name)
        async def handle(number: int) -> object:
            handled.append(number)
            if number == 1:
                return Drop()
            if number == 2:
                return DeadLetter("returned")
            if number == 3:
                raise DeadLetter("raised")
            return None

        @subscriber(f"{name}.dead")
        async def bury(message: Message) -> None:
            letters.append(message)

        app = self.app(broker, handle, bury)
        async with app.running():
            for number in range(5):
                await app.publish(name, number, key="one")
            await self.until(lambda: len(handled) >= 5 and len(letters) >= 2, "all are settled")
            await self.still(handled, 5)
        assert sorted(letter.headers[ERROR] for letter in letters) == ["raised", "returned"]
        assert sorted(letter.body for letter in letters) == [b"2", b"3"]

    async def test_without_a_dead_letter_it_is_discarded(self, broker: Broker, name: str) -> None:
        attempts: list[int] = []
        letters: list[Message] = []

        @subscriber(name, attempts=2, backoff=AT_ONCE, dead_letter=None)
        async def fail(message: Message) -> None:
            attempts.append(message.attempt)
            raise ValueError("always")

        @subscriber(f"{name}.dead")
        async def bury(message: Message) -> None:
            letters.append(message)

        app = self.app(broker, fail, bury)
        async with app.running():
            await app.publish(name, 1)
            await self.until(lambda: len(attempts) >= 2, "it is tried twice")
            await self.still(letters, 0)
        assert attempts == [1, 2]

    async def test_a_dead_letter_that_nobody_subscribes_to_is_kept(self, broker: Broker, name: str) -> None:
        failed: list[Message] = []
        letters: list[Message] = []

        @subscriber(name)
        async def fail(message: Message) -> None:
            failed.append(message)
            raise DeadLetter("later")

        @subscriber(f"{name}.dead")
        async def bury(message: Message) -> None:
            letters.append(message)

        app = self.app(broker, fail)
        async with app.running():
            await app.publish(name, 1)
            await self.until(lambda: failed, "it fails")
        async with self.app(self.another(broker), bury).running():
            await self.until(lambda: letters, "whoever subscribes first gets it")
        assert letters[0].headers[ERROR] == "later"
