"""What came of the demo: read from the store and the dead letters, and compared with what was published."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from streamfw import Message

from .store import Delivered, Store, Stored, Total
from .traffic import Webhook, by_owner

__all__ = ["Report", "make_report", "show"]


class Report(msgspec.Struct, kw_only=True):
    """The result. `differences` is empty when everything is as it must be; times are in seconds.

    - `retried`: messages whose handler failed and then worked; `failures`: how often it failed.
    - `lost`: published, and neither handled nor dead-lettered.
    - `duplicates`: deliveries that a handler began once more, although the one before had not failed: its worker died
      between beginning and commit. `stored_twice`: how many of them the summary counts twice.
    - `takeover`: from the killed worker's last commit to the other worker's first message.
    """

    broker: str
    published: int
    handled: int
    retried: int
    failures: int
    dead_lettered: int
    lost: int
    duplicates: int
    stored_twice: int
    killed: int | None
    takeover: float | None
    seconds: float
    per_second: float
    busiest: list[Total]
    differences: list[str]


async def make_report(
    broker: str, published: Sequence[Webhook], store: Store, dead: Sequence[Message], killed: int | None
) -> Report:
    """Read everything from the store, and say what does not agree."""
    stored, journal, totals = await store.webhooks(), await store.journal(), await store.totals()
    handled = {row.message_id for row in stored}
    began = Counter(entry.message_id for entry in journal if entry.what == "began")
    failed = Counter(entry.message_id for entry in journal if entry.what == "failed")
    began_at = min((entry.at for entry in journal), default=0.0)
    seconds = max((row.at for row in stored), default=began_at) - began_at
    ids, dead_ids = {webhook.message_id for webhook in published}, {message.message_id for message in dead}
    return Report(
        broker=broker,
        published=len(ids),
        handled=len(handled),
        retried=sum(message_id in failed for message_id in handled),
        failures=sum(failed[message_id] for message_id in handled),
        dead_lettered=len(dead_ids),
        lost=len(ids - handled - dead_ids),
        duplicates=sum(max(0, began[i] - failed[i] - 1) for i in handled),
        stored_twice=sum(total.webhooks for total in totals) - len(handled),
        killed=killed,
        takeover=_takeover(killed, stored, journal),
        seconds=round(seconds, 2),
        per_second=round(len(stored) / seconds, 1) if seconds else 0.0,
        busiest=list(totals[:5]),
        differences=[*_sets(ids, handled, dead_ids), *_counts(totals, stored), *_order(published, stored)],
    )


def _takeover(killed: int | None, stored: Sequence[Stored], journal: Sequence[Delivered]) -> float | None:
    last = max((row.at for row in stored if row.worker == killed), default=None)
    first = min((entry.at for entry in journal if entry.worker != killed), default=None)
    return round(first - last, 2) if killed is not None and first and last else None


def _sets(published: set[str], handled: set[str], dead: set[str]) -> Iterable[str]:
    for what, ids in (
        ("published, and neither handled nor dead-lettered", published - handled - dead),
        ("handled or dead-lettered, and never published", (handled | dead) - published),
        ("handled and dead-lettered", handled & dead),
    ):
        if ids:
            yield f"{len(ids)} {what}: {', '.join(sorted(ids)[:5])}{', ..' if len(ids) > 5 else ''}"


def _counts(totals: Sequence[Total], stored: Sequence[Stored]) -> Iterable[str]:
    counted = {total.event: total.webhooks for total in totals}
    for event, webhooks in Counter(row.event for row in stored).items():
        if counted.get(event) != webhooks:
            yield f"the summary counts {counted.get(event)} {event} webhooks, and {webhooks} are stored"


def _order(published: Sequence[Webhook], stored: Sequence[Stored]) -> Iterable[str]:
    handled = {row.message_id for row in stored}
    stored_by_owner: dict[str, list[str]] = {}
    for row in stored:
        stored_by_owner.setdefault(row.owner, []).append(row.message_id)
    for owner, mine in by_owner(published).items():
        expected = [webhook.message_id for webhook in mine if webhook.message_id in handled]
        actual = stored_by_owner.get(owner, [])
        wrong = next((pair for pair in zip(expected, actual, strict=False) if pair[0] != pair[1]), None)
        if wrong:
            yield f"{owner}: out of order: {wrong[1]} was handled where {wrong[0]} was due"


def show(report: Report, console: Console) -> None:
    """Print it as a table."""
    table = Table(title=f"webhooks on {report.broker}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    for row in _rows(report):
        table.add_row(*row)
    console.print(table)
    console.print("busiest events: " + ", ".join(f"{total.event} {total.webhooks}" for total in report.busiest))
    for difference in report.differences:
        console.print(f"[bold red]wrong:[/] {difference}", highlight=False)
    if not report.differences:
        console.print("[green]Every id that was published is in the summary or the dead letters; order was kept.[/]")


def _rows(r: Report) -> Iterable[tuple[str, str, str]]:
    yield "published", str(r.published), ""
    yield "handled", str(r.handled), "each once in the summary" if not r.stored_twice else f"{r.stored_twice} twice"
    yield "retried", str(r.retried), f"their handler failed {r.failures} times, then worked"
    yield "dead-lettered", str(r.dead_lettered), "a body that cannot be decoded"
    yield "lost", str(r.lost), ""
    yield "duplicates", str(r.duplicates), _why(r)
    yield (
        "messages/s",
        f"{r.per_second:g}",
        f"in {r.seconds:g} s"
        + (f", {r.takeover:g} s of it until the other worker took over" if r.takeover is not None else ""),
    )


def _why(r: Report) -> str:
    if r.killed is None:
        return "no worker died"
    if not r.duplicates:
        return f"worker {r.killed} was killed between two messages"
    if r.broker.startswith("postgres"):
        return f"begun, and rolled back with worker {r.killed} when it was killed; then handled by the other"
    return f"begun by worker {r.killed}, which was killed before it had settled them; handled again by the other"
