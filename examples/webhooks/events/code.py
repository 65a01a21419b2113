"""What is pushed, tagged, released and published."""

from __future__ import annotations

import msgspec

from .base import Event, Named, Payload, Repository, User, on


class CommitComment(msgspec.Struct, frozen=True):
    commit_id: str
    user: User


class WikiPage(msgspec.Struct, frozen=True):
    title: str
    action: str


class ReleaseOf(msgspec.Struct, frozen=True):
    tag_name: str


class PageBuildOf(msgspec.Struct, frozen=True):
    status: str


class PushPayload(Payload, frozen=True, kw_only=True):
    ref: str
    commits: list[msgspec.Raw]


class RefPayload(Payload, frozen=True, kw_only=True):
    ref: str
    ref_type: str


class CommitCommentPayload(Payload, frozen=True, kw_only=True):
    comment: CommitComment


class ForkPayload(Payload, frozen=True, kw_only=True):
    forkee: Repository


class GollumPayload(Payload, frozen=True, kw_only=True):
    pages: list[WikiPage]


class ReleasePayload(Payload, frozen=True, kw_only=True):
    release: ReleaseOf


class PackagePayload(Payload, frozen=True, kw_only=True):
    package: Named


class PageBuildPayload(Payload, frozen=True, kw_only=True):
    build: PageBuildOf


class StatusPayload(Payload, frozen=True, kw_only=True):
    sha: str
    state: str
    context: str


class Push(Event, tag="push", frozen=True):
    payload: PushPayload


class Create(Event, tag="create", frozen=True):
    payload: RefPayload


class Delete(Event, tag="delete", frozen=True):
    payload: RefPayload


class CommitCommented(Event, tag="commit_comment", frozen=True):
    payload: CommitCommentPayload


class Fork(Event, tag="fork", frozen=True):
    payload: ForkPayload


class Gollum(Event, tag="gollum", frozen=True):
    payload: GollumPayload


class Release(Event, tag="release", frozen=True):
    payload: ReleasePayload


class Package(Event, tag="package", frozen=True):
    payload: PackagePayload


class PageBuild(Event, tag="page_build", frozen=True):
    payload: PageBuildPayload


class Status(Event, tag="status", frozen=True):
    payload: StatusPayload


@on
async def push(event: Push) -> str:
    return f"{len(event.payload.commits)} commits pushed to {event.payload.ref}"


@on
async def create(event: Create) -> str:
    return f"{event.payload.ref_type} {event.payload.ref} created"


@on
async def delete(event: Delete) -> str:
    return f"{event.payload.ref_type} {event.payload.ref} deleted"


@on
async def commit_comment(event: CommitCommented) -> str:
    comment = event.payload.comment
    return f"comment of {comment.user.login} on commit {comment.commit_id:.7}"


@on
async def fork(event: Fork) -> str:
    return f"forked as {event.payload.forkee.full_name}"


@on
async def gollum(event: Gollum) -> str:
    return "wiki: " + ", ".join(f"{page.title} {page.action}" for page in event.payload.pages)


@on
async def release(event: Release) -> str:
    return f"release {event.payload.release.tag_name} {event.payload.action}"


@on
async def package(event: Package) -> str:
    return f"package {event.payload.package.name} {event.payload.action}"


@on
async def page_build(event: PageBuild) -> str:
    return f"pages {event.payload.build.status}"


@on
async def status(event: Status) -> str:
    return f"{event.payload.context} says {event.payload.state} of commit {event.payload.sha:.7}"
