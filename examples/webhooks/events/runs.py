"""Checks, workflows and deployments."""

from __future__ import annotations

import msgspec

from .base import Event, Payload, on


class Run(msgspec.Struct, frozen=True):
    status: str
    conclusion: str | None = None
    name: str | None = None

    def __str__(self) -> str:
        return f"{self.name or 'run'}: {self.conclusion or self.status}"


class DeploymentOf(msgspec.Struct, frozen=True):
    ref: str
    environment: str


class DeploymentState(msgspec.Struct, frozen=True):
    state: str


class CheckRunPayload(Payload, frozen=True, kw_only=True):
    check_run: Run


class CheckSuitePayload(Payload, frozen=True, kw_only=True):
    check_suite: Run


class WorkflowRunPayload(Payload, frozen=True, kw_only=True):
    workflow_run: Run


class WorkflowJobPayload(Payload, frozen=True, kw_only=True):
    workflow_job: Run


class WorkflowDispatchPayload(Payload, frozen=True, kw_only=True):
    ref: str
    workflow: str


class RepositoryDispatchPayload(Payload, frozen=True, kw_only=True):
    branch: str


class DeploymentPayload(Payload, frozen=True, kw_only=True):
    deployment: DeploymentOf


class DeploymentStatusPayload(DeploymentPayload, frozen=True, kw_only=True):
    deployment_status: DeploymentState


class DeploymentReviewPayload(Payload, frozen=True, kw_only=True):
    environment: str


class CheckRun(Event, tag="check_run", frozen=True):
    payload: CheckRunPayload


class CheckSuite(Event, tag="check_suite", frozen=True):
    payload: CheckSuitePayload


class WorkflowRun(Event, tag="workflow_run", frozen=True):
    payload: WorkflowRunPayload


class WorkflowJob(Event, tag="workflow_job", frozen=True):
    payload: WorkflowJobPayload


class WorkflowDispatch(Event, tag="workflow_dispatch", frozen=True):
    payload: WorkflowDispatchPayload


class RepositoryDispatch(Event, tag="repository_dispatch", frozen=True):
    payload: RepositoryDispatchPayload


class Deployment(Event, tag="deployment", frozen=True):
    payload: DeploymentPayload


class DeploymentStatus(Event, tag="deployment_status", frozen=True):
    payload: DeploymentStatusPayload


class DeploymentReview(Event, tag="deployment_review", frozen=True):
    payload: DeploymentReviewPayload


class RunnerBusy(Exception):
    """What runs workflows has no room at the moment; asking again helps."""


@on
async def check_run(event: CheckRun) -> str:
    return f"check {event.payload.check_run}"


@on
async def check_suite(event: CheckSuite) -> str:
    return f"check suite {event.payload.check_suite}"


@on
async def workflow_run(event: WorkflowRun) -> str:
    return f"workflow {event.payload.workflow_run}"


@on
async def workflow_job(event: WorkflowJob) -> str:
    return f"job {event.payload.workflow_job}"


@on
async def workflow_dispatch(event: WorkflowDispatch, attempt: int) -> str:
    """The demo's failing handler: it works from the third delivery on."""
    if attempt <= 2:
        raise RunnerBusy(f"no runner for {event.payload.workflow}")
    return f"{event.payload.workflow} started on {event.payload.ref}"


@on
async def repository_dispatch(event: RepositoryDispatch) -> str:
    return f"{event.payload.action} on {event.payload.branch}"


@on
async def deployment(event: Deployment) -> str:
    return f"{event.payload.deployment.ref} is deployed to {event.payload.deployment.environment}"


@on
async def deployment_status(event: DeploymentStatus) -> str:
    return f"{event.payload.deployment.environment}: {event.payload.deployment_status.state}"


@on
async def deployment_review(event: DeploymentReview) -> str:
    return f"a review of {event.payload.environment} is {event.payload.action}"
