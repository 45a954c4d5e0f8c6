"""Ports of local pods: free ones, chosen once per pod and kept over restarts.

They are taken from below the range that the kernel hands out to outgoing connections, so that a connection of some
other process does not sit on a pod's port while the pod restarts.
"""

import hashlib
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from kvferry_cli.errors import UserError
from kvferry_cli.local.state_dir import write_atomically
from kvferry_operator.plan import ServicePlan

HOST = "127.0.0.1"
FIRST_PORT = 15000
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")

PodPorts = dict[str, dict[str, int]]  # pod -> port name -> number


def allocate(plan: ServicePlan, file: Path, endpoint_port: int) -> PodPorts:
    """Give each port of the plan a number, the same as last time where that is still free.

    Args:
        plan: the pods.
        file: where the numbers are kept.
        endpoint_port: the router's; 0 takes a free one.

    Raises:
        UserError: the endpoint's port is taken, or no free port is left.
    """
    if endpoint_port and not is_free(endpoint_port):
        raise UserError(f"port {endpoint_port} on {HOST} is already in use; choose another with --port")
    kept = _read(file)
    used = {endpoint_port}
    ports: PodPorts = {}
    for pod in plan.pods:
        ports[pod.name] = {}
        for port in pod.ports:
            if port.local_port is not None and endpoint_port:
                ports[pod.name][port.name] = endpoint_port
                continue
            before = kept.get(pod.name, {}).get(port.name)
            candidates = [before] if before is not None else []
            number = _first_free((*candidates, *_sequence(f"{file}/{pod.name}/{port.name}")), used)
            used.add(number)
            ports[pod.name][port.name] = number
    keep(ports, file)
    return ports


def keep(ports: PodPorts, file: Path) -> None:
    """Write the numbers down for the next time."""
    write_atomically(file, msgspec.json.encode(ports))


def replace_taken(ports: PodPorts, pod: str, file: Path, fixed: int) -> dict[str, int]:
    """The ports of a pod that does not run, with other numbers for those that somebody else has by now.

    Args:
        ports: of all pods.
        file: as ``allocate``.
        fixed: a number that stays whoever has it; 0 for none.

    Raises:
        UserError: no free port is left.
    """
    used = {number for numbers in ports.values() for number in numbers.values()}
    found = {}
    for name, number in ports[pod].items():
        found[name] = number
        if number != fixed and not is_free(number):
            found[name] = _first_free(_sequence(f"{file}/{pod}/{name}"), used)
            used.add(found[name])
    return found


def endpoint_of(router: Mapping[str, int]) -> str:
    """Where clients reach the service, by the router's ports."""
    return f"http://{HOST}:{router['http']}"


def is_free(port: int) -> bool:
    """Whether a server could listen on the port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: old connections do not count
        try:
            probe.bind((HOST, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def _first_free(candidates: Iterable[int], used: set[int]) -> int:
    for candidate in candidates:
        if candidate not in used and is_free(candidate):
            return candidate
    raise UserError(f"no free port between {FIRST_PORT} and {_last_port()} on {HOST}")


def _sequence(seed: str) -> Iterator[int]:
    """All ports of the range, from a place that depends on the state folder: two services seldom meet."""
    last = _last_port()
    size = last - FIRST_PORT + 1
    start = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "big") % size
    return (FIRST_PORT + (start + step) % size for step in range(size))


def _last_port() -> int:
    try:
        lowest = int(_EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):  # another system, or a sandbox without it
        lowest = 32768
    return lowest - 1 if lowest > FIRST_PORT + 1000 else 32767


def _read(file: Path) -> PodPorts:
    try:
        return msgspec.json.decode(file.read_bytes(), type=PodPorts)
    except (FileNotFoundError, msgspec.DecodeError):
        return {}
