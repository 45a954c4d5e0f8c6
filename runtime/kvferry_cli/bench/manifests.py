"""The two sides of a comparison, as manifests: both could be given to ``kvferry up`` as they are. Pure.

Aggregated is what a manifest says without a prefill pool: as many pods, each of which does whole requests, behind the
same router. The engine does not know its role; it is a policy of the router.
"""

from typing import Literal, get_args

from kvferry_operator.api import InferenceService
from kvferry_operator.api.router import ApiKeys, Disaggregation

Side = Literal["disaggregated", "aggregated"]
SIDES: tuple[Side, ...] = get_args(Side)


def faults_of(service: InferenceService) -> list[str]:
    """Why a manifest has nothing to compare; each fault with its field."""
    spec, faults = service.spec, []
    if spec.prefill_replicas == 0:
        faults.append("spec.prefill.replicas: got 0; accepts at least 1, there is nothing to compare without prefill")
    if spec.router.disaggregation.mode == "never":
        faults.append("spec.router.disaggregation.mode: got never; accepts auto or always")
    return faults


def disaggregated(service: InferenceService, keys_file: str) -> InferenceService:
    """The manifest as it is, but for the router's clients: the load generator's key is the only one."""
    return _with(service, keys_file, disaggregation=service.spec.router.disaggregation)


def aggregated(service: InferenceService, keys_file: str) -> InferenceService:
    """As many engine pods, all in one pool, and a router that splits nothing."""
    spec = service.spec
    decode = spec.decode.model_copy(update={"replicas": spec.prefill_replicas + spec.decode.replicas})
    whole = service.model_copy(update={"spec": spec.model_copy(update={"prefill": None, "decode": decode})})
    return _with(whole, keys_file, disaggregation=Disaggregation(mode="never"))


def notes_of(service: InferenceService) -> list[str]:
    """What is not the same on both sides, though a reader would expect it."""
    spec = service.spec
    if spec.prefill is None:
        return []
    own = [
        name
        for name, differs in (
            ("engine", spec.engine_of("prefill") != spec.engine_of("decode")),
            ("env", spec.prefill.env != spec.decode.env),
        )
        if differs
    ]
    return [f"spec.prefill.{name} differs from spec.decode.{name}, which all aggregated pods have" for name in own]


def _with(service: InferenceService, keys_file: str, disaggregation: Disaggregation) -> InferenceService:
    changed = {
        "auth": "apiKeys",
        "api_keys": ApiKeys.model_validate({"keysFile": keys_file}),
        "disaggregation": disaggregation,
    }
    router = service.spec.router.model_copy(update=changed)
    copy = service.model_copy(update={"spec": service.spec.model_copy(update={"router": router})})
    return InferenceService.model_validate(copy.model_dump(by_alias=True, exclude_none=True))
