"""The library's channel for declarations and the like: no call is broken off, and many messages come in one round trip.

The library's `basic_get` sends the next Basic.Get when the one before is answered. AMQP does not ask for that: a
channel answers its methods in order, so they can all be under way together, and the answers are in the order of the
queue.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiormq
from aiormq.abc import ChannelFrame, DeliveredMessage
from pamqp import commands
from pamqp.header import ContentHeader

from ._base import finished

__all__ = ["GettingChannel"]


class GettingChannel(aiormq.Channel):
    """A channel of the library that can ask for many messages at once. `out`: the tags of those that came so, until
    somebody removes them."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.out: set[int] = set()
        self._came: list[DeliveredMessage] = []
        self._missing = 0
        self._all: asyncio.Future[None] | None = None
        self._calls: set[asyncio.Task[Any]] = set()

    async def open(self, timeout: Any = None) -> Any:
        """See `aiormq.Channel.open`. It runs to its end as well."""
        return await finished(super().open(timeout), self._calls)

    async def rpc(self, frame: Any, timeout: Any = None) -> Any:
        """See `aiormq.Channel.rpc`. It runs to its end, also when the caller is cancelled: the library would close the
        channel in the middle of it, and what then comes for its number may end the whole connection (504)."""
        return await finished(super().rpc(frame, timeout), self._calls)

    async def get_many(self, queue: str, count: int) -> list[DeliveredMessage]:
        """The first messages of `queue`, `count` of them, or fewer when it has no more. They are unsettled, also when
        the caller is cancelled meanwhile: see `rested`."""
        return await finished(self._get_many(queue, count), self._calls)

    async def rested(self) -> None:
        """Wait until nothing is under way: `out` is all that there is."""
        if self._calls:
            await asyncio.wait(self._calls)

    async def _get_many(self, queue: str, count: int) -> list[DeliveredMessage]:
        async with self.lock:
            # The library's future: it ends with the channel.
            self._came, self._missing, self._all = [], count, self.create_future()
            gets = [commands.Basic.Get(queue=queue)] * count
            await self.write_queue.put(ChannelFrame.marshall(channel_number=self.number, frames=gets))
            await self._all
            for _ in range(count):  # the reader takes each for the answer to a call as well
                self.rpc_frames.get_nowait()
                self.rpc_frames.task_done()
            return self._came

    async def _on_get_frame(self, frame: commands.Basic.GetOk | commands.Basic.GetEmpty) -> None:
        if not self._missing:
            await super()._on_get_frame(frame)
            return
        if isinstance(frame, commands.Basic.GetOk):
            header = await self._get_frame()
            assert isinstance(header, ContentHeader)
            self._came.append(await self._read_content(frame, header))
            self.out.add(frame.delivery_tag or 0)
        self._missing -= 1
        if not self._missing and self._all is not None and not self._all.done():
            self._all.set_result(None)
