"""Other ports for a pod of which one was taken between the launcher's look and the pod's bind."""

from collections.abc import Callable

from kvferry_cli.local.pod import LocalPod, discovery
from kvferry_cli.local.ports import PodPorts, keep, replace_taken
from kvferry_cli.local.state_dir import StateDir, write_atomically

Render = Callable[[PodPorts], tuple[LocalPod, ...]]


class Relocator:
    """The ports of a running service. The endpoint's stays where the user has chosen it."""

    def __init__(self, ports: PodPorts, state: StateDir, render: Render, *, fixed: int) -> None:
        """``fixed``: the endpoint's port; 0 where it was not chosen."""
        self._ports = ports
        self._state = state
        self._render = render
        self._fixed = fixed

    def move(self, name: str) -> LocalPod:
        """The pod with every port replaced that is taken now; the router is told of it, too.

        Raises:
            UserError: no free port is left.
            OSError: the state folder cannot be written.
        """
        self._ports = {**self._ports, name: replace_taken(self._ports, name, self._state.ports_file, self._fixed)}
        pods = self._render(self._ports)
        keep(self._ports, self._state.ports_file)
        write_atomically(self._state.pods_file, discovery(pods))
        return next(pod for pod in pods if pod.name == name)
