"""`Topic`: what only Kafka has, said in the subscriber's own source object."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime

import msgspec

from streamfw.broker import Position, Route, Subscription

from .settings import is_legal_name

__all__ = ["Topic", "name_mistake", "topic_of", "whole"]


class Topic(msgspec.Struct, frozen=True, repr_omit_defaults=True):
    """A Kafka topic: ``@subscriber(Topic("orders", start="latest"))``.

    - `name`: the topic. With `pattern` it only names the subscriber (and its dead letter topic).
    - `pattern`: a regular expression; every topic whose whole name it matches is read, also those that are created
      later (noticed within the broker's ``metadata_age``).
    - `partitions`: read these partitions and no others, outside the group's assignment: nobody moves them, and nobody
      else takes them over. Their positions are still committed for the group, which must have no other members.
    - `start`: where a group without a committed position begins; what a group has committed always counts more. Offsets
      that are not there become the nearest that are. A partition that is added to the topic later is read from its
      beginning, and so is a retry topic.
    - `retry_topic`: pauses of at least `retry_after` seconds (``Retry(after=..)``, or of the subscriber's backoff) go
      through a topic of their own, so that they do not hold the partition's position back: True for
      ``<name>.<group>.retry``, or its name. It must exist, or the broker must have ``create_topics``. What waits is in
      memory, up to the subscriber's `max_bytes`; the rest stays in the topic, and may be late. Refused with
      ``ordered_by=``, unless `overtaking` says that later messages may pass one that waits.
    - `mixed_batches`: a batch may hold messages of several partitions (default: of one).
    - `transactional_id`: the beginning of the transactional ids of ``transactional=True`` (default: group and topic);
      there is one for each partition.

    Values are checked when the app is built.
    """

    name: str
    pattern: str | None = None
    partitions: Sequence[int] | None = None
    start: Position = "earliest"
    retry_topic: bool | str = False
    retry_after: float = 300.0
    overtaking: bool = False
    mixed_batches: bool = False
    transactional_id: str | None = None

    def mistakes(self, subscription: Subscription) -> list[str]:
        """What is wrong with it, as sentences."""
        name = name_mistake(self.name)
        found = self._pattern_mistakes() if self.pattern is not None else [name] if name else []
        dead = subscription.dead_letter
        if dead is not None and not found and (mistake := name_mistake(dead)):
            found.append(f"its dead letters: {mistake}; give another one with dead_letter=")
        if self.partitions is not None and not _are_partitions(self.partitions):
            found.append(f"Topic(partitions={self.partitions!r}): numbers of partitions, each once, are needed")
        found += self._start_mistakes()
        if self.retry_topic:
            found += self._retry_mistakes(subscription)
        if subscription.transactional and (self.mixed_batches or self.partitions is not None):
            found.append(
                "Topic(mixed_batches=True) or Topic(partitions=..) with transactional=True: a transaction belongs to "
                "one partition, which the group has given us"
            )
        return found

    def route(self, name: str) -> Route | None:
        """See `streamfw.broker.Routed`: all of its topic, or of the topics that its pattern matches."""
        if self.pattern is not None and (found := self._pattern_mistakes()):
            raise ValueError(found[0])
        matches = name == self.name if self.pattern is None else re.fullmatch(str(self.pattern), name) is not None
        return (lambda key, headers: True) if matches else None

    def _pattern_mistakes(self) -> list[str]:
        try:
            re.compile(str(self.pattern))
        except re.error as error:
            return [f"Topic(pattern={self.pattern!r}): not a regular expression: {error}"]
        try:
            re.compile(whole(str(self.pattern)))
        except re.error as error:
            return [f"Topic(pattern={self.pattern!r}): flags belong in a group, as in (?i:..): {error}"]
        if self.partitions is not None or isinstance(self.start, Mapping):
            return ["Topic(pattern=..): its partitions, and offsets in them, cannot be given: they belong to one topic"]
        return []

    def _start_mistakes(self) -> list[str]:
        mistake = position_mistake(self.start)
        return [f"Topic(start={self.start!r}): {mistake}"] if mistake else []

    def seek_mistake(self, to: object) -> str | None:
        """What is wrong with seeking to there."""
        if self.pattern is not None and isinstance(to, Mapping):
            return "offsets belong to the partitions of one topic, and this reads those of a pattern"
        return position_mistake(to)

    def _retry_mistakes(self, subscription: Subscription) -> list[str]:
        found = []
        retry = self.retry_name(subscription.group)
        if mistake := name_mistake(retry):
            found.append(f"its retry topic: {mistake}; give another one with retry_topic=")
        if retry in (self.name, subscription.dead_letter):
            what = "the topic itself" if retry == self.name else "its dead letter topic"
            found.append(f"Topic(retry_topic={retry!r}): that is {what}")
        if self.pattern is not None or self.partitions is not None:
            found.append("Topic(retry_topic=..): needs a topic of one name, read as a group")
        if subscription.ordered_by is not None and not self.overtaking:
            found.append(
                f"Topic(retry_topic=..) with ordered_by={subscription.ordered_by!r}: later messages would pass one "
                "that waits; drop one of the two, or allow it with overtaking=True"
            )
        if subscription.transactional:
            found.append("Topic(retry_topic=..) with transactional=True: a transaction keeps its partition's order")
        if not isinstance(self.retry_after, int | float) or self.retry_after < 0:
            found.append(f"Topic(retry_after={self.retry_after!r}): seconds, zero or more, are needed")
        return found

    def retry_name(self, group: str) -> str | None:
        """The retry topic's name, or None."""
        if not self.retry_topic:
            return None
        return self.retry_topic if isinstance(self.retry_topic, str) else f"{self.name}.{group}.retry"


def topic_of(subscription: Subscription) -> Topic:
    """The topic of a subscription; a plain name is a topic of that name."""
    source = subscription.source
    return source if isinstance(source, Topic) else Topic(subscription.name)


def name_mistake(name: object) -> str | None:
    """What is wrong with a topic's name."""
    if is_legal_name(name):
        return None
    return f"{name!r} cannot be a topic: up to 249 letters, digits, '.', '_' and '-' are needed"


def position_mistake(to: object) -> str | None:
    """What is wrong with a position (see `streamfw.broker.Position`), before any server is asked."""
    if to in ("earliest", "latest"):
        return None
    if isinstance(to, datetime):
        return "a time without a time zone means another moment on each machine" if to.tzinfo is None else None
    if isinstance(to, Mapping) and all(_is_count(p) and _is_count(o) for p, o in to.items()):
        return None
    return "'earliest', 'latest', a datetime or offsets by partition are needed"


def whole(pattern: str, but: str | None = None) -> str:
    """A pattern of whole names, and not of `but` (aiokafka looks for a beginning)."""
    excepted = rf"(?!{re.escape(but)}\Z)" if but else ""
    return rf"{excepted}(?:{pattern})\Z"


def _are_partitions(value: object) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and len(value) > 0
        and all(map(_is_count, value))
        and len(set(value)) == len(value)
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
