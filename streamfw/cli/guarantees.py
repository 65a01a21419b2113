"""What a broker's capabilities mean for a subscriber, in plain words."""

from __future__ import annotations

from collections.abc import Sequence

from streamfw.broker import Capabilities

__all__ = ["guarantees"]

_SETTLEMENT = {
    "immediate": "at once: an outcome is durable when it is settled",
    "grouped": "in groups: outcomes are durable when the claim that took their messages ends",
    "positional": "by position: an outcome is durable when the position behind it is committed; after a crash, what "
    "was done beyond the committed position is done again",
    "sent": "sent: an outcome is on its way when it is settled; if the connection breaks then, the message comes again",
}


def guarantees(
    capabilities: Capabilities, in_memory: bool = False, whole: Capabilities | None = None
) -> Sequence[tuple[str, str]]:
    """What the capabilities of a subscription mean, as pairs of a subject and plain words.

    `in_memory`: its messages live in the process, which no capability says. `whole`: the broker's capabilities, where
    those of the subscription may differ.
    """
    survives = (
        "at least once while the process lives; messages are in memory and die with it"
        if in_memory
        else "at least once: a message whose handler did not finish is delivered again, also after a crash"
    )
    return (
        ("delivery", survives),
        ("settlement", "at once, in memory" if in_memory else _SETTLEMENT[capabilities.settlement]),
        ("retries", _retries(capabilities)),
        ("delays", _delays(capabilities.delay)),
        ("attempts", _attempts(capabilities, whole or capabilities, in_memory)),
        (
            "dead letters",
            "moved by the broker in one step"
            if capabilities.dead_letter
            else "published and confirmed first, then the original is settled: a crash in between leaves both",
        ),
        ("order", _order(capabilities)),
        (
            "transactions",
            "yes: with transactional=True the handler's writes and the end of its message are one"
            if capabilities.transactions
            else "none",
        ),
        (
            "first publish",
            "what is published before any group subscribed is kept for the first one"
            if capabilities.kept
            else "what is published before any group subscribed is refused (Unroutable)",
        ),
        (
            "largest body",
            "no limit of the broker's own"
            if capabilities.max_body is None
            else f"{capabilities.max_body:,} bytes; a larger one is refused",
        ),
    )


def _attempts(capabilities: Capabilities, whole: Capabilities, in_memory: bool) -> str:
    if capabilities.attempts == "durable":
        return "counted by the broker: a crash does not start the count again"
    if whole.attempts == "durable":
        return (
            "deliveries are counted by the broker, also across a crash; but an ordered message waits for its retry in "
            "the process that has it, and that one counts it: a crash forgets those retries, not the deliveries"
        )
    if capabilities.retry and not in_memory:
        return (
            "counted in this process, and kept with a message that is given back for its pause: a crash forgets those "
            "made since then"
        )
    return "counted in this process: a crash starts the count again"


def _retries(capabilities: Capabilities) -> str:
    given_back = "given back to the broker: any process of the group may do the next attempt"
    kept = "kept in this process for their pause; a crash meanwhile makes them come at once"
    if capabilities.retry and capabilities.retry_after > 0:
        return f"from pauses of {capabilities.retry_after:g} s on {given_back}; shorter ones are {kept}"
    return given_back if capabilities.retry else kept


def _delays(granularity: float | None) -> str:
    if granularity is None:
        return "no delayed publishing"
    unit = f"{granularity * 1000:g} ms" if granularity < 1 else f"{granularity:g} s"
    return f"never early, and late by about {unit} at most while the consumers keep up"


def _order(capabilities: Capabilities) -> str:
    if not capabilities.ordered_by:
        return "none over the processes of a group"
    orders = " or ".join(sorted(capabilities.ordered_by))
    return f"over all processes of a group, by {orders}, where ordered_by= asks for it"
