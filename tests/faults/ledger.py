"""What happened, written by the processes themselves (see `lines`), and judged afterwards.

S <nanoseconds> <id> <attempt>     a handler starts
D <nanoseconds> <id>...            a settlement returned: it is durable
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from streamfw.broker import (
    Broker,
    Capabilities,
    Connection,
    Delivery,
    Health,
    Settlement,
    Source,
    Subscription,
    UnitOfWork,
)
from streamfw.errors import PublishError, SettleError
from streamfw.message import Outgoing
from streamfw.outcome import Ack, Drop
from streamfw_postgres.deliveries import PostgresDelivery
from streamfw_postgres.holding import HeldClaim
from streamfw_postgres.rowlock import RowLockSource
from tests.faults.lines import LineFile, lines_of

__all__ = ["Ledger", "Start", "Verdict", "judge", "recorded"]


class Ledger(LineFile):
    """One process's file."""

    def started(self, identity: str, attempt: int) -> None:
        self.write(f"S {time.monotonic_ns()} {identity} {attempt}")

    def settled(self, identities: Sequence[str]) -> None:
        if identities:
            self.write(f"D {time.monotonic_ns()} {' '.join(identities)}")


class RecordedSource(Source):
    """A source that notes which acknowledgements have returned."""

    def __init__(self, source: Source, ledger: Ledger) -> None:
        self._source, self._ledger = source, ledger

    async def fetch(self, limit: int, max_bytes: int) -> Sequence[Delivery]:
        return await self._source.fetch(limit, max_bytes)

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleError]:
        errors = await self._source.settle(settlements)
        failed = {id(error.delivery) for error in errors}
        self._ledger.settled(
            [
                s.delivery.message_id
                for s in settlements
                if isinstance(s.outcome, Ack | Drop) and id(s.delivery) not in failed
            ]
        )
        return errors

    async def stop(self) -> None:
        await self._source.stop()

    async def flush(self, deadline: float) -> None:
        await self._source.flush(deadline)

    async def close(self) -> None:
        await self._source.close()

    async def reopen(self) -> None:
        await self._source.reopen()

    def transaction(self, deliveries: Sequence[Delivery]) -> AbstractAsyncContextManager[UnitOfWork]:
        return self._source.transaction(deliveries)

    def health(self) -> Health:
        return self._source.health()


class RecordedLocks(RecordedSource):
    """The same of row locks, whose acknowledgements are durable when their claim has ended."""

    def __init__(self, source: RowLockSource, ledger: Ledger) -> None:
        super().__init__(source, ledger)
        self._messages: dict[int, str] = {}
        source.ended = self._ended  # type: ignore[method-assign]

    async def fetch(self, limit: int, max_bytes: int) -> Sequence[Delivery]:
        deliveries = cast("Sequence[PostgresDelivery]", await self._source.fetch(limit, max_bytes))
        self._messages.update({delivery.id: delivery.message_id for delivery in deliveries})
        return deliveries

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleError]:
        recorded = {id(s.delivery) for s in settlements if getattr(s.delivery.claim, "open", False)}  # type: ignore[attr-defined]
        errors = await self._source.settle(settlements)
        recorded.update(id(error.delivery) for error in errors)
        self._ledger.settled(
            [
                s.delivery.message_id
                for s in settlements
                if isinstance(s.outcome, Ack | Drop) and id(s.delivery) not in recorded
            ]
        )
        return errors

    def _ended(self, claim: HeldClaim) -> None:
        self._ledger.settled([self._messages[row] for row in claim.finished])


class RecordedConnection(Connection):
    def __init__(self, connection: Connection, ledger: Ledger) -> None:
        self._connection, self._ledger = connection, ledger

    async def open(self, subscription: Subscription) -> Source:
        source = await self._connection.open(subscription)
        if isinstance(source, RowLockSource):
            return RecordedLocks(source, self._ledger)
        return RecordedSource(source, self._ledger)

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[PublishError | None]:
        return await self._connection.publish(messages)

    async def check(self) -> Health:
        return await self._connection.check()


class _Recorded(Broker):
    def __init__(self, broker: Broker, ledger: Ledger) -> None:
        super().__init__(broker.url)
        self._broker, self._ledger = broker, ledger
        self.capabilities = broker.capabilities

    @asynccontextmanager
    async def connect(self) -> Any:
        async with self._broker.connect() as connection:
            yield RecordedConnection(connection, self._ledger)

    def capabilities_of(self, subscription: Subscription) -> Capabilities:
        return self._broker.capabilities_of(subscription)

    def mistakes(self, subscription: Subscription) -> Iterable[str]:
        return self._broker.mistakes(subscription)

    def decoder(self, subscription: Subscription, annotation: object) -> Any:
        return self._broker.decoder(subscription, annotation)


def recorded(broker: Broker, ledger: Ledger) -> Broker:
    """`broker`, whose durable acknowledgements go into `ledger`."""
    return _Recorded(broker, ledger)


@dataclass(frozen=True, slots=True)
class Start:
    """One handler's start: when, in which process, and whether its acknowledgement was seen to be durable."""

    at: int
    process: str
    attempt: int
    durable: bool


@dataclass(slots=True)
class Verdict:
    """The oracle's findings over sets of ids. `explained` duplicates were delivered to a process that was killed before
    their settlement was durable; there must be no others, and nothing `lost`."""

    published: int = 0
    handled: int = 0
    lost: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)
    explained: int = 0
    unexplained: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not (self.lost or self.strangers or self.unexplained)


def judge(
    directory: Path,
    published: set[str],
    killed: set[str],
    *,
    maybe: set[str] = frozenset(),  # type: ignore[assignment]
    lease: float | None = None,
    counted: bool = True,
    crashes: Sequence[int] = (),
) -> Verdict:
    """Read every ledger (``<process>.log``) in `directory`.

    `killed` are the processes that got a SIGKILL. `maybe` are ids whose publish ended in `OutcomeUnknown`: each may
    have been stored. With `lease` (seconds), a second delivery is explained as well when it came after the first one's
    lease had ended, unsettled because the server could not be reached. `counted`: each delivery counts an attempt, also
    one that died with its process; except that a server that was killed (at `crashes`, in nanoseconds) may have
    forgotten the row locks' journal of a delivery that had begun before, since its insert does not wait for the disk.
    """
    starts = _starts(directory)
    verdict = Verdict(published=len(published), handled=len(published & starts.keys()))
    verdict.lost = sorted(published - starts.keys())
    verdict.strangers = sorted(starts.keys() - published - maybe)
    for identity, of_one in starts.items():
        of_one.sort(key=lambda start: start.at)
        for earlier, later in itertools.pairwise(of_one):
            over = lease is not None and later.at - earlier.at >= 0.9e9 * lease
            # A process's ledger knows ids, not attempts: in one process only the last delivery's end is durable.
            unsettled = not earlier.durable or earlier.process == later.process
            forgotten = any(earlier.at <= crash <= later.at for crash in crashes)
            counts = counted and not forgotten
            if (earlier.process in killed or over) and unsettled and later.attempt >= earlier.attempt + counts:
                verdict.explained += 1
            else:
                verdict.unexplained.append(f"{identity}: {earlier} then {later}")
    return verdict


def _starts(directory: Path) -> dict[str, list[Start]]:
    begun: list[tuple[int, str, str, int]] = []
    durable: set[tuple[str, str]] = set()
    for process, (kind, at, *rest) in lines_of(directory):
        if kind == "S":
            begun.append((int(at), process, rest[0], int(rest[1])))
        else:
            durable.update((process, identity) for identity in rest)
    found: dict[str, list[Start]] = defaultdict(list)
    for at_ns, process, identity, attempt in begun:
        found[identity].append(Start(at_ns, process, attempt, (process, identity) in durable))
    return found
