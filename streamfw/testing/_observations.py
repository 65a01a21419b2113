"""What a test asks about an app: what was received, what was published, and assertions on both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias, TypeVar, overload

from streamfw.app import App
from streamfw.codec import Codec
from streamfw.config import near
from streamfw.errors import NotRunning
from streamfw.outcome import Ack, DeadLetter, Drop, Outcome, Retry

from ._records import Outbox, Published, Received, Watched

__all__ = ["Observations"]

T = TypeVar("T")
Who: TypeAlias = "Callable[..., object] | str"
"""A handler, its name, or what it subscribes to."""
ANYTHING: Final = object()
"""Any payload at all."""


class Observations:
    """The part of `TestApp` that only looks. Everything may be asked after the app has ended, too."""

    app: App
    _watched: list[Watched]
    _outbox: Outbox

    def __init__(self, app: App) -> None:
        self.app = app

    # -- looking

    @overload
    def received(self, who: Who) -> list[Received[Any]]: ...
    @overload
    def received(self, who: Who, kind: type[T]) -> list[Received[T]]: ...
    def received(self, who: Who, kind: type[T] | None = None) -> list[Received[Any]]:
        """What subscribers received, in order, each attempt by itself.

        `who` is a handler, its name, or what it subscribes to (then of every group). The value is as the handler's
        annotation has it, or (`kind`) the body decoded as that. Raises `LookupError` when nobody is meant by `who`.
        """
        found: list[Received[Any]] = []
        for one in self._called(who):
            codec = one.built.declaration.codec or self._codec
            decode = None if kind is None else codec.decoder(kind)
            for entry in one.entries:
                value = entry.value if decode is None else decode(entry.message.body)
                found.append(Received(value, entry.message, entry.outcome, entry.error, one.where))
        return found

    @overload
    def dead_letters(self, who: Who) -> list[Received[Any]]: ...
    @overload
    def dead_letters(self, who: Who, kind: type[T]) -> list[Received[T]]: ...
    def dead_letters(self, who: Who, kind: type[T] | None = None) -> list[Received[Any]]:
        """Those of `received` that went to the dead letter; the reason is ``outcome.reason``."""
        received = self.received(who) if kind is None else self.received(who, kind)
        return [one for one in received if isinstance(one.outcome, DeadLetter)]

    @overload
    def published(self, name: str) -> list[Published[Any]]: ...
    @overload
    def published(self, name: str, kind: type[T]) -> list[Published[T]]: ...
    def published(self, name: str, kind: type[T] | None = None) -> list[Published[Any]]:
        """What was published to `name`, in order: by handlers, by the app and by the test itself. Dead letters are not.

        The value is decoded as `kind`, by default as plain values (dict, list, text, numbers).
        """
        self._require_observed()
        decode = self._codec.decoder(Any if kind is None else kind)
        return [
            Published(decode(message.body), message, broker)
            for broker, message in self._outbox.messages
            if message.name == name
        ]

    # -- asserting

    def assert_acked(self, who: Who, *, times: int | None = None) -> list[Received[Any]]:
        """So many deliveries (None: at least one) were acknowledged. Returns them."""
        __tracebackhide__ = True
        return self._assert_ended(who, Ack, "acknowledged", times, "")

    def assert_retried(self, who: Who, *, times: int | None = None) -> list[Received[Any]]:
        """So many deliveries (None: at least one) were to be tried again. Returns them."""
        __tracebackhide__ = True
        return self._assert_ended(who, Retry, "retried", times, "")

    def assert_dropped(self, who: Who, *, times: int | None = None) -> list[Received[Any]]:
        """So many deliveries (None: at least one) were discarded. Returns them."""
        __tracebackhide__ = True
        return self._assert_ended(who, Drop, "dropped", times, "")

    def assert_dead_lettered(self, who: Who, *, times: int | None = None, reason: str = "") -> list[Received[Any]]:
        """So many deliveries (None: at least one) went to the dead letter, with `reason` in theirs. Returns them."""
        __tracebackhide__ = True
        return self._assert_ended(who, DeadLetter, "put to the dead letter", times, reason)

    def assert_published(
        self, name: str, payload: object = ANYTHING, *, times: int | None = None
    ) -> list[Published[Any]]:
        """So many messages (None: at least one) were published to `name`; with a payload, messages equal to it, decoded
        as its type. Returns them."""
        __tracebackhide__ = True
        everything = found = self.published(name)
        what = ""
        if payload is not ANYTHING:
            found = [one for one in self._decodable(name, type(payload)) if one.value == payload]
            what = f" equal to {payload!r}"
        if not _enough(len(found), times):
            names = ", ".join(dict.fromkeys(repr(message.name) for _, message in self._outbox.messages)) or "nothing"
            raise AssertionError(
                f"{len(found)} messages{what} were published to {name!r}, not {_wanted(times)}"
                f"{_listed(everything, f'there was nothing else; published to were: {names}')}"
            )
        return found

    def _assert_ended(
        self, who: Who, kind: type[Outcome], words: str, times: int | None, reason: str
    ) -> list[Received[Any]]:
        __tracebackhide__ = True
        received = self.received(who)
        found = [
            one
            for one in received
            if isinstance(one.outcome, kind) and (not reason or reason in getattr(one.outcome, "reason", ""))
        ]
        if not _enough(len(found), times):
            where = " and ".join(one.where for one in self._called(who))
            because = f" with {reason!r} in the reason" if reason else ""
            raise AssertionError(
                f"{len(found)} deliveries to {where} were {words}{because}, not {_wanted(times)}"
                f"{_listed(received, 'it received nothing; was there an `await tb.settle()`?')}"
            )
        return found

    # -- finding

    @property
    def _codec(self) -> Codec:
        codec: Codec = getattr(self.app, "_codec")  # noqa: B009
        return codec

    def _require_observed(self) -> None:
        if not hasattr(self, "_outbox"):
            raise NotRunning("this TestApp was not entered: async with TestApp(app) as tb")

    def _called(self, who: Who) -> list[Watched]:
        self._require_observed()
        found = [one for one in self._watched if one.is_called(who)]
        if not found:
            names = [one.built.declaration.name for one in self._watched]
            handlers = [getattr(one.built.declaration.handler, "__name__", "") for one in self._watched]
            known = near(who if isinstance(who, str) else "", [name for name in (*handlers, *names) if name])
            raise LookupError(f"the app has no subscriber {who!r}{known}")
        return found

    def _decodable(self, name: str, kind: type[Any]) -> list[Published[Any]]:
        decode = self._codec.decoder(kind)
        found: list[Published[Any]] = []
        for one in self.published(name):
            try:
                found.append(Published(decode(one.message.body), one.message, one.broker))
            except Exception:  # it is something else, so it is not equal
                continue
        return found


def _enough(count: int, times: int | None) -> bool:
    return count > 0 if times is None else count == times


def _wanted(times: int | None) -> str:
    return "at least one" if times is None else str(times)


def _listed(records: Sequence[object], nothing: str) -> str:
    if not records:
        return f"; {nothing}"
    lines = [f"\n  {record}" for record in records[:20]]
    return ":" + "".join(lines) + (f"\n  and {len(records) - 20} more" if len(records) > 20 else "")
