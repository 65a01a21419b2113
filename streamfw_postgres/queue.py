"""`Queue`: what only a Postgres queue has, said in the subscriber's own source object."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import msgspec

from streamfw.broker import Subscription
from streamfw.urls import number

__all__ = ["Form", "Queue", "form_of"]

Form: TypeAlias = Literal["lease", "rowlock"]
CONNECTIONS = 2

# Renewal comes at half of it, and a deadline of the connection must fit before its end.
SHORTEST, LONGEST = 1.0, 86400.0


class Queue(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """A queue of the standard table: ``@subscriber(Queue("emails", lease=120))``.

    - `name`: what is published to.
    - `lease`: seconds that a row is ours without a renewal (default: the broker's own, 30). Leases are renewed at
      half of it while handlers run, so it is no limit for a handler; it is how long a row waits after its process
      died without a word. Between 1 and 86,400.
    - `form`: how a row is held (default: the broker's own, ``"lease"``). ``"rowlock"`` holds it by an open transaction:
      faster, and free at once when its process dies; for handlers that take well under a second.
    - `connections`: with ``form="rowlock"``, how many connections claim in turn (default 2; 1 to 16).

    Values are checked when the app is built.
    """

    name: str
    lease: float | None = None
    form: Form | None = None
    connections: int | None = None

    def mistakes(self) -> list[str]:
        """What is wrong with it, as sentences."""
        found = []
        if self.form is not None and self.form not in get_args(Form):
            found.append(f"Queue(form={self.form!r}): one of {', '.join(get_args(Form))} is needed")
        if self.connections is not None:
            found += self._connection_mistakes(self.connections)
        if self.lease is not None:
            found += lease_mistakes(self.lease, "Queue(lease=")
        return found

    def _connection_mistakes(self, connections: object) -> list[str]:
        if self.form == "lease":
            return ["Queue(connections=): a lease needs none of its own; they are for form='rowlock'"]
        if not isinstance(connections, int) or isinstance(connections, bool) or not 1 <= connections <= 16:
            return [f"Queue(connections={connections!r}): a whole number from 1 to 16 is needed"]
        return []


def form_of(subscription: Subscription, default: Form) -> Form:
    """How the rows of a subscription are held."""
    source = subscription.source
    return source.form if isinstance(source, Queue) and source.form is not None else default


def lease_mistakes(lease: float, where: str) -> list[str]:
    """What is wrong with a lease of so many seconds; `where` opens the sentence and its parenthesis."""
    if isinstance(lease, int | float) and SHORTEST <= lease <= LONGEST:
        return []
    return [f"{where}{lease!r}): seconds from {number(SHORTEST)} to {number(LONGEST)} are needed"]
