"""Project boards, classic and new."""

from __future__ import annotations

import msgspec

from .base import Event, Named, Payload, on


class Card(msgspec.Struct, frozen=True):
    note: str | None


class Item(msgspec.Struct, frozen=True):
    content_type: str


class ProjectPayload(Payload, frozen=True, kw_only=True):
    project: Named


class ColumnPayload(Payload, frozen=True, kw_only=True):
    project_column: Named


class CardPayload(Payload, frozen=True, kw_only=True):
    project_card: Card


class ItemPayload(Payload, frozen=True, kw_only=True):
    projects_v2_item: Item


class Project(Event, tag="project", frozen=True):
    payload: ProjectPayload


class ProjectColumn(Event, tag="project_column", frozen=True):
    payload: ColumnPayload


class ProjectCard(Event, tag="project_card", frozen=True):
    payload: CardPayload


class ProjectItem(Event, tag="projects_v2_item", frozen=True):
    payload: ItemPayload


@on
async def project(event: Project) -> str:
    return f"project {event.payload.project.name} {event.payload.action}"


@on
async def project_column(event: ProjectColumn) -> str:
    return f"column {event.payload.project_column.name} {event.payload.action}"


@on
async def project_card(event: ProjectCard) -> str:
    return f"card {event.payload.action}: {event.payload.project_card.note or '(no note)'}"


@on
async def projects_v2_item(event: ProjectItem) -> str:
    return f"{event.payload.projects_v2_item.content_type} {event.payload.action}"
