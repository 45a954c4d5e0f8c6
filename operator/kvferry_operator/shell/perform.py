"""Effects as calls of the API. What the server answers goes into the cache at once."""

from kvferry_operator.plan.effects import Apply, ApplyFault, Create, Delete, Effect, Patch
from kvferry_operator.shell.api import Api, ApiError
from kvferry_operator.shell.cache import ObjectCache
from kvferry_operator.shell.kinds import SECRET, kind_of
from kvferry_service import logs

_log = logs.get_logger(__name__)


class Performer:
    """Performs effects, one line in the log for each."""

    def __init__(self, api: Api, cache: ObjectCache) -> None:
        self._api = api
        self._cache = cache

    async def perform(self, effect: Effect) -> bool:
        """Do one effect; what its type calls done is done. Returns whether anything was done; not where it was there.

        Raises:
            ApiError: it was refused or not answered.
            FencedError: leadership is lost.
        """
        if isinstance(effect, Create):
            return await self._create(effect)
        if isinstance(effect, Apply):
            self._cache.put(await self._api.apply(kind_of(effect.object["kind"]), effect.object, effect.manager))
            self._log("applied", effect)
        elif isinstance(effect, Patch):
            await self._patch(effect)
        else:
            await self._delete(effect)
        return True

    async def _create(self, effect: Create) -> bool:
        kind = kind_of(effect.object["kind"])
        try:
            made = await self._api.create(kind, effect.object, effect.manager)
        except ApiError as error:
            if not error.exists:
                raise
            return False
        if kind is not SECRET:
            self._cache.put(made)
        self._log("created", effect)
        return True

    async def _patch(self, effect: Patch) -> None:
        kind = kind_of(effect.kind)
        try:
            self._cache.put(await self._api.merge(kind, effect.namespace, effect.name, effect.body, effect.manager))
        except ApiError as error:
            if error.code != 404:
                raise
            self._cache.forget((effect.kind, effect.namespace, effect.name))
            return
        self._log("patched", effect)

    async def _delete(self, effect: Delete) -> None:
        try:
            await self._api.delete(kind_of(effect.kind), effect.namespace, effect.name, effect.uid)
        except ApiError as error:
            if error.code != 404:
                raise  # also of 409: whether it was another object or only another write, no answer tells
        if self._cache.uid((effect.kind, effect.namespace, effect.name)) == effect.uid:
            self._cache.forget((effect.kind, effect.namespace, effect.name))
        self._log("deleted", effect)

    def _log(self, done: str, effect: Effect) -> None:
        kind, namespace, name = target(effect)
        why = "missing" if isinstance(effect, Create) else effect.why
        _log.info(done, extra=logs.fields(kind=kind, namespace=namespace, name=name, why=why))


def target(effect: Effect) -> tuple[str, str, str]:
    """Kind, namespace and name of what an effect changes."""
    if isinstance(effect, Apply | Create):
        metadata = effect.object["metadata"]
        return effect.object["kind"], metadata["namespace"], metadata["name"]
    return effect.kind, effect.namespace, effect.name


def fault_of(effect: Effect, error: ApiError) -> ApplyFault:
    """A refused effect as the next decision tells it."""
    kind, namespace, name = target(effect)
    where = logs.fields(kind=kind, namespace=namespace, name=name, code=error.code, reason=error.message)
    _log.warning("refused" if error.code else "not answered", extra=where)
    return ApplyFault(kind=kind, name=name, code=error.code, message=error.message)
