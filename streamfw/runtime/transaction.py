"""Handlers inside the transaction that also ends their message."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from streamfw.broker import Source
from streamfw.errors import BrokerError, SettleError
from streamfw.handler import Call
from streamfw.outcome import ACK, RELEASE, SETTLED, Outcome, Policy

__all__ = ["transactional"]

logger = logging.getLogger("streamfw")


def transactional(call: Call, source: Callable[[], Source], policy: Policy, batch: bool) -> Call:
    """`call` inside `Source.transaction`: an acknowledgement is settled in it; anything else rolls it back and is
    settled like any other outcome. A batch has one outcome."""

    async def call_in_transaction(message: Any) -> Any:
        deliveries: Sequence[Any] = message.messages if batch else (message,)
        try:
            async with source().transaction(deliveries) as unit:
                message.unit = unit
                try:
                    result = await call(message)
                finally:
                    message.unit = None
                outcome = _one_outcome(result, message, policy, batch)
                if outcome is not ACK:
                    return outcome  # leaving without finish rolls back
                await unit.finish(ACK)
        except SettleError as error:
            logger.warning("%s; its transaction was rolled back", error)
            for delivery in deliveries:
                delivery.lost = True
        except BrokerError as error:
            if not error.transient:
                raise
            # It may have been committed. The message is done again here, and fenced: then it is not ours any more.
            logger.warning("the transaction of message %s broke: %s", deliveries[0].message_id, error)
            return RELEASE
        return SETTLED

    return call_in_transaction


def _one_outcome(result: Any, message: Any, policy: Policy, batch: bool) -> Outcome:
    if result is None:
        return ACK
    if batch:
        if isinstance(result, Outcome):
            return result
        raise TypeError("a transactional batch has one outcome: return nothing or one, or raise")
    return policy.outcome(message, result)
