"""Issues, discussions, and what they are sorted by."""

from __future__ import annotations

import msgspec

from .base import Event, Named, Numbered, Payload, User, on


class Comment(msgspec.Struct, frozen=True):
    body: str
    user: User


class IssuePayload(Payload, frozen=True, kw_only=True):
    issue: Numbered


class IssueCommentPayload(IssuePayload, frozen=True, kw_only=True):
    comment: Comment


class DiscussionPayload(Payload, frozen=True, kw_only=True):
    discussion: Numbered


class DiscussionCommentPayload(DiscussionPayload, frozen=True, kw_only=True):
    comment: Comment


class LabelPayload(Payload, frozen=True, kw_only=True):
    label: Named


class MilestonePayload(Payload, frozen=True, kw_only=True):
    milestone: Numbered


class Issues(Event, tag="issues", frozen=True):
    payload: IssuePayload


class IssueComment(Event, tag="issue_comment", frozen=True):
    payload: IssueCommentPayload


class Discussion(Event, tag="discussion", frozen=True):
    payload: DiscussionPayload


class DiscussionComment(Event, tag="discussion_comment", frozen=True):
    payload: DiscussionCommentPayload


class Label(Event, tag="label", frozen=True):
    payload: LabelPayload


class Milestone(Event, tag="milestone", frozen=True):
    payload: MilestonePayload


@on
async def issues(event: Issues) -> str:
    return f"issue {event.payload.issue} {event.payload.action}"


@on
async def issue_comment(event: IssueComment) -> str:
    p = event.payload
    return f"comment of {p.comment.user.login} on issue {p.issue} {p.action}"


@on
async def discussion(event: Discussion) -> str:
    return f"discussion {event.payload.discussion} {event.payload.action}"


@on
async def discussion_comment(event: DiscussionComment) -> str:
    p = event.payload
    return f"comment of {p.comment.user.login} in discussion {p.discussion} {p.action}"


@on
async def label(event: Label) -> str:
    return f"label {event.payload.label.name} {event.payload.action}"


@on
async def milestone(event: Milestone) -> str:
    return f"milestone {event.payload.milestone} {event.payload.action}"
