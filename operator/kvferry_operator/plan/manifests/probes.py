"""Probes that tell the truth: startup as long as a load may take, readiness = send clients, liveness = makes steps."""

import math

from kvferry_operator.plan.manifests.meta import Object
from kvferry_operator.plan.pods import Probes
from kvferry_wire.limits import DEFAULT_LIMITS

PERIOD_S = 2
LOAD_BYTES_PER_S = 50 * 2**20  # of a slow disk, through the slowest reader
LOAD_FLOOR_S = 300.0  # imports and the first step on an overloaded node: who is ended there only begins anew
LIVE_PERIOD_S = 5
# The pod itself starts a silent engine again; only if that has not helped does the kubelet start the pod again.
LIVE_AFTER_S = DEFAULT_LIMITS.engine_kill_s + 20.0


def load_seconds(model_bytes: int | None) -> float:
    """How long an engine may take until it answers; the engine's own limit where the model's size is not known."""
    if model_bytes is None:
        return DEFAULT_LIMITS.engine_start_s
    return min(DEFAULT_LIMITS.engine_start_s, LOAD_FLOOR_S + model_bytes / LOAD_BYTES_PER_S)


def probes(paths: Probes, startup_s: float) -> Object:
    """The three probes of a container. The others wait until the startup probe has succeeded."""
    return {
        "startupProbe": _get(paths.traffic, period=PERIOD_S, failures=math.ceil(startup_s / PERIOD_S), timeout=2),
        "readinessProbe": _get(paths.traffic, period=1, failures=1, timeout=2),
        "livenessProbe": _get(
            paths.live, period=LIVE_PERIOD_S, failures=math.ceil(LIVE_AFTER_S / LIVE_PERIOD_S), timeout=5
        ),
    }


def _get(path: str, *, period: int, failures: int, timeout: int) -> Object:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period,
        "failureThreshold": failures,
        "timeoutSeconds": timeout,
    }
