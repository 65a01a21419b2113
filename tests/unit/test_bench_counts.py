"""Counts of what the code does for a message: they do not flutter, so a test compares them with what is stored."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import counts
from streamfw import Batch

ALLOWED = 0.1  # calls a message: ten for a batch of a hundred; one for each message is 1.0
AGAIN = "if it is meant, store the new one: `python -m benchmarks --baseline`"


def test_every_job_has_a_stored_count() -> None:
    assert counts.stored().keys() == counts.JOBS.keys(), AGAIN


@pytest.mark.parametrize("name", counts.JOBS)
def test_a_message_costs_no_more_calls_than_it_did(name: str) -> None:
    before, now = counts.stored()[name], counts.count_calls(counts.JOBS[name])
    assert now.python <= before.python + ALLOWED, (
        f"{name}: {before.python} Python calls a message before, {now.python} now; {AGAIN}"
    )
    assert now.c <= before.c + ALLOWED, f"{name}: {before.c} calls of C a message before, {now.c} now; {AGAIN}"


def test_a_count_is_the_same_each_time() -> None:
    """But for the turns that a pump gives the loop by the clock: a few in a thousand messages, on a busy machine."""
    job = counts.JOBS["consume, everything"]
    one, other = counts.count_calls(job), counts.count_calls(job)
    assert one.python == pytest.approx(other.python, abs=ALLOWED / 2)
    assert one.c == pytest.approx(other.c, abs=ALLOWED / 2)


@pytest.mark.parametrize(
    "options",
    [{"workers": 1}, {"workers": 8, "ordered_by": "key"}, {"handler": counts.noop_batch, "batch": Batch(100)}],
    ids=["workers=1", "keyed lanes", "batches"],
)
def test_ten_thousand_records_take_few_calls_of_the_client(options: dict[str, Any]) -> None:
    fetches, commits = counts.requests_to_read(10_000, **options)
    assert 20 <= fetches <= 22, "full fetches of 500, but for the last of each partition"
    assert commits == 3, "one for each 5,000, and one at the end"


def test_nothing_stays_in_memory() -> None:
    slope = counts.block_slope()
    assert abs(slope) < 0.01, f"{slope} blocks of memory stay behind each message"
