"""What the demo publishes: GitHub's own example webhooks, several rounds of them, and one body that is cut off."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from streamfw import App

from .events import AnyEvent

__all__ = ["BROKEN", "Webhook", "by_owner", "load", "publish"]

DATA: Final = Path(__file__).parent / "data" / "github-webhooks.jsonl.gz"
BROKEN: Final = "broken"


class Webhook(msgspec.Struct, frozen=True):
    message_id: str
    owner: str
    body: bytes


def load(rounds: int) -> list[Webhook]:
    """`rounds` times the webhooks of the file, each with an id of its own, and in the middle the broken one."""
    with gzip.open(DATA) as file:
        bodies = file.read().splitlines()
    event_of = msgspec.json.Decoder(AnyEvent).decode
    owners = [event_of(body).owner for body in bodies]
    webhooks = [
        Webhook(f"{round_:03}-{number:03}", owner, body)
        for round_ in range(1, rounds + 1)
        for number, (owner, body) in enumerate(zip(owners, bodies, strict=True), 1)
    ]
    middle = webhooks[len(webhooks) // 2]
    webhooks.insert(len(webhooks) // 2, Webhook(BROKEN, middle.owner, middle.body[: len(middle.body) // 2]))
    return webhooks


def by_owner(webhooks: Sequence[Webhook]) -> dict[str, list[Webhook]]:
    """The webhooks of each owner, in order."""
    owners: dict[str, list[Webhook]] = {}
    for webhook in webhooks:
        owners.setdefault(webhook.owner, []).append(webhook)
    return owners


async def publish(app: App, name: str, webhooks: Sequence[Webhook]) -> None:
    """Publish them: the webhooks of one owner one after another, those of different owners at the same time."""

    async def in_order(mine: Sequence[Webhook]) -> None:
        for webhook in mine:
            await app.publish(name, webhook.body, key=webhook.owner, message_id=webhook.message_id)

    async with asyncio.TaskGroup() as tasks:
        for mine in by_owner(webhooks).values():
            tasks.create_task(in_order(mine))
