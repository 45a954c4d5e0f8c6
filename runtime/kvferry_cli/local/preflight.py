"""What can be known of a service before any of its processes starts: faults that its pods could only die of."""

from pathlib import Path

from kvferry_cli.errors import ExitCode, UserError
from kvferry_operator.api import InferenceService
from kvferry_operator.api.service import EngineSettings
from kvferry_operator.plan import ServicePlan
from kvferry_router.key_source import ApiKeys
from kvferry_router.tenants import KeyFileError
from kvferry_wire.limits import Limits

ENGINE_BLOCK_SIZE = 16  # the engine's own default


def engine_faults(service: InferenceService) -> list[str]:
    """One line for each pool whose KV blocks cannot hold a sequence of ``maxModelLen`` tokens."""
    faults: list[str] = []
    spec = service.spec
    for role, pool in (("prefill", spec.prefill), ("decode", spec.decode)):
        if pool is None or pool.replicas == 0:
            continue
        settings = pool.engine.over(spec.engine)
        if fault := _room_fault(settings):
            place = "spec.engine" if pool.engine.kv_blocks is None else f"spec.{role}.engine"
            faults.append(f"{place}.kvBlocks: {fault}")
    return list(dict.fromkeys(faults))


def _room_fault(settings: EngineSettings) -> str:
    if settings.kv_blocks is None or settings.max_model_len is None:
        return ""
    size = settings.block_size or ENGINE_BLOCK_SIZE
    if settings.kv_blocks * size >= settings.max_model_len:
        return ""
    least = -(-settings.max_model_len // size)
    return (
        f"got {settings.kv_blocks}; accepts at least {least}, so that blocks of {size} tokens hold "
        f"maxModelLen ({settings.max_model_len}) tokens"
    )


def check_model(model: str) -> None:
    """Open the model's headers. Raises ``UserError`` where no engine could load it."""
    from kvferry_runtime.model.errors import ModelError
    from kvferry_runtime.model.folder import open_folder

    try:
        open_folder(model)
    except (ModelError, OSError) as error:
        raise UserError(f"spec.model.source: {error}") from None


def api_keys_file(plan: ServicePlan, base: Path) -> Path | None:
    """The checked file of the clients' API keys; ``None`` where the service needs none. Raises ``UserError``."""
    if plan.api_keys_file is None:
        return None
    field = "spec.router.apiKeys.keysFile"
    path = (base / Path(plan.api_keys_file).expanduser()).absolute()
    if not path.is_file():
        raise UserError(f"{field}: there is no file {path}")
    try:
        keys = ApiKeys(path, Limits().tenants)
    except KeyFileError as error:
        raise UserError(f"{field}: {error}") from None
    if plan.auth == "apiKeys" and not len(keys):
        raise UserError(f"{field}: {path} holds no key, so that nobody could ask; a line is TENANT:SHA256HEX")
    return path


def refuse(file: Path, faults: list[str]) -> None:
    """Raises ``UserError`` with all faults of a manifest, if there are any."""
    if faults:
        raise UserError("\n".join(f"{file}: {fault}" for fault in faults), ExitCode.USAGE, located=True)
