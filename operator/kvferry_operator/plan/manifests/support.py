"""The smaller objects around the pods: account, disruption budgets, key Secret, and the plan in words."""

import base64
from collections.abc import Mapping

from kvferry_operator.plan.manifests.commits import PLAN
from kvferry_operator.plan.manifests.meta import Object, Owner, make_object, selector
from kvferry_operator.plan.manifests.names import child, keys_name
from kvferry_operator.plan.pods import ServicePlan
from kvferry_wire.keys import KEY_BYTES, KEY_NAMES


def engine_account(owner: Owner) -> Object:
    """The ServiceAccount of engine pods: no rights, no token."""
    body = {"automountServiceAccountToken": False}
    return make_object("v1", "ServiceAccount", child(owner.name, "engine"), owner, body)


def budget(owner: Owner, component: str) -> Object:
    """A PodDisruptionBudget: a drain takes one pod of a role at a time, and is never stopped by broken ones."""
    spec = {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": selector(owner.name, component)},
    }
    name = child(owner.name, component)
    return make_object("policy/v1", "PodDisruptionBudget", name, owner, {"spec": spec}, component=component)


def key_secret(owner: Owner, keys: Mapping[str, bytes]) -> Object:
    """The service's keys, to be created once and never read; that it exists already is no error.

    Args:
        keys: 32 random bytes for each of ``KEY_NAMES``, drawn by the caller.
    """
    if set(keys) != set(KEY_NAMES) or any(len(key) != KEY_BYTES for key in keys.values()):
        raise ValueError(f"keys: {KEY_BYTES} bytes for each of {', '.join(KEY_NAMES)} are needed")
    data = {name: base64.b64encode(key.hex().encode()).decode() for name, key in keys.items()}
    body = {"type": "Opaque", "immutable": True, "data": data}
    return make_object("v1", "Secret", keys_name(owner.name, owner.uid), owner, body)


def plan_notes(owner: Owner, plan: ServicePlan, notes: tuple[str, ...], commits: Mapping[str, str]) -> Object:
    """A ConfigMap that tells people what was chosen and why. Of it, containers that fetch read the commits."""
    data = {"revision": plan.revision, "source": str(plan.source), "notes": "\n".join(notes) + "\n", **commits}
    return make_object("v1", "ConfigMap", child(owner.name, PLAN), owner, {"data": data})
