"""Which cores each engine pod runs on. Pure."""

from collections.abc import Mapping, Sequence


def pin(cores: Sequence[int], threads: Mapping[str, int]) -> tuple[dict[str, tuple[int, ...]], str]:
    """An equal share of the cores for each pod, no core in two shares.

    Args:
        cores: that may be used, in order.
        threads: compute threads of each pod.

    Returns:
        The cores by pod, and an empty text; or no cores, and why the pods cannot have cores of their own.
    """
    share = len(cores) // len(threads)
    most = max(threads.values())
    if share < most:
        wanted = sum(threads.values())
        return {}, f"{wanted} compute threads of {len(threads)} pods share {len(cores)} cores"
    return {pod: tuple(cores[index * share : (index + 1) * share]) for index, pod in enumerate(threads)}, ""


def shown(cores: Sequence[int]) -> str:
    """Cores for a reader: ``core 0``, ``cores 2-3``, ``cores 0, 2``; ``any core`` for none in particular."""
    if not cores:
        return "any core"
    if len(cores) == 1:
        return f"core {cores[0]}"
    if list(cores) == list(range(cores[0], cores[-1] + 1)):
        return f"cores {cores[0]}-{cores[-1]}"
    return f"cores {', '.join(map(str, cores))}"
