"""Advisories and alerts."""

from __future__ import annotations

import msgspec

from .base import Event, Payload, on


class Advisory(msgspec.Struct, frozen=True):
    ghsa_id: str
    severity: str


class DependabotAlertOf(msgspec.Struct, frozen=True):
    number: int
    security_advisory: Advisory


class ScanningAlertOf(msgspec.Struct, frozen=True):
    number: int


class VulnerabilityAlertOf(msgspec.Struct, frozen=True):
    affected_package_name: str


class AdvisoryPayload(Payload, frozen=True, kw_only=True):
    security_advisory: Advisory


class DependabotPayload(Payload, frozen=True, kw_only=True):
    alert: DependabotAlertOf


class ScanningPayload(Payload, frozen=True, kw_only=True):
    alert: ScanningAlertOf
    ref: str


class VulnerabilityPayload(Payload, frozen=True, kw_only=True):
    alert: VulnerabilityAlertOf


class SecurityAdvisory(Event, tag="security_advisory", frozen=True):
    payload: AdvisoryPayload


class DependabotAlert(Event, tag="dependabot_alert", frozen=True):
    payload: DependabotPayload


class CodeScanningAlert(Event, tag="code_scanning_alert", frozen=True):
    payload: ScanningPayload


class VulnerabilityAlert(Event, tag="repository_vulnerability_alert", frozen=True):
    payload: VulnerabilityPayload


@on
async def security_advisory(event: SecurityAdvisory) -> str:
    advisory = event.payload.security_advisory
    return f"advisory {advisory.ghsa_id} ({advisory.severity}) {event.payload.action}"


@on
async def dependabot_alert(event: DependabotAlert) -> str:
    alert = event.payload.alert
    return f"alert {alert.number} ({alert.security_advisory.severity}) {event.payload.action}"


@on
async def code_scanning_alert(event: CodeScanningAlert) -> str:
    return f"code scanning alert {event.payload.alert.number} on {event.payload.ref}: {event.payload.action}"


@on
async def repository_vulnerability_alert(event: VulnerabilityAlert) -> str:
    return f"vulnerability in {event.payload.alert.affected_package_name}: {event.payload.action}"
