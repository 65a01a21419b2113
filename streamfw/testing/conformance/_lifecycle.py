"""Stop, flush, close, cuts, and what is said about it all."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from streamfw.broker import Broker, Capabilities, Delivery, Settlement, Subscription
from streamfw.errors import BrokerClosed, BrokerError, SettleError, Unsupported
from streamfw.outcome import ACK

from ._kit import ConformanceKit, Member, ids, numbered, outgoing

RELEASED_WITHIN = 10.0
SECRET = "s3cr3t-p4ssw0rd"


class LifecycleConformance(ConformanceKit):
    async def test_unsettled_deliveries_come_back_when_their_source_closes(self, broker: Broker, name: str) -> None:
        async with self.member(broker, name) as first:
            sent = await first.send(name, *numbered(5), key="one")
            taken = await first.take(5)
            await first.close()
            closed = time.monotonic()
            async with self.member(self.another(broker), name) as second:
                again = await second.take(5)
                assert time.monotonic() - closed < RELEASED_WITHIN
                assert ids(again) == sent, "in their order"
                assert [delivery.attempt for delivery in again] == [1] * 5, "a release counts no attempt"
                await second.acknowledge(again)
                await self._settle_late(first, taken)
                await second.expect_nothing(self.quiet)

    @staticmethod
    async def _settle_late(member: Member, taken: list[Delivery]) -> None:
        """After the close of its source a settlement says that it came too late, in either way, and does nothing."""
        try:
            errors = await member.settle(taken)
        except BrokerClosed:
            return
        assert [error.delivery for error in errors] == taken

    async def test_stop_ends_a_pending_fetch(self, broker: Broker, name: str) -> None:
        async with self.member(broker, name) as member:
            await member.expect_nothing(self.quiet / 2)
            began = time.monotonic()
            assert await member.stop() == []
            assert time.monotonic() - began < self.grace + 1
            assert list(await member.source.fetch(10, 1000)) == [], "and every later one"

    async def test_close_includes_stop(self, broker: Broker, name: str) -> None:
        async with broker.connect() as connection:
            source = await connection.open(Subscription(name))
            fetch = asyncio.create_task(_fetch(source.fetch, 1))
            await asyncio.wait({fetch}, timeout=self.quiet / 2)
            await source.close()
            await asyncio.wait({fetch}, timeout=self.patience)
            assert fetch.done(), "a pending fetch ends with its source"
            assert fetch.result() in ("nothing", "BrokerClosed")

    async def test_a_connection_closes_the_sources_it_opened(self, broker: Broker, name: str) -> None:
        async with broker.connect() as connection:
            member = Member(connection, await connection.open(Subscription(name, workers=3)), self.patience)
            sent = await member.send(name, *numbered(3), key="one")
            assert ids(await member.take(3)) == sent
        async with self.member(self.another(broker), name) as successor:
            again = await successor.take(3)
            assert (ids(again), [delivery.attempt for delivery in again]) == (sent, [1, 1, 1])
            await successor.acknowledge(again)

    @pytest.mark.parametrize("turns", [1, 4, 16, 64])
    async def test_a_connection_is_closed_to_its_end_though_cancelled(
        self, broker: Broker, name: str, turns: int
    ) -> None:
        """A cancellation that arrives `turns` turns of the loop after the closing has begun leaves no task behind."""
        entered, leave = asyncio.Event(), asyncio.Event()

        async def use() -> None:
            async with broker.connect() as connection:
                await connection.open(Subscription(name))
                entered.set()
                await leave.wait()

        before = asyncio.all_tasks()
        user = asyncio.create_task(use())
        await asyncio.wait({user, asyncio.ensure_future(entered.wait())}, return_when=asyncio.FIRST_COMPLETED)
        leave.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        user.cancel()
        await asyncio.wait({user})
        assert user.cancelled() or user.exception() is None
        end = time.monotonic() + self.patience
        while (left := asyncio.all_tasks() - before) and time.monotonic() < end:  # noqa: ASYNC110 - tasks tell nobody
            await asyncio.sleep(0.01)
        assert not left, "a task of it goes on"

    async def test_stop_keeps_what_is_out(self, broker: Broker, name: str) -> None:
        async with self.member(broker, name) as first, self.member(self.another(broker), name) as second:
            sent = [i for number in range(40) for i in await first.send(name, b"x", key=f"key-{number}")]
            ours = await first.poll(self.patience, limit=5)
            assert ours
            await first.stop()
            theirs = await second.take_all(self.quiet)
            await second.acknowledge(theirs)
            assert not set(ids(ours)) & set(ids(theirs)), "what is out stays ours after stop"
            await first.acknowledge(ours)
            await first.close()
            rest = await second.take(40 - len(ours) - len(theirs))
            assert sorted(ids(ours + theirs + rest)) == sorted(sent), "settled, given to the other, or released: once"
            await second.acknowledge(rest)
            await second.expect_nothing(self.quiet)

    async def test_flush_and_close_lose_no_settlement(self, broker: Broker, name: str) -> None:
        async with self.member(broker, name) as first:
            sent = [i for number in range(200) for i in await first.send(name, b"x", key=f"key-{number % 7}")]
            taken = await first.take(200)
            for start in range(0, 120, 10):
                await first.acknowledge(taken[start : start + 10])
            await first.close()
        async with self.member(self.another(broker), name) as second:
            again = await second.take(80)
            assert sorted(ids(again)) == sorted(set(sent) - set(ids(taken[:120])))
            await second.acknowledge(again)
            await second.expect_nothing(self.quiet)

    async def test_stop_and_close_twice_is_once(self, broker: Broker, name: str) -> None:
        async with self.member(broker, name) as member:
            await member.stop()
            await member.stop()
            await member.close()
            await member.source.close()
            await member.source.stop()

    async def test_handles_of_a_closed_connection_say_so(
        self, broker: Broker, name: str, capabilities: Capabilities
    ) -> None:
        async with self.member(broker, name) as member:
            await member.send(name, b"x")
            taken = await member.take(1)
            await member.acknowledge(taken)
        source, connection = member.source, member.connection
        now = asyncio.get_running_loop().time()
        for call in (
            lambda: source.fetch(1, 1000),
            lambda: source.settle([Settlement(taken[0], ACK)]),
            lambda: source.flush(now),
            lambda: connection.publish([outgoing(name)]),
            lambda: connection.open(Subscription(name)),
            lambda: connection.check(),
        ):
            with pytest.raises(BrokerClosed):
                await call()
        with pytest.raises((BrokerClosed, Unsupported)):
            await connection.dead_letters(f"{name}.dead")
        if capabilities.transactions:
            with pytest.raises(BrokerClosed):
                async with source.transaction(taken):
                    pytest.fail("a transaction of a closed connection was entered")
        assert not source.health().ok, "what it knows of itself it tells without the connection"
        for end in (source.stop, source.close):
            # Both are called on the way out, where nobody is helped by an error; but one may say so.
            with contextlib.suppress(BrokerClosed):
                await end()

    async def test_a_connection_closed_under_a_pending_fetch(self, broker: Broker, name: str) -> None:
        async with broker.connect() as connection:
            source = await connection.open(Subscription(name))
            fetch = asyncio.create_task(_fetch(source.fetch, 1))
            await asyncio.wait({fetch}, timeout=self.quiet / 2)
        await asyncio.wait({fetch}, timeout=self.patience)
        assert fetch.done(), "a pending fetch ends with its connection"
        assert fetch.result() in ("nothing", "BrokerClosed")

    async def test_two_connections_are_apart(self, broker: Broker, name: str) -> None:
        async with self.member(broker, name) as member:
            async with self.member(broker, f"{name}.other") as other:
                await other.send(name, b"x")
            taken = await member.take(1)
            await member.acknowledge(taken)

    async def test_a_cut_loses_nothing(self, broker: Broker, name: str) -> None:
        """Settled and flushed does not come back; what was out is settled after all or comes back; the rest comes."""
        async with self.member(broker, name) as member:
            sent = [i for number in range(30) for i in await member.send(name, b"x", key=f"key-{number % 5}")]
            taken = await member.take(20)
            await member.acknowledge(taken[:10])
            await member.flush()
            if await self.interrupt(broker):
                await self._end(member, taken, sent)
            else:
                await member.close()
                async with self.member(self.another(broker), name) as successor:
                    await self._end(successor, taken, sent, settle_late=False)

    async def _end(self, member: Member, taken: list[Delivery], sent: list[str], settle_late: bool = True) -> None:
        lost = ids(taken[10:])
        if settle_late:
            errors = await member.settle(taken[10:])
            assert all(isinstance(error, SettleError) for error in errors)
            lost = [error.delivery.message_id for error in errors]
        expected = set(lost) | (set(sent) - set(ids(taken)))
        came: set[str] = set()
        while not expected <= came:
            chunk = await member.take(1)
            came |= set(ids(chunk))
            await member.settle(chunk)
        assert not came & set(ids(taken[:10])), "what was settled and flushed came back"
        await member.expect_nothing(self.quiet)

    async def test_a_publisher_survives_a_cut(self, broker: Broker, name: str) -> None:
        async with self.member(broker, name) as member:
            await member.send(name, b"before")
            await member.acknowledge(await member.take(1))
            await member.flush()
            await self.interrupt(broker)
            message = outgoing(name, b"after")
            deadline = time.monotonic() + self.patience
            while any(await member.connection.publish([message])):
                assert time.monotonic() < deadline, "publishing did not recover"
                await asyncio.sleep(0.05)  # a server that comes back has no event to wait for
            taken = await member.take(1)
            assert ids(taken) == [message.message_id]
            await member.settle(taken)

    async def test_health(self, broker: Broker, name: str) -> None:
        async with self.member(broker, name) as member:
            assert (await member.connection.check()).ok
            assert member.source.health().ok

    async def test_no_password_in_descriptions_and_errors(self, broker: Broker) -> None:
        hidden = self.unreachable(broker, SECRET)
        said = [repr(hidden), str(hidden), hidden.describe()]
        assert all(said)
        try:
            async with asyncio.timeout(30), hidden.connect() as connection:
                said.append(repr(await connection.check()))
                said.append(repr(connection))
        except BrokerError as error:  # a refused connection is nothing else
            said.extend(_whole(error))
        for text in said:
            assert SECRET not in text

    async def test_capabilities_are_whole(self, broker: Broker, name: str, capabilities: Capabilities) -> None:
        """Parts that say something only together."""
        assert isinstance(capabilities, Capabilities)
        assert capabilities.prefetch >= 1
        assert capabilities.ordered_by <= {"key", "partition"}
        assert capabilities.delay is None or 0 <= capabilities.delay < 3600
        assert capabilities.settlement in ("immediate", "grouped", "positional", "sent")
        assert list(broker.mistakes(Subscription(name))) == [], "a plain name is right on every broker"
        mistakes = list(broker.mistakes(Subscription(name, source=object())))
        assert mistakes, "a foreign source object is not"
        assert all(isinstance(mistake, str) for mistake in mistakes)


async def _fetch(fetch: object, limit: int) -> str:
    assert callable(fetch)
    try:
        return "deliveries" if await fetch(limit, 1000) else "nothing"
    except BrokerClosed:
        return "BrokerClosed"


def _whole(error: BaseException | None) -> list[str]:
    """What an error and all behind it say."""
    said: list[str] = []
    while error is not None:
        said += [str(error), repr(error), *getattr(error, "__notes__", ())]
        error = error.__cause__ or error.__context__
    return said
