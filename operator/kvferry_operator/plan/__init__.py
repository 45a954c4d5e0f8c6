"""The plan: what must run for a manifest, as values. Kubernetes objects and local processes are its renderings."""

from kvferry_operator.plan.pods import Observed, PodPlan, PortPlan, Probes, ServicePlan, Slot
from kvferry_operator.plan.service import PlanError, plan

__all__ = ["Observed", "PlanError", "PodPlan", "PortPlan", "Probes", "ServicePlan", "Slot", "plan"]
