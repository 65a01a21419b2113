"""Publishing: what comes in while one statement runs goes into the next one.

A group is one statement and one commit: all of it is stored or nothing. When its values are refused, it is repeated
in halves until the bad message stands alone.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence

from streamfw.errors import (
    BrokerClosed,
    BrokerError,
    BrokerUnavailable,
    OutcomeUnknown,
    PublishError,
    Rejected,
    TooLarge,
    Unavailable,
    Unroutable,
)
from streamfw.message import Outgoing

from . import headers
from .errors import is_data_error
from .roles import Cut, Role
from .sql import Statements

__all__ = ["Publisher"]

Item = tuple[Outgoing, bytes | None]
# What one statement carries at most. Its values are held three times: here, in the packet, in the server.
_MOST, _MOST_BYTES = 1000, 8 * 1024 * 1024


class _Job:
    """Messages of one call, for one statement, and who waits for them."""

    __slots__ = ("done", "items", "size")

    def __init__(self, items: list[Item], size: int) -> None:
        self.items = items
        self.size = size
        self.done: asyncio.Future[dict[int, PublishError]] = asyncio.get_running_loop().create_future()


class Publisher:
    """Publishes over one connection. `published` is called after each commit, with the queues and the smallest delay
    of each, in seconds."""

    def __init__(
        self, role: Role, statements: Statements, max_body: int, published: Callable[[dict[str, float]], None]
    ) -> None:
        self._role = role
        self._sql = statements
        self._max_body = max_body
        self._published = published
        self._jobs: list[_Job] = []
        self._task: asyncio.Task[None] | None = None

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[PublishError | None]:
        """One answer for each message, in order; empty when all are stored. Raises `BrokerClosed`."""
        if len(messages) == 1:
            error, encoded = self._prepared(messages[0])
            if error is None:
                job = _Job([(messages[0], encoded)], len(messages[0].body))
                self._jobs.append(job)
                self._start()
                error = (await job.done).get(0)
            return () if error is None else (error,)
        items: list[Item] = []
        wrong: dict[int, PublishError] = {}
        for index, message in enumerate(messages):
            error, encoded = self._prepared(message)
            if error is None:
                items.append((message, encoded))
            else:
                wrong[index] = error
        failed = await self._through(items) if items else {}
        if not wrong and not failed:
            return ()
        position = itertools.count()
        return [wrong.get(i) or failed.get(next(position)) for i in range(len(messages))]

    def _prepared(self, message: Outgoing) -> tuple[PublishError | None, bytes | None]:
        """Whether the table can take it, and its headers as the table holds them."""
        # Nearly all of them: one look at all of their text.
        text = f"{message.name}{message.message_id}{message.key or ''}"
        bare = not (message.delay or message.priority or message.headers.pairs)
        if bare and text.isascii() and "\0" not in text and len(message.body) <= self._max_body:
            return None, None
        if len(message.body) > self._max_body:
            text = f"its body of {len(message.body)} bytes is larger than max_body={self._max_body}"
            return TooLarge(text, name=message.name, message_id=message.message_id), None
        try:
            wrong = _bad_text(message.name) or _bad_text(message.message_id)
            if not wrong and message.key is not None:
                wrong = _bad_text(message.key)
            encoded = headers.encode(message.headers)
        except UnicodeEncodeError:
            wrong = "a header's name has lone surrogates, which are no text"
        if not wrong and not -(2**31) <= message.priority < 2**31:
            wrong = f"priority={message.priority} is beyond 32 bits"
        if not wrong and not 0 <= message.delay < 10**9:
            wrong = f"delay={message.delay!r} is not a number of seconds from now"
        if wrong:
            return Rejected(wrong, name=message.name, message_id=message.message_id), None
        return None, encoded

    async def _through(self, items: list[Item]) -> dict[int, PublishError]:
        """Queue them for the sender, and wait. Errors by position."""
        jobs = list(_jobs(items))
        self._jobs += jobs
        self._start()
        if len(jobs) == 1:
            return await jobs[0].done
        failed: dict[int, PublishError] = {}
        offset = 0
        for job, answer in zip(jobs, await asyncio.gather(*(job.done for job in jobs)), strict=True):
            failed.update({offset + i: error for i, error in answer.items()})
            offset += len(job.items)
        return failed

    def _start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._send(), name="streamfw publish")

    async def _send(self) -> None:
        """Send whatever waits, group by group, until nothing waits."""
        group: list[_Job] = []
        try:
            while self._jobs:
                group = self._next_group()
                items = group[0].items if len(group) == 1 else [item for job in group for item in job.items]
                failed = await self._stored(items)
                self._answer(group, failed)
        except BaseException as error:
            # Nobody may be left waiting, whatever happened.
            cancelled = isinstance(error, asyncio.CancelledError)
            for job in group + self._jobs:
                if not job.done.done():
                    job.done.set_exception(BrokerClosed("publishing was cut off") if cancelled else error)
            self._jobs.clear()
            if cancelled:
                raise
        finally:
            self._task = None

    def _next_group(self) -> list[_Job]:
        count = size = taken = 0
        for job in self._jobs:
            count += len(job.items)
            size += job.size
            if taken and (count > _MOST or size > _MOST_BYTES):
                break
            taken += 1
        group = self._jobs[:taken]
        del self._jobs[:taken]
        return group

    @staticmethod
    def _answer(group: list[_Job], failed: dict[int, PublishError]) -> None:
        offset = 0
        for job in group:
            n = len(job.items)
            mine = {i - offset: e for i, e in failed.items() if offset <= i < offset + n} if failed else {}
            if not job.done.done():
                job.done.set_result(mine)
            offset += n

    async def _stored(self, items: list[Item], known: bool = False) -> dict[int, PublishError]:
        """Store them in one statement; errors by position. `known`: their queues were just made known."""
        unkept = not all(message.kept for message, _ in items)
        if unkept and any(message.kept for message, _ in items):
            return await self._apart(items)
        try:
            unknown = await self._inserted(items, unkept)
            if unkept:
                return {
                    i: Unroutable("nobody has subscribed to it", name=m.name, message_id=m.message_id)
                    for i, (m, _) in enumerate(items)
                    if m.name in unknown
                }
        except BrokerClosed:
            raise
        except BrokerError as error:
            if is_data_error(error.__cause__) and len(items) > 1:
                return await self._halved(items)
            return {i: _failure(item[0], error) for i, item in enumerate(items)}
        if not unknown:
            return {}
        # The others are stored: whatever happens from here on is the answer of these alone.
        again = [i for i, (message, _) in enumerate(items) if message.name in unknown]
        if known:  # removed again in this very moment, by a person
            return {i: _failure(items[i][0], BrokerError("its queue is being removed")) for i in again}
        refused = await self._made_known(unknown)
        failed = {i: _failure(items[i][0], refused[items[i][0].name]) for i in again if items[i][0].name in refused}
        again = [i for i in again if i not in failed]
        if again:
            answers = await self._stored([items[i] for i in again], known=True)
            failed.update({again[i]: error for i, error in answers.items()})
        return failed

    async def _made_known(self, names: Sequence[str]) -> dict[str, BrokerError]:
        """Make these queues known; answers those that could not be, and why. None of their messages is stored."""
        refused: dict[str, BrokerError] = {}
        for place, name in enumerate(names):
            try:
                await self._role.fetch(self._sql.ensure_queue, name)
            except BrokerClosed:
                raise
            except BrokerError as error:
                if error.transient:  # the server is away: also for the others
                    away = BrokerUnavailable(str(error))  # also where the statement was cut: it stores no message
                    away.__cause__ = error
                    return refused | dict.fromkeys(names[place:], away)
                refused[name] = error
        return refused

    async def _apart(self, items: list[Item]) -> dict[int, PublishError]:
        """Two statements: for what is kept where nobody has subscribed, and for what is not."""
        failed: dict[int, PublishError] = {}
        for kept in (True, False):
            places = [i for i, (message, _) in enumerate(items) if message.kept is kept]
            answers = await self._stored([items[i] for i in places])
            failed.update({places[i]: error for i, error in answers.items()})
        return failed

    async def _halved(self, items: list[Item]) -> dict[int, PublishError]:
        middle = len(items) // 2
        failed = await self._stored(items[:middle])
        failed.update({middle + i: e for i, e in (await self._stored(items[middle:])).items()})
        return failed

    async def _inserted(self, items: list[Item], unkept: bool = False) -> Sequence[str]:
        """One statement. Answers the queues that nobody knows, whose messages were not stored."""
        first = items[0][0].name
        keys, encoded = [m.key for m, _ in items], [h for _, h in items]
        priorities = [m.priority for m, _ in items]
        # A column without values is null: an element costs the driver as much as all else of a message.
        columns = (
            [m.message_id for m, _ in items],
            keys if keys.count(None) < len(keys) else None,
            encoded if encoded.count(None) < len(encoded) else None,
            [m.body for m, _ in items],
            priorities if any(priorities) else None,
        )
        delays = [m.delay for m, _ in items]
        if not unkept and not any(delays) and len({m.name for m, _ in items}) == 1:
            stored = await self._role.count(self._sql.publish_one, first, *columns)
            if not stored:
                return (first,)
            self._published({first: 0.0})
            return ()
        names = _soonest(items)
        sql = self._sql.publish_unkept if unkept else self._sql.publish
        unknown: list[str] = await self._role.value(sql, [m.name for m, _ in items], *columns, delays, list(names))
        for name in unknown:
            del names[name]
        self._published(names)
        return unknown

    async def close(self, seconds: float) -> None:
        """Let what waits go out, for at most so many seconds."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=seconds)


def _jobs(items: list[Item]) -> Iterator[_Job]:
    start = size = 0
    for index, (message, _) in enumerate(items):
        length = len(message.body)
        if index - start >= _MOST or (index > start and size + length > _MOST_BYTES):
            yield _Job(items[start:index], size)
            start, size = index, 0
        size += length
    yield _Job(items[start:] if start else items, size)


def _soonest(items: list[Item]) -> dict[str, float]:
    soonest: dict[str, float] = {}
    for message, _ in items:
        soonest[message.name] = min(message.delay, soonest.get(message.name, message.delay))
    return soonest


def _bad_text(text: str) -> str:
    """Why a text column cannot hold it; empty when it can."""
    if "\0" in text:
        return f"{text[:60]!r} has a NUL character, which a text column of Postgres cannot hold"
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return f"{text[:60]!r} has lone surrogates, which are no text"
    return ""


def _failure(message: Outgoing, error: BrokerError) -> PublishError:
    """The answer for a message whose statement failed."""
    kind: type[PublishError] = Unavailable
    if isinstance(error, Cut):
        kind = OutcomeUnknown
    elif is_data_error(error.__cause__):
        kind = Rejected
    failure = kind(str(error), name=message.name, message_id=message.message_id)
    failure.__cause__ = error
    return failure
