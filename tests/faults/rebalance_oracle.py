"""Judges what the members of a Kafka group wrote down (`kafka_ledger`): what was lost, what was repeated, and why.

A message may be handled again only by a later owner of its partition, from the offset on where that owner began, which
is the newest that anybody had committed. Why it was repeated follows from what befell the owner before:

- ``kill``, ``stop``: its process got a SIGKILL, or stood still past its session, before the later owner began.
- ``server``: something happened to the server, or to all connections, meanwhile.
- ``starved``: the group took it for dead, and its own log shows that its event loop had stood still: a machine that is
  too busy for sessions of two seconds.
- ``behind``: of messages in lanes, or in batches, one may have to wait while later ones of its partition are handled.
  When the partition moves it is still open, and holds back what is done after it.
- ``moved``: none of this, the partition was only given to somebody else. There must be none.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from tests.faults.findings import Judged, Pauses
from tests.faults.kafka_ledger import Handled, Log, Owner

__all__ = ["Cost", "Fate", "Findings", "judge", "out_of_order"]

Cause: TypeAlias = Literal["kill", "stop", "server", "starved", "behind", "moved"]
SETTLING = 0.05  # seconds from a handler's end to its settlement, at most: groups wait for up to 0.02 s
SESSIONS = 3  # so long before it was taken for dead (in sessions) a loop that stood still explains it


@dataclass(frozen=True, slots=True)
class Fate:
    """A signal that a process got; or what happened to the ``server``, and so to every process, and `until` when."""

    at: int
    kind: Literal["kill", "stop", "go on", "leave", "server"]
    process: str = ""
    until: int = 0


@dataclass(frozen=True, slots=True)
class Cost:
    """What a kill repeated, and at most may have: all that began since the last commit that was accepted was sent, and
    what the marks in it waited for. `since` is how long before the kill that was, in seconds."""

    repeated: int
    most: int
    since: float


@dataclass(slots=True)
class Findings(Judged):
    """Of members of a Kafka group; `duplicates` by `Cause`."""

    overtaken: int = 0  # of them, how many the earlier owner began after the later one had the partition
    kills: list[Cost] = field(default_factory=list)
    generations: int = 0
    kept: int = 0
    new: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    fenced: int = 0
    pauses: Pauses = field(default_factory=lambda: Pauses.of(()))
    group_pauses: Pauses = field(default_factory=lambda: Pauses.of(()))
    longest_handler: float = 0.0
    cadence: float = 0.0  # seconds between two commits of a member, the median
    batches: int = 0
    largest_batch: int = 0


def judge(
    log: Log,
    published: Collection[int],
    fates: Sequence[Fate] = (),
    *,
    session: float,
    maybe: Collection[int] = (),
    gapless: bool = True,
    fifo: bool = True,
) -> Findings:
    """`published` are ids, and `maybe` those whose publish had an unknown outcome. `gapless`: the topic has neither
    transactions nor compaction. `fifo`: handlers begin in the order of offsets (not with lanes, nor in batches), so
    what a kill repeats can be bounded, and nothing is repeated because it was done ``behind`` another."""
    lost = [identity for identity in published if identity not in log.handled]
    findings = Findings(published=len(published), handled=len(published) - len(lost))
    findings.wrong("ids were lost", lost)
    findings.wrong("strange ids", sorted(log.handled.keys() - set(published) - set(maybe)))
    if gapless:
        findings.wrong("partitions had gaps", sorted(log.gaps.items()))
    _leave_out_standstills(log, fates)
    _judge_repeats(log, findings, _Causes(log, fates, session, fifo), fifo)
    _judge_commits(log, findings)
    _judge_batches(log, findings)
    _measure(log, findings)
    return findings


def _leave_out_standstills(log: Log, fates: Sequence[Fate]) -> None:
    """What ran while its process stood still took as long as that; nothing is to be learnt from it."""
    still: list[tuple[str, int, int]] = []
    for fate in fates:
        if fate.kind == "stop":
            ends = [each.at for each in fates if each.process == fate.process and each.at > fate.at]
            still.append((fate.process, fate.at, min(ends, default=fate.at)))
    for entries in log.handled.values():
        for entry in entries:
            entry.stopped = any(
                process == entry.process and entry.began < last and entry.ended > first
                for process, first, last in still
            )


class _Causes:
    """Why a partition went from one owner to another."""

    def __init__(self, log: Log, fates: Sequence[Fate], session: float, fifo: bool) -> None:
        self._log, self._session, self._window = log, int(session * 1e9), int(SESSIONS * session * 1e9)
        self._fates: dict[str, list[Fate]] = defaultdict(list)
        self._next: dict[str, Owner] = {}  # the next owner of the same partition
        owners = sorted(log.owners.values(), key=lambda owner: (owner.partition, owner.at))
        for earlier, later in itertools.pairwise(owners):
            if earlier.partition == later.partition:
                self._next[earlier.name] = later
        for fate in sorted(fates, key=lambda fate: fate.at):
            if fate.kind in ("kill", "stop"):
                self._fates[fate.process].append(fate)
        self._of_server = [fate for fate in fates if fate.kind == "server"]
        self._handled: set[tuple[str, int]] | None = None if fifo else {
            (entry.owner, entry.offset) for entries in log.handled.values() for entry in entries
        }  # fmt: skip

    def fate(self, owner: Owner) -> Fate | None:
        """What befell its process while the partition was its own: before anybody else began."""
        later = self._next.get(owner.name)
        until = later.at if later is not None else owner.at
        found = [fate for fate in self._fates[owner.process] if owner.at < fate.at < until]
        found += [fate for fate in self._of_server if fate.at < until and owner.at < fate.until + self._session]
        return found[-1] if found else None

    def cause(self, owner: Owner, offset: int) -> Cause:
        """Why what it handled at `offset` is handled by somebody else again."""
        fate = self.fate(owner)
        if fate is not None:
            return "kill" if fate.kind == "kill" else "stop" if fate.kind == "stop" else "server"
        fenced = self._log.fenced.get(owner.name)
        if fenced is not None:
            return "starved" if self._stood_still(owner.process, fenced) else "moved"
        return "behind" if self._behind(owner, offset) else "moved"

    def _behind(self, owner: Owner, offset: int) -> bool:
        """Whether the next owner begins at a message that this one had not handled, and `offset` comes after it."""
        later = self._next.get(owner.name)
        if later is None or self._handled is None:
            return False
        return later.start < offset and (owner.name, later.start) not in self._handled

    def _stood_still(self, process: str, until: int) -> bool:
        return any(who == process and until - self._window < at <= until for at, who, _ in self._log.stood_still)


def _judge_repeats(log: Log, findings: Findings, causes: _Causes, fifo: bool) -> None:
    twice: list[str] = []
    before: list[str] = []
    moved: list[str] = []
    of_kills: Counter[Fate] = Counter()
    for identity, entries in log.handled.items():
        if len(entries) == 1:
            continue
        owners = sorted({log.owners[entry.owner] for entry in entries}, key=lambda owner: owner.at)
        if len(owners) < len(entries):
            twice.append(f"{identity}: {entries}")
        for earlier, later in itertools.pairwise(owners):
            cause = causes.cause(earlier, entries[0].offset)
            findings.duplicates[cause] += 1
            fate = causes.fate(earlier)
            if fate is not None and fate.kind == "kill":
                of_kills[fate] += 1
            if cause == "moved":
                moved.append(f"{identity}: {earlier} then {later}")
            if entries[0].offset < later.start:
                before.append(f"{identity} at {entries[0].offset}: {later}")
            findings.overtaken += any(e.began > later.at for e in entries if e.owner == earlier.name)
    findings.wrong("ids were handled twice by one owner", twice)
    findings.wrong("repeats are before the start of the later owner", before)
    findings.wrong("repeats came from moves alone", moved)
    if fifo:
        findings.kills = [_cost(log, fate, repeated) for fate, repeated in of_kills.items()]
        findings.wrong("kills repeated more than their last commit explains", [
            cost for cost in findings.kills if cost.repeated > cost.most
        ])  # fmt: skip


def _cost(log: Log, fate: Fate, repeated: int) -> Cost:
    """A commit holds what was settled when it was sent; but a mark waits for the slowest handler before it, so what
    began after that one may be done, and not committed."""
    process = fate.process
    of_process = [entry for entries in log.handled.values() for entry in entries if entry.process == process]
    longest = max((entry.seconds for entry in of_process), default=0.0)
    owned = min((owner.at for owner in log.owners.values() if owner.process == process), default=0)
    sent = max((c.sent for c in log.commits if c.process == process and c.sent < fate.at), default=owned)
    since = sent - int((longest + SETTLING) * 1e9)
    return Cost(repeated, sum(entry.began >= since for entry in of_process), (fate.at - sent) / 1e9)


def _judge_commits(log: Log, findings: Findings) -> None:
    """Of a partition they never go back, by generation (the answer to a stopped process is written down late); and an
    owner begins at the newest that was known to be committed."""
    of_partition: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
    for commit in log.commits:
        for partition, offset in commit.offsets.items():
            of_partition[partition].append((commit.generation, commit.sent, commit.answered, offset))
    back = []
    newest: dict[int, tuple[list[int], list[int]]] = {}
    for partition, commits in of_partition.items():
        commits.sort()
        back += [
            f"partition {partition}: {earlier} then {later}"
            for earlier, later in itertools.pairwise(commits)
            if later[3] < earlier[3]
        ]
        answered = sorted((commit[2], commit[3]) for commit in commits)
        highest = list(itertools.accumulate((offset for _, offset in answered), max))
        newest[partition] = ([at for at, _ in answered], highest)
    below = []
    for owner in log.owners.values():
        times, highest = newest.get(owner.partition, ([], []))
        known = bisect.bisect_left(times, owner.at)
        if known and owner.start < highest[known - 1]:
            below.append(f"{owner}, though {highest[known - 1]} was committed")
    findings.wrong("commits went back", back)
    findings.wrong("owners began before what was committed", below)


def _judge_batches(log: Log, findings: Findings) -> None:
    batches: dict[tuple[str, int], list[Handled]] = defaultdict(list)
    for entries in log.handled.values():
        for entry in entries:
            if entry.batch:
                batches[entry.process, entry.batch].append(entry)
    mixed = [name for name, entries in batches.items() if len({entry.partition for entry in entries}) > 1]
    findings.wrong("batches were of several partitions", mixed)
    findings.batches = len(batches)
    findings.largest_batch = max(map(len, batches.values()), default=0)


def _measure(log: Log, findings: Findings) -> None:
    findings.kept, findings.new, findings.refused = log.kept, log.new, log.refused
    findings.fenced = len(log.fenced)
    findings.longest_handler = max((entry.seconds for some in log.handled.values() for entry in some), default=0.0)
    shut: dict[int, int] = {}
    opened: dict[int, int] = {}
    pauses: list[float] = []
    left: dict[str, int] = {}
    events = [(at, 0, who, generation) for at, who, generation in log.revoked]
    events += [(at, 1, who, generation) for at, who, generation in log.assigned]
    for at, is_assigned, who, generation in sorted(events):
        if not is_assigned:
            left.setdefault(who, at)  # a second revocation does not open the gate
            continue
        opened[generation] = max(opened.get(generation, 0), at)
        if (since := left.pop(who, None)) is not None:
            pauses.append((at - since) / 1e9)
            shut[generation] = min(shut.get(generation, since), since)
    findings.generations = len(opened)
    findings.pauses = Pauses.of(pauses)
    findings.group_pauses = Pauses.of((opened[generation] - at) / 1e9 for generation, at in shut.items())
    of_process: dict[str, list[int]] = defaultdict(list)
    for commit in log.commits:
        of_process[commit.process].append(commit.sent)
    between = [(b - a) / 1e9 for sent in of_process.values() for a, b in itertools.pairwise(sorted(sent))]
    findings.cadence = statistics.median(between or [0.0])


def out_of_order(log: Log, keys: int) -> list[str]:
    """Violations of the order of keys (the key of an id is its remainder by `keys`), over all owners: a message is
    first begun when the one before it in its key has ended once. And in one owner: they begin in order, one at a
    time."""
    found: list[str] = []
    by_key: dict[int, list[int]] = defaultdict(list)
    for identity in sorted(log.handled):
        by_key[identity % keys].append(identity)
    for ids in by_key.values():
        for before, after in itertools.pairwise(ids):
            ended = min(entry.ended for entry in log.handled[before])
            began = min(entry.began for entry in log.handled[after])
            if began < ended:
                found.append(f"{after} first began {(ended - began) / 1e6:.1f} ms before {before} had ended")
        for owner, entries in _by_owner(log, ids).items():
            found += [
                f"{owner}: offset {second.offset} began before offset {first.offset} had ended"
                for first, second in itertools.pairwise(entries)
                if second.began < first.ended or second.offset < first.offset
            ]
    return found


def _by_owner(log: Log, ids: Iterable[int]) -> dict[str, list[Handled]]:
    found: dict[str, list[Handled]] = defaultdict(list)
    for identity in ids:
        for entry in log.handled[identity]:
            found[entry.owner].append(entry)
    for entries in found.values():
        entries.sort(key=lambda entry: entry.began)
    return found
