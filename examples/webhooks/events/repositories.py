"""Repositories themselves: made, renamed, protected, watched; and their hooks."""

from __future__ import annotations

import msgspec

from .base import Event, Named, Payload, on


class Key(msgspec.Struct, frozen=True):
    title: str


class RulePayload(Payload, frozen=True, kw_only=True):
    rule: Named


class KeyPayload(Payload, frozen=True, kw_only=True):
    key: Key


class ImportPayload(Payload, frozen=True, kw_only=True):
    status: str


class HookPayload(Payload, frozen=True, kw_only=True):
    hook_id: int


class PingPayload(HookPayload, frozen=True, kw_only=True):
    zen: str


class RepositoryChanged(Event, tag="repository", frozen=True):
    payload: Payload


class RepositoryImport(Event, tag="repository_import", frozen=True):
    payload: ImportPayload


class BranchProtectionRule(Event, tag="branch_protection_rule", frozen=True):
    payload: RulePayload


class DeployKey(Event, tag="deploy_key", frozen=True):
    payload: KeyPayload


class Public(Event, tag="public", frozen=True):
    payload: Payload


class Star(Event, tag="star", frozen=True):
    payload: Payload


class Watch(Event, tag="watch", frozen=True):
    payload: Payload


class Meta(Event, tag="meta", frozen=True):
    payload: HookPayload


class Ping(Event, tag="ping", frozen=True):
    payload: PingPayload


@on
async def repository(event: RepositoryChanged) -> str:
    return f"repository {event.payload.action}"


@on
async def repository_import(event: RepositoryImport) -> str:
    return f"import: {event.payload.status}"


@on
async def branch_protection_rule(event: BranchProtectionRule) -> str:
    return f"protection of {event.payload.rule.name} {event.payload.action}"


@on
async def deploy_key(event: DeployKey) -> str:
    return f"deploy key {event.payload.key.title} {event.payload.action}"


@on
async def public(event: Public) -> str:
    return "made public"


@on
async def star(event: Star) -> str:
    return f"star {event.payload.action}"


@on
async def watch(event: Watch) -> str:
    return f"watching {event.payload.action}"


@on
async def meta(event: Meta) -> str:
    return f"hook {event.payload.hook_id} {event.payload.action}"


@on
async def ping(event: Ping) -> str:
    return f"hook {event.payload.hook_id} says: {event.payload.zen}"
