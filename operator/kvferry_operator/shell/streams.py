"""What the requests of the watch layer tell: is everything listed, which watch is silent, which objects went unseen.

Pure. The watch layer lists a kind, then watches it, and does the same again when its place in the history is lost. It
does not say which objects vanished in between: those that a new list did not show are doubtful (``doubtful``), and
the caller looks them up one by one.
"""

import msgspec

Stream = tuple[str, str | None]  # kind, namespace (None: all)
Name = tuple[str, str]  # namespace, name


class _State(msgspec.Struct, kw_only=True):
    lists: int = 0  # begun
    listed: bool = False  # the last list is over: its watch has begun
    heard_at: float  # when it last asked or was told anything
    showed_at: float  # when an object of a list last came by, or the watch after it began
    checked: int = 1  # the list after which was looked for what vanished; there is nothing to look for after the first
    seen: set[Name] = msgspec.field(default_factory=set)


class Streams:
    """All watches of this process."""

    def __init__(self, streams: tuple[Stream, ...], now: float) -> None:
        self._states = {stream: _State(heard_at=now, showed_at=now) for stream in streams}

    def requested(self, stream: Stream, *, watch: bool, more: bool, now: float) -> None:
        """A request begins: a list (``more``: the next part of one) or a watch."""
        state = self._states.get(stream)
        if state is None:
            return
        state.heard_at = now
        if watch:
            state.showed_at = now if not state.listed else state.showed_at
            state.listed = True
        elif not more:
            state.lists += 1
            state.listed = False
            state.seen = set()

    def heard(self, stream: Stream, name: Name, *, listing: bool, now: float) -> None:
        """An object came by, in a list or from a watch."""
        state = self._states.get(stream)
        if state is None:
            return
        state.heard_at = now
        state.showed_at = now if listing else state.showed_at
        if state.checked < state.lists:
            state.seen.add(name)

    def unlisted(self) -> list[Stream]:
        """Streams that were never listed to the end."""
        return [stream for stream, state in self._states.items() if state.lists <= 1 and not state.listed]

    def settled(self, now: float, quiet_s: float, optional: frozenset[str]) -> bool:
        """Whether everything was seen once: all lists are over, and no further object of one came for ``quiet_s``.
        Kinds in ``optional`` need not be there."""
        unlisted = [stream for stream in self.unlisted() if stream[0] not in optional]
        return not unlisted and all(now - state.showed_at >= quiet_s for state in self._states.values())

    def silent(self, now: float, after_s: float) -> list[Stream]:
        """Streams that have begun and neither asked nor heard anything for so long. One whose kind is not served never
        begins."""
        return [stream for stream, state in self._states.items() if state.lists and now - state.heard_at > after_s]

    def relisted(self, now: float, quiet_s: float) -> list[Stream]:
        """Streams that were listed again, and whose objects have come by (no further one for ``quiet_s``)."""
        return [
            stream
            for stream, state in self._states.items()
            if state.listed and state.checked < state.lists and now - state.showed_at >= quiet_s
        ]

    def doubtful(self, stream: Stream, known: set[Name]) -> set[Name]:
        """Of the objects that are known, those that the new list did not show. To be asked once for each list."""
        state = self._states[stream]
        state.checked = state.lists
        seen, state.seen = state.seen, set()
        return known - seen
