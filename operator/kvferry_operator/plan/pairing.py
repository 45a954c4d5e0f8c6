"""Which pods of one revision cannot ferry KV to each other since they run different models. Pure.

Two pods pair where their compat hashes are equal. A hash holds what the revision fixes (settings, code, key) and the
model's digest; of that an init container reports what it has fetched. A branch, a folder or a bucket may change between
the starts of two pods: then one revision has two models. What is not fetched (a claim, an image volume) is reported by
nobody; the router, which asks each pod, knows of those too.
"""

from collections.abc import Mapping

import msgspec

from kvferry_operator.plan.causes import is_ready
from kvferry_operator.plan.listing import some
from kvferry_operator.plan.manifests.commits import fetched
from kvferry_operator.plan.manifests.names import ENGINE_ROLES
from kvferry_operator.plan.observed import Seen
from kvferry_operator.plan.pods import ServicePlan
from kvferry_wire.fetch import FetchReport


class Lonely(msgspec.Struct, frozen=True, kw_only=True):
    """Ready pods that have no partner, and why in words."""

    all: bool  # no two pods pair: no KV is ferried at all
    told: str


def lonely(plan: ServicePlan, seen: Seen) -> Lonely | None:
    """The ready pods at the plan's revision that pair with none of the other role; ``None`` where each has a partner.

    A pod that does not tell what it runs, and a role without a ready pod, are no reason.
    """
    runs = {role: _runs(plan, role, seen) for role in ENGINE_ROLES}
    if not all(runs.values()):
        return None
    alone = {role: _alone(runs[role], runs[_other(role)]) for role in ENGINE_ROLES}
    if not any(alone.values()):
        return None
    if all(len(alone[role]) == len(runs[role]) for role in ENGINE_ROLES):
        models = "; ".join(_models(alone[role]) for role in ENGINE_ROLES)
        told = f"prefill and decode fetched different {_what(alone)} of {plan.source} ({models})"
        return Lonely(all=True, told=f"{told}, so their compat hashes differ: delete the pods of the older one")
    parts = [
        f"no {_other(role)} pod has what {some(alone[role])} fetched of {plan.source} ({_models(alone[role])})"
        for role in ENGINE_ROLES
        if alone[role]
    ]
    told = f"{'; '.join(parts)}: compat hashes differ, so no KV is ferried there; delete the pods that differ"
    return Lonely(all=False, told=told)


def _runs(plan: ServicePlan, role: str, seen: Seen) -> dict[str, FetchReport | None]:
    """What each ready pod of a role has fetched, by its name."""
    pods = (pod for pod in seen.role_pods(role, plan.revision) if is_ready(pod))
    return {pod["metadata"]["name"]: fetched(pod, plan.source) for pod in pods}


def _alone(ours: Mapping[str, FetchReport | None], theirs: Mapping[str, FetchReport | None]) -> dict[str, FetchReport]:
    return {
        name: report
        for name, report in ours.items()
        if report is not None and all(other is not None and _differ(report, other) for other in theirs.values())
    }


def _differ(one: FetchReport, other: FetchReport) -> bool:
    """Whether two reports are of different models. Of an image that tells no digest yet the commit has to do."""
    if one.digest and other.digest:
        return one.digest != other.digest
    return bool(one.commit and other.commit and one.commit != other.commit)


def _other(role: str) -> str:
    return "decode" if role == "prefill" else "prefill"


def _what(alone: Mapping[str, Mapping[str, FetchReport]]) -> str:
    return "commits" if all(one.commit for pods in alone.values() for one in pods.values()) else "contents"


def _models(pods: Mapping[str, FetchReport]) -> str:
    return some((report.commit or report.digest or "")[:12] for report in pods.values())
