"""Requests and replies where they are declared; where not, a request is refused and nothing was sent."""

from __future__ import annotations

import asyncio

import pytest

from streamfw.broker import Broker, Capabilities
from streamfw.errors import ReplyTimeout, Unroutable, Unsupported
from streamfw.message import Message
from streamfw.subscriber import subscriber

from ._app_kit import AppKit
from ._kit import outgoing


class AppRepliesConformance(AppKit):
    async def test_requests_in_flight_are_not_mixed_up(
        self, broker: Broker, name: str, capabilities: Capabilities
    ) -> None:
        seen: list[int] = []

        @subscriber(name, workers=8)
        async def double(number: int) -> int:
            seen.append(number)
            await asyncio.sleep(0.001 * (number % 5))
            return 2 * number

        app = self.app(broker, double)
        async with app.running():
            if not capabilities.replies:
                with pytest.raises(Unsupported):
                    await app.request(name, 1, int, timeout=self.patience)
                assert seen == [], "what could not be answered was not asked"
                return
            asked = (app.request(name, number, int, timeout=self.patience) for number in range(200))
            assert await asyncio.gather(*asked) == [2 * number for number in range(200)]

    async def test_a_late_reply_is_counted_and_delivered_to_nobody(
        self, broker: Broker, name: str, capabilities: Capabilities
    ) -> None:
        go = asyncio.Event()

        @subscriber(name)
        async def slow(number: int) -> int:
            await go.wait()
            return number

        app = self.app(broker, slow)
        async with app.running():
            refusal = ReplyTimeout if capabilities.replies else Unsupported
            with pytest.raises(refusal):
                await app.request(name, 1, int, timeout=0.05)
            go.set()
            if capabilities.replies:
                (inbox,) = app.inboxes
                await self.until(lambda: inbox.late == 1, "the late reply is counted")
                assert await app.request(name, 2, int, timeout=self.patience) == 2

    async def test_a_reply_goes_only_where_the_handler_allows(self, broker: Broker, name: str) -> None:
        seen: list[bytes] = []

        @subscriber(name, replies_to=[f"{name}.answers"])
        async def double(number: int) -> int:
            return 2 * number

        @subscriber(f"{name}.answers")
        async def answers(message: Message) -> None:
            assert message.correlation_id == "c"
            seen.append(message.body)

        @subscriber(f"{name}.payments")
        async def payments(message: Message) -> None:
            seen.append(b"it could write into any queue")

        app = self.app(broker, double, answers, payments)
        async with app.running():
            await app.publish(name, 1, reply_to=f"{name}.payments", correlation_id="c")
            await app.publish(name, 2, reply_to=f"{name}.answers", correlation_id="c")
            await self.until(lambda: seen, "the allowed reply comes")
            await self.still(seen, 1)
        assert seen == [b"4"]

    async def test_what_nobody_keeps_is_unroutable_where_nobody_has_subscribed(
        self, broker: Broker, name: str, capabilities: Capabilities
    ) -> None:
        async with broker.connect() as connection:
            message = outgoing(f"{name}.nobody", b"1")
            message.kept = not capabilities.replies  # replies are what nobody keeps; elsewhere there are none
            answers = await connection.publish([message])
            kept = capabilities.kept and message.kept
            assert [type(error) for error in answers if error] == ([] if kept else [Unroutable])

    async def test_a_group_that_is_withdrawn_gets_nothing_more(self, broker: Broker, name: str) -> None:
        async with self.member(broker, name, "stays"), self.member(broker, name, "goes"):
            pass
        async with self.member(broker, name, "stays") as member:
            await member.send(name, b"1")
            try:
                gone = await member.connection.withdraw(name, "goes")
            except Unsupported:
                gone = None  # said, and nothing was done
            else:
                assert await member.connection.withdraw(name, "goes") == 0, "twice is once"
            assert gone in (1, None)
            assert [delivery.body for delivery in await member.take(1)] == [b"1"], "other groups keep what they have"
