"""What a pod asks of its node where the manifest does not say: from the model, its KV and the engine's threads."""

from collections.abc import Mapping

import msgspec

from kvferry_operator.api.quantities import parse_bytes
from kvferry_operator.api.service import EngineSettings
from kvferry_operator.plan.models import GIB, MIB, ModelFacts
from kvferry_operator.plan.pods import PodPlan

# Both processes of an engine pod without weights and KV: torch, buffers of a step, the API server with its tokenizer.
# `benchmarks/memory.py` measures the terms.
ENGINE_BASE = 1024 * MIB
WEIGHTS_SLACK = 1.1  # packed copies and what loading needs at its peak
DEFAULT_KV = 1 * GIB  # the engine takes a quarter of what is available, 4 GiB at most
DEFAULT_BLOCK = 16
ROUTER_MEMORY = 768 * MIB  # its prefix index full (kvferry_wire.limits), texts of a model, requests in flight
ROUTER_CPU = "250m"
STEP = 64 * MIB


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """Requests and limits of one container, and why they are what they are."""

    requests: Mapping[str, str]
    limits: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def rendered(self) -> dict[str, dict[str, str]]:
        """As a container takes them."""
        pairs = (("requests", self.requests), ("limits", self.limits))
        return {name: dict(values) for name, values in pairs if values}


def router_resources(pod: PodPlan) -> Resources:
    """The router's: as the manifest says, else a quarter of a core and room for a full index."""
    memory = f"{ROUTER_MEMORY // MIB}Mi"
    return _filled(pod, cpu=ROUTER_CPU, memory=memory, limit=True, notes=())


def engine_resources(
    pod: PodPlan, settings: EngineSettings, facts: ModelFacts | None, model_bytes: int | None
) -> Resources:
    """An engine's: as the manifest says, else derived.

    Args:
        pod: with what the manifest says of requests and limits, and the number of threads.
        settings: the pool's effective engine settings.
        facts: sizes that are known of the model.
        model_bytes: size of the model's files, as the manifest says or a fetch found.
    """
    cpu = str(pod.threads or 1)
    if _given(pod, "memory"):
        return _filled(pod, cpu=cpu, memory=None, limit=False, notes=())
    needed = _engine_memory(settings, facts, model_bytes)
    if needed is None:
        note = (
            f"{pod.role}: no memory is asked for: the model's size is not known;"
            f" give spec.model.size or spec.{pod.role}.resources"
        )
        return _filled(pod, cpu=cpu, memory=None, limit=False, notes=(note,))
    total, exact = needed
    memory = f"{-(-total // STEP) * STEP // MIB}Mi"
    how = "request and limit" if exact else "request; no limit, since files and memory differ in size"
    note = f"{pod.role}: {memory} of memory ({how})"
    return _filled(pod, cpu=cpu, memory=memory, limit=exact, notes=(note,))


def _engine_memory(
    settings: EngineSettings, facts: ModelFacts | None, model_bytes: int | None
) -> tuple[int, bool] | None:
    """Bytes, and whether every term of them is known; ``None`` if nothing is known of the model."""
    half = settings.dtype == "bfloat16"
    if facts is not None:
        weights = facts.weights // 2 if half else facts.weights
        kv = _kv(settings, facts, half)
        return ENGINE_BASE + int(weights * WEIGHTS_SLACK) + kv, True
    if model_bytes is None:
        return None
    # Files are taken to hold 16-bit weights.
    weights = model_bytes if half else 2 * model_bytes
    return ENGINE_BASE + int(weights * WEIGHTS_SLACK) + _kv(settings, None, half), False


def _kv(settings: EngineSettings, facts: ModelFacts | None, half: bool) -> int:
    if settings.kv_memory is not None:
        return parse_bytes(settings.kv_memory)
    if settings.kv_blocks is not None and facts is not None:
        per_token = facts.kv_per_token // 2 if half else facts.kv_per_token
        return (settings.kv_blocks + 1) * (settings.block_size or DEFAULT_BLOCK) * per_token
    return DEFAULT_KV


def _given(pod: PodPlan, resource: str) -> bool:
    return resource in dict(pod.requests) or resource in dict(pod.limits)


def _filled(pod: PodPlan, *, cpu: str, memory: str | None, limit: bool, notes: tuple[str, ...]) -> Resources:
    """What is given, and what is derived where nothing of that resource is given."""
    requests, limits = dict(pod.requests), dict(pod.limits)
    if not _given(pod, "cpu"):
        requests["cpu"] = cpu
    if memory is not None and not _given(pod, "memory"):
        requests["memory"] = memory
        if limit:
            limits["memory"] = memory
    return Resources(requests=requests, limits=limits, notes=notes)
