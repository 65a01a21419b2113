"""Reply addresses that strangers give: tried apart before they are trusted.

A direct reply address holds, encoded, the process of the server that the reply is to be sent to. One that does not
decode, or names a node that there is not, ends the connection of whoever publishes to it (541; seen on 3.10.8,
and not on 4.0.5), with all that is under way there. And it comes from the sender of a request. So the first reply to an
address goes out alone, on a connection for this purpose; once one has been confirmed, the next ones go with everything
else.
"""

from __future__ import annotations

import asyncio
from typing import Final

from streamfw.errors import OutcomeUnknown, PublishError, Unroutable
from streamfw.message import Outgoing

from .channel import Closed, Properties, Receipts
from .epochs import Epochs
from .lane import Lane
from .settings import Settings, connection_options

__all__ = ["Addresses"]

_INTERNAL_ERROR: Final = 541
_KNOWN: Final = 10_000  # addresses that are remembered


class Addresses:
    """The direct reply addresses that one connection has replied to. It connects when the first reply is sent."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._known: dict[str, None] = {}
        self._turn = asyncio.Lock()
        self._epochs: Epochs | None = None
        self._lane: Lane | None = None
        self._closed = False

    def knows(self, address: str) -> bool:
        """Whether a reply to it has been confirmed."""
        return address in self._known

    def forget(self) -> None:
        """Trust none of them any more: the server's nodes may have changed."""
        self._known.clear()

    async def send(self, message: Outgoing, properties: Properties, deadline: float) -> PublishError | None:
        """Send a reply alone. None: it was confirmed. Raises what `Lane.send` does."""
        where = {"name": message.name, "message_id": message.message_id}
        async with self._turn:
            lane = self._opened()
            receipts = Receipts()
            lane.watch(receipts, deadline)
            try:
                await lane.send(
                    "", message.name, properties, message.body, receipts, 0, mandatory=False, until=deadline
                )
                (answer,) = await receipts.wait()
            finally:
                if receipts.left:
                    receipts.abandon()
        if answer is None:
            if len(self._known) >= _KNOWN:
                del self._known[next(iter(self._known))]
            self._known[message.name] = None
            return None
        if isinstance(answer, Closed) and answer.code == _INTERNAL_ERROR:
            return Unroutable("the server knows no such reply address", **where)
        return OutcomeUnknown(f"the reply may have been sent: {answer}", **where)

    def _opened(self) -> Lane:
        if self._lane is None:
            self._epochs = Epochs(connection_options(self._settings, "answering"))
            self._lane = Lane(self._epochs, self._settings)
            if self._closed:
                self._lane.close()
            else:
                self._epochs.start()
        return self._lane

    async def close(self) -> None:
        self._closed = True
        if self._lane is not None:
            self._lane.close()
        if self._epochs is not None:
            await self._epochs.close()
