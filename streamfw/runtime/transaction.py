"""Handlers inside the transaction that also ends their message."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from streamfw.broker import Source
from streamfw.errors import BrokerError, PartialFailure, SettleError
from streamfw.handler import Call
from streamfw.observe.logs import about
from streamfw.outcome import ACK, RELEASE, SETTLED, Ack, Outcome, as_outcome
from streamfw.outlet import TRANSACTION
from streamfw.texts import one_line

__all__ = ["transactional"]

logger = logging.getLogger("streamfw")
TOO_OFTEN = 3  # broken transactions of one message


def transactional(call: Call, source: Callable[[], Source], batch: bool) -> Call:
    """`call` inside `Source.transaction`: an acknowledgement is settled in it; anything else rolls it back and is
    settled like any other outcome. A batch has one outcome.

    What the transaction itself raises is told apart from what the handler raises (which may be a broker's error, too):
    the handler's is a failure; a transaction that broke counts for nothing, and the message is done again here. It may
    have been committed: then the repetition is fenced, for the message is not ours any more.
    """

    broken = _Broken()

    async def call_in_transaction(message: Any) -> Any:
        deliveries: Sequence[Any] = message.messages if batch else (message,)
        failure: BaseException | None = None
        try:
            async with source().transaction(deliveries) as unit:
                message.unit = unit
                token = TRANSACTION.set(unit) if unit.publishes else None
                try:
                    outcome = _one_outcome(await _result(call, message), batch)
                except BaseException as error:
                    failure = error
                    raise
                finally:
                    message.unit = None
                    if token is not None:
                        TRANSACTION.reset(token)
                if outcome is not ACK:
                    return outcome  # leaving without finish rolls back
                await unit.finish(ACK)
        except PartialFailure as partial:
            # Everything was rolled back, so nothing of the batch may be acknowledged.
            raise _first_error(partial) from partial
        except SettleError as error:
            if error is failure:
                raise
            logger.warning("%s; its transaction was rolled back", error, extra=about(error.delivery))
            error.delivery.lost = True
            return RELEASE  # of a batch, the others are still ours
        except BrokerError as error:
            if error is failure or not error.transient:
                raise
            first = deliveries[0]
            identity = one_line(first.message_id)
            logger.warning("the transaction of message %s broke: %s", identity, error, extra=about(first))
            if not broken.again(first.message_id):
                return RELEASE
            raise  # not the server, so often in a row: what its handler does to its connection is a failure of it
        finally:
            failure = None  # no cycle through this frame
        return SETTLED

    return call_in_transaction


class _Broken:
    """Counts how often in a row the transaction of a message broke."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def again(self, message_id: str) -> bool:
        """One more; whether it were too many to blame the server."""
        if len(self._counts) > 1000:  # a server that goes away breaks many, once each
            self._counts.clear()
        count = self._counts.get(message_id, 0) + 1
        if count >= TOO_OFTEN:
            self._counts.pop(message_id, None)
            return True
        self._counts[message_id] = count
        return False


async def _result(call: Call, message: Any) -> Any:
    """What the handler returned, or the outcome that it raised: both mean the same, so an `Ack` commits either way."""
    try:
        return await call(message)
    except Outcome as raised:
        return raised


def _one_outcome(result: Any, batch: bool) -> Outcome:
    """Not by the policy yet: the worker asks that, of whatever comes out of here."""
    if result is None:
        return ACK
    outcome = as_outcome(result)
    if outcome is None and batch:
        raise TypeError("a transactional batch has one outcome: return nothing or one, or raise")
    return ACK if outcome is None or isinstance(outcome, Ack) else outcome


def _first_error(partial: PartialFailure) -> BaseException:
    for _, error in sorted(partial.errors.items()):
        if isinstance(error, BaseException):
            return error
    return TypeError("a transactional batch has one outcome: it cannot fail in part")
