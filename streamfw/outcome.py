"""What becomes of a delivery: outcomes as values, and the policy that turns a failure into one.

A handler returns or raises an outcome; both mean the same, and returning nothing means `Ack`. The runtime settles;
neither handlers nor middleware ever do.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import msgspec

from .errors import MessageError
from .message import Message

__all__ = [
    "ACK",
    "RELEASE",
    "SETTLED",
    "Ack",
    "Backoff",
    "DeadLetter",
    "Drop",
    "ErrorRule",
    "Outcome",
    "Policy",
    "Retry",
    "as_outcome",
    "is_outcome",
]


class Outcome(Exception):
    """The root of the four outcomes. An exception, so that code deep below a handler can raise one."""


class Ack(Outcome):
    """Done: the message ends. The same as returning nothing."""


class Retry(Outcome):
    """Deliver it again, not before `after` seconds (by the subscriber's `Backoff` when none is given).

    It counts as an attempt: with ``attempts=5`` the fifth `Retry` goes to the dead letter.
    """

    def __init__(self, after: float | None = None) -> None:
        if after is not None and not 0 <= after < 10**9:
            raise ValueError(f"Retry(after={after!r}): seconds from now, zero or more")
        super().__init__(after)
        self.after = after


class Drop(Outcome):
    """Discard it, deliberately. The only outcome that loses a message."""


class DeadLetter(Outcome):
    """Put it aside, with `reason`, where a person or a program looks later (by default at ``<name>.dead``).

    The reason travels as a header: its first 1,024 bytes of UTF-8 are kept.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = _fit_for_a_header(str(reason))
        self.error_type = type(self).__name__


class _Release(Outcome):
    """Unsettled: the source has it back at once, and its attempt is not counted. Only the runtime makes it."""


class _Settled(Outcome):
    """Already settled inside the handler's own transaction. Only the runtime makes it; no source ever sees it."""


ACK: Final = Ack()
RELEASE: Final = _Release()
SETTLED: Final = _Settled()

ErrorRule: TypeAlias = "type[Outcome] | Outcome | Callable[[BaseException], Outcome]"


class Backoff(msgspec.Struct, frozen=True, kw_only=True):
    """How long a retry waits: ``first * factor ** (attempt - 1)`` seconds, at most `max`.

    With `jitter`, the actual pause is drawn from the upper half of that, so that what failed together does not
    come back together.
    """

    first: float = 1.0
    factor: float = 2.0
    max: float = 300.0
    jitter: bool = True

    def __post_init__(self) -> None:
        if not (0 <= self.first <= self.max < 10**9 and 1 <= self.factor < math.inf):
            raise ValueError(f"{self!r}: 0 <= first <= max < 1e9 seconds and a factor of 1 or more are needed")

    def _whole(self, attempt: int) -> float:
        try:
            return min(self.max, self.first * float(self.factor) ** max(attempt - 1, 0))
        except OverflowError:  # of floats, long after the maximum
            return self.max

    def longest(self, attempts: int | None) -> float:
        """The longest pause, in seconds, between so many attempts (None: any number of them)."""
        if attempts is None:
            return self.max if self.first > 0 and self.factor > 1 else self.first
        return self._whole(attempts - 1) if attempts > 1 else 0.0

    def together(self, attempts: int, enough: float) -> float:
        """The most that the pauses between so many attempts take together, in seconds; above `enough` it counts no
        further."""
        total = 0.0
        for attempt in range(1, attempts):
            total += self._whole(attempt)
            if total > enough or not total:
                break
        return total

    def pause(self, attempt: int) -> float:
        """Seconds to wait after the failed `attempt` (1 is the first delivery)."""
        pause = self._whole(attempt)
        return pause * random.uniform(0.5, 1.0) if self.jitter else pause


def as_outcome(result: object) -> Outcome | None:
    """The outcome that a handler's result is, or is the class of: ``return DeadLetter`` means what raising it means."""
    if isinstance(result, type) and issubclass(result, Outcome):
        return result()
    return result if isinstance(result, Outcome) else None


def is_outcome(result: object) -> bool:
    """Whether a handler's result is an outcome, or the class of one."""
    return as_outcome(result) is not None


class Policy:
    """Failure to outcome, by the options of one subscriber. Cold: not asked when a handler simply returns.

    `attempts` counts deliveries, the first included; None retries for ever. `dead_letter` False discards what would
    go there (``dead_letter=None`` of a subscriber). The first rule of `on_error` that matches wins.

    `told` hears of each outcome that is no `Ack`: the message, the error (None where the handler asked for it), the
    outcome, and whether a rule of `on_error` decided.
    """

    __slots__ = ("_backoff", "_dead_letter", "_rules", "_told", "attempts")

    def __init__(
        self,
        attempts: int | None = None,
        backoff: Backoff | None = None,
        on_error: Mapping[type[BaseException], ErrorRule] | None = None,
        dead_letter: bool = True,
        told: Callable[[Message, BaseException | None, Outcome, bool], None] | None = None,
    ) -> None:
        self.attempts = attempts
        self._told = told
        self._backoff = backoff or Backoff()
        self._rules = tuple((on_error or {}).items())
        self._dead_letter = dead_letter

    def outcome(self, message: Message, result: object) -> Outcome:
        """The outcome of `message`, whose handler returned or raised `result`."""
        result = as_outcome(result) or result
        if isinstance(result, Outcome):
            # A raised outcome carries tracebacks, whose frames hold the message: never kept.
            result.__traceback__ = result.__context__ = result.__cause__ = None
            return self._limited(message, result, None)
        if not isinstance(result, BaseException):
            return ACK  # a value: a reply, or for unit tests; `publishes=` has taken it already
        for kind, rule in self._rules:
            if isinstance(result, kind):
                try:
                    return self._limited(message, self._by_rule(rule, result), result, by_rule=True)
                except Exception as broken:  # the user's own function: a failure of this message, not of the app
                    return self._limited(message, Retry(), broken)
        if isinstance(result, MessageError):
            return self._limited(message, dead_letter(result), result)
        return self._limited(message, Retry(), result)

    @staticmethod
    def _by_rule(rule: ErrorRule, error: BaseException) -> Outcome:
        if isinstance(rule, Outcome):
            return Retry(rule.after) if isinstance(rule, Retry) else rule
        if rule is DeadLetter:
            return dead_letter(error)
        made = rule() if isinstance(rule, type) else rule(error)
        if not isinstance(made, Outcome):
            raise TypeError(f"on_error: {rule!r} gave {made!r}, not an outcome")
        return made

    def _limited(
        self, message: Message, outcome: Outcome, error: BaseException | None, by_rule: bool = False
    ) -> Outcome:
        if isinstance(outcome, Ack):
            return ACK
        outcome = self._within_attempts(message, outcome, error)
        if self._told is not None:
            self._told(message, error, outcome, by_rule)
        return outcome

    def _within_attempts(self, message: Message, outcome: Outcome, error: BaseException | None) -> Outcome:
        if isinstance(outcome, Retry):
            if self.attempts is None or message.attempt < self.attempts:
                return outcome if outcome.after is not None else Retry(self._backoff.pause(message.attempt))
            outcome = dead_letter(error) if error else DeadLetter(f"attempt {message.attempt} asked for another")
        if isinstance(outcome, DeadLetter) and not self._dead_letter:
            return Drop()
        return outcome


def dead_letter(error: BaseException) -> DeadLetter:
    """A dead letter for `error`: its type and at most 1 kB of its message; no traceback, which may carry data."""
    try:
        text = str(error)
    except Exception:  # anybody may write a __str__ that fails
        text = "(its text cannot be had)"
    outcome = DeadLetter(f"{type(error).__name__}: {text}")
    outcome.error_type = type(error).__qualname__
    return outcome


def _fit_for_a_header(text: str) -> str:
    """At most 1 kB that every broker takes: UTF-8 without NUL and lone surrogates."""
    encoded = text[:1024].replace("\0", "\\0").encode(errors="backslashreplace")
    return encoded[:1024].decode(errors="ignore")
