"""Watches of a service's objects, each read by a thread as Kubernetes tells of them."""

import json
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from urllib.parse import quote

from e2e.harness.kubectl import Object
from e2e.harness.service import Service

PODS = "/api/v1/namespaces/{namespace}/pods"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"

Take = Callable[[str, Object], None]  # the event's type, the object


class Watch:
    """One path's watch, and the thread that reads it."""

    def __init__(self, command: Sequence[str], take: Take) -> None:
        self._command = command
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._take = take
        self._why_ended = ""
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            with self._process.stdout as lines:
                for line in lines:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise ValueError(f"the API server says {event['object']}")
                    self._take(event["type"], event["object"])
            self._why_ended = "its connection has ended"
        except Exception as error:  # kept, and told by `ended`
            self._why_ended = f"{type(error).__name__}: {error}"

    def ended(self) -> str:
        """Why it tells nothing any more, so that what was seen is not all that was; empty while it does."""
        return self._why_ended and f"{' '.join(self._command)}: {self._why_ended}"

    def end(self) -> None:
        self._process.kill()
        self._process.wait(10)
        self._thread.join(10)


class WatchEndedError(AssertionError):
    """A watch ended before who watches did."""


@contextmanager
def watching(service: Service, takes: Mapping[str, Take]) -> Iterator[None]:
    """Hand over each event of these paths' watches while the body of the ``with`` runs.

    A watch begins with what is there; nothing waits for that.

    Raises:
        WatchEndedError: behind a body that ended well, when a watch did not last as long; else its error gets a note.
    """
    selector = quote(service.selector)
    with ExitStack() as at_end:
        watches = []
        for path, take in takes.items():
            address = f"{path.format(namespace=service.kubectl.namespace)}?watch=1&labelSelector={selector}"
            watches.append(Watch(["kubectl", "get", "--raw", address], take))
            at_end.callback(watches[-1].end)
        try:
            yield
        except Exception as error:
            for why in filter(None, map(Watch.ended, watches)):
                error.add_note(f"a watch has ended: {why}")
            raise
        for why in filter(None, map(Watch.ended, watches)):
            raise WatchEndedError(why)


def ready_pods(found: Object) -> set[str]:
    """Names of the pods that an EndpointSlice calls ready."""
    return {
        endpoint["targetRef"]["name"]
        for endpoint in found.get("endpoints") or ()
        if endpoint.get("conditions", {}).get("ready", True)
    }
