"""The index by brute force: what ``prefix_index`` must be equal to, kept beside it as its test's oracle."""

from collections.abc import Iterable, Sequence


class NaiveIndex:
    """A set of hashes per pod; no cap."""

    def __init__(self) -> None:
        self._held: dict[str, set[bytes]] = {}

    @property
    def blocks(self) -> int:
        return sum(map(len, self._held.values()))

    def store(self, pod: str, hashes: Iterable[bytes]) -> None:
        self._held.setdefault(pod, set()).update(hashes)

    def remove(self, pod: str, hashes: Iterable[bytes]) -> None:
        self._held.get(pod, set()).difference_update(hashes)

    def drop(self, pod: str) -> None:
        self._held.pop(pod, None)

    def match(self, hashes: Sequence[bytes]) -> dict[str, int]:
        lengths = {}
        for pod, held in self._held.items():
            length = 0
            while length < len(hashes) and hashes[length] in held:
                length += 1
            if length:
                lengths[pod] = length
        return lengths
