"""The contract between the core and a broker.

Theory of operation
    A `Broker` is configuration: constructing one does no I/O. `Broker.connect()` yields a `Connection`, and a
    connection opens one `Source` for each subscription. Only connections and sources have I/O.

    The runtime drives a source from one place (the pump):

        open -> fetch, fetch, ...          -> stop -> flush -> close
                   settle, settle, ... (at the same time)

    and these rules make every broker look alike from there:

    - Nobody cancels a `fetch`. Cancelling a claim leaves messages held that nobody saw. `stop()` makes a pending
      fetch return ``()``. A fetch waits until it has something, so it never returns ``()`` otherwise. A claim that
      fails half way returns what it has, or gives it back.
    - `settle` records, and never waits for another delivery. What its return means is declared in
      `Capabilities.settlement`; `flush` waits until all that was recorded is durable.
    - `settle` and `fetch` run at the same time, each at most once.
    - When `fetch` raises a transient `BrokerError`, the runtime waits (full jitter, growing) and calls `reopen`
      until it works, then fetches again. Deliveries that do not survive this are marked `Delivery.lost` by the
      source before `reopen` returns; all others stay ours and are settled on the reopened source.
    - When `settle` raises a transient `BrokerError`, nothing of the group counts as settled, and the runtime calls
      it again with the same group. A source must therefore take a settlement twice: what it has done already is done,
      and no error.
    - An error that belongs to one delivery is *returned* by `settle`, never raised.
    - Messages of one key, from one publisher, are fetched in the order published, and so are those that came back
      without a pause. Over all members of a group, and across failures, this holds only where ordered (`Subscription.
      ordered_by`, `Capabilities.ordered_by`).
    - All of it is called in one event loop. What blocks belongs in a thread.

    To write a broker, implement the four abstract classes below and run `streamfw.testing.conformance` on it;
    ``docs/writing-a-broker.md`` builds one step by step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from typing import Any, ClassVar, Final, Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

from .errors import BrokerError, PublishError, SettleError, Unsupported, redact
from .message import Headers, Message, Outgoing
from .outcome import Outcome

__all__ = [
    "REPLY_PREFIX",
    "Broker",
    "Capabilities",
    "Connection",
    "DeadLetters",
    "Delivery",
    "Health",
    "Order",
    "Placed",
    "Position",
    "PumpControl",
    "Route",
    "Routed",
    "Settlement",
    "Source",
    "Subscription",
    "UnitOfWork",
]

Order = Literal["key", "partition"]
Position: TypeAlias = Literal["earliest", "latest"] | datetime | Mapping[int, int]
"""Where in a log to read from: the first message that is kept, what comes from now on, the first one published at or
after a time (with a time zone), or an offset for each partition that is named."""
REPLY_PREFIX: Final = "streamfw.reply."
"""How the names of reply inboxes begin, on brokers that have no replies of their own."""


class Delivery(Message, gc=False, kw_only=True):
    """A message as a source delivers it. A broker derives from it and adds its own handle (row, offset, tag).

    - `lane`: deliveries of one lane are handled one after another, in the order fetched. The source sets it by
      `Subscription.ordered_by`: the key (or what stands for it), the partition, or None (no order asked).
    - `attempt`: the source sets it, 1 the first, also where its counts are not durable. The runtime counts on in it
      where it tries again in place, so a source that needs the number keeps it in its handle.
    - `unit`: the transaction its handler runs in; set by the runtime, for the handler's time only.
    - `lost`: the source knows that it is not ours any more (a lease that ran out, a revoked partition). A lost
      delivery is not started; the settlement of one whose handler runs changes nothing.
    - `bundle`: deliveries of different bundles never share a batch. None: it makes no difference.
    """

    lane: Hashable | None = None
    lost: bool = False
    unit: Any = None
    bundle: Hashable | None = None

    def origin_place(self) -> Mapping[str, str]:
        """Headers for its dead letter that say where in `name` it was; none by default."""
        return {}


class Settlement(msgspec.Struct, gc=False):
    """A delivery and what became of it: an `Ack`, a `Retry` with its seconds (where `Capabilities.retry`; never None),
    a `Drop` (for a source the same as an `Ack`), a `DeadLetter` (where `Capabilities.dead_letter`), or `RELEASE` (where
    `Capabilities.release`)."""

    delivery: Delivery
    outcome: Outcome


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a broker does by itself. What it does not, the runtime provides (`retry`, `attempts`, `dead_letter`),
    `App.build()` refuses (`ordered_by`, `transactions`), or the broker refuses when it is asked: `Rejected` for a
    `delay`, `TooLarge` above `max_body`, `Unsupported` for the rest. A `priority` is ignored where there are none.

    - `settlement`: what the return of `Source.settle` means. ``immediate``: durable. ``grouped``: durable when the
      claim that took the message ends. ``positional``: durable when the position is committed. ``sent``: on its way.
    - `retry`: takes a single message back, to deliver it again later. If not, the runtime keeps it and tries again in
      place; so it does with pauses below `retry_after` seconds, and with messages of a lane, unless those behind may
      pass (`overtaking`).
    - `longest_pause`: how many seconds a message may wait in the process to be tried again, where the runtime keeps it;
      a server may take back what is out for longer. None: no limit. `App.build()` refuses a policy that waits for
      longer, and a `Retry` that asks for more gets this.
    - `delay`: the granularity in seconds of ``publish(delay=)`` and of `Retry`'s pause: never earlier, and about
      this much later; None: no delayed publishing.
    - `release`: takes a single message back without counting an attempt. If not, only `close` gives back.
    - `attempts`: ``durable`` counts survive the death of a process, and a delivery that died with its process counts.
      The runtime limits what it sees fail; so it is the source that ends a message beyond its `Subscription.attempts`
      that killed its process each time (to the dead letter, without a delivery), and that spares those which only died
      with it. ``process`` counts are this process's own.
    - `dead_letter`: `settle` moves a message to the subscription's dead letter by itself, in one step, with the headers
      named in `streamfw.message` (`ERROR` and those after it) and an attempt of 1 there; and `Connection.dead_letters`
      answers. If not, the runtime publishes it there, and settles the original once that is confirmed; then
      `Connection.dead_letters` may answer all the same.
    - `ordered_by`: the orders that hold over all processes of a group.
    - `priorities`, `transactions`, `replies`, `seek`, `tombstones`: has them. `publishing_transactions`: what a handler
      publishes on this broker is part of its transaction.
    - `priorities_option`: the option of the broker that gives it priorities, for the error of a publish with one.
    - `kept`: what is published before any group has subscribed is kept for the first one; if not, the publisher gets
      `Unroutable`.
    - `prefetch`: how many messages a subscriber starts with, before it adapts.
    - `max_body`: the largest body in bytes; None: no limit of its own.
    """

    settlement: Literal["immediate", "grouped", "positional", "sent"] = "immediate"
    retry: bool = False
    retry_after: float = 0.0
    overtaking: bool = False
    longest_pause: float | None = None
    delay: float | None = None
    release: bool = False
    attempts: Literal["durable", "process"] = "process"
    dead_letter: bool = False
    ordered_by: frozenset[Order] = frozenset()
    priorities: bool = False
    priorities_option: str | None = None
    transactions: bool = False
    publishing_transactions: bool = False
    replies: bool = False
    seek: bool = False
    tombstones: bool = False
    kept: bool = True
    prefetch: int = 100
    max_body: int | None = None


class PumpControl(Protocol):
    """How a source holds the pump that feeds on it, when deliveries are about to move. Costs a comparison a message."""

    def hold(self) -> None:
        """Start nothing new. What runs goes on; what is queued stays queued."""

    async def quiesce(self, seconds: float, finish: Callable[[Delivery], bool] | None = None) -> bool:
        """Wait until nothing runs and what ran is settled, for at most `seconds`; whether that is so. Then what is
        queued and matches `finish` is handled as well, within the same time. Needs `hold` first. Not to be called from
        within `Source.settle`, which it waits for."""

    def release(self, drop: Callable[[Delivery], bool] | None = None) -> None:
        """Go on. What matches `drop` moved elsewhere: what is queued of it is dropped without being settled, and what
        runs is marked `lost`."""

    def take_back(self, wanted: Callable[[Delivery], bool]) -> Sequence[Delivery]:
        """Take out what has not begun and matches `wanted`, in order: it is not begun any more, nor settled, and the
        source may let others have it. What runs stays, and what waits to be tried again."""

    def vouch(self, seconds: float, look: Callable[[], None]) -> None:
        """For sources that hold by time: nothing that is out is lost for so many seconds. Before a handler begins later
        than that, `look` is called, which marks what is lost and vouches again. A source vouches from a timer, well
        within the time; who comes too late is a process that was stopped, or whose event loop a handler blocked. There
        the timers that would have marked it are late as well, and workers must not begin before them."""


Route: TypeAlias = Callable[[str | None, Headers], bool]
"""Whether a message with this key and these headers is taken."""


@runtime_checkable
class Routed(Protocol):
    """A source object that says by which other names messages reach it. Any object that has this method is one.

    Where the server leads what is published to a name by rules (bindings, patterns), `streamfw.testing.TestApp` follows
    them by what the source objects say, so that in memory a message reaches whom it reaches on the server.
    """

    def route(self, name: str) -> Route | None:
        """Which of the messages that are published to `name` reach it; None: that name does not lead to it.

        Names that lead somewhere lead nowhere else, but to those who subscribe to them as plain names. Its own name,
        where it leads nowhere, leads to it; that of its dead letters never does. A message that is taken is taken once.
        Raises `ValueError` for a malformed object, and `Unsupported` where only the server knows.
        """


@runtime_checkable
class Placed(Protocol):
    """A source object that says where its messages wait. Any object that has this method is one; see `Broker.place`."""

    def place(self, group: str) -> Hashable:
        """What holds the messages of a group."""


class Subscription:
    """What a source is opened for: one subscriber's wishes, resolved and checked at build.

    `name` is what was published to and `group` who competes for it (both any text: a broker quotes them, or refuses
    them in `Broker.mistakes`); `source` is the broker's own source object, or None for a plain name. `attempts` counts
    deliveries (None: no limit); `dead_letter` is the name that a dead letter goes to (None: they are discarded).
    `timeout` is what one handler may take, in seconds. `member` names this process for people and is the same for all
    its subscriptions; it may be empty, so it is no identity to hold messages by. `pump` is there from the moment the
    source is opened.

    `workers`, `prefetch`, `max_bytes` and `batch` (its size) are what the runtime keeps by itself; they are here for
    brokers that size something of their own by them.
    """

    __slots__ = (
        "attempts",
        "batch",
        "dead_letter",
        "group",
        "max_bytes",
        "member",
        "name",
        "ordered_by",
        "prefetch",
        "pump",
        "source",
        "timeout",
        "transactional",
        "workers",
    )

    def __init__(
        self,
        name: str,
        group: str = "default",
        *,
        source: object | None = None,
        workers: int = 1,
        ordered_by: Order | None = None,
        attempts: int | None = None,
        dead_letter: str | None = None,
        prefetch: int = 1000,
        max_bytes: int = 64 * 1024 * 1024,
        batch: int | None = None,
        timeout: float | None = None,
        transactional: bool = False,
        member: str = "",
        pump: PumpControl | None = None,
    ) -> None:
        self.name = name
        self.group = group
        self.source = source
        self.workers = workers
        self.ordered_by = ordered_by
        self.attempts = attempts
        self.dead_letter = dead_letter
        self.prefetch = prefetch
        self.max_bytes = max_bytes
        self.batch = batch
        self.timeout = timeout
        self.transactional = transactional
        self.member = member
        self.pump: PumpControl = pump if pump is not None else _NoPump()

    def __repr__(self) -> str:
        return f"Subscription({self.name!r}, group={self.group!r})"


class _NoPump:
    """For a source that is driven without a runtime: nothing runs, so there is nothing to hold."""

    def hold(self) -> None: ...

    async def quiesce(self, seconds: float, finish: Callable[[Delivery], bool] | None = None) -> bool:
        return True

    def release(self, drop: Callable[[Delivery], bool] | None = None) -> None: ...

    def take_back(self, wanted: Callable[[Delivery], bool]) -> Sequence[Delivery]:
        return ()

    def vouch(self, seconds: float, look: Callable[[], None]) -> None: ...


class Health(msgspec.Struct, frozen=True):
    """`ok`, and in one line why or why not (no credentials in it)."""

    ok: bool
    detail: str = ""


class UnitOfWork(ABC):
    """A delivery's (or a batch's) own transaction: what its handler writes through `connection` and the end of its
    messages are one.

    Entered before the handler; `finish` is called once, inside; leaving without it rolls back. The runtime calls it
    for an acknowledgement only: every other outcome leaves without, and is settled like any other then.
    """

    connection: Any
    publishes: ClassVar[bool] = False
    """Whether what the handler publishes on its own broker goes through `publish`, and is seen with the commit or
    never."""

    def belongs_to(self, connection: Connection) -> bool:
        """Whether it was begun on this connection. Asked where it `publishes`."""
        return False

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[PublishError | None]:
        """Publish in this transaction; see `Connection.publish`. Only where it `publishes`."""
        raise Unsupported(f"{type(self).__name__} does not publish")

    @abstractmethod
    async def finish(self, outcome: Outcome) -> None:
        """Settle *in this transaction*. `ACK` commits the handler's writes with the end of the message; any other
        outcome rolls the writes back and then settles.

        Fenced: when the delivery is not ours any more, everything is rolled back and `SettleError` raised.
        """


class Source(ABC):
    """An open subscription. Driven by one pump; see the module's theory of operation.

    `forgot` is set by whoever waits for replies at a reply inbox (`REPLY_PREFIX`). A source whose replies are kept
    nowhere calls it when those to all that was asked until now were lost, with why.
    """

    forgot: Callable[[BrokerError], None] | None = None

    @abstractmethod
    async def fetch(self, limit: int, max_bytes: int) -> Sequence[Delivery]:
        """Wait for messages and return at least one and at most `limit`, and about `max_bytes` of bodies (one message
        may be larger than that; it comes alone). ``()`` only after `stop`.

        Raises a `BrokerError`; after a transient one `reopen` follows, after another the app ends.
        """

    @abstractmethod
    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleError]:
        """Record what became of these deliveries; answer an error for each that was not ours any more.

        Empty means all is well. What the return means is `Capabilities.settlement`. Takes deliveries from before a
        `reopen`, and answers for those that did not survive it. After `close` every delivery has an error, or
        `BrokerClosed` is raised. An outcome that is not declared raises `Unsupported`, and nothing is settled.
        """

    def can_retry(self, delivery: Delivery) -> bool:
        """Whether a `Retry` of this delivery can be settled, where `Capabilities.retry`. If not (a copy of it would be
        larger than what the server takes, say), the runtime keeps it and tries again in place. Must not raise."""
        return True

    @abstractmethod
    async def stop(self) -> None:
        """No new deliveries: a pending `fetch` returns ``()`` soon, and so does every later one. What is out stays
        ours: it can be settled, and nobody else gets it. What a claim under way still brings is given back, or
        returned: nobody handles it any more, and `close` releases it. Twice is once."""

    @abstractmethod
    async def flush(self, deadline: float) -> None:
        """Wait until everything recorded is durable, at most until `deadline` (of the loop's clock, in seconds): then
        return, what is left comes again. No settle is under way."""

    @abstractmethod
    async def close(self) -> None:
        """Release what is unsettled, so that others get it within 10 s (where the server allows it, at once), with no
        attempt counted; free everything. Includes `stop`. Twice is once. Never raises for a connection that is broken
        or closed already."""

    async def reopen(self) -> None:  # noqa: B027 - the default is meant: a source in process has nothing to open
        """Open again after `fetch` raised a transient error; mark what did not survive as lost.

        No fetch is pending meanwhile. Raises a `BrokerError` when it did not work. The default has nothing to open.
        """

    def holds_back(self, delivery: Delivery) -> bool:
        """Whether something behind this delivery, which is not settled, is settled already: it would be repeated if
        this one did not end before the position is committed for the last time. For positional sources; asked while
        their pump is held."""
        return False

    async def seek(self, to: Position) -> None:
        """Read on from elsewhere, in the partitions that are this source's; only where `Capabilities.seek`.

        What is queued is dropped, what runs is marked `Delivery.lost`, and the group's committed position moves, also
        back. Raises a `BrokerError` (nothing has moved then), `ValueError` for a partition that is not this source's.
        """
        raise Unsupported(f"{type(self).__name__} cannot seek")

    def transaction(self, deliveries: Sequence[Delivery]) -> AbstractAsyncContextManager[UnitOfWork]:
        """A transaction of these deliveries' own (one, or a whole batch, which then has one outcome); only where
        `Capabilities.transactions`."""
        raise Unsupported(f"{type(self).__name__} has no transactions")

    def health(self) -> Health:
        """What this source knows of itself, without I/O: whether it is able to deliver."""
        return Health(True)

    def gauges(self) -> Mapping[str, float]:
        """Numbers that go up and down, for the metrics of the app, where ``lag`` becomes ``streamfw_source_lag``; none
        by default. A log has ``lag`` (from what is settled to the ends of its partitions), ``open`` (messages that were
        read and are not settled) and ``partitions``.

        Asked only when somebody reads them, after `Connection.open`, from any thread; no I/O.
        """
        return {}


class Connection(ABC):
    """An open connection to a broker, for the life of an app: it publishes, and opens sources.

    It outlives a cut of the network: what it needs is established again when it is next used. Closing it closes the
    sources that are still open. After that every method, and every method of every source it opened, raises
    `BrokerClosed`; but `Source.health` answers, and `Source.stop` and `Source.close` may simply return.
    """

    @abstractmethod
    async def open(self, subscription: Subscription) -> Source:
        """Register the group and open its source. Raises a `BrokerError`; no delivery is out before it returns.

        Called concurrently for the subscribers of an app, and may be cancelled: then nothing stays open.

        A group stays registered when its sources close: it gets what is published meanwhile. The first group of a name
        gets what was published before (where `Capabilities.kept`), a later one what comes after (or, on a log, all
        that is kept). Sources of one group compete, also two that were opened by one connection. Where nothing is kept,
        it also makes `Subscription.dead_letter` a place that can be published to.
        """

    @abstractmethod
    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[PublishError | None]:
        """Publish, and wait until the broker has accepted; one answer for each message, in order (or an empty
        sequence: all went well).

        Called concurrently, and may be cancelled: then nobody knows. One message that cannot be published fails alone:
        a broker whose statement fails as a whole repeats it message by message. A server that is away is an answer
        too, `Unavailable` or `OutcomeUnknown`; only `BrokerClosed` is raised. Message ids are the publishers' own, and
        may come twice: both are published.
        """

    @abstractmethod
    async def check(self) -> Health:
        """Ask the server. Never raises for a server that is away: that is an unhealthy answer."""

    async def withdraw(self, name: str, group: str) -> int:
        """Forget a group for good, with what waits for it; return how many messages that were.

        A name that loses its last group keeps what is published from then on for the next one, as before its first; a
        reply inbox (`REPLY_PREFIX`) leaves nothing behind.
        """
        raise Unsupported(f"{type(self).__name__} cannot forget a group")

    async def dead_letters(self, name: str) -> DeadLetters:
        """What a person does with the dead letters at `name` (for example ``orders.dead``)."""
        raise Unsupported(f"{type(self).__name__} cannot list dead letters")


class DeadLetters(ABC):
    """The dead letters at one name, for the command line and for programs."""

    @abstractmethod
    async def list(self, limit: int = 100) -> Sequence[Message]:
        """The oldest `limit` of them, with the error and the origin in their headers. Takes nothing away."""

    @abstractmethod
    async def requeue(self, message_ids: Sequence[str] | None = None) -> int:
        """Put them (None: all) back where they came from, for the group that failed only, with their attempts at
        zero; return how many."""

    @abstractmethod
    async def purge(self, message_ids: Sequence[str] | None = None) -> int:
        """Discard them (None: all); return how many."""


class Broker(ABC):
    """A configured broker. Constructing it does no I/O and keeps no password where `repr` shows it.

    It is found by the scheme of its URL: a package registers it in the entry-point group ``streamfw.brokers``. It is
    made as ``Factory(url, **options)``; the options are the keyword-only parameters of its constructor, and the
    configuration checks them by name and annotation. A `ValueError` from the constructor becomes a `ConfigError` with
    the path of its key. It may be connected more than once, also at the same time.
    """

    capabilities: Capabilities = Capabilities()
    reply_patterns: ClassVar[tuple[str, ...]] = (f"{REPLY_PREFIX}*",)
    """The addresses (as `fnmatch` patterns) that handlers reply to unless ``replies_to=`` says otherwise."""

    def __init__(self, url: str) -> None:
        self.url = url

    @abstractmethod
    def connect(self) -> AbstractAsyncContextManager[Connection]:
        """Connect for the life of the context. Raises a `BrokerError` when the server is away or refuses."""

    def capabilities_of(self, subscription: Subscription) -> Capabilities:
        """The capabilities of one subscription, where they depend on its source object."""
        return self.capabilities

    def mistakes(self, subscription: Subscription) -> Iterable[str]:
        """What this broker cannot honour of a subscription, as sentences; asked at build, before any I/O.

        What follows from the capabilities is checked by the core already.
        """
        if subscription.source is not None:
            yield f"{type(subscription.source).__name__} is not a source of {type(self).__name__}"

    def place(self, subscription: Subscription) -> Hashable:
        """What holds the messages of a subscription: those that have the same one compete for them. So it is a mistake,
        told at build, for two of one app that do not have the same name and group. Asked before any I/O, also for
        subscriptions that are mistaken.

        By default each group of a name has its own, unless the source object says otherwise (`Placed`).
        """
        source = subscription.source
        own = (subscription.name, subscription.group)
        return source.place(subscription.group) if isinstance(source, Placed) else own

    def decoder(self, subscription: Subscription, annotation: object) -> Callable[[Any], Any] | None:
        """How this subscription's bodies become `annotation`; None: they are bytes, and the codec does it."""
        return None

    def describe(self) -> str:
        """The broker in a few words: its URL without password."""
        return redact(self.url)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.describe()!r})"
