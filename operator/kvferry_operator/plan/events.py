"""Events that a person would want: each change of a condition's reason, once."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from kvferry_operator.plan.causes import REASONS, WAITS, is_ready
from kvferry_operator.plan.listing import some
from kvferry_operator.plan.manifests.meta import Object

_TOLD = ("Ready", "Progressing")
INVALID = "InvalidSpec"


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """An Event about the service."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


def events(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Event, ...]:
    """What changed between two statuses. The same cause is told once, though two conditions have it."""
    old = {condition.get("type"): condition for condition in before.get("conditions", ())}
    told: dict[str, Event] = {}
    for condition in after.get("conditions", ()):
        known = old.get(condition["type"], {})
        same = (known.get("status"), known.get("reason")) == (condition["status"], condition["reason"])
        if condition["type"] not in _TOLD or same:
            continue
        reason = condition["reason"]
        fault = (reason in REASONS and reason not in WAITS) or reason == INVALID
        told.setdefault(
            reason,
            Event(type="Warning" if fault else "Normal", reason=reason, message=condition["message"][:1000]),
        )
    return tuple(told.values())


def keys_replaced(pods: Sequence[Object]) -> Event | None:
    """What to tell when the key Secret was made while pods run: it was lost, and theirs are the former keys.

    Between them and pods that start from now on no request and no KV goes. ``None`` where none runs.
    """
    old = [pod["metadata"]["name"] for pod in pods if is_ready(pod)]
    if not old:
        return None
    message = (
        f"the key Secret was missing and was made anew: pods that run ({some(old)}) have the former keys and do not"
        " work with new ones; `kubectl rollout restart` the service's Deployments"
    )
    return Event(type="Warning", reason="KeysReplaced", message=message)
