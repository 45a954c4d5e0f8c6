"""Engine pods as processes on addresses of their own, with the ports of a cluster, found by real EndpointSlices."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvferry_service.key_files import create_keys
from tests.router.cluster.objects import DECODE, PREFILL, make_endpoint, make_slice
from tests.router.cluster.whole import running
from tests.router.harness import text_of
from tests.router.scripted_pod import KEYS
from tests.runtime.server.harness import PodProcess, running_pod

from .conftest import Place

pytestmark = pytest.mark.processes

PORTS = {"http": 8000, "control": 5600, "data": 5601, "state": 5557}
FLAGS = ("--served-name", "toy", "--control-port", "5600", "--data-port", "5601", "--state-port", "5557")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, PodProcess]]:
    """One prefill and two decode pods on 127.77.0.1 to 127.77.0.3."""
    folder = tmp_path_factory.mktemp("engines")
    keys = folder / "keys"
    for name in ("http", "state", "hash"):  # those of the tests' router; `kv` is drawn
        keys.mkdir(mode=0o700, exist_ok=True)
        (keys / name).write_text(getattr(KEYS, name).hex())
        (keys / name).chmod(0o600)
    create_keys(keys)
    with ExitStack() as stack:
        made = {}
        for number, (name, role) in enumerate((("p1", "prefill"), ("d1", "decode"), ("d2", "decode")), 1):
            flags = (*FLAGS, "--host", f"127.77.0.{number}", "--role", role)
            pod = running_pod(folder / name, *flags, keys=keys, port=PORTS["http"])
            made[name] = stack.enter_context(pod)
        yield made


async def test_an_answer_is_ferried_between_pods_that_slices_name(
    place: Place, engines: dict[str, PodProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill here, decode there; the pod that the slice calls unready gets nothing more."""
    for name, value in place.environment().items():
        monkeypatch.setenv(name, value)
    await place.put(make_slice("p", make_endpoint("p1", "10.77.0.1"), service=PREFILL, ports=PORTS))
    both = [make_endpoint("d1", "10.77.0.2"), make_endpoint("d2", "10.77.0.3")]
    await place.put(make_slice("d", *both, service=DECODE, ports=PORTS))
    assert engines.keys() == {"p1", "d1", "d2"}
    flags = ("--service-account-dir", str(place.account))
    async with running(tmp_path, None, monkeypatch, *flags, namespace=place.namespace, own_addresses=True) as router:
        await router.wait_pods(3, 20.0)
        prompt = "a prompt that is long enough to be worth a ferry " * 2
        async with router.complete(prompt, max_tokens=24, temperature=0, stream=True) as response:
            assert response.status == 200, await response.text()
            assert response.headers["x-kvferry-path"] == "disaggregated"
            first = text_of(await response.read())
        held = [make_endpoint("d1", "10.77.0.2", ready=False), both[1]]
        await place.put(make_slice("d", *held, service=DECODE, ports=PORTS))
        await router.wait_pods(2)
        for _ in range(3):
            async with router.complete(prompt, max_tokens=24, temperature=0, stream=True) as response:
                assert text_of(await response.read()) == first
            assert (await router.decisions())[0]["decode"] == "d2"
