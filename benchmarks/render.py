"""docs/benchmarks.md from docs/benchmarks.json: every number in it was measured."""

from __future__ import annotations

from collections.abc import Iterable

from .document import PUBLISHED, Count, Run, published
from .harness import CaseResult, Comparison, Sample
from .stats import median

__all__ = ["PAGE", "page", "table"]

PAGE = PUBLISHED.with_suffix(".md")
HEAD = """\
# Benchmarks

Rendered by `python -m benchmarks render` from `docs/benchmarks.json`; no number here is typed by hand. To measure:
`make bench`, or `python -m benchmarks SCENARIO`; to publish what was measured here: `--publish`.

All cases of a table ran in turn within each round, in rotating order. A figure is the median over the rounds, a
comparison the median of the ratios within the rounds, with its 95 % interval (bootstrap over the rounds). The window
closes at the last durable settlement. *Indistinguishable*: the interval holds "the same". *Server-bound*: the process
waited for half of the time or more; *disturbed*: it did, and there is no server to wait for: the machine was busy with
other things. A goal is met when the median meets it.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(f"## {_heading(run)}\n\n{table(run)}" for run in published().runs)])


def table(run: Run) -> str:
    """One run as text: where and when, and a row a case."""
    machine = run.machine
    versions = ", ".join(f"{name} {version}" for name, version in (run.versions | run.facts).items())
    rounds = f", {len(run.cases[0].samples)} rounds" if run.cases else ""
    load = "" if run.load is None else f", load before {run.load:.1f}"
    goals = [line for case in run.cases for line in _comparisons(case)]
    parts = [
        run.about,
        "",
        f"{run.date[:10]}, commit {run.commit}, {machine.processor}, {machine.cores} cores, "
        f"{machine.memory_gib:.0f} GiB, {machine.kernel}; Python {run.python}, {run.loop}{rounds}{load}; "
        f"{versions}.",
    ]
    if run.cases:
        parts += ["", *_markdown(["case", *_columns(run)], [_row(case, run) for case in run.cases])]
    if run.counts:
        parts += ["", *_counts(run.counts)]
    if goals:
        parts += ["", *_markdown(["case", "measure", "against", "median (95 %)", "goal", "", "marks"], goals)]
    return "\n".join(parts) + "\n"


def _heading(run: Run) -> str:
    return f"{run.title} (Python {run.python.rpartition('.')[0]}, {run.loop})"


def _columns(run: Run) -> list[str]:
    served = ["server CPU us"] if _has_server(run) else []
    return ["messages/s, median", "best", "worst", "CPU us", *served, *_extras(run)]


def _has_server(run: Run) -> bool:
    return any(sample.server for case in run.cases for sample in case.samples)


def _extras(run: Run) -> list[str]:
    return list(dict.fromkeys(name for case in run.cases for sample in case.samples for name in sample.extra))


def _row(case: CaseResult, run: Run) -> list[str]:
    speeds = [sample.count / sample.wall for sample in case.samples]
    cells = [f"{speed:,.0f}" for speed in (median(speeds), max(speeds), min(speeds))]
    cells.append(_number(_each(case.samples, "client")))
    if _has_server(run):
        cells.append(_number(_each(case.samples, "server")))
    for name in _extras(run):
        values = [sample.extra[name] for sample in case.samples if name in sample.extra]
        cells.append(_number(median(values)) if values else "")
    return [case.name, *cells]


def _each(samples: Iterable[Sample], side: str) -> float:
    return median([(s.client if side == "client" else s.server) / s.count * 1e6 for s in samples])


def _comparisons(case: CaseResult) -> Iterable[list[str]]:
    for one in case.comparisons:
        units = " units" if one.measure == "over" else " x"
        value = f"{_number(one.median)}{units} ({_number(one.low)} to {_number(one.high)})"
        met = "" if one.met is None else "met" if one.met else "**missed**"
        yield [case.name, one.measure, one.reference, value, _goal(one), met, ", ".join(one.marks)]


def _goal(one: Comparison) -> str:
    if one.at_least is not None:
        return f"at least {one.at_least:g}"
    return f"at most {one.at_most:g}" if one.at_most is not None else ""


def _counts(counts: list[Count]) -> list[str]:
    columns = list(dict.fromkeys(name for count in counts for name in count.values))
    rows = [
        [count.name, *(_number(count.values[name]) if name in count.values else "" for name in columns)]
        for count in counts
    ]
    return _markdown(["a message", *columns], rows)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return [line(head), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *map(line, rows)]
