"""The status of a service: conditions with a reason for programs and words for people. The time is an argument."""

from collections.abc import Mapping
from typing import Any

import msgspec

from kvferry_operator.api.service import InferenceService
from kvferry_operator.plan.causes import Cause, apply_cause, deployment_cause, is_ready, pod_cause
from kvferry_operator.plan.manifests.commits import commit_names, pinned
from kvferry_operator.plan.manifests.context import Context
from kvferry_operator.plan.manifests.meta import COMPONENT, Object, Owner
from kvferry_operator.plan.manifests.names import ENGINE_ROLES, ROLES
from kvferry_operator.plan.manifests.services import endpoint_url
from kvferry_operator.plan.observed import Seen, owner_uid, replicas
from kvferry_operator.plan.pairing import lonely
from kvferry_operator.plan.pods import ServicePlan
from kvferry_operator.plan.rollout import RoleState, done

MAX_MESSAGE = 2000
MORE_CAUSES = 2  # told beside the first


class RoleView(msgspec.Struct, frozen=True, kw_only=True):
    """One role as the status tells it."""

    role: str
    wanted: int
    ready: int  # of the wanted revision
    old: int  # pods of earlier revisions
    old_ready: int
    causes: tuple[Cause, ...]  # of pods that do not answer, most telling first, one of each reason

    @property
    def text(self) -> str:
        return f"{self.ready}/{self.wanted}"


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """A condition before it has its times."""

    type: str
    status: str  # True, False, Unknown
    reason: str
    message: str


def status(context: Context, wanted: Mapping[str, int], seen: Seen, before: Mapping[str, Any], now: str) -> Object:
    """The whole status.

    Args:
        wanted: pods of each role.
        before: the status as it is, for the times of its conditions.
        now: RFC 3339, for conditions that change.
    """
    owner, plan, service = context.owner, context.plan, context.service
    views = {role: role_view(context, role, wanted.get(role, 0), seen) for role in ROLES}
    made = [_role_condition(views[role]) for role in ROLES]
    made.append(_ferry(service, plan, views, seen))
    progressing = _progressing(owner, plan, views, seen)
    conditions = [_ready(made[: len(ROLES)], views, plan), progressing, *made]
    whole = {
        "observedGeneration": owner.generation,
        "revision": plan.revision,
        "url": endpoint_url(owner, service.spec.router),
        "path": "disaggregated" if _ferries(service, wanted) else "aggregated",
        "roles": [_role_status(view) for view in views.values() if view.wanted or view.old or view.role != "prefill"],
        "conditions": timed(conditions, before, owner.generation, now),
    }
    names = commit_names(owner.name, plan.source)
    commit = pinned(plan.source) if names is None else context.commits.get(names.key)
    if commit is not None:
        whole["modelCommit"] = commit
    return whole


def refused(owner: Owner, reason: str, told: str, before: Mapping[str, Any], now: str) -> Object:
    """The status of a spec that is not acted on: what runs stays as it is."""
    said = Condition(type="Ready", status="False", reason=reason, message=told)
    stuck = Condition(type="Progressing", status="False", reason=reason, message=told)
    kept = {key: value for key, value in before.items() if key != "conditions"}
    types = {condition.type for condition in (said, stuck)}
    others = [condition for condition in before.get("conditions", ()) if condition.get("type") not in types]
    conditions = [*timed([said, stuck], before, owner.generation, now), *others]
    return {**kept, "observedGeneration": owner.generation, "conditions": conditions}


def timed(made: list[Condition], before: Mapping[str, Any], generation: int, now: str) -> list[Object]:
    """Conditions with their times: ``lastTransitionTime`` changes only where ``status`` does."""
    old = {condition.get("type"): condition for condition in before.get("conditions", ())}
    out = []
    for condition in made:
        known = old.get(condition.type, {})
        since = known.get("lastTransitionTime") if known.get("status") == condition.status else None
        out.append(
            {
                "type": condition.type,
                "status": condition.status,
                "reason": condition.reason,
                "message": condition.message[:MAX_MESSAGE],
                "observedGeneration": generation,
                "lastTransitionTime": since or now,
            }
        )
    return out


def role_view(context: Context, role: str, wanted: int, seen: Seen) -> RoleView:
    """What is known of a role's pods."""
    owner, plan = context.owner, context.plan
    revision = plan.revision if role in ENGINE_ROLES else None
    pods = seen.role_pods(role, revision)
    old = [pod for pod in seen.role_pods(role) if pod not in pods and not pod["metadata"].get("deletionTimestamp")]
    ready = sum(is_ready(pod) for pod in pods)
    found = [cause for pod in pods if (cause := pod_cause(pod)) is not None]
    for child in seen.of_kind("Deployment"):
        ours = owner_uid(child) == owner.uid and child["metadata"].get("labels", {}).get(COMPONENT) == role
        if ours and (cause := deployment_cause(child)) is not None:
            found.append(cause)
    if ready < wanted and not found:
        found = [apply_cause(fault) for fault in seen.faults]
    if ready < wanted and not found:
        found = [Cause(reason="Starting", message=f"{role}: pods are being made")]
    first = {cause.reason: cause for cause in sorted(found, key=lambda cause: cause.rank, reverse=True)}
    causes = tuple(sorted(first.values(), key=lambda cause: cause.rank)) if ready < wanted else ()
    return RoleView(
        role=role,
        wanted=wanted,
        ready=ready,
        old=len(old),
        old_ready=sum(is_ready(pod) for pod in old),
        causes=causes,
    )


def _role_condition(view: RoleView) -> Condition:
    """Whether a role would do its work now: one ready pod does. How many are missing, and why, is in the message."""
    kind = {"prefill": "PrefillReady", "decode": "DecodeReady", "router": "RouterReady"}[view.role]
    if view.wanted == 0:
        if view.role == "prefill":
            told = "no prefill pods are wanted: decode pods compute prompts themselves"
            return Condition(type=kind, status="True", reason="NotWanted", message=told)
        return Condition(type=kind, status="False", reason="ScaledToZero", message=f"no {view.role} pods are wanted")
    if view.ready >= view.wanted:
        return Condition(type=kind, status="True", reason="AllReady", message=f"{view.text} ready")
    told = "; ".join(cause.message for cause in view.causes[: 1 + MORE_CAUSES])
    answers = view.ready > 0
    return Condition(
        type=kind,
        status="True" if answers else "False",
        reason="SomeReady" if answers else view.causes[0].reason,
        message=f"{view.text} ready: {told}",
    )


def _ready(roles: list[Condition], views: Mapping[str, RoleView], plan: ServicePlan) -> Condition:
    """Ready follows from the roles: each would do its work now, at the revision that is asked for."""
    missing = [condition for condition in roles if condition.status != "True"]
    if not missing:
        return Condition(type="Ready", status="True", reason="Answering", message="would answer a request now")
    worst = min(missing, key=lambda condition: (condition.reason == "Starting", condition.reason == "Loading"))
    parts = [f"{condition.type.removesuffix('Ready').lower()}: {condition.message}" for condition in missing]
    decode, router = views["decode"], views["router"]
    if decode.old_ready and router.ready:
        parts.append(f"pods of an earlier revision than {plan.revision} still answer")
    return Condition(type="Ready", status="False", reason=worst.reason, message="; ".join(parts))


def _progressing(owner: Owner, plan: ServicePlan, views: Mapping[str, RoleView], seen: Seen) -> Condition:
    """As of a Deployment: True while work goes on or is complete, False where it is stuck."""
    causes = [cause for view in views.values() for cause in view.causes] + [apply_cause(fault) for fault in seen.faults]
    stuck = sorted((cause for cause in causes if not cause.waits), key=lambda cause: cause.rank)
    if stuck:
        return Condition(type="Progressing", status="False", reason=stuck[0].reason, message=stuck[0].message)
    states = {role: RoleState(wanted=views[role].wanted, pools=seen.pools(role, owner.uid)) for role in ENGINE_ROLES}
    waits = sorted(causes, key=lambda cause: cause.rank)
    if any(view.old for view in views.values()) or not done(states, plan.revision):
        counts = ", ".join(f"{view.role} {view.text}" for view in views.values() if view.wanted)
        told = f"revision {plan.revision}: {counts} ready" + (f"; {waits[0].message}" if waits else "")
        return Condition(type="Progressing", status="True", reason="RollingOut", message=told)
    if waits:
        return Condition(type="Progressing", status="True", reason=waits[0].reason, message=waits[0].message)
    if not _router_current(owner, seen):
        return Condition(type="Progressing", status="True", reason="RollingOut", message="routers are being replaced")
    return Condition(type="Progressing", status="True", reason="Complete", message=f"revision {plan.revision} runs")


def _router_current(owner: Owner, seen: Seen) -> bool:
    """Whether all routers run the newest template."""
    for child in seen.of_kind("Deployment"):
        if owner_uid(child) == owner.uid and child["metadata"].get("labels", {}).get(COMPONENT) == "router":
            state = child.get("status", {})
            seen_it = state.get("observedGeneration", 0) >= child["metadata"].get("generation", 0)
            newest, all_pods = int(state.get("updatedReplicas", 0)), int(state.get("replicas", 0))
            return bool(seen_it) and newest == all_pods == replicas(child)
    return False


def _ferry(service: InferenceService, plan: ServicePlan, views: Mapping[str, RoleView], seen: Seen) -> Condition:
    """Whether KV crosses from prefill to decode."""
    kind = "KVTransferEffective"
    if not _ferries(service, {role: view.wanted for role, view in views.items()}):
        told = "no prompt goes to a prefill pod: decode pods compute prompts themselves"
        return Condition(type=kind, status="False", reason="NotUsed", message=told)
    if not (views["prefill"].ready and views["decode"].ready):
        told = f"needs a ready prefill and a ready decode pod of revision {plan.revision}"
        return Condition(type=kind, status="False", reason="WaitsForPods", message=told)
    alone = lonely(plan, seen)
    if alone is not None and alone.all:
        return Condition(type=kind, status="False", reason="CompatDiffers", message=alone.told)
    backend = service.spec.transfer.backend
    told = f"prefill and decode of revision {plan.revision} ferry KV by {'tcp' if backend == 'auto' else backend}"
    if alone is not None:
        return Condition(type=kind, status="True", reason="SomeDiffer", message=f"{told}, but not all: {alone.told}")
    return Condition(type=kind, status="True", reason="SameRevision", message=told)


def _ferries(service: InferenceService, wanted: Mapping[str, int]) -> bool:
    return wanted.get("prefill", 0) > 0 and service.spec.router.disaggregation.mode != "never"


def _role_status(view: RoleView) -> Object:
    return {
        "name": view.role,
        "ready": view.text,
        "replicas": view.wanted,
        "readyReplicas": view.ready,
        "oldReplicas": view.old,
    }
