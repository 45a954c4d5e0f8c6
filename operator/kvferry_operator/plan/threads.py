"""How many threads each engine computes with."""

from fractions import Fraction

from kvferry_operator.api.quantities import parse_quantity
from kvferry_operator.api.service import EngineRole, EngineSettings


def threads(role: EngineRole, settings: EngineSettings, cores: int | None, engines: int) -> tuple[int | None, str]:
    """Threads of one engine and the reason in words; ``None`` leaves it to the engine.

    Args:
        role: the pool; its CPU limit (else request) counts where the pod has cores of its own.
        settings: the pool's effective engine settings; an explicit number wins.
        cores: what all engines share on one machine; ``None`` where each pod has its own.
        engines: number of engine pods that share ``cores``.
    """
    if settings.threads is not None:
        return settings.threads, f"{settings.threads} threads, as the manifest says"
    if cores is not None:
        share = max(1, cores // max(1, engines))
        note = f"{_count(share, 'thread')}: {_count(cores, 'core')} shared by {_count(engines, 'engine')}"
        if engines > cores:
            note += " (more engines than cores: they take turns)"
        return share, note
    for given in (role.resources.limits, role.resources.requests):
        if "cpu" in given:
            cpu = parse_quantity(given["cpu"])
            return max(1, int(Fraction(cpu))), f"{max(1, int(cpu))} threads for {given['cpu']} CPU"
    return None, "threads are the engine's choice: the pod has no CPU limit or request"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
