"""Leadership as calls: reads and writes of the Lease as ``election`` says."""

import asyncio

from kvferry_operator.plan.manifests.meta import Object
from kvferry_operator.shell.api import Api, ApiError
from kvferry_operator.shell.clock import Clock, micro_stamp
from kvferry_operator.shell.election import Election, LeaseRecord, Over, Read, Sleep, Write
from kvferry_operator.shell.kinds import LEASE
from kvferry_service import logs

CALL_S = 4.0  # well below the time in which a renewal must have succeeded
RELEASE_S = 2.0
_log = logs.get_logger(__name__)


class LeaseKeeper:
    """Runs one ``Election`` against a Lease object."""

    def __init__(self, api: Api, election: Election, *, namespace: str, name: str, clock: Clock) -> None:
        self.election = election
        self.reached_at: float | None = None  # when the API server last answered about the Lease
        self._api = api
        self._where = {"namespace": namespace, "name": name}
        self._clock = clock
        self._told = ""

    async def run(self) -> str:
        """Take part until it is over; returns why."""
        while True:
            step = self.election.step(self._clock(), micro_stamp())
            if isinstance(step, Over):
                return step.why
            if isinstance(step, Sleep):
                await asyncio.sleep(step.seconds)
            elif isinstance(step, Read):
                await self._read()
            else:
                await self._write(step)

    async def release(self) -> None:
        """Give the Lease away, so that another takes over at once. A failure costs the others some seconds."""
        record = self.election.release(self._clock(), micro_stamp())
        if record is None:
            return
        try:
            await self._api.replace(LEASE, self._body(record), timeout_s=RELEASE_S)
            _log.info("Lease released")
        except ApiError as error:
            _log.warning("the Lease was not released", extra=logs.fields(reason=str(error)))

    async def _read(self) -> None:
        try:
            async with asyncio.timeout(CALL_S):
                found = await self._api.get(LEASE, self._where["namespace"], self._where["name"])
        except (ApiError, TimeoutError) as error:
            self._failed(error)
            return
        now = self.reached_at = self._clock()
        record = None if found is None else record_of(found)
        self._tell(f"the Lease is held by {record.holder}" if record is not None and record.holder else "")
        self.election.found(record, now)

    async def _write(self, step: Write) -> None:
        sent_at = self._clock()
        body = self._body(step.record)
        was = self.election.state
        try:
            if step.record.version:
                made = await self._api.replace(LEASE, body, timeout_s=CALL_S)
            else:
                made = await self._api.start(LEASE, body, timeout_s=CALL_S)
        except ApiError as error:
            if error.code in (404, 409):
                self.reached_at = self._clock()
                self.election.conflicted(self.reached_at)
            else:
                self._failed(error)
            return
        now = self.reached_at = self._clock()
        self.election.written(record_of(made), sent_at, now)
        if was == "candidate" and self.election.state == "leader":
            _log.info("leader", extra=logs.fields(identity=self.election.identity))

    def _failed(self, error: Exception) -> None:
        self._tell(f"the Lease cannot be reached: {error}")
        self.election.failed(self._clock())

    def _tell(self, text: str) -> None:
        """One line for each change."""
        if text and text != self._told:
            _log.info(text)
        self._told = text

    def _body(self, record: LeaseRecord) -> Object:
        metadata: Object = dict(self._where)
        if record.version:
            metadata["resourceVersion"] = record.version
        spec: Object = {
            "holderIdentity": record.holder,
            "leaseDurationSeconds": int(record.duration_s),
            "acquireTime": record.acquired,
            "renewTime": record.renewed,
            "leaseTransitions": record.transitions,
        }
        return {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": metadata, "spec": spec}


def record_of(found: Object) -> LeaseRecord:
    """What of a Lease object decides. Whatever others left out has a value that lets the election go on."""
    spec = found.get("spec") or {}
    return LeaseRecord(
        holder=str(spec.get("holderIdentity") or ""),
        duration_s=float(spec.get("leaseDurationSeconds") or 0),
        acquired=str(spec.get("acquireTime") or ""),
        renewed=str(spec.get("renewTime") or ""),
        transitions=int(spec.get("leaseTransitions") or 0),
        version=str(found["metadata"].get("resourceVersion", "")),
    )
