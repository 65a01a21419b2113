"""The watermark against a naive model: a set of open positions."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from streamfw.positions import Watermark


class AgainstASet(RuleBasedStateMachine):
    """Whatever is held, skipped and resolved, in whatever order: the same as with a set and an end."""

    @initialize(start=st.integers(0, 2**62))
    def begin(self, start: int) -> None:
        self.mark = Watermark(start)
        self.open: set[int] = set()
        self.end = start
        self.highest = start
        self.last = start - 1  # the highest position that was resolved

    @rule(gap=st.sampled_from([0, 0, 0, 1, 5, 4095, 4096, 10_000, 2**40]), count=st.integers(1, 300))
    def hold(self, gap: int, count: int) -> None:
        first = self.end + gap
        self.mark.hold(first, count)
        self.open.update(range(first, first + count))
        self.end = first + count

    @rule(gap=st.sampled_from([-3, 0, 1, 4095, 4096, 2**33]))
    def skip(self, gap: int) -> None:
        self.mark.skip(self.end + gap)
        self.end += max(gap, 0)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), share=st.floats(0, 1))
    def resolve(self, data: st.DataObject, share: float) -> None:
        candidates = data.draw(st.permutations(sorted(self.open)))
        for position in candidates[: int(len(candidates) * share) + 1]:
            assert self.mark.resolve(position)
            self.open.discard(position)
            self.last = max(self.last, position)

    @rule(
        data=st.data(),
        count=st.integers(0, 4) | st.integers(0, 300),
        stride=st.sampled_from([1, 1, 1, -1, 7]),
        twice=st.booleans(),
    )
    def resolve_many(self, data: st.DataObject, count: int, stride: int, twice: bool) -> None:
        """A run in order, back to front or with holes; some of it not open, or one named in the place of another."""
        first = data.draw(st.integers(self.highest - 10, self.end))
        positions = list(range(first, first + count * stride, stride))
        if twice and count > 2:
            positions[data.draw(st.integers(1, count - 2))] = data.draw(st.sampled_from(positions))
        wrong = [p for place, p in enumerate(positions) if p not in self.open or p in positions[:place]]
        assert list(self.mark.resolve_all(positions)) == wrong
        self.last = max([self.last, *self.open.intersection(positions)])
        self.open.difference_update(positions)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def ask_what_is_held_back(self, data: st.DataObject) -> None:
        """A gap holds nothing back: nobody was given it."""
        for position in {min(self.open), max(self.open), data.draw(st.sampled_from(sorted(self.open)))}:
            assert self.mark.behind(position) == (self.last > position)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), count=st.integers(1, 300))
    def resolve_what_was_held_in_a_row(self, data: st.DataObject, count: int) -> None:
        first = data.draw(st.sampled_from(sorted(self.open)))
        positions = [p for p in range(first, first + count) if p in self.open]
        assert not self.mark.resolve_all(positions)
        self.last = max(self.last, positions[-1])
        self.open.difference_update(positions)

    @rule(offset=st.integers(-10_000, 10_000))
    def resolve_what_may_not_be_open(self, offset: int) -> None:
        position = self.end + offset
        assert self.mark.resolve(position) == (position in self.open)
        if position in self.open:
            self.last = max(self.last, position)
        self.open.discard(position)

    @rule()
    def ask(self) -> None:
        expected = min(self.open, default=self.end)
        assert self.mark.position == expected
        assert self.mark.window == self.end - expected
        assert expected >= self.highest
        self.highest = expected

    @invariant()
    def counts(self) -> None:
        if hasattr(self, "mark"):
            assert self.mark.open == len(self.open)
            assert self.mark.end == self.end


TestAgainstASet = AgainstASet.TestCase
TestAgainstASet.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@given(st.permutations(range(50)))
def test_any_order_of_settlement_ends_at_the_end(order: list[int]) -> None:
    mark = Watermark(1000)
    mark.hold(1000, 50)
    for done, index in enumerate(order, 1):
        assert mark.resolve(1000 + index)
        expected = 1000 + next((i for i in range(50) if i not in order[:done]), 50)
        assert mark.position == expected


def test_a_position_is_resolved_once() -> None:
    mark = Watermark(0)
    mark.hold(0, 2)
    assert mark.resolve(0)
    assert not mark.resolve(0)
    assert mark.position == 1
    assert not mark.resolve(0), "it is below the watermark now"


def test_many_that_lie_before_the_watermark_are_not_open() -> None:
    mark = Watermark(0)
    mark.hold(0, 10)
    assert not mark.resolve_all([0, 1, 2, 3, 4])
    assert mark.position == 5
    assert list(mark.resolve_all([2, 3])) == [2, 3], "and not those that lie as far before the end"
    assert (mark.position, mark.open) == (5, 5)


@pytest.mark.parametrize(("position", "count"), [(4, 1), (5, 0), (5, -1)])
def test_a_position_is_held_once_and_in_order(position: int, count: int) -> None:
    mark = Watermark(0)
    mark.hold(0, 5)
    with pytest.raises(ValueError, match="5 is next"):
        mark.hold(position, count)
    assert mark.open == 5


def test_a_wide_gap_takes_no_room() -> None:
    mark = Watermark(0)
    mark.hold(0)
    mark.hold(10**15)
    assert mark.position == 0
    assert mark.resolve(10**15)
    assert mark.position == 0
    assert mark.resolve(0)
    assert mark.position == 10**15 + 1


def test_the_bytes_behind_the_watermark_are_freed() -> None:
    mark = Watermark(0)
    for first in range(0, 100_000, 100):
        mark.hold(first, 100)
        for position in range(first, first + 99):
            mark.resolve(position)
        if first:
            mark.resolve(first - 1)
        assert mark.position == first + 99
    assert len(mark._ring) <= 100
