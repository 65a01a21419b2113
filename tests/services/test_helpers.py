"""`eventually`: the one way in which tests wait."""

from __future__ import annotations

import pytest

from tests.helpers import eventually, eventually_blocking


async def test_it_returns_what_the_condition_returned_when_it_is_true() -> None:
    values = iter([0, "", None, "found"])
    assert await eventually(lambda: next(values)) == "found"


async def test_the_condition_may_be_a_coroutine_function() -> None:
    values = iter([0, 7])

    async def condition() -> int:
        return next(values)

    assert await eventually(condition) == 7


async def test_it_fails_with_its_message_and_the_last_value() -> None:
    with pytest.raises(AssertionError, match=r"not within 0.02 s: the moon rises \(last: 0\)"):
        await eventually(lambda: 0, deadline=0.02, message="the moon rises")


async def test_without_a_message_it_shows_the_condition() -> None:
    with pytest.raises(AssertionError, match="lambda: 3 < 2"):
        await eventually(lambda: 3 < 2, deadline=0.0)


async def test_what_the_condition_raises_passes() -> None:
    with pytest.raises(ZeroDivisionError):
        await eventually(lambda: 1 / 0)


def test_without_an_event_loop() -> None:
    values = iter([0, 0, 5])
    assert eventually_blocking(lambda: next(values)) == 5
    with pytest.raises(AssertionError, match="never"):
        eventually_blocking(lambda: False, deadline=0.0, message="never")
