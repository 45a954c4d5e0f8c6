"""On a slow API server calls do not pile up: few are under way, the Lease goes past them, lateness makes a pause."""

import asyncio
from typing import Any

import pytest

from kvferry_operator.shell import api as api_module
from kvferry_operator.shell.api import CALLS, ApiError, FencedError, KubeApi
from kvferry_operator.shell.kinds import LEASE, kind_of

PLAN = kind_of("ConfigMap")


class SlowClient:
    """A client whose answers never come."""

    def __init__(self) -> None:
        self.rest_client = self
        self.configuration = self
        self.host = "https://server"
        self.asked: list[str] = []

    async def update_params_for_auth(self, *_: Any) -> None:
        pass

    async def request(self, method: str, url: str, **_: Any) -> Any:
        self.asked.append(url)
        await asyncio.Event().wait()


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_leases_calls_never_wait_behind_others() -> None:
    """So many reads and writes are under way at most; renewing and looking at the Lease begin at once."""
    client = SlowClient()
    api = KubeApi(client, lambda: 10.0)  # type: ignore[arg-type]
    plan = {"metadata": {"name": "x", "namespace": "ns"}}
    calls = [asyncio.create_task(api.get(PLAN, "ns", f"c{number}")) for number in range(CALLS)]
    calls += [asyncio.create_task(api.apply(PLAN, plan, "m")) for _ in range(CALLS)]
    await turns()
    assert len(client.asked) == CALLS
    lease = {"metadata": {"name": "lease", "namespace": "ns"}}
    calls.append(asyncio.create_task(api.get(LEASE, "ns", "lease")))
    calls.append(asyncio.create_task(api.replace(LEASE, lease, timeout_s=5.0)))
    await turns()
    assert sum("/leases" in url for url in client.asked) == 2
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_a_write_that_waited_until_the_lease_was_lost_is_not_sent() -> None:
    """The fence is looked at when its turn comes, not when it was asked for."""
    client, left = SlowClient(), [10.0]
    api = KubeApi(client, lambda: left[0])  # type: ignore[arg-type]
    reads = [asyncio.create_task(api.get(PLAN, "ns", f"c{number}")) for number in range(CALLS)]
    await turns()
    write = asyncio.create_task(api.delete(PLAN, "ns", "x", "uid"))
    await turns()
    left[0] = 0.0
    for read in reads:
        read.cancel()
    with pytest.raises(FencedError):
        await write
    assert len(client.asked) == CALLS
    await asyncio.gather(*reads, return_exceptions=True)


async def test_no_answer_in_time_makes_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where nothing answers at all: after it only a few passes run until one has gone well."""
    monkeypatch.setattr(api_module, "READ_S", 0.01)
    with pytest.raises(ApiError) as caught:
        await KubeApi(SlowClient(), lambda: 10.0).get(PLAN, "ns", "x")  # type: ignore[arg-type]
    assert (caught.value.code, caught.value.passing, caught.value.pause_s) == (0, True, 1.0)
