"""A cluster as kubectl sees it: the tests do what a person would type."""

import json
import os
import re
import selectors
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Object = dict[str, Any]

TIMEOUT_S = 60.0
FORWARD_S = 20.0
FORWARDING = re.compile(rb"Forwarding from 127\.0\.0\.1:(\d+) ->")


class KubectlError(Exception):
    """kubectl failed; the message is what it said."""


class Kubectl:
    """kubectl in one namespace, with the environment's KUBECONFIG."""

    def __init__(self, namespace: str = "default") -> None:
        self.namespace = namespace

    def run(self, *words: str, stdin: str | None = None, timeout_s: float = TIMEOUT_S) -> str:
        """Standard output. Raises ``KubectlError``, also after the timeout."""
        command = ["kubectl", f"--namespace={self.namespace}", *words]
        try:
            done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            raise KubectlError(f"{' '.join(command)}: took over {timeout_s:g} s") from None
        if done.returncode:
            raise KubectlError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def apply(self, *objects: Object) -> None:
        text = "\n---\n".join(json.dumps(wanted) for wanted in objects)
        self.run("apply", "-f", "-", stdin=text)

    def get(self, kind: str, name: str) -> Object | None:
        """The object, or ``None`` where there is none."""
        text = self.run("get", kind, name, "--ignore-not-found", "--output=json")
        found: Object | None = json.loads(text) if text.strip() else None
        return found

    def list(self, kinds: str, selector: str = "") -> list[Object]:
        """Objects of some kinds (comma-separated) that have these labels."""
        chosen = [f"--selector={selector}"] if selector else []
        items: list[Object] = json.loads(self.run("get", kinds, *chosen, "--output=json"))["items"]
        return items

    def delete(self, kind: str, name: str, *words: str) -> None:
        self.run("delete", kind, name, "--ignore-not-found", *words, timeout_s=180)

    def python(self, pod: str, program: str, container: str = "") -> str:
        """Run a program with the Python of a pod's container."""
        chosen = [f"--container={container}"] if container else []
        return self.run("exec", pod, *chosen, "--", "python", "-P", "-c", program)

    def fetch(self, path: str, timeout_s: float = TIMEOUT_S) -> str:
        """GET a path of the API server, such as a pod's proxied port."""
        return self.run("get", "--raw", path, timeout_s=timeout_s)

    @contextmanager
    def forwarded(self, target: str, port: int) -> Iterator[str]:
        """The address of a pod's or Service's port while ``kubectl port-forward`` runs."""
        command = ["kubectl", f"--namespace={self.namespace}", "port-forward", target, f":{port}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0) as process:
            try:
                yield f"127.0.0.1:{_forwarded_port(process, target)}"
            finally:
                process.kill()


def _forwarded_port(process: "subprocess.Popen[bytes]", target: str) -> int:
    said = b""
    deadline = time.monotonic() + FORWARD_S
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            if selector.select(timeout=1.0):
                chunk = os.read(process.stdout.fileno(), 4096)
                if not chunk:
                    break
                said += chunk
                found = FORWARDING.search(said)
                if found:
                    return int(found[1])
    raise KubectlError(f"port-forward to {target}: no port within {FORWARD_S:g} s: {said.decode().strip()}")


def conditions(seen: Object) -> dict[str, Object]:
    """The conditions of an object by their type."""
    return {each["type"]: each for each in seen.get("status", {}).get("conditions", ())}


def names(objects: Sequence[Object]) -> list[str]:
    """Kind and name of each, for messages."""
    return sorted(f"{each['kind']}/{each['metadata']['name']}" for each in objects)
