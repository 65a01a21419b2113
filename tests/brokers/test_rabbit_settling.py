"""Acknowledging by multiples: against a model of the server's channel, in any order of settling."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streamfw_rabbit.settling import Frames, Tags


class Server:
    """RabbitMQ's side of a channel, as far as acknowledgements go."""

    def __init__(self, delivered: int) -> None:
        self.out = set(range(1, delivered + 1))
        self.last = delivered
        self.frames = 0

    def take(self, frames: Frames) -> None:
        for tag, multiple in frames:
            assert tag in self.out, f"{tag} is unknown to the server: it would close the channel (406)"
            assert tag >= 1
            self.out -= {other for other in self.out if other <= tag} if multiple else {tag}
            self.frames += 1


Step = tuple[str, int]
steps = st.lists(
    st.tuples(st.sampled_from(["settle", "settle", "settle", "tell", "step over"]), st.integers(1, 40)), max_size=120
)


@given(steps)
def test_what_is_told_is_what_was_settled_and_nothing_twice(script: list[Step]) -> None:
    tags, server = Tags(), Server(40)
    settled: set[int] = set()
    for what, tag in script:
        if what == "settle":
            assert tags.is_out(tag) == (tag not in settled)
            assert tags.settle(tag) == (tag not in settled)
            settled.add(tag)
        else:
            server.take(tags.frames(step_over=what == "step over"))
            told = set(range(1, 41)) - server.out
            assert tags.untold(tag, 40) == len([one for one in server.out if one >= tag])
            assert told <= settled, "nothing is acknowledged that was not settled"
            if what == "step over":
                assert told == settled, "and after stepping over, all that was"
        unsettled = set(range(1, 42)) - settled
        assert tags.oldest() == min(unsettled)
    server.take(tags.frames(step_over=True))
    assert server.out == set(range(1, 41)) - settled
    assert tags.gap is None


@given(steps)
def test_without_stepping_over_all_before_the_gap_is_told(script: list[Step]) -> None:
    tags, server = Tags(), Server(40)
    settled: set[int] = set()
    for what, tag in script:
        if what == "settle":
            tags.settle(tag)
            settled.add(tag)
        else:
            server.take(tags.frames())
            first_gap = min(set(range(1, 42)) - settled)
            assert set(range(1, 41)) - server.out == set(range(1, first_gap))
            beyond = {one for one in settled if one > first_gap}
            assert tags.gap == (first_gap if beyond else None)


def test_what_is_settled_in_order_is_one_frame_a_group() -> None:
    tags, server = Tags(), Server(1000)
    for first in range(1, 1001, 100):
        for tag in range(first, first + 100):
            assert tags.settle(tag)
        server.take(tags.frames())
    assert (server.frames, server.out) == (10, set())


def test_after_a_gap_that_was_stepped_over_multiples_begin_again() -> None:
    tags, server = Tags(), Server(100)
    for tag in range(2, 51):
        tags.settle(tag)
    assert (tags.frames(), tags.gap) == ([], 1)
    server.take(tags.frames(step_over=True))
    assert (server.frames, server.out) == (49, {1, *range(51, 101)})
    for tag in range(51, 61):
        tags.settle(tag)
    server.take(tags.frames())
    assert server.out == {1, *range(61, 101)}, "singly: a multiple would take the first along"
    before = server.frames
    tags.settle(1)
    for tag in range(61, 101):
        tags.settle(tag)
    server.take(tags.frames())
    assert (server.frames - before, server.out) == (1, set())


def test_a_gap_that_closes_alone_is_told_alone() -> None:
    tags, server = Tags(), Server(3)
    tags.settle(3)
    server.take(tags.frames(step_over=True))
    tags.settle(1)
    assert tags.frames() == [(1, False)]
    tags.settle(2)
    assert tags.frames() == [(2, False)]
    assert tags.oldest() == 4


def test_nothing_to_tell() -> None:
    tags = Tags()
    assert (tags.frames(), tags.frames(step_over=True), tags.gap) == ([], [], None)
