"""Publishing: what can be sent at all, to which topic, and an answer for each message.

How it is sent is in `sending`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, Final

from streamfw.ending import ended
from streamfw.errors import (
    BrokerClosed,
    BrokerError,
    BrokerUnavailable,
    PublishError,
    Rejected,
    TooLarge,
    Unavailable,
    Unroutable,
)
from streamfw.message import Message, Outgoing

from .admin import Leaders, MissingTopic, Topics
from .errors import concerns_message
from .lanes import BATCH_BYTES, Call, Entry, Route
from .sending import Sending
from .settings import Settings
from .wire import Pairs, encoded, value_of

__all__ = ["MAX_BYTES", "Publishing", "kind_of", "record_of", "size_of"]

log = logging.getLogger("streamfw.kafka")

MAX_BYTES: Final = "max.message.bytes"
_SETTLING: Final = 5.0  # seconds after we first saw a topic in which not every node need know it
_PACE: Final = 0.05  # seconds at least between two questions for leaders


class Publishing:
    """Publishes for one connection: idempotent, acknowledged by all replicas in sync. Nothing is connected before the
    first message."""

    def __init__(self, settings: Settings, topics: Topics) -> None:
        self._settings, self._topics = settings, topics
        self._routes: dict[str, Route] = {}
        self._held: dict[str, list[Entry]] = {}  # until their topic is found
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending: Sending | None = None
        self._stale: asyncio.Event
        self._watching: asyncio.Task[None] | None = None
        self._closed = False

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[PublishError | None]:
        """One answer for each message, in order; empty when all are stored. Raises `BrokerClosed`.

        Messages of one key (and topic) are stored in the order given, also over calls that do not wait for each other.
        The answer is there within `publish_timeout`; looking for a topic that is new to us may take as long again.
        """
        if self._closed:
            raise BrokerClosed("the connection to Kafka was closed")
        if not messages:
            return ()
        call = Call(len(messages))
        for place, message in enumerate(messages):
            route = self._routes.get(message.name)
            if route is None:
                self._hold((call, place, message))
            else:
                self._add(route, call, place, message)
        await call.done
        errors = call.errors
        return () if errors is None else [errors.get(place) for place in range(len(messages))]

    def _add(self, route: Route, call: Call, place: int, message: Outgoing) -> None:
        try:
            key, body, headers = record_of(message, self._settings.max_body)
        except PublishError as error:
            call.answer(place, error.with_traceback(None))  # its frame has the call, which keeps the error
            return
        assert self._sending is not None  # it comes with the first route
        self._sending.add(route, (call, place, message), key, body, headers)

    @staticmethod
    def _fail(
        call: Call, place: int, message: Outgoing, kind: type[PublishError], text: str, cause: BrokerError | None = None
    ) -> None:
        error = kind(text, name=message.name, message_id=message.message_id)
        error.__cause__ = cause
        call.answer(place, error)

    # -- topics

    def _hold(self, entry: Entry) -> None:
        """Until its topic is found: behind those that wait for it already."""
        name = entry[2].name
        held = self._held.get(name)
        if held is not None:
            held.append(entry)
            return
        self._held[name] = [entry]
        self._start(self._find(name))

    async def _find(self, name: str) -> None:
        try:
            route = await self._found(name)
        except BrokerError as error:
            for call, place, message in self._held.pop(name):
                self._fail(call, place, message, kind_of(error), str(error), error)
            return
        # In one step, so that nobody overtakes those who waited.
        self._begin()
        self._routes[name] = route
        for call, place, message in self._held.pop(name):
            if not call.done.done():
                self._add(route, call, place, message)

    async def _found(self, name: str) -> Route:
        """The topic, made if need be and allowed. Tries for as long as a publish may take. Raises `BrokerError`."""
        loop = asyncio.get_running_loop()
        end, pause = loop.time() + self._settings.publish_timeout, _PACE
        while True:
            try:
                async with asyncio.timeout_at(end):
                    return Route(name, await self._topics.ensure(name), loop.time())
            except TimeoutError:
                raise BrokerUnavailable(f"Kafka: asking for topic {name!r}: no answer in time") from None
            except BrokerUnavailable:
                if loop.time() + pause > end:
                    raise
            await asyncio.sleep(pause)
            pause = min(pause * 2, 1.0)

    def _begin(self) -> None:
        if self._sending is None:
            self._sending = Sending(self._topics.nodes, self._settings, self._told_stale, self._told_too_large)
            self._stale = asyncio.Event()
            self._watching = asyncio.create_task(self._watch(), name="streamfw kafka leaders")

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _told_stale(self, route: Route) -> None:
        self._stale.set()

    async def _watch(self) -> None:
        """Ask for the leaders of all our topics from time to time, and at once where one has moved."""
        while True:
            try:
                async with asyncio.timeout(self._settings.metadata_age):
                    await self._stale.wait()
            except TimeoutError:
                pass
            self._stale.clear()
            try:
                found = await self._topics.look(list(self._routes), strict=False)
                for name, leaders in found.items():
                    self._heard(name, leaders)
            except BrokerUnavailable:
                pass  # whoever waits hears of it by his own time-out
            except BrokerError as error:
                log.warning("Kafka: the leaders of topics are not known: %s", error)
            except Exception:  # of ours: without this task nothing would ever find a leader that moved
                log.exception("Kafka: looking for the leaders of topics")
            await asyncio.sleep(_PACE)

    def _heard(self, name: str, leaders: Leaders | None) -> None:
        route = self._routes[name]
        if leaders is not None:
            route.heard(leaders)
        elif asyncio.get_running_loop().time() - route.since > _SETTLING:
            route.gone = True
            del self._routes[name]

    # -- too large

    def _told_too_large(self, route: Route, entry: Entry, error: BrokerError) -> None:
        self._start(self._tell_too_large(route, entry, error))

    async def _tell_too_large(self, route: Route, entry: Entry, error: BrokerError) -> None:
        call, place, message = entry
        limit = None
        try:
            limit = await self._limit(route)
        finally:
            named = f"larger than {MAX_BYTES}={limit}" if limit else f"too large for {MAX_BYTES}"
            text = f"its record, with a body of {len(message.body or b'')} bytes, is {named} of topic {route.name!r}"
            over = _headers_over(message, limit)
            failed = TooLarge(text, name=message.name, message_id=message.message_id, headers_over=over)
            failed.__cause__ = error
            call.answer(place, failed)

    async def _limit(self, route: Route) -> int | None:
        """What the topic takes. Batches for it become no larger from now on."""
        try:
            value = await self._topics.config(route.name, MAX_BYTES)
        except BrokerError:  # we may lack the right to ask
            return None
        if value is None or not value.isdecimal():
            return None
        route.limit = min(BATCH_BYTES, int(value))
        return int(value)

    # -- the end

    async def close(self, deadline: float) -> None:
        """Let go out what was published, until `deadline` (of the loop's clock, in seconds); what is left then gets its
        answer. Twice is once."""
        self._closed = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=max(0.0, deadline - asyncio.get_running_loop().time()))
        await ended(self._tasks)  # nobody adds anything from here on
        if self._sending is not None:
            await self._sending.close(deadline)
        await ended({*self._tasks, *([self._watching] if self._watching else [])})
        for entry in itertools.chain.from_iterable(self._held.values()):
            self._fail(*entry, Unavailable, "publishing was closed before its topic was found")
        self._held.clear()


def record_of(message: Outgoing, max_body: int, moves: bool = True) -> tuple[bytes | None, bytes | None, Pairs]:
    """Key, value and headers of the record that a message becomes. `moves`: it may be in a topic already
    (`Outgoing.stored`), and then our own limits are none. Raises the `PublishError` of what cannot be sent at all."""
    body: bytes | None = message.body
    stored = moves and message.stored
    about = {"name": message.name, "message_id": message.message_id}
    if type(body) is not bytes:
        body = value_of(body)
        if body is None and message.key is None and not stored:
            raise Rejected("a tombstone without a key would delete nothing", **about)
    if body is not None and len(body) > max_body and not stored:
        text = f"its body of {len(body)} bytes is larger than max_body={max_body}"
        raise TooLarge(text, name=message.name, message_id=message.message_id)
    if message.delay and not message.delay < 0:
        raise Rejected(f"delay={message.delay!r}: Kafka has no delayed publishing", **about)
    try:
        key, headers = encoded(message)
    except ValueError as error:
        raise Rejected(str(error), **about) from None
    return key, body, headers


_AROUND: Final = 100  # bytes of a batch and a record at most, besides key, value and headers


def size_of(message: Message | Outgoing) -> int:
    """About how large a batch is that has only this record, in bytes, not compressed; never less than it is."""
    return _AROUND + len(message.key or "") * 4 + len(message.body) + _headers_size(message)


def _headers_size(message: Message | Outgoing) -> int:
    return sum(len(name) * 4 + len(value or b"") + 10 for name, value in message.headers.pairs)


def _headers_over(message: Outgoing, limit: int | None) -> int:
    """See `TooLarge`; where the limit is not known, the least that there can be."""
    headers = _headers_size(message)
    over = 1 if limit is None else max(1, size_of(message) - limit)
    return over if over <= headers else 0


def kind_of(error: BrokerError) -> type[PublishError]:
    """What a topic that was not found means for a message to it."""
    if isinstance(error, MissingTopic):
        return Unroutable
    # Without a cause it is a name that cannot be.
    return Rejected if not error.transient and (concerns_message(error) or error.__cause__ is None) else Unavailable
