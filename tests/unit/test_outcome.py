"""The policy: attempts, rules, pauses, and what a dead letter says."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from streamfw import Message, subscriber
from streamfw.errors import DecodeError
from streamfw.outcome import ACK, Ack, Backoff, DeadLetter, Drop, Outcome, Policy, Retry


def message(attempt: int = 1) -> Message:
    return Message(name="orders", body=b"", attempt=attempt)


@pytest.mark.parametrize("after", [-1, float("nan"), float("inf"), 10**9])
def test_a_pause_is_a_number_of_seconds(after: float) -> None:
    with pytest.raises(ValueError, match="seconds from now"):
        Retry(after=after)


@pytest.mark.parametrize("value", [0, "text", [], {"a": 1}, True])
def test_a_value_is_an_acknowledgement(value: object) -> None:
    assert Policy(1).outcome(message(), value) is ACK


def test_any_ack_is_the_constant() -> None:
    class Mine(Ack): ...

    assert Policy().outcome(message(), Ack()) is ACK
    assert Policy().outcome(message(), Mine()) is ACK


def test_attempts() -> None:
    policy = Policy(3)
    kinds = [type(policy.outcome(message(attempt), ValueError("x"))) for attempt in (1, 2, 3, 4)]
    assert kinds == [Retry, Retry, DeadLetter, DeadLetter]
    assert isinstance(Policy(None).outcome(message(10**6), ValueError("x")), Retry)
    assert isinstance(policy.outcome(message(3), Retry(after=5)), DeadLetter)
    assert isinstance(policy.outcome(message(9), Drop()), Drop)


def test_without_a_dead_letter_what_would_go_there_is_dropped() -> None:
    policy = Policy(1, dead_letter=False)
    for result in (ValueError("x"), DeadLetter("x"), DecodeError("x")):
        assert isinstance(policy.outcome(message(), result), Drop)


def test_what_cannot_be_decoded_is_not_tried_again_unless_a_rule_says_so() -> None:
    assert isinstance(Policy(5).outcome(message(), DecodeError("x")), DeadLetter)
    assert isinstance(Policy(5, on_error={DecodeError: Retry}).outcome(message(), DecodeError("x")), Retry)


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        (Retry, Retry),
        (Retry(after=7), Retry),
        (Drop, Drop),
        (Drop(), Drop),
        (Ack, Ack),
        (DeadLetter, DeadLetter),
        (DeadLetter("because"), DeadLetter),
        (lambda error: Retry(after=9) if str(error) == "x" else Drop(), Retry),
    ],
)
def test_rules(rule: Any, kind: type[Outcome]) -> None:
    outcome = Policy(5, on_error={KeyError: Drop, ValueError: rule}).outcome(message(), ValueError("x"))
    assert isinstance(outcome, kind)


def test_a_rule_that_is_an_instance_is_not_used_up() -> None:
    rule = Retry()
    policy = Policy(5, Backoff(jitter=False), {ValueError: rule})
    pauses = [policy.outcome(message(attempt), ValueError()).args for attempt in (1, 2, 3)]
    assert rule.after is None
    assert pauses == [(1.0,), (2.0,), (4.0,)]


def test_pauses() -> None:
    backoff = Backoff(first=2, factor=3, max=50, jitter=False)
    assert [backoff.pause(attempt) for attempt in (0, 1, 2, 3, 4, 10**9)] == [2, 2, 6, 18, 50, 50]
    jittered = [Backoff(first=8).pause(1) for _ in range(200)]
    assert 4 <= min(jittered) < max(jittered) <= 8


def test_a_dead_letter_says_what_and_not_where() -> None:
    outcome = Policy(1).outcome(message(), KeyError("secret line"))
    assert isinstance(outcome, DeadLetter)
    assert (outcome.reason, outcome.error_type) == ("KeyError: 'secret line'", "KeyError")
    assert "Traceback" not in outcome.reason


@pytest.mark.parametrize("text", ["x" * 5000, "é" * 5000, "\ud800" * 5000, "a\0b", "\U0001f600" * 2000])
def test_a_reason_fits_into_any_header(text: str) -> None:
    for outcome in (DeadLetter(text), Policy(1).outcome(message(), ValueError(text))):
        assert isinstance(outcome, DeadLetter)
        encoded = outcome.reason.encode()
        assert 0 < len(encoded) <= 1024
        assert b"\0" not in encoded


def test_a_raised_outcome_keeps_nothing_alive() -> None:
    class Big: ...

    def fails(big: Big) -> None:
        try:
            raise ValueError("inner")
        except ValueError as error:
            raise Retry(after=1) from error

    big = Big()
    gone = weakref.ref(big)
    outcome: Outcome | None = None
    try:
        fails(big)
    except Retry as raised:
        outcome = Policy().outcome(message(), raised)
    del big
    gc.collect()
    assert isinstance(outcome, Retry)
    assert gone() is None, "its frames hold the message"


async def test_a_decorated_function_is_still_a_function() -> None:
    async def double(order: int) -> int:
        return 2 * order

    same = subscriber("orders", attempts=3)(double)
    assert same is double
    assert await same(4) == 8
