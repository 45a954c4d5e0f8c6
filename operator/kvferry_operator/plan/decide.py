"""One decision: from a service and what is seen of it to effects in order, and its status. Level-triggered and pure.

Called again after every change, it comes to rest: with everything as wanted it yields no effect.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from kvferry_operator.api.cluster import load_object
from kvferry_operator.api.faults import ManifestError
from kvferry_operator.api.role import ROLE_KIND
from kvferry_operator.api.service import API_VERSION, InferenceService
from kvferry_operator.plan.diff import first_difference, stamped
from kvferry_operator.plan.effects import Apply, Create, Delete, Effect, Patch
from kvferry_operator.plan.events import Event, events
from kvferry_operator.plan.manifests.commits import commits
from kvferry_operator.plan.manifests.context import Context
from kvferry_operator.plan.manifests.meta import (
    COMPONENT,
    FIELD_MANAGER,
    MANAGED_BY,
    REVISION,
    SEED_MANAGER,
    SEEDED,
    Object,
    Owner,
)
from kvferry_operator.plan.manifests.names import ENGINE_ROLES, role_name
from kvferry_operator.plan.manifests.objects import objects
from kvferry_operator.plan.manifests.roles import reseed_patch, role_frame, role_object, role_status
from kvferry_operator.plan.manifests.settings import ClusterSettings
from kvferry_operator.plan.manifests.support import key_secret
from kvferry_operator.plan.observed import Seen, owner_uid, replicas
from kvferry_operator.plan.pods import Observed
from kvferry_operator.plan.rollout import RoleState, next_step
from kvferry_operator.plan.scaling import Scale, scale
from kvferry_operator.plan.service import PlanError, plan
from kvferry_operator.plan.status import refused, status

# Never pruned: the Secret cannot be listed, and pods are their controllers' own.
PRUNED_KINDS = frozenset(
    {
        "Deployment",
        "Service",
        "ServiceAccount",
        "ConfigMap",
        "PodDisruptionBudget",
        "NetworkPolicy",
        "Ingress",
        "HTTPRoute",
        ROLE_KIND,
    }
)


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done now."""

    effects: tuple[Effect, ...]
    status: Object | None  # to be written if it is not what is there; None: nothing to say
    role_statuses: Mapping[str, Object]  # by name of the role object
    events: tuple[Event, ...]


NOTHING = Decision(effects=(), status=None, role_statuses={}, events=())


def decide(
    found: Object, seen: Seen, settings: ClusterSettings, keys: Mapping[str, bytes] | None, now: str
) -> Decision:
    """Decide the next effects.

    Args:
        found: the InferenceService as the API server has it.
        seen: its children and pods.
        settings: the installation's.
        keys: random keys for a Secret to be made; ``None`` where the caller knows that it is there.
        now: RFC 3339.
    """
    if found["metadata"].get("deletionTimestamp"):
        return NOTHING  # the garbage collector takes what belongs to it
    owner, before = owner_of(found), found.get("status", {})
    try:
        service = load_object(found)
        chosen = plan(service, Observed())
        known = commits(owner, chosen.source, seen)
        context = Context(owner=owner, service=service, plan=chosen, settings=settings, commits=known)
        effects, wanted = _effects(context, seen, keys)
    except (ManifestError, PlanError) as error:
        told = refused(owner, "InvalidSpec", _said(error), before, now)
        return Decision(effects=(), status=told, role_statuses={}, events=events(before, told))
    taken = _taken(owner, effects, seen)
    told = status(context, wanted, seen, before, now)
    if taken:
        told = refused(owner, "NameTaken", "; ".join(taken), {**told, **_times(before)}, now)
        effects = ()
    return Decision(
        effects=effects,
        status=told,
        role_statuses=_role_statuses(owner, told, seen, wanted),
        events=events(before, told),
    )


def _times(before: Mapping[str, Any]) -> dict[str, Any]:
    """The conditions that were there, for their times."""
    return {"conditions": before["conditions"]} if "conditions" in before else {}


def owner_of(found: Object) -> Owner:
    """The service that children belong to."""
    metadata = found["metadata"]
    return Owner(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        generation=metadata.get("generation", 0),
    )


def _effects(
    context: Context, seen: Seen, keys: Mapping[str, bytes] | None
) -> tuple[tuple[Effect, ...], dict[str, int]]:
    """The effects in order, and how many pods each role is to have."""
    owner, chosen = context.owner, context.plan
    scales = {
        str(pod.role): scale(_manifest_replicas(context.service, pod.role), _role(owner, pod.role, seen))
        for pod in chosen.templates
    }
    wanted = {role: decided.replicas for role, decided in scales.items()}
    states = {
        role: RoleState(wanted=wanted[role], pools=seen.pools(role, owner.uid))
        for role in ENGINE_ROLES
        if role in wanted
    }
    step = next_step(states, chosen.revision)
    now = {role: step[role][chosen.revision] if role in step else wanted[role] for role in wanted}
    applied = objects(context, now)
    effects: list[Effect] = []
    if keys is not None:
        effects.append(Create(object=key_secret(owner, keys), manager=SEED_MANAGER))
    for role, decided in scales.items():
        effects += _role_effects(owner, role, decided, seen)
    down, up = _applies(owner, applied, seen)
    effects += down
    shrunk, gone = _old_pools(owner, step, chosen.revision, seen)
    effects += [*shrunk, *up]
    kept = {(made["kind"], made["metadata"]["name"]) for made in applied}
    kept |= {(ROLE_KIND, role_name(owner.name, role)) for role in wanted}
    kept |= {("Deployment", name) for name in _old_names(owner, step, chosen.revision, seen)}
    effects += [*gone, *_prunes(owner, kept, seen)]
    return tuple(effects), wanted


def _manifest_replicas(service: InferenceService, role: str) -> int:
    spec = service.spec
    return {"prefill": spec.prefill_replicas, "decode": spec.decode.replicas}.get(role, spec.router.replicas)


def _role(owner: Owner, role: str, seen: Seen) -> Object | None:
    found = seen.child(ROLE_KIND, role_name(owner.name, role))
    return found if found is not None and owner_uid(found) == owner.uid else None


def _role_effects(owner: Owner, role: str, decided: Scale, seen: Seen) -> list[Effect]:
    if decided.write == "create":
        return [Create(object=role_object(owner, role, decided.replicas), manager=SEED_MANAGER)]
    made: list[Effect] = []
    found = _role(owner, role, seen)
    if found is not None and (why := first_difference(role_frame(owner, role), found)) is not None:
        made.append(Apply(object=stamped(role_frame(owner, role)), manager=FIELD_MANAGER, why=why))
    if decided.write != "nothing":
        body = reseed_patch(decided.manifest)
        if decided.write == "seed":
            body = {"metadata": body["metadata"]}
        why = f"the manifest's number is {body['metadata']['annotations'][SEEDED]}"
        made.append(
            _patch(
                owner,
                api_version=API_VERSION,
                kind=ROLE_KIND,
                name=role_name(owner.name, role),
                body=body,
                manager=SEED_MANAGER,
                why=why,
            )
        )
    return made


def _applies(owner: Owner, applied: tuple[Object, ...], seen: Seen) -> tuple[list[Effect], list[Effect]]:
    """Objects to be written: Deployments that shrink apart from all others, since they go first."""
    down: list[Effect] = []
    up: list[Effect] = []
    for made in applied:
        there = seen.child(made["kind"], made["metadata"]["name"])
        why = "missing" if there is None else first_difference(made, there)
        if why is None:
            continue
        shrinks = made["kind"] == "Deployment" and there is not None and replicas(made) < replicas(there)
        (down if shrinks else up).append(Apply(object=stamped(made), manager=FIELD_MANAGER, why=why))
    return down, up


def _old_pools(
    owner: Owner, step: Mapping[str, Mapping[str, int]], target: str, seen: Seen
) -> tuple[list[Effect], list[Effect]]:
    """Deployments of earlier revisions: fewer pods where new ones are ready, none at all once they are empty."""
    shrunk: list[Effect] = []
    gone: list[Effect] = []
    for child, most in _old_deployments(owner, step, target, seen):
        name = child["metadata"]["name"]
        if replicas(child) > most:
            why = f"{most} pods of this revision are still needed"
            body = {"spec": {"replicas": most}}
            shrunk.append(
                _patch(
                    owner,
                    api_version=child["apiVersion"],
                    kind="Deployment",
                    name=name,
                    body=body,
                    manager=FIELD_MANAGER,
                    why=why,
                )
            )
        elif most == 0 and not child.get("status", {}).get("replicas", 0):
            gone.append(_delete(owner, child, f"revision {target} has taken its place"))
    return shrunk, gone


def _old_deployments(
    owner: Owner, step: Mapping[str, Mapping[str, int]], target: str, seen: Seen
) -> list[tuple[Object, int]]:
    found = []
    for child in seen.of_kind("Deployment"):
        labels = child["metadata"].get("labels", {})
        role, revision = labels.get(COMPONENT), labels.get(REVISION)
        if owner_uid(child) == owner.uid and role in step and revision is not None and revision != target:
            found.append((child, step[role].get(revision, 0)))
    return found


def _old_names(owner: Owner, step: Mapping[str, Mapping[str, int]], target: str, seen: Seen) -> set[str]:
    return {child["metadata"]["name"] for child, _ in _old_deployments(owner, step, target, seen)}


def _prunes(owner: Owner, kept: set[tuple[str, str]], seen: Seen) -> list[Effect]:
    """What belongs to the service and is not wanted any more. What carries other marks is others' business."""
    return [
        _delete(owner, child, "not wanted any more")
        for child in seen.children
        if child["kind"] in PRUNED_KINDS
        and owner_uid(child) == owner.uid
        and child["metadata"].get("labels", {}).get(MANAGED_BY) == "kvferry"
        and (child["kind"], child["metadata"]["name"]) not in kept
        and not child["metadata"].get("deletionTimestamp")
    ]


def _taken(owner: Owner, effects: tuple[Effect, ...], seen: Seen) -> list[str]:
    """Names that are wanted and belong to somebody else: they are never written."""
    told = []
    for effect in effects:
        if isinstance(effect, Apply | Create):
            kind, name = effect.object["kind"], effect.object["metadata"]["name"]
            there = seen.child(kind, name)
            if there is not None and owner_uid(there) != owner.uid:
                told.append(f"{kind} {name} exists already and does not belong to this service: rename one of them")
    return told


def _role_statuses(owner: Owner, told: Object, seen: Seen, wanted: Mapping[str, int]) -> dict[str, Object]:
    """The statuses of role objects that are not what they should be; none of one that goes."""
    out = {}
    for role in told.get("roles", ()):
        found = _role(owner, role["name"], seen)
        if found is None or role["name"] not in wanted:
            continue
        made = role_status(
            owner,
            role["name"],
            replicas=len([pod for pod in seen.role_pods(role["name"]) if not pod["metadata"].get("deletionTimestamp")]),
            ready=role["readyReplicas"],
            generation=found["metadata"].get("generation", 0),
        )
        if made != found.get("status"):
            out[found["metadata"]["name"]] = made
    return out


def _patch(
    owner: Owner, *, api_version: str, kind: str, name: str, body: dict[str, Any], manager: str, why: str
) -> Patch:
    return Patch(
        api_version=api_version,
        kind=kind,
        namespace=owner.namespace,
        name=name,
        body=body,
        manager=manager,
        why=why,
    )


def _delete(owner: Owner, child: Object, why: str) -> Delete:
    metadata = child["metadata"]
    return Delete(
        api_version=child["apiVersion"],
        kind=child["kind"],
        namespace=owner.namespace,
        name=metadata["name"],
        uid=metadata["uid"],
        why=why,
    )


def _said(error: ManifestError | PlanError) -> str:
    if isinstance(error, ManifestError):
        return "; ".join(f"{fault.field}: {fault.text}" if fault.field else fault.text for fault in error.faults)
    return "; ".join(str(error).splitlines())
