"""What a memory broker keeps: topics, a queue for each group of one, and the room they take.

Theory of operation
    A published message becomes one `Stored` in the queue of each group of its topic. A topic that nobody has
    subscribed to has a single queue under the empty name; the first group to register adopts it by renaming.

    In a queue, what came in at priority 0 and was never handed out stands in a deque, in order: the hot path. All
    else (another priority, what came back, what was delayed and is due) stands in a heap by (priority, number). Who
    takes merges the two, so a message that comes back is again in front of those published after it.

    Delayed messages stand in a second heap, by `clock`. A queue has one timer, set to the earliest of them, and only
    while somebody waits: a source that is busy promotes what is due when it next fetches. The clock is not the
    loop's: uvloop's stands still while a turn lasts and counts whole milliseconds, so what is due by it may be early.
    A store may be given another clock before it is used, one that the loop's timers agree with (tests do).

    Nothing here suspends. Waiting is a future that whoever brings a message, or makes room, resolves.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush

import msgspec

from .errors import BrokerRefused
from .message import ORIGIN, ORIGIN_GROUP, Headers, Message, Outgoing, dead_letter_headers, original_headers
from .outcome import DeadLetter

__all__ = ["Queue", "Store", "Stored", "as_messages", "clock", "now"]

clock = time.monotonic
"""What delays are measured by, in seconds."""

UNCLAIMED = ""
"""The queue of a topic that no group has registered for yet."""


class Stored(msgspec.Struct, gc=False):
    """One message in one queue. `seq` is the message's number, the same in every queue; `attempt` counts the
    deliveries that ended in a retry; `size` is what it takes of the store's room, in bytes."""

    seq: int
    name: str
    body: bytes
    message_id: str
    key: str | None
    headers: Headers
    priority: int
    timestamp: float
    size: int
    attempt: int = 0


class Queue:
    """The messages of one topic for one group, and the sources that compete for them."""

    __slots__ = (
        "_delayed",
        "_fresh",
        "_largest",
        "_members",
        "_returned",
        "_timer",
        "_waiting",
        "clock",
        "group",
        "name",
        "owner",
    )

    def __init__(self, name: str, group: str, clock: Callable[[], float]) -> None:
        self.name = name
        self.group = group
        self.clock = clock
        self.owner: object | None = None
        self._fresh: deque[Stored] = deque()
        self._returned: list[tuple[int, int, Stored]] = []
        self._delayed: list[tuple[float, int, Stored]] = []
        self._members: dict[object, bool] = {}
        self._waiting: dict[object, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._largest = 1

    def __len__(self) -> int:
        """How many wait here: ready and delayed, without those handed out."""
        return len(self._fresh) + len(self._returned) + len(self._delayed)

    @property
    def ready(self) -> bool:
        """Whether somebody could take something now."""
        return bool(self._fresh or self._returned or (self._delayed and self._delayed[0][0] <= self.clock()))

    # Messages

    def put(self, stored: Stored, due: float | None = None) -> None:
        """A message that is new here, for now or (`due`, by `clock`) for later."""
        if stored.size > self._largest:
            self._largest = stored.size
        if due is not None:
            heappush(self._delayed, (due, stored.seq, stored))
            self._set_timer()
            return
        if stored.priority:
            heappush(self._returned, (stored.priority, stored.seq, stored))
        else:
            self._fresh.append(stored)
        if self._waiting:
            self.wake()

    def put_back(self, stored: Stored, due: float | None = None) -> None:
        """A message that was handed out: to its old place, at once or later."""
        if due is not None:
            self.put(stored, due)
            return
        heappush(self._returned, (stored.priority, stored.seq, stored))
        if self._waiting:
            self.wake()

    def take(self, limit: int, max_bytes: int) -> list[Stored]:
        """The first at most `limit`, of at most `max_bytes` together (a larger one comes alone); maybe none."""
        if self._delayed:
            self._promote()
        fresh = self._fresh
        count = min(limit, len(fresh))
        if self._returned or count * self._largest > max_bytes:
            return self._take_merged(limit, max_bytes)
        popleft = fresh.popleft
        return [popleft() for _ in range(count)]

    def _take_merged(self, limit: int, max_bytes: int) -> list[Stored]:
        fresh, returned = self._fresh, self._returned
        taken: list[Stored] = []
        room = max_bytes
        while len(taken) < limit and (fresh or returned):
            from_heap = bool(returned) and (not fresh or returned[0][:2] < (0, fresh[0].seq))
            first = returned[0][2] if from_heap else fresh[0]
            room -= first.size
            if room < 0 and taken:
                break
            taken.append(heappop(returned)[2] if from_heap else fresh.popleft())
        return taken

    def waiting_messages(self) -> list[Stored]:
        """All that wait here, in the order they would be taken, the delayed ones last."""
        ready = [(0, s.seq, s) for s in self._fresh] + self._returned
        return [entry[2] for entry in sorted(ready)] + [entry[2] for entry in sorted(self._delayed)]

    def remove(self, seqs: set[int]) -> list[Stored]:
        """Take these out, whether ready or delayed; return those that were here."""
        gone = [stored for stored in self.waiting_messages() if stored.seq in seqs]
        if gone:
            self._fresh = deque(s for s in self._fresh if s.seq not in seqs)
            self._returned = sorted(e for e in self._returned if e[1] not in seqs)
            self._delayed = sorted(e for e in self._delayed if e[1] not in seqs)
        return gone

    # Members and waiting

    def join(self, member: object, ordered: bool) -> None:
        """`member` competes from now on. The first ordered one owns the queue until it leaves."""
        self._members[member] = ordered
        if ordered and self.owner is None:
            self.owner = member

    def leave(self, member: object) -> None:
        """`member` is gone; if it owned the queue, the ordered member that has stood by longest takes over."""
        self._members.pop(member, None)
        self.interrupt(member)
        if self.owner is member:
            self.owner = next((m for m, ordered in self._members.items() if ordered), None)
        self.wake()

    def serves(self, member: object) -> bool:
        """Whether `member` may take: everybody where nobody owns the queue."""
        return self.owner is None or self.owner is member

    async def wait(self, member: object) -> None:
        """Until there may be something for `member`, or it was interrupted."""
        waiter = self._waiting[member] = asyncio.get_running_loop().create_future()
        self._set_timer()
        try:
            await waiter
        finally:
            if self._waiting.get(member) is waiter:
                del self._waiting[member]

    def interrupt(self, member: object) -> None:
        """End the wait of `member`, whatever there is."""
        waiter = self._waiting.pop(member, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def wake(self) -> None:
        """Wake whoever has waited longest, if there is something to take. Who has taken calls it for the next."""
        if not self._waiting or not (self._fresh or self._returned):
            return
        member = self.owner if self.owner is not None else next(iter(self._waiting))
        self.interrupt(member)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._delayed and self._waiting:
            pause = max(0.0, self._delayed[0][0] - self.clock())
            self._timer = asyncio.get_running_loop().call_later(pause, self._on_timer)

    def _on_timer(self) -> None:
        # A loop may call a little early, by the resolution of its own clock: then nothing is due yet, and the timer is
        # set again.
        self._timer = None
        self._promote()
        self.wake()
        self._set_timer()

    def _promote(self) -> None:
        delayed, now = self._delayed, self.clock()
        while delayed and delayed[0][0] <= now:
            stored = heappop(delayed)[2]
            heappush(self._returned, (stored.priority, stored.seq, stored))


class Store:
    """All topics of one memory broker, or of all that share a name."""

    __slots__ = (
        "__weakref__",
        "_connections",
        "_loop",
        "_made_room",
        "_seq",
        "bytes",
        "clock",
        "count",
        "tag",
        "topics",
        "turn",
    )

    def __init__(self) -> None:
        self.topics: dict[str, dict[str, Queue]] = {}
        self.clock = clock
        self.count = 0
        self.bytes = 0
        self.turn = asyncio.Lock()
        self._made_room: asyncio.Future[None] | None = None
        self.tag = 0  # the number of the next delivery, over all sources
        self._seq = 0
        self._connections = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def enter(self) -> None:
        """One more connection. Raises `BrokerRefused` when another event loop has one: nothing here is locked."""
        loop = asyncio.get_running_loop()
        if self._connections and self._loop is not loop:
            raise BrokerRefused("this memory broker is in use by another event loop; give each loop one of its own")
        if self._loop is not loop:
            self._loop, self.turn, self._made_room = loop, asyncio.Lock(), None
        self._connections += 1

    def leave(self) -> None:
        self._connections -= 1

    # Topics and their queues

    def queues(self, name: str) -> dict[str, Queue]:
        """The queues of a topic by group; an unclaimed one where nobody has subscribed."""
        queues = self.topics.get(name)
        if queues is None:
            queues = self.topics[name] = {UNCLAIMED: Queue(name, UNCLAIMED, self.clock)}
        return queues

    def register(self, name: str, group: str) -> Queue:
        """The queue of `group`, made where there is none; the topic's first group adopts what was published before."""
        queues = self.queues(name)
        queue = queues.get(group)
        if queue is None:
            queue = queues.pop(UNCLAIMED, None) or Queue(name, group, self.clock)
            queue.group = group
            queues[group] = queue
        return queue

    def has_groups(self, name: str) -> bool:
        """Whether anybody has subscribed to this topic."""
        return any(group != UNCLAIMED for group in self.topics.get(name, ()))

    def withdraw(self, name: str, group: str, leave: bool) -> int:
        """Forget a group and what waits for it; `leave`: the topic goes on to keep what is published."""
        queue = self.topics.get(name, {}).pop(group, None)
        if queue is None:
            return 0
        gone = queue.remove({stored.seq for stored in queue.waiting_messages()})
        self.free(len(gone), sum(stored.size for stored in gone))
        if not self.topics[name]:
            if leave:
                self.topics[name] = {UNCLAIMED: Queue(name, UNCLAIMED, self.clock)}
            else:
                del self.topics[name]
        return len(gone)

    # Messages

    def add(self, message: Outgoing, size: int, stamp: float) -> None:
        """Store one message for every group of its topic."""
        due = self.clock() + message.delay if message.delay > 0 else None
        self._put(message, size, stamp, None, due)

    def bury(self, stored: Stored, attempt: int, queue: Queue, name: str, outcome: DeadLetter) -> None:
        """Move a message that `queue` handed out, and that failed at `attempt`, to the dead letters at `name`.

        Not held up by the limits: its room is already taken, and settling must not wait.
        """
        headers = dead_letter_headers(
            stored.headers, outcome.reason, outcome.error_type, stored.name, queue.group, attempt
        )
        letter = Outgoing(
            name=name, body=stored.body, message_id=stored.message_id, key=stored.key, headers=headers,
            priority=stored.priority,
        )  # fmt: skip
        self._put(letter, stored.size, stored.timestamp, None, None)
        self.free(1, stored.size)

    def unbury(self, letter: Stored) -> bool:
        """Put a dead letter back where it came from, for the group that failed; False where it does not say."""
        # Anybody may have published here: what is not text names no queue.
        name, group = (_text(letter.headers.raw(header)) for header in (ORIGIN, ORIGIN_GROUP))
        if not name or not group:
            return False
        again = Outgoing(
            name=name, body=letter.body, message_id=letter.message_id, key=letter.key,
            headers=original_headers(letter.headers), priority=letter.priority,
        )  # fmt: skip
        self._put(again, letter.size, letter.timestamp, [self.register(name, group)], None)
        return True

    def _put(
        self, message: Outgoing, size: int, stamp: float, queues: Iterable[Queue] | None, due: float | None
    ) -> None:
        """Into these queues; None: those of its name."""
        self._seq += 1
        for queue in self.queues(message.name).values() if queues is None else queues:
            stored = Stored(
                self._seq, queue.name, message.body, message.message_id, message.key, message.headers,
                message.priority, stamp, size,
            )  # fmt: skip
            queue.put(stored, due)
            self.count += 1
            self.bytes += size

    # Room

    def free(self, count: int, size: int) -> None:
        """So many messages of so many bytes together are gone."""
        self.count -= count
        self.bytes -= size
        self.nudge()

    def nudge(self) -> None:
        """Let the publisher that waits for room look again."""
        if self._made_room is not None and not self._made_room.done():
            self._made_room.set_result(None)

    async def until_freed(self) -> None:
        """Until a message has gone. Only who holds `turn` waits here, so publishers are served in order."""
        self._made_room = asyncio.get_running_loop().create_future()
        try:
            await self._made_room
        finally:
            self._made_room = None


def _text(value: bytes | None) -> str:
    try:
        return (value or b"").decode()
    except UnicodeDecodeError:
        return ""


def as_messages(stored: Sequence[Stored]) -> list[Message]:
    """Stored messages as a person sees them."""
    return [
        Message(
            name=s.name, body=s.body, message_id=s.message_id, key=s.key, attempt=s.attempt + 1,
            timestamp=s.timestamp, raw_headers=s.headers,
        )
        for s in stored
    ]  # fmt: skip


def now() -> float:
    """When a message was published, in seconds since 1970."""
    return time.time()
