"""Pull requests, their reviews, and the queue they are merged from."""

from __future__ import annotations

import msgspec

from .base import Event, Numbered, Payload, User, on


class Comment(msgspec.Struct, frozen=True):
    user: User


class Review(msgspec.Struct, frozen=True):
    state: str


class MergeGroup(msgspec.Struct, frozen=True):
    head_ref: str
    base_ref: str


class PullRequestPayload(Payload, frozen=True, kw_only=True):
    pull_request: Numbered


class ReviewPayload(PullRequestPayload, frozen=True, kw_only=True):
    review: Review


class ReviewCommentPayload(PullRequestPayload, frozen=True, kw_only=True):
    comment: Comment


class MergeGroupPayload(Payload, frozen=True, kw_only=True):
    merge_group: MergeGroup


class PullRequest(Event, tag="pull_request", frozen=True):
    payload: PullRequestPayload


class PullRequestReview(Event, tag="pull_request_review", frozen=True):
    payload: ReviewPayload


class PullRequestReviewComment(Event, tag="pull_request_review_comment", frozen=True):
    payload: ReviewCommentPayload


class PullRequestReviewThread(Event, tag="pull_request_review_thread", frozen=True):
    payload: PullRequestPayload


class MergeGroupChecks(Event, tag="merge_group", frozen=True):
    payload: MergeGroupPayload


@on
async def pull_request(event: PullRequest) -> str:
    return f"pull request {event.payload.pull_request} {event.payload.action}"


@on
async def pull_request_review(event: PullRequestReview) -> str:
    p = event.payload
    return f"review of pull request {p.pull_request} {p.action}: {p.review.state}"


@on
async def pull_request_review_comment(event: PullRequestReviewComment) -> str:
    p = event.payload
    return f"comment of {p.comment.user.login} on pull request {p.pull_request} {p.action}"


@on
async def pull_request_review_thread(event: PullRequestReviewThread) -> str:
    return f"thread on pull request {event.payload.pull_request} {event.payload.action}"


@on
async def merge_group(event: MergeGroupChecks) -> str:
    group = event.payload.merge_group
    return f"{event.payload.action} for {group.head_ref} into {group.base_ref}"
