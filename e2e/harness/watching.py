"""Watches of a service's objects, each read by a thread as Kubernetes tells of them."""

import json
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import quote

from e2e.harness.kubectl import Object
from e2e.harness.service import Service

PODS = "/api/v1/namespaces/{namespace}/pods"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"

Take = Callable[[str, Object], None]  # the event's type, the object


@contextmanager
def watching(service: Service, takes: Mapping[str, Take]) -> Iterator[None]:
    """Hand over each event of these paths' watches while the body of the ``with`` runs.

    A watch begins with what is there; nothing waits for that.
    """
    selector = quote(service.selector)
    processes, threads = [], []
    try:
        for path, take in takes.items():
            address = f"{path.format(namespace=service.kubectl.namespace)}?watch=1&labelSelector={selector}"
            process = subprocess.Popen(["kubectl", "get", "--raw", address], stdout=subprocess.PIPE, text=True)
            processes.append(process)
            threads.append(threading.Thread(target=_read, args=(process, take)))
            threads[-1].start()
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
        for thread in threads:
            thread.join(10)


def _read(process: "subprocess.Popen[str]", take: Take) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            event = json.loads(line)
            take(event["type"], event["object"])


def ready_pods(found: Object) -> set[str]:
    """Names of the pods that an EndpointSlice calls ready."""
    return {
        endpoint["targetRef"]["name"]
        for endpoint in found.get("endpoints") or ()
        if endpoint.get("conditions", {}).get("ready", True)
    }
