"""The arithmetic of the benchmarks, and that the page says what the document says."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from benchmarks import render, stats
from benchmarks.document import new_run
from benchmarks.harness import Case, Goal, Sample, Scenario, Window, measure
from benchmarks.proc import tree_cpu


def scenario(*cases: Case, unit: str | None = None) -> Scenario:
    @contextmanager
    def opened() -> Iterator[Sequence[Case]]:
        yield cases

    return Scenario(name="toy", title="A toy", about="Nothing.", cases=opened, unit=unit, seconds=1.0)


def took(wall: float, client: float, server: float = 0.0) -> Sample:
    return Sample(1000, wall, client, server)


def quiet(line: str) -> None: ...


def test_ratios_are_taken_within_rounds_and_a_goal_is_met_by_their_median() -> None:
    drift = iter([1.0, 1.0, 4.0, 4.0, 1.0, 1.0, 4.0, 4.0])  # the machine slows down by 4 every other round
    hand = Case(name="hand", run=lambda n: took(next(drift), 0.5), count=1000)
    ours = Case(
        name="ours",
        run=lambda n: took(0.5 * next(drift), 0.25, 0.25),
        count=1000,
        goals=[
            Goal(measure="speed", reference="hand", at_least=1.9),
            Goal(measure="speed", reference="hand", at_least=2.1),
            Goal(measure="cpu", reference="hand", at_most=1.0),
        ],
    )
    _, result = measure(scenario(hand, ours), rounds=3, report=quiet)
    fast, faster, cpu = result.comparisons
    assert (fast.median, fast.low, fast.high, fast.met) == (2.0, 2.0, 2.0, True)
    assert faster.met is False
    assert cpu.median == 1.0 and cpu.met and "indistinguishable" in cpu.marks


def test_what_waits_for_half_of_its_time_is_server_bound() -> None:
    hand = Case(name="hand", run=lambda n: took(1.0, 0.9), count=1)
    ours = Case(name="ours", run=lambda n: took(1.0, 0.5, 0.9), count=1, goals=[Goal(measure="cpu", reference="hand")])
    alone = Case(name="alone", run=lambda n: took(1.0, 0.5), count=1, goals=[Goal(measure="cpu", reference="hand")])
    _, served, disturbed = measure(scenario(hand, ours, alone), rounds=2, report=quiet)
    assert served.comparisons[0].marks == ["server-bound"]
    assert served.comparisons[0].met is None
    assert disturbed.comparisons[0].marks == ["disturbed"]


def test_costs_over_a_reference_are_in_units() -> None:
    unit = Case(name="unit", run=lambda n: took(0.1, 0.1), count=1)
    hand = Case(name="hand", run=lambda n: took(1.0, 1.0), count=1)
    goal = Goal(measure="over", reference="hand", at_most=2.0, per=3)
    ours = Case(name="ours", run=lambda n: took(1.6, 1.6), count=1, goals=[goal])
    result = measure(scenario(unit, hand, ours, unit="unit"), rounds=2, report=quiet)[-1]
    assert result.comparisons[0].median == pytest.approx(2.0)


def test_a_unit_may_be_measured_in_the_process_of_each_case() -> None:
    """The machine was twice as slow when ours ran: the unit is what it cost beside the two."""

    def case(name: str, client: float, unit: float, *goals: Goal) -> Case:
        return Case(name=name, run=lambda n: Sample(1000, 9.0, client, extra={"h() us": unit}), count=1, goals=goals)

    hand = case("hand", 0.5, 50.0)
    ours = case("ours", 2.0, 100.0, Goal(measure="over", reference="hand", at_most=20.1))
    result = measure(scenario(hand, ours, unit="h() us"), rounds=2, report=quiet)[-1]
    assert result.comparisons[0].median == pytest.approx(1500 / 75)
    assert result.comparisons[0].met


def test_our_own_side_is_compared_without_the_server() -> None:
    hand = Case(name="hand", run=lambda n: took(1.0, 0.5, 0.5), count=1)
    goals = [Goal(measure="client", reference="hand"), Goal(measure="cpu", reference="hand")]
    ours = Case(name="ours", run=lambda n: took(1.0, 0.25, 1.75), count=1, goals=goals)
    client, cpu = measure(scenario(hand, ours), rounds=1, report=quiet)[-1].comparisons
    assert (client.median, cpu.median) == (0.5, 2.0)


def test_rounds_rotate_and_a_trial_sizes_them() -> None:
    order: list[tuple[str, int]] = []

    def case(name: str) -> Case:
        def run(count: int) -> Sample:
            order.append((name, count))
            return Sample(count, count * 1e-4, count * 1e-4)

        return Case(name=name, run=run)

    measure(scenario(case("a"), case("b")), rounds=2, report=quiet)
    assert order == [("a", 1000), ("b", 1000), ("a", 5000), ("b", 5000), ("b", 5000), ("a", 5000)]


def test_only_some_cases_run_with_those_they_are_compared_to() -> None:
    def case(name: str, *references: str) -> Case:
        goals = [Goal(measure="speed", reference=reference) for reference in references]
        return Case(name=name, run=lambda n: took(1.0, 1.0), count=1, goals=goals)

    cases = scenario(case("hand"), case("one", "hand"), case("two", "one"), case("three", "hand"))
    assert [result.name for result in measure(cases, rounds=1, only="two", report=quiet)] == ["hand", "one", "two"]
    with pytest.raises(ValueError, match="no case has 'four' in its name: hand, one"):
        measure(cases, rounds=1, only="four", report=quiet)


def test_the_interval_holds_the_median_and_ignores_an_outlier() -> None:
    values = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 90.0]
    low, high = stats.interval(values)
    assert 1.0 <= low < stats.median(values) == 1.4 < high < 90.0
    assert stats.interval(values) == (low, high)
    assert stats.interval([3.0]) == (3.0, 3.0)


def test_cpu_of_children_counts_also_when_they_have_ended() -> None:
    burn = "import time\nwhile time.process_time() < {}: pass"
    before = tree_cpu(os.getpid())
    subprocess.run([sys.executable, "-c", burn.format(0.3)], check=True)
    with subprocess.Popen([sys.executable, "-c", burn.format(0.3) + "\nprint(flush=True); input()"],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as alive:  # fmt: skip
        assert alive.stdout is not None
        alive.stdout.readline()
        used = tree_cpu(os.getpid()) - before
        alive.communicate(b"\n")
    assert used > 0.55


def test_a_window_measures_this_process() -> None:
    with Window() as window:
        end = time.process_time() + 0.05
        while time.process_time() < end:
            pass
    sample = window.sample(10, claims=3.0)
    assert sample.count == 10 and sample.extra == {"claims": 3.0} and sample.server == 0.0
    assert 0.05 <= sample.client <= sample.wall * 1.05


def test_a_table_marks_a_missed_goal() -> None:
    hand = Case(name="hand", run=lambda n: took(1.0, 1.0), count=1)
    ours = Case(
        name="ours",
        run=lambda n: took(2.0, 1.0, 1.0),
        count=1,
        goals=[Goal(measure="speed", reference="hand", at_least=1.2)],
    )
    toy = scenario(hand, ours)
    run = new_run(toy, "asyncio")
    run.cases = measure(toy, rounds=2, report=quiet)
    text = render.table(run)
    assert "0.50 x (0.50 to 0.50) | at least 1.2 | **missed** | server-bound |" in text
    assert "server CPU us" in text


def test_the_page_is_what_the_document_says() -> None:
    assert render.PAGE.read_text() == render.page(), "render it again: python -m benchmarks render"
