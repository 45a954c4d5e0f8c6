"""The pods of a pool."""

from kvferry_operator.api.service import EngineRole, EngineRoleName
from kvferry_operator.plan.manifests.commits import commit_names
from kvferry_operator.plan.manifests.context import Context
from kvferry_operator.plan.manifests.deployment import deployment
from kvferry_operator.plan.manifests.meta import Object
from kvferry_operator.plan.manifests.model import model_bytes, model_mount
from kvferry_operator.plan.manifests.names import child, keys_name
from kvferry_operator.plan.manifests.pod import Part, arguments, pod_template
from kvferry_operator.plan.manifests.probes import load_seconds
from kvferry_operator.plan.models import facts_of
from kvferry_operator.plan.pods import PodPlan, Slot
from kvferry_operator.plan.resources import Resources, engine_resources
from kvferry_wire.limits import DEFAULT_LIMITS

# From SIGTERM for legs to end or to move, and for leases. Only answers that can go on nowhere else take so long: it is
# what a request may last by default, and no field's, since an edit of it would replace the pods.
DRAIN_S = int(DEFAULT_LIMITS.request_deadline_s)
GRACE_S = DRAIN_S + 20  # until SIGKILL, with what the pod lingers before and its end
TMP, SHM = "1Gi", "256Mi"


def pool_resources(context: Context, pod: PodPlan) -> Resources:
    """What an engine pod asks of its node, and why."""
    role: EngineRoleName = "prefill" if pod.role == "prefill" else "decode"
    spec, source = context.service.spec, context.plan.source
    return engine_resources(pod, spec.engine_of(role), facts_of(source), model_bytes(spec.model, source))


def engine_deployment(context: Context, pod: PodPlan, pool: EngineRole, replicas: int) -> Object:
    """The Deployment of a pool at the plan's revision."""
    owner, settings = context.owner, context.settings
    model, source = context.service.spec.model, context.plan.source
    image = pod.image or settings.runtime_image
    mount = model_mount(model, source, image, settings.image_pull_policy, commit_names(owner.name, source))
    startup_s = load_seconds(model_bytes(model, source))
    part = Part(
        image=image,
        argv=(*arguments(pod, {Slot.MODEL: mount.argument}), "--drain", str(DRAIN_S)),
        resources=pool_resources(context, pod).rendered(),
        startup_s=startup_s,
        grace_s=GRACE_S,
        service_account=child(owner.name, "engine"),
        keys_secret=keys_name(owner.name, owner.uid),
        tmp=TMP,
        volumes=({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": SHM}}, *mount.volumes),
        mounts=({"name": "shm", "mountPath": "/dev/shm"}, *mount.mounts),  # noqa: S108 - an emptyDir
        init=mount.init,
    )
    template = pod_template(context, pod, pool, part)
    return deployment(context, pod, template, replicas=replicas, startup_s=startup_s)
