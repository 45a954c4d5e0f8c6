"""What the operator sees of a service: its children, its pods, and what it could not write."""

import msgspec

from kvferry_operator.plan.effects import ApplyFault
from kvferry_operator.plan.manifests.meta import COMPONENT, REVISION, Object
from kvferry_operator.plan.manifests.names import ENGINE_ROLES
from kvferry_operator.plan.rollout import PoolState


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster's side of a service. Objects are as the API server gives them.

    ``children`` holds every object of the kinds we make that carries the service's labels or one of its names: also one
    that belongs to somebody else.
    """

    children: tuple[Object, ...] = ()
    pods: tuple[Object, ...] = ()
    faults: tuple[ApplyFault, ...] = ()  # of the last attempt

    def of_kind(self, kind: str) -> tuple[Object, ...]:
        return tuple(child for child in self.children if child["kind"] == kind)

    def child(self, kind: str, name: str) -> Object | None:
        return next((child for child in self.of_kind(kind) if child["metadata"]["name"] == name), None)

    def role_pods(self, role: str, revision: str | None = None) -> tuple[Object, ...]:
        """Pods of a role, of one revision if it is given."""
        return tuple(
            pod
            for pod in self.pods
            if _label(pod, COMPONENT) == role and (revision is None or _label(pod, REVISION) == revision)
        )

    def pools(self, role: str, uid: str) -> tuple[PoolState, ...]:
        """The Deployments of an engine role that belong to the service."""
        if role not in ENGINE_ROLES:
            return ()
        return tuple(
            PoolState(revision=revision, replicas=replicas(child), ready=ready_replicas(child))
            for child in self.of_kind("Deployment")
            if _label(child, COMPONENT) == role
            and (revision := _label(child, REVISION)) is not None
            and owner_uid(child) == uid
        )


def owner_uid(child: Object) -> str | None:
    """The uid of an object's controller."""
    owners = child["metadata"].get("ownerReferences", ())
    return next((str(owner["uid"]) for owner in owners if owner.get("controller")), None)


def replicas(deployment: Object) -> int:
    """Pods asked for."""
    return int(deployment["spec"].get("replicas", 1))


def ready_replicas(deployment: Object) -> int:
    """Pods ready, as far as the Deployment's controller has seen its spec."""
    status = deployment.get("status", {})
    if status.get("observedGeneration", 0) < deployment["metadata"].get("generation", 0):
        return min(int(status.get("readyReplicas", 0)), replicas(deployment))
    return int(status.get("readyReplicas", 0))


def _label(found: Object, name: str) -> str | None:
    value = found["metadata"].get("labels", {}).get(name)
    return None if value is None else str(value)
