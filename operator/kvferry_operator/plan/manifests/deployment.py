"""Deployments: one for the router, one for each pool and revision."""

from kvferry_operator.plan.manifests.context import Context
from kvferry_operator.plan.manifests.meta import Object, make_object, selector
from kvferry_operator.plan.manifests.names import child, engine_name
from kvferry_operator.plan.pods import PodPlan

HISTORY = 2
PROGRESS_SLACK_S = 120


def deployment_name(context: Context, pod: PodPlan) -> str:
    """The Deployment of a role; engines have one for each revision."""
    service = context.owner.name
    return child(service, "router") if pod.role == "router" else engine_name(service, pod.role, context.plan.revision)


def deployment(context: Context, pod: PodPlan, template: Object, *, replicas: int, startup_s: float) -> Object:
    """A Deployment whose new pods are ready before old ones leave."""
    owner = context.owner
    revision = None if pod.role == "router" else context.plan.revision
    spec = {
        "replicas": replicas,
        "revisionHistoryLimit": HISTORY,
        "progressDeadlineSeconds": int(startup_s) + PROGRESS_SLACK_S,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "selector": {"matchLabels": selector(owner.name, pod.role, revision)},
        "template": template,
    }
    name = deployment_name(context, pod)
    return make_object("apps/v1", "Deployment", name, owner, {"spec": spec}, component=pod.role, revision=revision)
