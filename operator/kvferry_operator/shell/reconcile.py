"""One pass over one service: see, decide, do, tell. Everything that it remembers can be lost at any time."""

import asyncio
import secrets
from collections.abc import Callable, Mapping

import msgspec

from kvferry_operator.plan.causes import unstarted
from kvferry_operator.plan.decide import NOTHING, Decision, decide, owner_of
from kvferry_operator.plan.effects import Apply, ApplyFault, Create, Effect
from kvferry_operator.plan.events import keys_replaced
from kvferry_operator.plan.manifests.meta import FIELD_MANAGER, Object
from kvferry_operator.plan.manifests.settings import ClusterSettings
from kvferry_operator.plan.observed import Seen, owner_uid
from kvferry_operator.plan.status import refused
from kvferry_operator.shell.api import Api, ApiError
from kvferry_operator.shell.cache import ObjectCache, Ref, ServiceKey, ref_of
from kvferry_operator.shell.clock import Clock
from kvferry_operator.shell.kinds import POD, ROLE, SECRET, SERVICE, kind_of
from kvferry_operator.shell.perform import Performer, fault_of
from kvferry_operator.shell.queue import Outcome
from kvferry_operator.shell.recorder import Recorder
from kvferry_service import logs
from kvferry_wire.keys import KEY_BYTES, KEY_NAMES

LOOKS = 8  # decisions in a row that may find that more has to be looked up; two do
LOOKS_AT_ONCE = 4  # of one pass; the connections of the client are shared by all
ABSENT_S = 15.0  # what was not there need not be looked up again while the server is too busy for writes
KEYS_AGAIN_S = 30.0  # between attempts to make a Secret that pods may wait for
INTERNAL = "OperatorFailed"
DEPLOYMENT = "Deployment"
_log = logs.get_logger(__name__)


class _Memory(msgspec.Struct, kw_only=True):
    """What is remembered of a service between passes, to spare calls; never what a decision needs."""

    uid: str
    keys_at: float | None = None  # when its Secret was last made or found
    keys_due: bool = False  # it was to be made, and could not be yet
    faults: tuple[ApplyFault, ...] = ()
    absent: frozenset[Ref] = frozenset()  # looked up in a pass that the server's pause has ended
    absent_at: float = 0.0


class Reconciler:
    """Passes over services. Not reentrant for one key; the queue sees to that."""

    def __init__(
        self,
        *,
        api: Api,
        cache: ObjectCache,
        settings: ClusterSettings,
        recorder: Recorder,
        clock: Clock,
        stamp: Callable[[], str],
    ) -> None:
        self._api = api
        self._cache = cache
        self._settings = settings
        self._recorder = recorder
        self._clock = clock
        self._stamp = stamp
        self._performer = Performer(api, cache)
        self._memory: dict[ServiceKey, _Memory] = {}

    async def run(self, key: ServiceKey) -> Outcome:
        """One pass.

        Raises:
            FencedError: leadership is lost; nothing may be written any more.
        """
        found = self._cache.service(key)
        if found is None or found["metadata"].get("deletionTimestamp"):
            self._memory.pop(key, None)
            return Outcome(gone=found is None)
        memory = self._remembered(key, found)
        pass_ = _Pass(self, key, found, memory)
        try:
            return await pass_.run()
        except ApiError as error:
            _log.warning("a look failed", extra=logs.fields(service="/".join(key), reason=str(error)))
            return Outcome(failed=True, pause_s=error.pause_s)

    def _remembered(self, key: ServiceKey, found: Object) -> _Memory:
        uid = found["metadata"]["uid"]
        memory = self._memory.get(key)
        if memory is None or memory.uid != uid:
            memory = self._memory[key] = _Memory(uid=uid)
        return memory


class _Pass:
    """The state of one pass."""

    def __init__(self, reconciler: Reconciler, key: ServiceKey, found: Object, memory: _Memory) -> None:
        self._its = reconciler
        self._key = key
        self._found = found
        self._memory = memory
        self._looked: dict[Ref, Object | None] = self._remembered()  # what the watches do not show, by name
        self._changed = False  # other faults than in the pass before
        self._wrote = False
        self._progressed = False

    async def run(self) -> Outcome:
        its = self._its
        decision = await self._decided(self._keys())
        failed, pause_s = await self._perform(decision.effects)
        again = False
        if decision.effects or self._changed:
            self._found = its._cache.service(self._key) or self._found
            self._looked = {ref: seen for ref, seen in self._looked.items() if self._unwatched(ref)}
            decision = await self._decided(None)
            again = not failed and bool(decision.effects)
        untold = await self._tell(decision)
        # No watch shows that somebody else's object goes whose name we need: look again after a while.
        blocked = any(found is not None for ref, found in self._looked.items() if self._unwatched(ref))
        pause_s = max(pause_s, untold or 0.0)
        self._remember(pause_s)
        return Outcome(
            wrote=self._wrote,
            progressed=self._progressed,
            failed=failed or blocked or untold is not None,
            pause_s=pause_s,
            again=again,
        )

    async def _perform(self, effects: tuple[Effect, ...]) -> tuple[bool, float]:
        """Do them in order; a refusal stops no other. Whether any failed, and for how long all must pause then."""
        memory = self._memory
        faults: list[ApplyFault] = []
        failed, pause_s = False, 0.0
        for effect in effects:
            try:
                made = await self._its._performer.perform(effect)
            except ApiError as error:
                failed, pause_s = True, max(pause_s, error.pause_s)
                if error.code != 409:  # somebody wrote at the same moment: nothing that people need to know
                    faults.append(fault_of(effect, error))
                if error.passing:
                    break  # the next one would fare no better
                continue
            self._done(effect, made=made)
            self._wrote = self._progressed = True
        self._changed = memory.faults != tuple(faults)
        memory.faults = tuple(faults)
        return failed, pause_s

    def _remembered(self) -> dict[Ref, Object | None]:
        fresh = self._its._clock() < self._memory.absent_at + ABSENT_S
        return dict.fromkeys(self._memory.absent) if fresh else {}

    def _remember(self, pause_s: float) -> None:
        """After a pass that had to pause: spare the looks of the next one."""
        memory, now = self._memory, self._its._clock()
        if now >= memory.absent_at + ABSENT_S:
            memory.absent, memory.absent_at = frozenset(), now
        if pause_s > 0:
            memory.absent |= {ref for ref, found in self._looked.items() if found is None}
        else:
            memory.absent = frozenset()

    # ---- see and decide

    async def _decided(self, keys: Mapping[str, bytes] | None) -> Decision:
        """Decide; where it wants to write an object that no watch shows, look whether it is there first."""
        for _ in range(LOOKS):
            decision = self._decision(keys)
            unknown = [ref for effect in decision.effects if (ref := _wanted(effect)) and self._unseen(ref)]
            if not unknown:
                return decision
            await self._look(unknown)
        raise RuntimeError(f"each of {LOOKS} decisions wanted other objects")

    async def _look(self, refs: list[Ref]) -> None:
        """Look objects up, several at once. Raises ``ApiError``; after a failure no further look begins."""
        places, failures = asyncio.Semaphore(LOOKS_AT_ONCE), list[ApiError]()

        async def look(ref: Ref) -> None:
            async with places:
                if failures:
                    return
                try:
                    self._looked[ref] = await self._its._api.get(kind_of(ref[0]), ref[1], ref[2])
                except ApiError as error:
                    failures.append(error)

        await asyncio.gather(*(look(ref) for ref in refs))
        if failures:
            raise failures[0]

    def _unseen(self, ref: Ref) -> bool:
        return ref not in self._looked and self._unwatched(ref)

    def _unwatched(self, ref: Ref) -> bool:
        return self._its._cache.uid(ref) is None

    def _decision(self, keys: Mapping[str, bytes] | None) -> Decision:
        its = self._its
        related = its._cache.related(self._key)
        extra = tuple(found for found in self._looked.values() if found is not None)
        seen = Seen(
            children=tuple(found for found in related if found["kind"] != POD.kind) + extra,
            pods=tuple(found for found in related if found["kind"] == POD.kind),
            faults=self._memory.faults,
        )
        try:
            return decide(self._found, seen, its._settings, keys, its._stamp())
        except Exception:  # noqa: BLE001 - one service that we cannot handle must not stop the others
            _log.exception("the decision failed", extra=logs.fields(service="/".join(self._key)))
            told = refused(
                owner_of(self._found),
                INTERNAL,
                "the operator failed on this service; its log says how. What runs stays as it is",
                self._found.get("status", {}),
                its._stamp(),
            )
            return msgspec.structs.replace(NOTHING, status=told)

    def _keys(self) -> dict[str, bytes] | None:
        """New keys, where the Secret may have to be made: nothing of the service is there, or pods wait for volumes.

        It is made before any Deployment: where there is one, there was a Secret.
        """
        its, memory = self._its, self._memory
        related = its._cache.related(self._key)
        ours = (found for found in related if found["kind"] == DEPLOYMENT and owner_uid(found) == memory.uid)
        begun = memory.keys_at is not None or any(True for _ in ours)
        if begun and not memory.keys_due:
            waits = any(unstarted(pod) for pod in related if pod["kind"] == POD.kind)
            if not waits or (memory.keys_at is not None and its._clock() < memory.keys_at + KEYS_AGAIN_S):
                return None
        memory.keys_due = True
        return {name: secrets.token_bytes(KEY_BYTES) for name in KEY_NAMES}

    def _done(self, effect: Effect, *, made: bool) -> None:
        if isinstance(effect, Create) and effect.object["kind"] == SECRET.kind:
            its = self._its
            self._memory.keys_at, self._memory.keys_due = its._clock(), False
            pods = tuple(found for found in its._cache.related(self._key) if found["kind"] == POD.kind)
            if made and (event := keys_replaced(pods)) is not None:
                its._recorder.record(self._found, (event,))

    # ---- tell

    async def _tell(self, decision: Decision) -> float | None:
        """Write statuses where they changed. Returns for how long all must pause if one failed."""
        its, metadata = self._its, self._found["metadata"]
        failed: float | None = None
        if decision.status is not None and decision.status != self._found.get("status", {}):
            failed = await self._write_status(metadata, decision.status)
            if failed is None:
                its._recorder.record(self._found, decision.events)
        for name, told in decision.role_statuses.items():
            role = its._cache.get((ROLE.kind, metadata["namespace"], name))
            if role is not None:
                again = await self._write_status(role["metadata"], told, ROLE.kind)
                failed = again if failed is None else max(failed, again or 0.0)
        return failed

    async def _write_status(self, metadata: Object, told: Object, kind: str = SERVICE.kind) -> float | None:
        its = self._its
        # The uid: a status is never written to another object of the same name.
        body = {
            "apiVersion": kind_of(kind).api_version,
            "kind": kind,
            "metadata": {name: metadata[name] for name in ("name", "namespace", "uid")},
            "status": told,
        }
        try:
            its._cache.put(await its._api.apply(kind_of(kind), body, FIELD_MANAGER, "status"))
            self._wrote = True
        except ApiError as error:
            if error.code == 404:
                return None  # it is gone: its events will tell
            if error.code == 409:
                return 0.0  # somebody wrote at the same moment, or another object has its name: look again
            where = logs.fields(service="/".join(self._key), kind=kind, name=metadata["name"], reason=str(error))
            _log.warning("a status was not written", extra=where)
            return error.pause_s
        return None


def _wanted(effect: Effect) -> Ref | None:
    """The object that an effect would make or take over; none for Secrets, which are never read."""
    if isinstance(effect, Apply | Create) and effect.object["kind"] != SECRET.kind:
        return ref_of(effect.object)
    return None
