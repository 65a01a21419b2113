"""Judges what an app on RabbitMQ wrote down (`rabbit_ledger`): what was lost, what came twice, and why.

A message may come twice in these cases, and each names what befell it:

- the channel that it came on had ended before the server had surely read its acknowledgement; and the channel had
  ended by one of the faults. Of a stream: before its offset was surely stored, and by somebody else.
- ``published again``: its publisher was not told whether it is stored, and published it once more.
- ``copied again``: the copy that is to come later, or the dead letter, was made more than once, because a fault came
  between the copy and the end of the original.

All else is an objection: also a channel that ended without a fault, a message of an order that began before the one
before it in its key had ended once, and one that its publisher was told was surely not stored.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from tests.faults.findings import Judged
from tests.faults.rabbit_app import DEAD, GROUP, HEARTBEAT, LOG, ORDERED, RETRIES, place_of
from tests.faults.rabbit_ledger import Entry, Log

__all__ = ["Answer", "Fate", "judge"]

Answer: TypeAlias = Literal["stored", "unknown", "refused"]
"""What its publisher was told of a copy; ``refused``: surely not stored."""

SECOND: Final = 1_000_000_000
READ: Final = SECOND // 4  # from an acknowledgement's write until a quorum queue has it for sure
STORED: Final = SECOND  # from a handler's end until a stream's offset is stored for sure
NOTICED: Final = (2 * HEARTBEAT + 3) * SECOND  # from a fault's end until everybody has noticed it


@dataclass(frozen=True, slots=True)
class Fate:
    """What happened, from when until when. `process` and `queue`: to whom alone (empty: to all). `ends`: whether it
    ends channels; publishes suffer from all. `kills`: the process itself got a SIGKILL."""

    at: int
    kind: str
    until: int
    process: str = ""
    queue: str = ""
    ends: bool = True
    kills: bool = False

    def befell(self, process: str, queue: str) -> bool:
        return self.process in ("", process) and self.queue in ("", queue)


def judge(
    log: Log,
    published: Mapping[int, str],
    answers: Mapping[tuple[int, int], Answer],
    fates: Iterable[Fate],
    key_of: Callable[[int], str],
) -> Judged:
    """`published`: to which name each id was published. `answers`: by id and copy. `key_of`: the key of an id."""
    judged = Judged(published=len(published))
    causes = _Causes(log, list(fates))
    done = {(entry.name, entry.id) for entry in log.entries if entry.outcome == "ok"}
    lost = [number for number, name in published.items() if (place_of(name, number), number) not in done]
    judged.handled = len(published) - len(lost)
    judged.wrong("ids were lost", lost)
    _judge_copies(log, judged, published, answers)
    _judge_repeats(log, judged, causes)
    judged.wrong("channels ended without a fault", causes.causeless_ends())
    judged.wrong("messages were out of order", _out_of_order(log, key_of))
    return judged


def _judge_copies(
    log: Log, judged: Judged, published: Mapping[int, str], answers: Mapping[tuple[int, int], Answer]
) -> None:
    copies: dict[tuple[str, int], set[int]] = defaultdict(set)
    for entry in log.entries:
        if entry.outcome == "ok":
            copies[entry.name, entry.id].add(entry.copy)
    came = {(entry.id, entry.copy) for entry in log.entries}
    judged.wrong("copies are strangers", sorted(came - answers.keys()))
    judged.wrong("copies came that were refused", sorted(one for one in came if answers.get(one) == "refused"))
    for identity, of_one in copies.items():
        if len(of_one) > 1:
            judged.duplicates["published again"] += len(of_one) - 1
            last = max(of_one)
            known = [copy for copy in of_one if copy != last and answers.get((identity[1], copy)) == "stored"]
            judged.wrong(f"copies of {identity} were published again though they were stored", known)
    places = {(place_of(name, number), number) for number, name in published.items()}
    judged.wrong("ids came to their end elsewhere", sorted(copies.keys() - places))


def _judge_repeats(log: Log, judged: Judged, causes: _Causes) -> None:
    same: dict[tuple[str, int, int, int], list[Entry]] = defaultdict(list)
    for entry in log.entries:
        same[entry.name, entry.id, entry.copy, entry.attempt].append(entry)
    unexplained = []
    for entries in same.values():
        entries.sort(key=lambda entry: entry.began)
        for earlier, later in itertools.pairwise(entries):
            cause = causes.of(earlier, later)
            if cause is None:
                unexplained.append(f"{earlier} then {later}")
            else:
                judged.duplicates[cause] += 1
    judged.wrong("repeats have no cause", unexplained)


class _Causes:
    def __init__(self, log: Log, fates: list[Fate]) -> None:
        self._log, self._fates = log, fates
        self._originals: dict[tuple[int, int], list[Entry]] = defaultdict(list)
        for entry in log.entries:
            if entry.outcome != "ok":
                self._originals[entry.id, entry.copy].append(entry)

    def of(self, one: Entry, other: Entry) -> str | None:
        """Why a message came again; None: there is no reason for it. Which of the two was delivered first does not show
        in when they began: what lies in a socket is handled before it is known that the connection is gone."""
        because = self._of_stream if one.name == LOG else self._of_queue
        cause = because(one, other) or because(other, one)
        return cause or ("copied again" if self._was_copied_again(other) else None)

    def _of_queue(self, first: Entry, second: Entry) -> str | None:
        fate = self._end_of(first.channel)
        if fate is None or second.began < fate.at or first.channel == second.channel:
            return None
        told = self._told(first)
        return fate.kind if told is None or told >= fate.at - READ else None

    def _of_stream(self, first: Entry, second: Entry) -> str | None:
        if first.channel == second.channel:
            return None
        for fate in self._fates:
            came_between = fate.at - STORED <= first.ended and fate.at <= second.began
            if fate.ends and came_between and fate.befell(first.process, LOG):
                return fate.kind
        return None

    def _end_of(self, channel: str) -> Fate | None:
        """What ended a channel, or its process."""
        process, end = channel.rpartition(".")[0], self._log.ends.get(channel)
        queue = self._log.queues.get(channel, "")
        found = None
        for fate in self._fates:
            if fate.ends and fate.befell(process, queue):
                killed = end is None and fate.kills
                if killed or (end is not None and fate.at <= end.at <= fate.until + NOTICED):
                    found = fate if found is None else max(found, fate, key=lambda fate: fate.at)
        return found

    def _told(self, entry: Entry) -> int | None:
        """When its acknowledgement was written."""
        acks = self._log.acks.get(entry.channel, ())
        return next((a.at for a in acks if a.tag == entry.tag or (a.multiple and a.tag > entry.tag)), None)

    def _was_copied_again(self, copy: Entry) -> bool:
        """Whether a fault came between the decision to copy the original, and the copy."""
        if copy.name == RETRIES:
            originals = [one for one in self._originals[copy.id, copy.copy] if one.attempt == copy.attempt - 1]
        else:
            originals = self._originals[copy.id, copy.copy] if copy.name == DEAD else []
        return any(
            fate.befell(original.process, f"{RETRIES}.{GROUP}")
            and fate.at <= copy.began
            and original.began <= fate.until + NOTICED
            for original in originals
            for fate in self._fates
        )

    def causeless_ends(self) -> list[str]:
        """Of channels that consumed, and that somebody else ended."""
        return [
            f"{channel} of {self._log.queues[channel]}: {end}"
            for channel, end in self._log.ends.items()
            if channel in self._log.queues and end.by != "local" and self._end_of(channel) is None
        ]


def _out_of_order(log: Log, key_of: Callable[[int], str]) -> list[str]:
    began: dict[int, int] = {}
    ended: dict[int, int] = {}
    keys: dict[str, list[int]] = defaultdict(list)
    for entry in log.entries:
        if entry.name == ORDERED:
            if entry.id not in began:
                keys[key_of(entry.id)].append(entry.id)
            began[entry.id] = min(began.get(entry.id, entry.began), entry.began)
            ended[entry.id] = min(ended.get(entry.id, entry.ended), entry.ended)
    return [
        f"{after} first began {(ended[before] - began[after]) / 1e6:.1f} ms before {before} had ended"
        for of_key in keys.values()
        for before, after in itertools.pairwise(sorted(of_key))
        if began[after] < ended[before]
    ]
