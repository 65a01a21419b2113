"""The webhook service: one ordered subscriber, a typed handler for each event, a summary.

    python -m examples.webhooks.service        # memory://, or what streamfw.toml or STREAMFW_BROKERS__DEFAULT__URL say

Events of one repository are handled one after another, in the order GitHub sent them, whatever they are: that is
why all of them come by one name, and `handle` finds the handler by the type of the event.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Annotated

from streamfw import App, Backoff, DeliveryField, Message, Next, State

from .events import AnyEvent, handle
from .store import Store, Stored, Unit, open_store

NAME = os.environ.get("WEBHOOKS_NAME", "webhooks")
WORKER = os.getpid()


async def lifespan(app: App) -> AsyncIterator[Store]:
    """The summary is where the messages are."""
    async with open_store(app.build().brokers["default"].url) as store:
        yield store


async def journal(message: Message, call_next: Next) -> object:
    """Middleware: note every delivery, and every failure."""
    (store,) = app.state
    assert isinstance(store, Store)
    await store.note(message.message_id, "began", WORKER)
    try:
        return await call_next(message)
    except Exception:
        await store.note(message.message_id, "failed", WORKER)
        raise


app = App(name="webhooks", lifespan=lifespan, middleware=[journal])
url: str = app.settings.brokers.get("default", {}).get("url", "memory://")


@app.subscriber(
    NAME,
    ordered_by="key",
    workers=8,
    attempts=5,
    backoff=Backoff(first=0.05, max=1.0),
    # On Postgres, the summary's row and the end of the message are one commit, so that it is stored exactly once.
    # Elsewhere the summary is not where the messages are: what makes a repeat harmless there is the store alone.
    transactional=url.startswith("postgres"),
)
async def webhook(
    event: AnyEvent,
    message: Message,
    store: Annotated[Store, State],
    unit: Annotated[Unit | None, DeliveryField("unit")],
) -> None:
    line = await handle(event, message.attempt)
    stored = Stored(
        message_id=message.message_id,
        owner=event.owner,
        event=event.name,
        line=line,
        attempt=message.attempt,
        worker=WORKER,
    )
    await store.add(stored, unit)


if __name__ == "__main__":
    app.run()
