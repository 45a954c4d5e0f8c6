"""Which pods no other one pairs with since their compat hashes differ, and what differs. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvferry_wire.pod import PodInfo

_SHOWN_CHARS = 120  # of each value


@dataclass(frozen=True, slots=True)
class Unpaired:
    """A pod that gets no KV across to, or from, any pod of the other side."""

    pod: str
    role: str
    beside: str  # a pod of the other side
    why: str  # what differs between the two, in words

    @property
    def pair(self) -> str:
        """Both names, the prefill pod's first."""
        return f"{self.beside} {self.pod}" if self.role == "decode" else f"{self.pod} {self.beside}"


class PairingNews:
    """What is new of pods without a partner, look by look: each is told once, and again where what differs changes.

    One that is alone at a single look is passed over: while pods are replaced, some wait for the first one there.
    """

    def __init__(self) -> None:
        self._before: dict[str, str] = {}
        self._told: dict[str, str] = {}

    def look(self, found: Sequence[Unpaired]) -> list[Unpaired]:
        """Take what is seen now; returns what to tell."""
        now = {one.pod: one.why for one in found}
        stay = [one for one in found if self._before.get(one.pod) == one.why]
        news = [one for one in stay if self._told.get(one.pod) != one.why]
        self._told = {pod: why for pod, why in self._told.items() if pod in now} | {one.pod: one.why for one in stay}
        self._before = now
        return news


def unpaired(prefill: Sequence[tuple[str, PodInfo]], decode: Sequence[tuple[str, PodInfo]]) -> list[Unpaired]:
    """The pods without a partner. Where the other side has no pod at all, that is what is missing, and none is told.

    Args:
        prefill: pods that may prefill now, by name; a pod of both roles is on both sides.
        decode: pods that may decode now.
    """
    return [*_alone(prefill, decode), *(one for one in _alone(decode, prefill) if one.role != "both")]


def difference(ours: PodInfo, theirs: PodInfo) -> str:
    """What makes the compat hashes of two pods differ, in words."""
    for name, one, other in (
        ("protocol_version", ours.protocol_version, theirs.protocol_version),
        ("model_digest", ours.model_digest, theirs.model_digest),
        ("dtype", ours.dtype, theirs.dtype),
        ("layout", ours.layout, theirs.layout),
    ):
        if one != other:
            return f"{name}: {str(one)[:_SHOWN_CHARS]} and {str(other)[:_SHOWN_CHARS]}"
    return "keys: the two have different hash keys"  # of what the hash is of, all that a pod does not tell


def _alone(ours: Sequence[tuple[str, PodInfo]], theirs: Sequence[tuple[str, PodInfo]]) -> Iterator[Unpaired]:
    for name, info in ours:
        others = [(other, its) for other, its in theirs if other != name]
        if others and all(its.compat_hash != info.compat_hash for _, its in others):
            beside, its = min(others, key=lambda one: one[0])
            yield Unpaired(name, info.role, beside, difference(info, its))
