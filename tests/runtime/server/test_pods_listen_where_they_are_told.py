"""A pod binds the address and the ports that it is given, of either family, and nothing else."""

import socket
from pathlib import Path

import psutil
import pytest

from kvferry_runtime.server.config import parse
from kvferry_runtime.server.flags import FlagError
from kvferry_wire.frames import End, Prefilled
from tests.operator.cluster import container_of, make_objects

from .harness import PodProcess, frames, make_leg, running_pod

pytestmark = pytest.mark.processes

PORTS = {"http": 8000, "control": 5600, "data": 5601, "state": 5557}


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def listening(pod: PodProcess) -> set[tuple[str, int]]:
    """Every TCP address on which a process of the pod listens, and every UDP one."""
    root = psutil.Process(pod.pid)
    found = set()
    for process in (root, *root.children(recursive=True)):
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM:
                found.add((connection.laddr.ip, connection.laddr.port))
    return found


def rendered(role: str, address: str) -> list[str]:
    """The command line that the operator writes, as the kubelet hands it over, without what ``running_pod`` gives."""
    container = container_of(make_objects(spec__model__source="toy:"), role)
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == PORTS
    args = [argument.replace("$(POD_IP)", address) for argument in container["args"]]
    for flag in ("--model", "--keys-dir", "--port"):
        at = args.index(flag)
        del args[at : at + 2]
    return args


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_rendered_pod_listens_on_its_declared_ports_alone(tmp_path: Path, role: str) -> None:
    """On its own address, as each pod has one in a cluster."""
    address = {"prefill": "127.78.0.1", "decode": "127.78.0.2"}[role]
    with running_pod(tmp_path, *rendered(role, address), port=PORTS["http"]) as pod:
        assert listening(pod) == {(address, number) for number in PORTS.values()}
        ready = pod.ready()
        assert {name: ready[name] for name in PORTS} == PORTS


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback address")
async def test_two_pods_ferry_kv_over_ipv6(tmp_path: Path) -> None:
    """All four ports bind the address, handles name it, and the reader comes back to it."""
    flags = ("--host", "::1", "--role")
    with (
        running_pod(tmp_path / "p", *flags, "prefill") as p,
        running_pod(tmp_path / "d", *flags, "decode", keys=p.keys) as d,
    ):
        for pod in (p, d):
            assert {host for host, _ in listening(pod)} == {"::1"}
            assert len(listening(pod)) == 4
        prompt = "a prompt of several blocks, long enough to be ferried"
        async with p.client() as prefill, d.client() as decode:
            prefilled = (await frames(prefill, "prefill", make_leg(prompt=prompt)))[-1]
            assert isinstance(prefilled, Prefilled)
            assert prefilled.handle is not None
            assert prefilled.handle.host == "::1"
            leg = make_leg(prompt=prompt, emitted=(prefilled.first,), handle=prefilled.handle, attempt=1)
            end = (await frames(decode, "generate", leg))[-1]
            assert isinstance(end, End)
            assert end.recomputed == ""


@pytest.mark.parametrize("given", ["pod.example.com", "*", "eth0", "", "127.0.0.1:80", "[::1]"])
def test_a_host_that_is_no_address_is_refused(given: str) -> None:
    """No name is looked up."""
    with pytest.raises(FlagError, match=r"--host: .* an IPv4 or IPv6 address or localhost is accepted"):
        parse(["toy", f"--host={given}"])
