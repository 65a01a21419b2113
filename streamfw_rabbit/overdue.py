"""Who takes too long: the server ends the channel of a consumer that has not settled something for long.

https://www.rabbitmq.com/docs/consumers#acknowledgement-timeout (``consumer_timeout``, 30 minutes by default). The time
counts from the delivery to the channel, also while the message only waits here. From 4.3 on it is the consumer that
the server ends, and of quorum queues only; we begin anew on another channel, as if it had been that.
"""

from __future__ import annotations

import logging
from collections import deque

__all__ = ["LOOKS", "Overdue"]

log = logging.getLogger("streamfw.rabbit")

LOOKS = 32
"""How many looks are to be taken in the time that the server allows."""

_TOO_LONG = 0.5 - 2 / LOOKS  # of that time: one look later it is not yet half, also of what came just after a look


class Overdue:
    """Warns once of what is out on a channel for half of `limit` seconds. `where`: whose it is, for the log."""

    def __init__(self, where: str, limit: float) -> None:
        self._where, self._limit = where, limit
        self._arrived: deque[tuple[float, int]] = deque()  # times, and the last tag that was there by then
        self._warned = 0

    def look(self, now: float, oldest: int, last: int) -> None:
        """`oldest`: the first tag that is not settled. `last`: the last one that came. `now`: in seconds."""
        arrived = self._arrived
        while arrived and arrived[0][1] < oldest:
            arrived.popleft()
        if arrived and now - arrived[0][0] >= self._limit / 2 and oldest > self._warned:
            self._warned = arrived[0][1]
            log.warning(
                "%s: a message has been here for %.0f s and is not settled; RabbitMQ takes back what is here when it "
                "takes longer than consumer_timeout, %.0f s, and gives it to others",
                self._where,
                now - arrived[0][0],
                self._limit,
            )
        if last >= oldest and (not arrived or last > arrived[-1][1]):
            arrived.append((now, last))

    def waiting(self, now: float) -> int:
        """The last tag of those that will have been here for half of the time before long. A handler that begins later
        than that, and takes more than half of the time itself, as it may, would end too late."""
        last = 0
        for when, tag in self._arrived:
            if now - when < self._limit * _TOO_LONG:
                break
            last = tag
        return last
