"""What every builder of a service's objects may look at."""

from collections.abc import Mapping

import msgspec

from kvferry_operator.api.service import InferenceService
from kvferry_operator.plan.manifests.meta import Owner
from kvferry_operator.plan.manifests.settings import ClusterSettings
from kvferry_operator.plan.pods import ServicePlan


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """One service: as asked for, as planned, as owned, and the installation's choices."""

    owner: Owner
    service: InferenceService
    plan: ServicePlan
    settings: ClusterSettings
    commits: Mapping[str, str] = {}  # of the hub, by their keys (`plan.manifests.commits`)
