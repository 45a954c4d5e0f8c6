"""Role objects: made once with a number of pods, which is then whoever's writes it last."""

from kvferry_operator.api.role import ROLE_KIND
from kvferry_operator.api.service import API_VERSION
from kvferry_operator.plan.diff import stamped
from kvferry_operator.plan.manifests.meta import SEEDED, Object, Owner, make_object, selector, selector_text
from kvferry_operator.plan.manifests.names import role_name


def role_object(owner: Owner, role: str, replicas: int) -> Object:
    """The object as it is created: its frame as if it had been applied, which need not be done once more, and the seed.

    ``replicas`` is not applied again: the seed belongs to another field manager.
    """
    frame = stamped(role_frame(owner, role))
    metadata = frame["metadata"]
    annotations = {**metadata["annotations"], SEEDED: str(replicas)}
    spec = {**frame["spec"], "replicas": replicas}
    return {**frame, "metadata": {**metadata, "annotations": annotations}, "spec": spec}


def reseed_patch(replicas: int) -> Object:
    """The merge patch for a new number in the manifest."""
    return {"metadata": {"annotations": {SEEDED: str(replicas)}}, "spec": {"replicas": replicas}}


def role_status(owner: Owner, role: str, *, replicas: int, ready: int, generation: int) -> Object:
    """The role object's status, as autoscalers read it through /scale."""
    return {
        "replicas": replicas,
        "readyReplicas": ready,
        "selector": selector_text(selector(owner.name, role)),
        "observedGeneration": generation,
    }


def role_frame(owner: Owner, role: str) -> Object:
    """What of a role object is applied again when somebody changes it: all but the number of pods and its seed."""
    body = {"spec": {"service": owner.name, "role": role}}
    return make_object(API_VERSION, ROLE_KIND, role_name(owner.name, role), owner, body, component=role)
