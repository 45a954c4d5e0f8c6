"""One service on the toy model for all tests of this folder; each test gets it whole."""

from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest

from tests.processes.asking import NAME
from tests.support.service import Service, running_service

# Small pools, so that answers preempt each other; a prompt takes several steps; a lease ends while a test looks on.
SPEC = {
    "model": {"name": NAME, "source": "toy:step_ms=10"},
    "engine": {"kvBlocks": 160, "blockSize": 16, "maxModelLen": 2048, "tokenBudget": 64, "threads": 1},
    "prefill": {"replicas": 1},
    "decode": {"replicas": 1},
    "router": {"auth": "none", "requestDeadline": "40s", "disaggregation": {"minUncachedTokens": 32}},
    "transfer": {"lease": "3s"},
}
DEADLINE_S = 40.0
LEASE_S = 3.0


@pytest.fixture(scope="session")
def toy_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running_service(tmp_path_factory.mktemp("toy"), SPEC) as service:
        yield service


@pytest.fixture
async def service(toy_service: Service) -> Service:
    """All processes up and nothing held, whatever the test before did to them."""
    async with toy_service.session() as session:
        await toy_service.wait_ready(session)
        await toy_service.wait_idle(session, 20.0)
    return toy_service


@pytest.fixture
async def internal(service: Service) -> AsyncIterator[aiohttp.ClientSession]:
    """A session that holds the service's own key."""
    async with service.session() as session:
        yield session


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    """A session without any key, as a user has."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session
