"""Organisations, teams and members; apps and money."""

from __future__ import annotations

import msgspec

from .base import Event, Named, Payload, User, on


class Sponsorship(msgspec.Struct, frozen=True):
    sponsor: User
    tier: Named


class Purchase(msgspec.Struct, frozen=True):
    account: User
    plan: Named


class MemberPayload(Payload, frozen=True, kw_only=True):
    member: User


class TeamPayload(Payload, frozen=True, kw_only=True):
    team: Named


class MembershipPayload(TeamPayload, frozen=True, kw_only=True):
    member: User


class BlockPayload(Payload, frozen=True, kw_only=True):
    blocked_user: User


class SponsorshipPayload(Payload, frozen=True, kw_only=True):
    sponsorship: Sponsorship


class PurchasePayload(Payload, frozen=True, kw_only=True):
    marketplace_purchase: Purchase


class RepositoriesPayload(Payload, frozen=True, kw_only=True):
    repositories_added: list[msgspec.Raw]
    repositories_removed: list[msgspec.Raw]


class Member(Event, tag="member", frozen=True):
    payload: MemberPayload


class Membership(Event, tag="membership", frozen=True):
    payload: MembershipPayload


class Team(Event, tag="team", frozen=True):
    payload: TeamPayload


class TeamAdd(Event, tag="team_add", frozen=True):
    payload: TeamPayload


class Organization(Event, tag="organization", frozen=True):
    payload: Payload


class OrgBlock(Event, tag="org_block", frozen=True):
    payload: BlockPayload


class Sponsored(Event, tag="sponsorship", frozen=True):
    payload: SponsorshipPayload


class MarketplacePurchase(Event, tag="marketplace_purchase", frozen=True):
    payload: PurchasePayload


class Installation(Event, tag="installation", frozen=True):
    payload: Payload


class InstallationRepositories(Event, tag="installation_repositories", frozen=True):
    payload: RepositoriesPayload


class AppAuthorization(Event, tag="github_app_authorization", frozen=True):
    payload: Payload


@on
async def member(event: Member) -> str:
    return f"member {event.payload.member.login} {event.payload.action}"


@on
async def membership(event: Membership) -> str:
    return f"{event.payload.member.login} {event.payload.action}, team {event.payload.team.name}"


@on
async def team(event: Team) -> str:
    return f"team {event.payload.team.name} {event.payload.action}"


@on
async def team_add(event: TeamAdd) -> str:
    return f"team {event.payload.team.name} may work here"


@on
async def organization(event: Organization) -> str:
    return f"organisation: {event.payload.action}"


@on
async def org_block(event: OrgBlock) -> str:
    return f"{event.payload.blocked_user.login} {event.payload.action}"


@on
async def sponsorship(event: Sponsored) -> str:
    p = event.payload
    return f"sponsorship of {p.sponsorship.sponsor.login} ({p.sponsorship.tier.name}) {p.action}"


@on
async def marketplace_purchase(event: MarketplacePurchase) -> str:
    p = event.payload
    return f"{p.marketplace_purchase.plan.name} {p.action} by {p.marketplace_purchase.account.login}"


@on
async def installation(event: Installation) -> str:
    return f"app installation: {event.payload.action}"


@on
async def installation_repositories(event: InstallationRepositories) -> str:
    p = event.payload
    return f"app: {len(p.repositories_added)} repositories added, {len(p.repositories_removed)} removed"


@on
async def github_app_authorization(event: AppAuthorization) -> str:
    return f"app authorisation {event.payload.action}"
