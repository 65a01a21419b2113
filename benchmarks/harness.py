"""Interleaved paired rounds.

Theory of operation
    Machines drift, and neighbours come and go, so no two numbers are compared that were not measured next to each
    other. A *round* runs every case of a scenario once; the order rotates from round to round, so that none always
    follows the same other. A ratio is taken within each round, and its median and interval over the rounds.

    A trial run sizes each case, so that all its rounds together measure at least `SECONDS`; a case whose count is
    given (50,000 rows) gets more rounds instead.

    A `Window` is opened by the case itself around what counts: from the start of the work to the last durable
    settlement (to the end of the last handler would flatter whoever settles late).
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from .proc import tree_cpu
from .stats import interval, median

__all__ = ["Case", "CaseResult", "Comparison", "Goal", "Sample", "Scenario", "Window", "measure"]

Measure = Literal["speed", "cpu", "client", "over"]
SECONDS = 5.0  # all rounds of a case together
ROUNDS = 9  # the least that decides about a goal
MOST_ROUNDS = 15


class Sample(msgspec.Struct):
    """One case in one round: `count` messages took `wall` seconds, and CPU seconds of our side and of the server."""

    count: int
    wall: float
    client: float
    server: float = 0.0
    extra: dict[str, float] = {}


class Window:
    """Measures between `__enter__` and `__exit__`. `server` and `clients` are pids of processes (with their
    descendants) whose CPU counts, beside this process."""

    def __init__(self, server: int | None = None, clients: Sequence[int] = ()) -> None:
        self._server, self._clients = server, clients

    def __enter__(self) -> Window:
        gc.collect()
        server = self._served()
        self._began = (*self._here(), server)
        return self

    def __exit__(self, *_: object) -> None:
        here = self._here()  # first: to read the server's takes milliseconds of ours
        self._ended = (*here, self._served())

    def _here(self) -> tuple[float, float]:
        return time.perf_counter(), time.process_time() + sum(map(tree_cpu, self._clients))

    def _served(self) -> float:
        return tree_cpu(self._server) if self._server else 0.0

    def sample(self, count: int, **extra: float) -> Sample:
        wall, client, server = (b - a for a, b in zip(self._began, self._ended, strict=True))
        return Sample(count, wall, client, server, extra)


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What a case is compared by.

    ``speed``: messages a second over those of `reference`. ``cpu``: CPU a message (both sides) over that of
    `reference`; ``client``: our side's alone. ``over``: our side's CPU a message above that of `reference`, in the
    scenario's unit, divided by `per`. A comparison without `at_least` and `at_most` is only shown.
    """

    measure: Measure
    reference: str
    at_least: float | None = None
    at_most: float | None = None
    per: int = 1


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to do the job. `run` does it for as many messages as it is told; `count` fixes that number."""

    name: str
    run: Callable[[int], Sample]
    goals: Sequence[Goal] = ()
    count: int | None = None
    about: str = ""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Cases that are measured together. `cases` is entered for the time of the run: it holds the servers.

    `unit` names the case whose cost is the unit of the measure ``over``; or, where each case runs in a process of its
    own, the figure of its samples (`Sample.extra`, in us) that says what the unit cost in that process. `seconds` is
    what all rounds of a case measure together, at least.
    """

    name: str
    title: str
    about: str
    cases: Callable[[], AbstractContextManager[Sequence[Case]]]
    unit: str | None = None
    seconds: float = SECONDS
    facts: dict[str, str] = field(default_factory=dict)


class Comparison(msgspec.Struct, kw_only=True):
    """A goal, measured: the median over the rounds with its interval, and the marks that stand beside it."""

    measure: Measure
    reference: str
    median: float
    low: float
    high: float
    at_least: float | None = None
    at_most: float | None = None
    per: int = 1
    met: bool | None = None
    marks: list[str] = []


class CaseResult(msgspec.Struct, kw_only=True):
    """What a case measured: a sample a round, in the order of the rounds."""

    name: str
    about: str
    samples: list[Sample]
    comparisons: list[Comparison] = []


Report = Callable[[str], None]


def measure(
    scenario: Scenario, *, rounds: int | None = None, only: str = "", report: Report = print
) -> list[CaseResult]:
    """Run a scenario. `only` restricts it to cases whose name contains it (and those they are compared to)."""
    with scenario.cases() as all_cases:
        cases = _chosen(all_cases, only, scenario.unit)
        counts, trials = _sizes(scenario, cases, rounds or ROUNDS, report)
        rounds = rounds or _rounds(scenario, cases, trials)
        samples: dict[str, list[Sample]] = {case.name: [] for case in cases}
        for number in range(rounds):
            turn = number % len(cases)
            for case in (*cases[turn:], *cases[:turn]):
                samples[case.name].append(case.run(counts[case.name]))
            report(f"{scenario.name}: round {number + 1} of {rounds}")
    return [
        CaseResult(
            name=case.name,
            about=case.about,
            samples=samples[case.name],
            comparisons=[_compare(goal, case.name, samples, scenario.unit) for goal in case.goals],
        )
        for case in cases
    ]


def _chosen(cases: Sequence[Case], only: str, unit: str | None) -> Sequence[Case]:
    wanted = {case.name for case in cases if only in case.name}
    while more := {goal.reference for case in cases if case.name in wanted for goal in case.goals} - wanted:
        wanted |= more
    if not wanted:
        raise ValueError(f"no case has {only!r} in its name: {', '.join(case.name for case in cases)}")
    return [case for case in cases if case.name in wanted or case.name == unit]


def _sizes(
    scenario: Scenario, cases: Iterable[Case], rounds: int, report: Report
) -> tuple[Mapping[str, int], Mapping[str, float]]:
    """How many messages each case does in a round, and how many seconds they took in the trial."""
    counts, trials = {}, {}
    for case in cases:
        count = case.count or 1000
        sample = case.run(count)
        while case.count is None and sample.wall < 0.05:
            count *= 4
            sample = case.run(count)
        if case.count is None:
            count = max(100, round(count * scenario.seconds / rounds / sample.wall))
        counts[case.name] = count
        trials[case.name] = sample.wall * count / sample.count
        report(f"{scenario.name}: {case.name}: {count:,} messages a round, about {trials[case.name]:.2f} s")
    return counts, trials


def _rounds(scenario: Scenario, cases: Iterable[Case], trials: Mapping[str, float]) -> int:
    shortest = min((trials[case.name] for case in cases if case.count is not None), default=scenario.seconds)
    return min(MOST_ROUNDS, max(ROUNDS, round(scenario.seconds / shortest)))


def _compare(goal: Goal, name: str, samples: Mapping[str, Sequence[Sample]], unit: str | None) -> Comparison:
    others = samples[goal.reference]
    units = _units(unit, samples, name, goal.reference)
    values = [_value(goal, own, other, one) for own, other, one in zip(samples[name], others, units, strict=True)]
    middle, (low, high) = median(values), interval(values)
    met = None
    if goal.at_least is not None or goal.at_most is not None:
        met = (goal.at_least is None or middle >= goal.at_least) and (goal.at_most is None or middle <= goal.at_most)
    same = 0.0 if goal.measure == "over" else 1.0
    marks = ["indistinguishable"] if low <= same <= high else []
    if median([1 - sample.client / sample.wall for sample in samples[name]]) >= 0.5:
        # Without a server nobody is waited for but the machine, which had others to serve.
        marks.append("server-bound" if any(sample.server for sample in samples[name]) else "disturbed")
    return Comparison(
        measure=goal.measure,
        reference=goal.reference,
        median=middle,
        low=low,
        high=high,
        at_least=goal.at_least,
        at_most=goal.at_most,
        per=goal.per,
        met=met,
        marks=marks,
    )


def _units(unit: str | None, samples: Mapping[str, Sequence[Sample]], name: str, other: str) -> Sequence[float]:
    """Seconds that the unit of ``over`` took, in each round."""
    if unit is None:
        return [math.nan] * len(samples[name])
    if unit in samples:
        return [sample.client / sample.count for sample in samples[unit]]
    pairs = zip(samples[name], samples[other], strict=True)
    return [(one.extra[unit] + another.extra[unit]) / 2e6 for one, another in pairs]


def _value(goal: Goal, own: Sample, other: Sample, unit: float) -> float:
    if goal.measure == "speed":
        return (own.count / own.wall) / (other.count / other.wall)
    if goal.measure == "cpu":
        return ((own.client + own.server) / own.count) / ((other.client + other.server) / other.count)
    ours, theirs = own.client / own.count, other.client / other.count
    return ours / theirs if goal.measure == "client" else (ours - theirs) / unit / goal.per
