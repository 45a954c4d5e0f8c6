"""The command line, ports and environment of an engine pod."""

from kvferry_operator.api.quantities import format_seconds, parse_bytes, parse_duration
from kvferry_operator.api.service import EngineRole, EngineRoleName, EngineSettings, InferenceServiceSpec
from kvferry_operator.plan.pods import Argument, PodPlan, PortPlan, Slot
from kvferry_wire.limits import DEFAULT_LIMITS

MODULE = "kvferry_runtime.server"
KEYS = ("http", "kv", "state", "hash")
PORTS = (
    PortPlan(name="http", slot=Slot.HTTP_PORT, cluster_port=8000),
    PortPlan(name="control", slot=Slot.CONTROL_PORT, cluster_port=5600),
    PortPlan(name="data", slot=Slot.DATA_PORT, cluster_port=5601),
    PortPlan(name="state", slot=Slot.STATE_PORT, cluster_port=5557),
)


def engine_pod(
    spec: InferenceServiceSpec,
    role: EngineRoleName,
    pool: EngineRole,
    index: int,
    thread_count: int | None,
) -> PodPlan:
    """One engine pod of a pool."""
    env = {} if thread_count is None else {"OMP_NUM_THREADS": str(thread_count)}
    env |= {variable.name: variable.value for variable in pool.env}
    return PodPlan(
        name=f"{role}-{index}",
        role=role,
        module=MODULE,
        argv=tuple(_argv(spec, role, spec.engine_of(role), thread_count)),
        env=tuple(sorted(env.items())),
        ports=PORTS,
        requests=tuple(sorted(pool.resources.requests.items())),
        limits=tuple(sorted(pool.resources.limits.items())),
        image=pool.image,
        keys=KEYS,
        threads=thread_count,
    )


def _argv(
    spec: InferenceServiceSpec, role: EngineRoleName, settings: EngineSettings, thread_count: int | None
) -> list[Argument]:
    argv: list[Argument] = ["--model", Slot.MODEL, "--served-name", spec.model.name, "--role", role]
    argv += ["--host", Slot.HOST, "--port", Slot.HTTP_PORT, "--control-port", Slot.CONTROL_PORT]
    argv += ["--data-port", Slot.DATA_PORT, "--state-port", Slot.STATE_PORT, "--keys-dir", Slot.KEYS_DIR]
    argv += ["--dtype", settings.dtype or "auto"]
    if thread_count is not None:
        argv += ["--threads", str(thread_count)]
    for flag, value in (
        ("--block-size", settings.block_size),
        ("--kv-blocks", settings.kv_blocks),
        ("--kv-memory", None if settings.kv_memory is None else parse_bytes(settings.kv_memory)),
        ("--max-model-len", settings.max_model_len),
        ("--max-running", settings.max_running),
        ("--token-budget", settings.token_budget),
        ("--attention", settings.attention_backend),
    ):
        if value is not None:
            argv += [flag, str(value)]
    if settings.prefix_caching is False:
        argv.append("--no-prefix-caching")
    if not spec.transfer.checksums:
        argv.append("--no-checksums")
    lease = DEFAULT_LIMITS.lease_s if spec.transfer.lease is None else parse_duration(spec.transfer.lease)
    return [*argv, "--lease", format_seconds(lease)]
