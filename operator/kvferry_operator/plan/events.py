"""Events that a person would want: each change of a condition's reason, once."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from kvferry_operator.plan.causes import REASONS, WAITS

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
