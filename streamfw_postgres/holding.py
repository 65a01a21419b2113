"""Rows held by an open transaction, and the connections that hold them.

A claim is the rows of one transaction on one connection. What its deliveries come to is recorded here, and written at
its end, all of it in one commit (rowlock.py). A *holder* is the connection: it takes one claim at a time.

When a holder's connection is lost, the server rolls its transaction back, and the rows are free at that moment. So a
statement for a claim must never run on a later connection: it would touch rows that are another's.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import asyncpg
from asyncpg.transaction import Transaction

from streamfw.errors import BrokerError

from .deliveries import Claim, new_token
from .errors import DRIVER_ERRORS, translated
from .pool import Pooled, UnitPool, end, is_ended
from .roles import Cut, Role

__all__ = ["Anyone", "HeldClaim", "Holder", "Holders", "Odd", "RoleHolder", "UnitHolder", "nothing"]

Anyone: TypeAlias = "asyncpg.Connection | Pooled"
# Answers how many statements it sent.
Work = Callable[[Anyone], Awaitable[int]]
# Of what is no acknowledgement: id, priority, kind, pause in seconds, when it was recorded, a dead letter's headers.
Odd = tuple[int, int, int, float, float, bytes | None]


async def nothing(_: Anyone) -> int:
    """The end of a transaction that has nothing to write."""
    return 0


class HeldClaim(Claim):
    """A claim whose transaction is (or was) open.

    `until` is never, until what is unfinished gets a lease. `count` rows are unfinished; `finished` are ids and `odd`
    the other outcomes (no deliveries: they refer to their claim). `open`: outcomes are still recorded here. `over` is
    set when the transaction has ended; `lost`: not by us, so nothing of it took effect.
    """

    __slots__ = ("count", "finished", "holder", "lost", "odd", "open", "over", "timer")

    def __init__(self, holder: Holder) -> None:
        super().__init__(new_token(), float("inf"))
        self.holder = holder
        self.count = 0
        self.finished: list[int] = []
        self.odd: list[Odd] = []
        self.open = True
        self.lost = False
        self.over = asyncio.Event()
        self.timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Record nothing more."""
        self.open = False
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Holder(ABC):
    """A connection whose transaction holds the rows of `claim`. All of it raises `BrokerError`, and then the rows are
    not held any more."""

    def __init__(self, broke: Callable[[HeldClaim], None]) -> None:
        self._broke = broke
        self.claim: HeldClaim | None = None

    @abstractmethod
    async def fetch(self, sql: str, *args: Any) -> list[asyncpg.Record]:
        """The claim itself; begins the transaction where none is begun."""

    @abstractmethod
    async def end(self, claim: HeldClaim | None, work: Work, chain: bool = False) -> None:
        """Do the last statements of `claim`, and commit; `chain`: the next transaction begins with it."""

    @abstractmethod
    async def drop(self) -> None:
        """Hold nothing any more, whatever state the transaction is in. Never raises for a connection that is lost."""

    def _ended(self, _connection: object) -> None:
        """The connection was lost, or closed."""
        if self.claim is not None:
            self._broke(self.claim)


class RoleHolder(Holder):
    """A connection that claims again and again. While it does, a commit begins the next transaction."""

    def __init__(self, role: Role, broke: Callable[[HeldClaim], None]) -> None:
        super().__init__(broke)
        self.role = role
        self._session: asyncpg.Connection | None = None
        self.begun = False

    async def fetch(self, sql: str, *args: Any) -> list[asyncpg.Record]:
        """See `Holder.fetch`."""

        async def claim(connection: asyncpg.Connection) -> list[asyncpg.Record]:
            if connection is not self._session:
                self._session, self.begun = connection, False
                connection.add_termination_listener(self._session_ended)
            if not self.begun:
                await connection.execute("begin")
                self.begun = True
                self.role.statements += 1
            rows: list[asyncpg.Record] = await connection.fetch(sql, *args)
            return rows

        return cast("list[asyncpg.Record]", await self._run(claim))

    async def end(self, claim: HeldClaim | None, work: Work, chain: bool = False) -> None:
        """See `Holder.end`."""

        async def finish(connection: asyncpg.Connection) -> None:
            if connection is not self._session or claim is not self.claim:
                raise _Stale
            self.role.statements += await work(connection)
            await connection.execute("commit and chain" if chain else "commit")
            self.begun = chain

        try:
            await self._run(finish)
        except _Stale:
            raise Cut("Postgres: the connection that held these rows was lost") from None

    def _session_ended(self, connection: object) -> None:
        if connection is self._session:  # not one that was replaced already
            self._ended(connection)

    async def _run(self, work: Callable[[asyncpg.Connection], Awaitable[Any]]) -> Any:
        try:
            return await self.role.run(work)
        except _Stale:
            raise
        except BaseException:
            # Whatever it was, the transaction is of no use any more.
            self.begun, self._session = False, None
            self.role.terminate()
            raise

    async def drop(self) -> None:
        """See `Holder.drop`."""
        self.begun, self._session = False, None
        self.role.terminate()


class _Stale(Exception):
    """The connection, or what it holds, is not that of the claim any more."""


class Holders:
    """The connections of one source that claim again and again, and who waits for them."""

    def __init__(self, roles: Sequence[Role], broke: Callable[[HeldClaim], None]) -> None:
        self.all = [RoleHolder(role, broke) for role in roles]
        self._free = list(self.all)
        self._changed = asyncio.Event()
        self._stopped = False
        # The last claim brought something: then the end of one begins the next transaction.
        self.busy = False

    async def wait(self, condition: Callable[[], bool] | None = None) -> bool:
        """Until one is free (or the condition holds, which is looked at whenever a claim has ended); False: stopped."""
        while not self._stopped:
            if condition() if condition is not None else self._free:
                return True
            self._changed.clear()
            await self._changed.wait()
        return False

    def take(self) -> RoleHolder:
        """One that is free."""
        return self._free.pop()

    def give_back(self, holder: Holder) -> None:
        """Its claim is over."""
        holder.claim = None
        if isinstance(holder, RoleHolder):
            self._free.append(holder)
        self._changed.set()

    def stop(self) -> None:
        """Nobody waits any more."""
        self._stopped = True
        self._changed.set()

    async def rest(self) -> None:
        """Leave no transaction open that holds nothing; claims that end from now on begin none."""
        self.busy = False
        for holder in [h for h in self._free if h.begun]:
            self._free.remove(holder)
            try:
                await holder.end(None, nothing)
            except BrokerError:
                pass  # it held nothing
            finally:
                self.give_back(holder)


class UnitHolder(Holder):
    """A connection of the handlers' pool, for one row: its handler's own transaction is the claim."""

    connection: Pooled

    def __init__(self, pool: UnitPool, broke: Callable[[HeldClaim], None]) -> None:
        super().__init__(broke)
        self._pool = pool
        self._transaction: Transaction | None = None
        self.entered = False  # a handler runs in it

    @contextmanager
    def deadline(self) -> Generator[None, None, None]:
        """For our own statements: a connection that does not answer in time is ended."""
        timer = self._pool.deadline(self.connection)
        try:
            yield
        finally:
            timer.cancel()

    async def fetch(self, sql: str, *args: Any) -> list[asyncpg.Record]:
        """See `Holder.fetch`; takes a connection."""
        self.connection = await self._pool.acquire()
        try:
            self.connection.add_termination_listener(self._ended)
            self._transaction = self.connection.transaction(isolation=self._pool.isolation)
            with self.deadline():
                await self._transaction.start()
                rows: list[asyncpg.Record] = await self.connection.fetch(sql, *args)
            return rows
        except DRIVER_ERRORS as error:
            raise translated(error, "claiming for a handler's transaction") from error

    async def end(self, claim: HeldClaim | None, work: Work, chain: bool = False) -> None:
        """See `Holder.end`; gives the connection back."""
        assert self._transaction is not None
        try:
            with self.deadline():
                await work(self.connection)
                await self._transaction.commit()
            self._transaction = None
        except DRIVER_ERRORS as error:
            raise translated(error, "ending a handler's transaction") from error
        finally:
            await self.drop()

    async def drop(self) -> None:
        """See `Holder.drop`; gives the connection back. Twice is once."""
        if not hasattr(self, "connection"):  # there was none to be had
            return
        transaction, self._transaction = self._transaction, None
        connection = self.connection
        if is_ended(connection):
            return
        connection.remove_termination_listener(self._ended)
        if transaction is not None and connection.is_in_transaction():
            try:
                with self.deadline():
                    await transaction.rollback()
            except DRIVER_ERRORS:
                end(connection)  # which rolls back
        await self._pool.release(connection)
