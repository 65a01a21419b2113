"""One partition, for one epoch: from being given it to losing it, and the deliveries that come out of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiokafka import TopicPartition

from streamfw.broker import Delivery
from streamfw.message import NO_HEADERS, ORIGIN_OFFSET, ORIGIN_PARTITION, TOMBSTONE, Headers
from streamfw.positions import Watermark

from .wire import key_of, message_id_in, visible_headers

__all__ = ["KafkaDelivery", "Maker", "Part", "maker_of"]

Maker = Callable[["Part", Iterable[Any]], "list[KafkaDelivery]"]

UNKNOWN = -1


class Part:
    """A partition that is ours, for one epoch.

    A delivery refers to the part it came out of, so a late settlement sees at once that its epoch is over (`live`).

    - `mark`: what of it is open; `committed` is what the group is known to have committed (-1: nothing), and `sent` the
      highest ever sent: a commit that timed out may have arrived all the same.
    - `gaps`: offsets that nobody was given (markers of transactions, what compaction took away).
    - `low`: the watermark as last looked at.
    - `blocking`: the oldest open offset as last looked at (-1: nothing is open), and `since` when (seconds since 1970).
    - `asked`: how many commits of it are on their way; `bound`: a transaction commits it, and nothing may beside that.
    - `shut`: there is no room for more of it, whatever is open.
    - `told`, `told_at`: the facts that were last committed with an offset, and when.
    - `due`: of a retry topic, when what waits may run (ms since 1970), as a heap.
    """

    __slots__ = (
        "asked", "blocking", "bound", "committed", "due", "epoch", "gaps", "live", "low", "mark", "sent", "shut",
        "since", "start", "told", "told_at", "tp",
    )  # fmt: skip

    def __init__(self, tp: TopicPartition, start: int, committed: int, epoch: int) -> None:
        self.tp, self.start, self.epoch = tp, start, epoch
        self.mark = Watermark(start)
        self.committed = self.sent = committed
        self.low = start
        self.blocking, self.since = UNKNOWN, 0.0
        self.told, self.told_at = "", 0.0
        self.gaps = 0
        self.live = True
        self.shut = self.bound = False
        self.asked = 0
        self.due: list[int] = []

    def hold(self, records: Sequence[Any]) -> None:
        """Open the offset of each record, before anybody can settle past it."""
        mark, first, count = self.mark, records[0].offset, len(records)
        gap = first - mark.end
        if records[-1].offset - first == count - 1:
            mark.hold(first, count)
        else:
            for record in records:
                mark.hold(record.offset)
            gap += records[-1].offset - first - count + 1
        self.gaps += gap

    def position(self, read_to: int | None) -> int:
        """What may be committed. With nothing open, that is as far as was read: past the markers at the end, so that
        the lag of a group that has done everything is 0."""
        mark = self.mark
        if read_to is not None and not mark.open and read_to > mark.end:
            self.gaps += read_to - mark.end
            mark.skip(read_to)
        self.low = mark.position
        return self.low

    def full(self, open_limit: int, window_limit: int) -> bool:
        """Whether nothing more is to be read of it for now. The mark moves lazily: look before it is left out."""
        mark = self.mark
        if mark.open >= open_limit or self.shut:
            return True
        if mark.end - self.low < window_limit:
            return False
        self.low = mark.position
        return mark.end - self.low >= window_limit

    def look(self, now: float) -> None:
        """Note which offset is the oldest open one, and since when."""
        low = self.mark.position if self.mark.open else UNKNOWN
        if low != self.blocking:
            self.blocking, self.since = low, now

    def facts(self, done: int = 0) -> str:
        """What others may want to know of it when `done` of what is open are settled; see `status.Facts`."""
        known = f"open={self.mark.open - done} read={self.mark.end}"
        if self.due:
            known += f" due={-(-self.due[0] // 1000)}"
        return known if done or self.blocking == UNKNOWN else f"{known} since={int(self.since)}"

    def is_still_ours(self, committed: int, left: int) -> bool:
        """Whether a partition that came back is as we left it: nobody else has committed meanwhile. `left`: what
        `committed` was when the group was asked, for a transaction may have committed more since."""
        return self.live and left <= committed <= self.sent

    def __repr__(self) -> str:
        return f"Part({self.tp.topic}-{self.tp.partition}, epoch {self.epoch}, from {self.start})"


class KafkaDelivery(Delivery, gc=False, kw_only=True):
    """A record as it is delivered. What most handlers never ask for is made when they do: a key's text, the message id
    (the publisher's, or ``topic-partition-offset`` where it gave none) and the time cost as much as all the rest.

    - `raw_key`, `published`: as they stand in the record; the time is in ms since 1970.
    - `identity`: the message id, from when somebody asked for it or for the headers, which it is left out of.
    """

    offset: int
    raw_key: bytes | None
    published: int
    part: Part
    place: Mapping[str, str] | None = None
    identity: str | None = None

    @property
    def partition(self) -> int:
        """Which partition of its topic it came from."""
        partition: int = self.part.tp.partition
        return partition

    @property
    def headers(self) -> Headers:
        """See `Message.headers`: without those that are only ours."""
        raw = self.raw_headers
        if type(raw) is not Headers:
            self.identity = self.message_id
            raw = self.raw_headers = visible_headers(raw)
        return raw

    if not TYPE_CHECKING:  # to a checker they are the fields of `Message`

        @property
        def message_id(self) -> str:
            """The publisher's, or one made of its place."""
            if self.identity is None:
                raw = self.raw_headers
                self.identity = message_id_in(() if type(raw) is Headers else raw, self.part.tp, self.offset)
            return self.identity

        @property
        def key(self) -> str | None:
            """Its key as text; what is not UTF-8 is kept in surrogate escapes."""
            return key_of(self.raw_key)

        @property
        def timestamp(self) -> float:
            """When it was published (or appended, where the topic says so), in seconds since 1970."""
            return self.published / 1000

    def origin_place(self) -> Mapping[str, str]:
        """See `Delivery.origin_place`."""
        if self.place is not None:  # it came by the retry topic
            return self.place
        return {ORIGIN_PARTITION: str(self.partition), ORIGIN_OFFSET: str(self.offset)}


def maker_of(order: str | None, bundled: bool) -> Maker:
    """What makes deliveries of records, in this order, and bundled by partition or not.

    One comprehension for each: this is what a message costs. It reads all of a record and lets it go, for records are
    objects that the garbage collector looks at, and deliveries are not: to keep a thousand of them cost 0.25 us each.
    """

    def plain(part: Part, records: Iterable[Any]) -> list[KafkaDelivery]:
        name = part.tp.topic
        return [
            KafkaDelivery(
                name=name,
                body=TOMBSTONE if (value := r.value) is None else value,
                raw_headers=r.headers or NO_HEADERS,
                offset=r.offset,
                raw_key=r.key,
                published=r.timestamp,
                part=part,
            )
            for r in records
        ]

    def by_key(part: Part, records: Iterable[Any]) -> list[KafkaDelivery]:
        name = part.tp.topic  # the key's bytes: they hash as well as its text, and need no decoding
        return [
            KafkaDelivery(
                name=name,
                body=TOMBSTONE if (value := r.value) is None else value,
                raw_headers=r.headers or NO_HEADERS,
                lane=(key := r.key),
                offset=r.offset,
                raw_key=key,
                published=r.timestamp,
                part=part,
            )
            for r in records
        ]

    def bundles(part: Part, records: Iterable[Any]) -> list[KafkaDelivery]:
        name = part.tp.topic
        return [
            KafkaDelivery(
                name=name,
                body=TOMBSTONE if (value := r.value) is None else value,
                raw_headers=r.headers or NO_HEADERS,
                bundle=part.tp,
                offset=r.offset,
                raw_key=r.key,
                published=r.timestamp,
                part=part,
            )
            for r in records
        ]

    def by_partition(part: Part, records: Iterable[Any]) -> list[KafkaDelivery]:
        found = plain(part, records)
        for delivery in found:
            delivery.lane = part.tp
        return found

    def bundled_in_order(part: Part, records: Iterable[Any]) -> list[KafkaDelivery]:
        found = makers[order](part, records)
        for delivery in found:
            delivery.bundle = part.tp
        return found

    makers: dict[str | None, Maker] = {None: plain, "key": by_key, "partition": by_partition}
    if not bundled:
        return makers[order]
    return bundles if order is None else bundled_in_order
