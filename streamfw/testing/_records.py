"""What a test sees: what subscribers received and how it ended, and what was published."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from streamfw.broker import Connection, Delivery, Source, Subscription, UnitOfWork
from streamfw.build import BuiltSubscriber
from streamfw.errors import PartialFailure, PublishError
from streamfw.handler import Call, MessageBatch
from streamfw.message import ORIGIN_GROUP, Message, Outgoing
from streamfw.outcome import ACK, RELEASE, SETTLED, Ack, Outcome, Policy

__all__ = ["Entry", "Outbox", "Published", "Received", "Watched"]

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Received(Generic[T_co]):
    """One delivery to one subscriber; a message that is tried again has several.

    - `value`: the decoded body; its bytes where it could not be decoded.
    - `message`: key, headers, attempt and the rest, as they were when the handler began.
    - `outcome`: what was decided: an `Ack`, `Retry`, `Drop` or `DeadLetter`. None while the handler runs, and where
      nothing was: it was cancelled, or its transaction broke, and the message comes again.
    - `error`: what the handler raised, where that was no outcome.
    - `subscriber`: who received it, as errors call it.
    """

    value: T_co
    message: Message
    outcome: Outcome | None
    error: Exception | None
    subscriber: str

    def __str__(self) -> str:
        message = self.message
        key = f" key={message.key!r}" if message.key is not None else ""
        error = f" after {_short(self.error)}" if self.error is not None else ""
        end = "nothing decided" if self.outcome is None else _short(self.outcome)
        return f"message {message.message_id} attempt {message.attempt}{key}: {_short(self.value)} -> {end}{error}"


@dataclass(frozen=True, slots=True)
class Published(Generic[T_co]):
    """One message that a broker accepted: its `value`, decoded, and all of it as `message` (headers, key, delay).
    `broker` is the app's name of where it went."""

    value: T_co
    message: Outgoing
    broker: str

    def __str__(self) -> str:
        message = self.message
        key = f" key={message.key!r}" if message.key is not None else ""
        delay = f" delay={message.delay:g}" if message.delay else ""
        return f"message {message.message_id}{key}{delay}: {_short(self.value)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


class Entry:
    """A `Received` in the making."""

    __slots__ = ("cancelled", "decided", "delivery", "error", "message", "outcome", "value")

    def __init__(self, delivery: Message, value: Any) -> None:
        self.delivery = delivery  # kept, so that its id stays its own
        self.message = Message(
            name=delivery.name,
            body=delivery.body,
            message_id=delivery.message_id,
            key=delivery.key,
            attempt=delivery.attempt,
            timestamp=delivery.timestamp,
            raw_headers=delivery.headers,
        )
        self.value = self.message if value is delivery else value
        self.outcome: Outcome | None = None
        self.error: Exception | None = None
        self.cancelled: BaseException | None = None
        self.decided = False


class Watched:
    """One subscriber under observation: its plan calls `call`, and asks the policy that `policy` gives.

    `failed` is told each error of the handler; `ended` how a delivery ended (None: undecided, it comes again).
    """

    def __init__(
        self,
        built: BuiltSubscriber,
        failed: Callable[[Watched, Entry, Exception], None],
        ended: Callable[[Watched, Message, Outcome], None],
    ) -> None:
        self.built, self._failed, self._ended = built, failed, ended
        self.entries: list[Entry] = []
        self._current: dict[int, Entry] = {}
        self._decode: Callable[[Any], Any] | None = built.compiled.names.get("_decode")

    @property
    def where(self) -> str:
        return self.built.declaration.where

    @property
    def pump(self) -> Any:
        return self.built.pump

    def is_called(self, who: object) -> bool:
        """Whether `who` (a handler, its name, or what it subscribes to) means this subscriber."""
        declaration = self.built.declaration
        names = (getattr(declaration.handler, "__name__", None), declaration.name, self.where)
        return who is declaration.handler or (isinstance(who, str) and who in names)

    # -- what the pump does with it

    def call(self, inner: Call) -> Call:
        """`inner`, noting what goes in and what comes out."""

        async def call_watched(message: Any) -> Any:
            entries = self._begin(message)
            try:
                result = await inner(message)
            except BaseException as error:
                self._raised(entries, error)
                raise
            self._returned(entries, result)
            return result

        return call_watched

    def policy(self, inner: Policy) -> Policy:
        """`inner`, noting what it decides."""
        return _WatchedPolicy(inner, self._decided)

    def _begin(self, message: Any) -> list[Entry]:
        if isinstance(message, MessageBatch):
            pairs = zip(message.messages, message.values, strict=True)
            return [self._note(delivery, value) for delivery, value in pairs]
        return [self._note(message, self._value(message))]

    def _value(self, delivery: Message) -> Any:
        if self._decode is None:
            return delivery  # the handler takes nothing but the message itself
        try:
            return self._decode(delivery.body)
        except Exception:  # it will be a DecodeError when the handler's own call finds out
            return delivery.body

    def _note(self, delivery: Message, value: Any) -> Entry:
        entry = self._current[id(delivery)] = Entry(delivery, value)
        self.entries.append(entry)
        return entry

    def _raised(self, entries: Sequence[Entry], error: BaseException) -> None:
        """What the policy will not be asked about; the rest it is."""
        if isinstance(error, asyncio.CancelledError):
            for entry in entries:
                entry.cancelled = error
        elif isinstance(error, PartialFailure):
            for index, entry in enumerate(entries):
                if index not in error.errors:
                    self._end(entry, ACK)

    def _returned(self, entries: Sequence[Entry], result: object) -> None:
        if result is None:
            for entry in entries:
                self._end(entry, ACK)
        elif isinstance(result, list | tuple):
            for entry, one in zip(entries, cast("Sequence[object]", result), strict=False):
                if one is None:
                    self._end(entry, ACK)

    def _end(self, entry: Entry, outcome: Outcome) -> None:
        entry.outcome = outcome
        self._ended(self, entry.message, outcome)

    def _decided(self, message: Message, result: object, outcome: Outcome) -> None:
        entry = self._current.get(id(message))
        if entry is None or entry.decided:  # an element that could not be decoded, so no handler was called
            entry = self._note(message, message.body)
        entry.decided = True
        if isinstance(result, Exception) and not isinstance(result, Outcome):
            entry.error = result
            if result.__cause__ is None and isinstance(result, TimeoutError) and entry.cancelled is not None:
                result.__cause__ = entry.cancelled  # its traceback says where the handler was
        if outcome is not RELEASE:
            self._end(entry, ACK if outcome is SETTLED else outcome)
        if entry.error is not None:
            self._failed(self, entry, entry.error)


class _WatchedPolicy(Policy):
    """A policy that tells what it decides."""

    def __init__(self, inner: Policy, decided: Callable[[Message, object, Outcome], None]) -> None:
        self.attempts = inner.attempts
        self._inner, self._decided = inner, decided

    def outcome(self, message: Message, result: object) -> Outcome:
        outcome = self._inner.outcome(message, result)
        self._decided(message, result, outcome)
        return outcome


class Outbox:
    """What the app's connections published. `sending` is told each message before it is on its way (it may be handled
    before its publisher knows that it is accepted), `refused` each that was not accepted. `asides` are the brokers and
    names that the runtime itself puts dead letters to."""

    def __init__(
        self,
        sending: Callable[[str, Outgoing], None],
        refused: Callable[[str, Outgoing], None],
        asides: set[tuple[str, str | None]],
    ) -> None:
        self.messages: list[tuple[str, Outgoing]] = []
        self.under_way = 0
        self._sending, self._refused, self._asides = sending, refused, asides

    def watch(self, broker: str, connection: Connection) -> None:
        """Note what goes out on `connection` from now on."""
        publish = connection.publish

        async def publish_watched(messages: Sequence[Outgoing]) -> Sequence[PublishError | None]:
            for message in messages:
                self._sending(broker, message)
            self.under_way += 1
            answers: Sequence[PublishError | BaseException | None] = [asyncio.CancelledError()] * len(messages)
            try:
                answers = given = await publish(messages)
                return given
            finally:
                self.under_way -= 1
                for index, message in enumerate(messages):
                    self._answered(broker, message, not answers or answers[index] is None)

        watched: Callable[[Sequence[Outgoing]], Awaitable[Sequence[PublishError | None]]] = publish_watched
        vars(connection)["publish"] = watched
        self._watch_transactions(broker, connection)

    def _watch_transactions(self, broker: str, connection: Connection) -> None:
        """Note what transactions of `connection` publish, once they are committed: nobody sees it before."""
        open_ = connection.open

        async def open_watched(subscription: Subscription) -> Source:
            source = await open_(subscription)
            begin = source.transaction
            if not subscription.transactional:
                return source

            def begin_watched(deliveries: Sequence[Delivery]) -> AbstractAsyncContextManager[UnitOfWork]:
                return self._noting(broker, begin(deliveries))

            vars(source)["transaction"] = begin_watched
            return source

        vars(connection)["open"] = open_watched

    @asynccontextmanager
    async def _noting(self, broker: str, entered: AbstractAsyncContextManager[UnitOfWork]) -> AsyncIterator[UnitOfWork]:
        async with entered as unit:
            if unit.publishes:
                self._note_with_commit(broker, unit)
            yield unit

    def _note_with_commit(self, broker: str, unit: UnitOfWork) -> None:
        publish, finish = unit.publish, unit.finish
        accepted: list[Outgoing] = []

        async def publish_watched(messages: Sequence[Outgoing]) -> Sequence[PublishError | None]:
            answers = await publish(messages)
            accepted.extend(m for index, m in enumerate(messages) if not answers or answers[index] is None)
            return answers

        async def finish_watched(outcome: Outcome) -> None:
            for message in accepted:
                self._sending(broker, message)
            committed = False
            try:
                await finish(outcome)
                committed = isinstance(outcome, Ack)
            finally:
                for message in accepted:
                    self._answered(broker, message, committed)

        vars(unit).update(publish=publish_watched, finish=finish_watched)

    def _answered(self, broker: str, message: Outgoing, accepted: bool) -> None:
        if not accepted:
            self._refused(broker, message)
        elif (broker, message.name) not in self._asides or message.headers.raw(ORIGIN_GROUP) is None:
            self.messages.append((broker, message))


def deliveries_of(slot_message: object) -> Sequence[Delivery | Message]:
    """The deliveries that a worker's `Slot.message` stands for."""
    if isinstance(slot_message, MessageBatch):
        return slot_message.messages
    return [slot_message] if isinstance(slot_message, Message) else []
