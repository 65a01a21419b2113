"""Who of a group reads a stream, from where on, and what of it is stored.

Theory of operation
    What we have of a stream does not depend on the channel it came over: it is settled in a watermark of ours
    (`streams.Reading`), and stored by a bookmark of ours. So when the channel ends, everything stays ours until
    somebody else has taken the bookmark, and the next channel reads on where what we have ends.

    One task goes round (`keep_reading`): connect, declare, take the group's lock, see whether what we have is still
    ours, begin a reader, wait for its end. While there is no reader, the pump is held: another process may have taken
    over, and to begin here what that one begins as well would undo the order. Without the lock we stand by, and try
    again.

    Another task (`keep_storing`) stores the watermark some times a second. When it hears that the bookmark was taken,
    what is out is lost: the pump is told in that very call, and a late settlement finds its `Reading` over.

    A stream may be deleted and made anew under the same name. It is another one for sure when it was not there before
    it was declared, and when a reader that goes on does not find what it has read (`stream_entry`). Then the group
    begins where a new one would.

    `move` (a seek) pauses the reader first, so that nothing of the old place is taken for the new one, and stores
    before it moves. Storing and moving exclude each other (`_storing`), and so do beginning a reader and moving
    (`_opening`).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from streamfw.broker import Delivery, Health, Subscription
from streamfw.ending import ended
from streamfw.errors import BrokerError, BrokerUnavailable
from streamfw.runtime.settler import backoff
from streamfw.runtime.signal import Signal

from .epochs import Epoch, Epochs
from .offsets import Bookmark, OffsetStore, Place
from .settings import Settings
from .stream_entry import Entry
from .stream_reader import Reader, Survey, survey
from .stream_witness import Witness
from .streams import WINDOW_LIMIT, Reading, Start, Stream, StreamDelivery, lock_name, stream_plan
from .topology import declare, declared, is_missing

__all__ = ["Readership"]

log = logging.getLogger("streamfw.rabbit")

STORE_EVERY: Final = 0.2  # seconds
STAND_BY: Final = 1.0  # seconds between two tries of a standby
LOOK: Final = 5.0  # seconds between two looks at where the stream ends
DOUBT: Final = 10.0  # seconds after which a stream that ends before what was read of it is taken for another one
_SOON: Final = 0.05
_SLICE: Final = 1.0
_PAUSE: Final = 2.0  # seconds between two attempts, at most, while there is a connection
_MOST: Final = 65535  # AMQP's prefetch has 16 bits


class Readership:
    """Of one subscription. `wake` is told when there is something to take, or nothing more to wait for.

    - `reader`: what reads; None: nobody here does. `reading`: what we have, with or without a reader.
    - `end`: of the stream, as last looked at.
    - `tick`: tells to store now.
    - `entry`: how the reader goes on.
    - `stores`: how often something was stored.
    """

    def __init__(
        self, subscription: Subscription, stream: Stream, settings: Settings, consuming: Epochs, wake: Signal
    ) -> None:
        assert isinstance(stream.store, OffsetStore)
        self._stream, self._settings, self._consuming, self._wake = stream, settings, consuming, wake
        self._subscription, self._plan = subscription, stream_plan(subscription, stream, settings)
        self._lock_name = lock_name(stream.name, subscription.group)
        self._prefetch = min(stream.prefetch or subscription.prefetch, _MOST)
        self._bookmark: Bookmark = stream.store.open(Place(settings.vhost, stream.name, subscription.group))
        self._opening, self._storing = asyncio.Lock(), asyncio.Lock()
        self.reader: Reader | None = None
        self.reading: Reading | None = None
        self.tick, self._ended = Signal(), Signal()
        self.end = self.stores = 0
        self._declared: Epoch | None = None
        self._anew = False  # it was not there before we declared it, and nothing was made of that yet
        self.entry = Entry(0, sure=True)
        self._held = self._stands_by = self._ousted = False
        self._ended_one: Reader | None = None  # to be closed: its channel may be open, and hold the lock
        self._why = "not open yet"
        self._trouble = ""

    # -- beginning

    async def begin(self, epoch: Epoch) -> bool:
        """Read, or (False) stand by. Raises a `BrokerError`."""
        async with self._opening:
            await self._bury()
            if self._declared is not epoch:
                self._anew |= await is_missing(self._consuming, self._plan)
                await declare(self._consuming, self._plan, epoch.server_version)
                self._declared = epoch
            reader = await Reader.locked(
                epoch, self._stream.name, self._lock_name, self._prefetch, self._settings.connect_timeout
            )
            if reader is None:
                await self._stand_by()
                return False
            try:
                with declared(self._plan):
                    await self._read_on(reader, epoch)
            except BaseException as error:
                if isinstance(error, BrokerUnavailable):
                    self._declared = None  # it may be gone
                await reader.close()
                raise
            return True

    async def _bury(self) -> None:
        reader, self._ended_one = self._ended_one, None
        if reader is not None:
            await reader.close()

    async def _stand_by(self) -> None:
        if not self._stands_by:
            log.info("%s: standing by: another process of the group reads it", self._plan.where)
        self._stands_by, self._anew = True, False  # it is for that one to see
        await self._look_whether_ours()  # the lock may be that of our own last connection

    async def _read_on(self, reader: Reader, epoch: Epoch) -> None:
        await self._look_whether_ours()
        sure = self.reading is None and await self._take(epoch)
        assert self.reading is not None
        if self._anew:
            async with self._storing:
                await self._store_and_move(self.reading, await self._start("it was not there any more", epoch))
            self._anew, sure = False, True
        reader.wake, reader.ended = self._wake.set, self._reader_ended
        await self._begin_at(reader, self.reading, sure)
        self.reader, self._stands_by, self._why = reader, False, ""
        if self._held:
            self._held = False
            self._subscription.pump.release()
        self._wake.set()

    async def _begin_at(self, reader: Reader, reading: Reading, sure: bool) -> None:
        self.entry = Entry(reading.mark.end, reading.trail.last, sure)
        await reader.begin(self.entry.asked_for)

    async def _look_whether_ours(self) -> None:
        async with self._storing:
            if self.reading is not None and not await self._bookmark.is_ours():
                self._lose()

    async def _take(self, epoch: Epoch) -> bool:
        """Take the bookmark; whether nothing was stored. From now on there is: so nothing that is published while the
        group is away is left out."""
        async with self._storing:
            self._bookmark.witness = None
            stored = await self._bookmark.take()
            if stored is not None and not self._anew:
                witness = Witness.of(self._bookmark.witness, stored, WINDOW_LIMIT)
                self.reading = Reading(stored, stored, witness)
                return False
            start = await self._start("it was not there any more" if stored else "", epoch)
            self._bookmark.witness = None
            ours = await self._bookmark.store(start)
            self._anew = False
            if not ours:
                raise BrokerUnavailable(f"{self._plan.where}: another process has just taken its offset")
            self.reading = Reading(start, start)
            return True

    async def _start(self, anew: str, epoch: Epoch | None = None) -> int:
        """Where a group begins, of a stream which is another one as `anew` says."""
        start = 0 if self._stream.offset == "first" else await self.resolve(self._stream.offset, epoch)
        if anew:
            told = "%s: it was deleted and made anew (%s); the group begins it at offset %d"
            log.warning(told, self._plan.where, anew, start)
        return start

    async def resolve(self, start: Start, epoch: Epoch | None = None) -> int:
        """The offset of a place to begin at. Raises a `BrokerError`."""
        return (await self._surveyed(start, epoch)).resolve(start)

    async def _surveyed(self, start: Start, epoch: Epoch | None = None) -> Survey:
        timeout = self._settings.connect_timeout
        found = await survey(epoch or await self._consuming.connected(timeout), self._stream.name, start, timeout)
        self.end = found.end or 0
        return found

    # -- the end of a reader, and of what we have

    def _reader_ended(self) -> None:
        """Called from within the channel."""
        reader, self.reader = self.reader, None
        if reader is None:
            return
        self._why, self._ended_one = reader.why or "", reader
        if reader.gone:
            self._declared = None
        self._held = True
        self._subscription.pump.hold()
        self.tick.set()  # whoever takes over now is not to repeat what is done
        self._ended.set()

    def _lose(self) -> None:
        """Another process has taken the bookmark; or it was in the stream, which is gone."""
        reading, self.reading = self.reading, None
        why = "it was deleted and made anew" if self._anew else "another process has taken over"
        self._anew = False
        if reading is not None:
            self._ousted = True
            log.warning("%s: %s; what is out is lost", self._plan.where, why)
            self._over(reading)

    def _over(self, reading: Reading) -> None:
        reading.live = self._held = False
        self._subscription.pump.hold()
        self._subscription.pump.release(drop=_is_over)

    # -- going round

    async def keep_reading(self) -> None:
        """Until it is cancelled, or nothing can help any more: then it raises a `BrokerError`."""
        attempt = 0
        while True:
            try:
                if self.reader is not None:
                    await self._until_its_end(self.reader)
                if self._ousted:  # by whom has the lock as well, or believes so: not at once again
                    self._ousted = False
                    await asyncio.sleep(STAND_BY)
                if not await self.begin(await self._connected()):
                    await asyncio.sleep(STAND_BY)
                attempt = 0
            except BrokerError as error:
                await self._failed(error)
                log.log(logging.DEBUG if attempt else logging.INFO, "%s: %s; trying again", self._plan.where, error)
                await asyncio.sleep(min(backoff(attempt), _PAUSE))
                attempt += 1

    async def _connected(self) -> Epoch:
        """Wait for the server, however long."""
        while True:
            try:
                return await self._consuming.connected(_SLICE)
            except BrokerUnavailable as error:
                await self._failed(error)

    async def _failed(self, error: BrokerError) -> None:
        """Nobody reads here for now. Who cannot read may not have any more what was read."""
        if not error.transient:
            raise error
        self._why, self._stands_by = str(error), False
        if self.reader is not None:
            return
        try:
            await self._look_whether_ours()
        except BrokerError as of_the_store:
            if not of_the_store.transient:
                raise

    async def _until_its_end(self, reader: Reader) -> None:
        while reader.why is None:
            await self._ended.wait_for(_SOON if self.entry.blocked and not self.entry.is_short else LOOK)
            if reader.why is None and not (self.entry.sure and reader.at_the_end):
                await self._look(reader)

    # -- where the stream begins and ends

    def came(self, first: StreamDelivery) -> bool:
        """The first message that a reader brings of what it asked for; whether to take it. What it means that it is
        another one is looked at soon."""
        taken = self.entry.came(first.seen())
        if not self.entry.sure:
            self._ended.set()
        return taken

    async def _look(self, reader: Reader) -> None:
        found = await self._surveyed("next")
        entry, reading = self.entry, self.reading
        if reading is None or self.reader is not reader or entry.sure:
            return
        was_short = entry.is_short
        verdict = entry.look(found.first, found.end, asyncio.get_running_loop().time(), DOUBT)
        if entry.is_short and not was_short:
            log.warning("%s: %s, which was read", self._plan.where, entry.why)
        if entry.gone is not None:
            log.error("%s: offsets %d to %d are gone", self._plan.where, *entry.gone)
        if verdict == "another":
            start = await self._start(entry.why)
            if self.entry is entry:  # nobody has moved it meanwhile
                await self.move(start)
        elif verdict == "no telling":
            await self._go_on_without_witness(reader, reading)

    async def _go_on_without_witness(self, reader: Reader, reading: Reading) -> None:
        async with self._opening:
            if self.reader is reader and self.reading is reading:
                await reader.pause()
                reading.trail.forget()
                await self._resume(reader, sure=False)

    # -- moving

    async def move(self, to: int) -> None:
        """Read on from there, and store that first. What is queued is dropped, what runs is marked lost. Raises a
        `BrokerError`; nothing has moved then, unless the store did not answer."""
        async with self._opening:
            reader, reading = self.reader, self.reading
            if reader is None or reading is None:
                who = "another process reads it; seek there" if self._stands_by else f"{self._why}; seek again"
                raise BrokerUnavailable(f"{self._plan.where}: {who}")
            await reader.pause()
            try:
                async with self._storing:
                    await self._store_and_move(reading, to)
            finally:
                await self._resume(reader, sure=reading is not self.reading)

    async def _store_and_move(self, reading: Reading, to: int) -> None:
        reading.committed = None  # if it fails, it may have arrived all the same: store again what holds
        self._bookmark.witness = None
        if not await self._bookmark.store(to):
            self._lose()
            raise BrokerUnavailable(f"{self._plan.where}: another process has taken over; seek there")
        self.reading = Reading(to, to)
        self._over(reading)

    async def _resume(self, reader: Reader, sure: bool) -> None:
        """Go on, from wherever that is now. If that fails the reader ends, and the next one does."""
        try:
            if self.reading is None:
                raise BrokerUnavailable("another process has taken over")
            await self._begin_at(reader, self.reading, sure)
            self._wake.set()
        except BrokerError as error:
            await reader.close(str(error))

    # -- storing

    async def keep_storing(self) -> None:
        """Until it is cancelled, or nothing can help any more: then it raises a `BrokerError`."""
        while True:
            await self.tick.wait_for(STORE_EVERY)
            await self.store()

    async def store(self) -> bool:
        """Store what is settled; whether it is stored. Raises a `BrokerError` that will not pass."""
        async with self._storing:
            reading = self.reading
            if reading is None or (position := reading.look()) == reading.committed:
                return True
            witness = reading.trail.stored
            self._bookmark.witness = None if witness is None else witness.text()
            try:
                ours = await self._bookmark.store(position)
            except BrokerError as error:
                reading.committed = None
                self._note_trouble(error)
                return False
            self._trouble = ""
            if ours:
                reading.committed = position
                self.stores += 1
                return True
            self._lose()
        if self.reader is not None:
            await self.reader.close("another process has taken over")
        return False

    def _note_trouble(self, error: BrokerError) -> None:
        if not error.transient:
            raise error
        if not self._trouble:
            log.warning("%s: its offset cannot be stored: %s; trying again", self._plan.where, error)
        self._trouble = f"its offset cannot be stored: {error}"

    # -- the end

    async def close(self, seconds: float) -> None:
        """Store what is settled, within so many seconds, and leave the rest to others. Never raises for a server that
        is away."""
        storing = asyncio.create_task(self._last())
        await asyncio.wait({storing}, timeout=seconds)
        await ended((storing,))
        reading, self.reading = self.reading, None
        if reading is not None:
            self._over(reading)
        if self.reader is not None:
            await self.reader.close()
        await self._bury()
        await self._bookmark.close()

    async def _last(self) -> None:
        try:
            await self.store()
        except BrokerError as error:
            log.warning("%s: %s", self._plan.where, error)

    def health(self) -> Health:
        """Live is who reads, or stands by."""
        if self._stands_by:
            return Health(True, "standing by: another process of the group reads it")
        if self.reader is None:
            return Health(False, self._why)
        if self.entry.is_short:
            return Health(False, f"{self.entry.why}, which was read")
        return Health(not self._trouble, self._trouble)


def _is_over(delivery: Delivery) -> bool:
    reading: Reading = delivery.reading  # type: ignore[attr-defined]
    return not reading.live
