"""What a subscriber gets: a delivery, made of what came over the channel."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TypeAlias

from streamfw.broker import Delivery, Order
from streamfw.message import Headers

from .channel import FieldValue, Properties, RawDelivery
from .headers import ATTEMPT, FROM, LEFT, key_of, malformed, visible_headers
from .queue import KeyFrom
from .retry import Ladder

__all__ = ["Make", "RabbitDelivery", "left_of", "maker_of"]


class RabbitDelivery(Delivery, gc=False, kw_only=True):
    """`tag` means something on the channel of that `epoch` only."""

    epoch: int
    tag: int
    raw: RawDelivery
    properties: Properties

    @staticmethod
    def decode_headers(raw: object) -> Headers:
        """See `Message.decode_headers`."""
        return raw if isinstance(raw, Headers) else visible_headers(raw) if isinstance(raw, Properties) else Headers()

    @property
    def exchange(self) -> str:
        """The exchange it was published to; empty for the default one, and where it cannot be read."""
        return self._came_by()[0]

    @property
    def routing_key(self) -> str:
        """The routing key it was published with; empty where it cannot be read."""
        return self._came_by()[1]

    @property
    def redelivered(self) -> bool:
        """The server has given it to somebody before."""
        return self.raw.redelivered

    def _came_by(self) -> tuple[str, str]:
        try:
            return _origin(self.raw, self.properties.headers)
        except ValueError:
            return "", ""


Make: TypeAlias = Callable[[RawDelivery, int], RabbitDelivery]


def _origin(raw: RawDelivery, table: Mapping[str, FieldValue]) -> tuple[str, str]:
    """Exchange and routing key of the first publish: a pause changes both."""
    told = table.get(FROM)
    if isinstance(told, list) and len(told) == 2:
        return str(told[0]), str(told[1])
    return raw.exchange, raw.routing_key


def maker_of(name: str, ordered_by: Order | None, queue: str, key: KeyFrom, ladder: Ladder | None) -> Make:
    """What makes the deliveries of a subscription to `name`, of what comes from `queue`."""
    by_routing_key = key == "routing_key"
    by_key = ordered_by == "key"
    whole: Hashable | None = queue if ordered_by == "partition" else None

    def make(raw: RawDelivery, epoch: int) -> RabbitDelivery:
        table: Mapping[str, FieldValue] = {}
        headers: Headers | Properties
        try:
            headers = properties = raw.properties
            table = properties.headers
        except ValueError as error:  # the sender's mistake: the message is there all the same
            properties = Properties()
            headers = malformed(error)
        key, attempt = None, 1
        if table:
            key = key_of(table)
            if ATTEMPT in table:
                attempt = _attempt(raw, table, ladder)
        if key is None and by_routing_key:
            key = _routing_key(raw, table) or None  # empty: not there, or no text
        return RabbitDelivery(
            name=name,
            body=raw.body,
            message_id=properties.message_id or "",
            key=key,
            attempt=attempt,
            timestamp=properties.timestamp or 0.0,
            raw_headers=headers,
            lane=key if by_key else whole,
            epoch=epoch,
            tag=raw.tag,
            raw=raw,
            properties=properties,
        )

    return make


def _routing_key(raw: RawDelivery, table: Mapping[str, FieldValue]) -> str | None:
    try:
        return _origin(raw, table)[1]
    except ValueError:
        return None


def _came_from(raw: RawDelivery, ladder: Ladder | None) -> bool:
    try:
        return ladder is not None and ladder.is_from(raw.exchange)
    except ValueError:
        return False


def _attempt(raw: RawDelivery, table: Mapping[str, FieldValue], ladder: Ladder | None) -> int:
    """Only our own retry queues may say it: from anybody else it could be forged."""
    value = table[ATTEMPT]
    return value if type(value) is int and value > 1 and _came_from(raw, ladder) else 1


def left_of(delivery: RabbitDelivery, ladder: Ladder) -> float:
    """Seconds that a message is still to wait, which came from our retry queues."""
    try:
        value = delivery.properties.headers.get(LEFT)
    except ValueError:
        return 0.0
    return float(value) if isinstance(value, int) and _came_from(delivery.raw, ladder) else 0.0
