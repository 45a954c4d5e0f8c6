"""An installation on the real API server, and clients that speak as its account."""

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio.client import ApiClient

from kvferry_operator.shell import connection
from tests.apiserver.operator.faulty import FaultyServer
from tests.apiserver.operator.install import Installation
from tests.apiserver.operator.process import OperatorProcess
from tests.apiserver.operator.service import Service
from tests.support.api_server import ApiServer
from tests.support.waiting import wait_for

Start = Callable[..., OperatorProcess]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A failing test shows the logs of the operators that run."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]  # pluggy's, untyped here
    if report.failed:
        for process in OperatorProcess.alive:
            report.sections.append((f"log of {process.name}", process.log()))


@pytest.fixture
def installation(api_server: ApiServer, tmp_path: Path) -> Installation:
    """A release of its own that watches one namespace."""
    return Installation(api_server, tmp_path)


@pytest.fixture(scope="module")
def everywhere(api_server: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """A release that watches all namespaces, for many tests that each take one."""
    return Installation(api_server, tmp_path_factory.mktemp("release"), clusterwide=True)


@pytest.fixture
async def client(everywhere: Installation) -> AsyncIterator[ApiClient]:
    """The operator's client, with its own account's token."""
    async with ApiClient(await connection.load(str(everywhere.kubeconfig))) as made:
        yield made


@pytest.fixture
def start(installation: Installation) -> Iterator[Start]:
    """Starts operators of this installation; all end with the test."""
    made: list[OperatorProcess] = []

    def begin(name: str = "operator", **options: Any) -> OperatorProcess:
        made.append(OperatorProcess(installation, name, **options))
        return made[-1]

    yield begin
    for process in made:
        process.close()


@pytest.fixture
def service(installation: Installation) -> Iterator[Service]:
    """A service that nobody has written yet, in a namespace with controllers."""
    stop = threading.Event()
    made = Service(installation.server, installation.namespace)
    thread = made.controllers.running(stop)
    yield made
    stop.set()
    thread.join()


@pytest.fixture
def faulty(installation: Installation) -> Iterator[FaultyServer]:
    server = FaultyServer(installation)
    yield server
    server.close()


@pytest.fixture(scope="module")
def running(api_server: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    """An operator that watches three namespaces."""
    process = OperatorProcess(Installation(api_server, tmp_path_factory.mktemp("release"), namespaces=3))
    try:
        process.await_leading()
        yield process
    finally:
        process.close()


@pytest.fixture
def make_service(running: OperatorProcess) -> Iterator[Callable[..., Service]]:
    """Services whose controllers run until the test is over; what is left is deleted."""
    stop, threads, made = threading.Event(), [], []

    def make(name: str, space: int = 0, **changes: Any) -> Service:
        service = Service(running.installation.server, running.installation.namespaces[space], name)
        service.write(**changes)
        made.append(service)
        threads.append(service.controllers.running(stop))
        return service

    yield make
    for service in made:
        if service.server.client.find(service.ref("InferenceService", service.name)) is not None:
            service.delete()
    wait_for(lambda: not any(service.controllers.objects() for service in made), "all children to be collected")
    stop.set()
    for thread in threads:
        thread.join()
