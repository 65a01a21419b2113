"""`Queue`: what only a Postgres queue has, said in the subscriber's own source object."""

from __future__ import annotations

import msgspec

__all__ = ["Queue"]

# Renewal comes at half of it, and a deadline of the connection must fit before its end.
SHORTEST, LONGEST = 1.0, 86400.0


class Queue(msgspec.Struct, frozen=True):
    """A queue of the standard table: ``@subscriber(Queue("emails", lease=120))``.

    - `name`: what is published to.
    - `lease`: seconds that a row is ours without a renewal (default: the broker's own, 30). Leases are renewed at
      half of it while handlers run, so it is no limit for a handler; it is how long a row waits after its process
      died without a word. Between 1 and 86,400.
    - `form`: how a row is held; this release has ``"lease"``.

    Values are checked when the app is built.
    """

    name: str
    lease: float | None = None
    form: str = "lease"

    def mistakes(self) -> list[str]:
        """What is wrong with it, as sentences."""
        found = []
        if self.form != "lease":
            found.append(f"Queue(form={self.form!r}): this release has form='lease' only")
        if self.lease is not None:
            found += lease_mistakes(self.lease, "Queue(lease=")
        return found


def lease_mistakes(lease: float, where: str) -> list[str]:
    """What is wrong with a lease of so many seconds; `where` opens the sentence and its parenthesis."""
    if isinstance(lease, int | float) and SHORTEST <= lease <= LONGEST:
        return []
    return [f"{where}{lease!r}): seconds from {SHORTEST:g} to {LONGEST:g} are needed"]
