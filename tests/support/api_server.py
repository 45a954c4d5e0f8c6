"""A real Kubernetes API server with its etcd, and nothing else: no node, no controller, no Docker, no root.

What controllers would do is missing: no pod starts, nothing is garbage collected, a deleted namespace stays, quotas
have no usage, and ServiceAccounts are made by whoever needs them. Admission is as by default (Pod Security, quota and
ServiceAccounts are on) and a little stricter. Both processes end with the one that started them.
"""

import base64
import ctypes
import itertools
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.kube_client import KubeClient, Object, Refused
from tests.support.waiting import wait_for

HOST = "127.0.0.1"
START_S = 90.0  # on a machine that is busy with other things; 3 s on an idle one
KUBECTL_S = 60.0
TOKEN_S = 3600 * 12
# Below the range of outgoing connections: none of those takes the port while the server is stopped.
PORTS = range(20000, 30000)
_LIBC = ctypes.CDLL(None)


class ApiServer:
    """One server. ``url`` and ``admin`` (a kubeconfig's path) stay the same over ``stop`` and ``start``.

    Args:
        tools: the folder with kube-apiserver, etcd and kubectl.
        folder: an empty one, which ``close`` removes.
    """

    # Beyond the default, as some distributions have it: whose owner blocks its deletion must be allowed to say so.
    admission = ("OwnerReferencesPermissionEnforcement",)

    def __init__(self, tools: Path, folder: Path) -> None:
        self.tools = tools
        self.folder = folder
        port, self._etcd_port = _free_ports(2)
        self.url = f"https://{HOST}:{port}"
        self._token = secrets.token_hex(16)
        self._numbers = itertools.count(1)
        self._clients: list[KubeClient] = []
        self._etcd: subprocess.Popen[bytes] | None = None
        self._server: subprocess.Popen[bytes] | None = None
        _make_certificate(self.folder / "server.crt", self.folder / "server.key")
        _run("openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(self.folder / "tokens.key"))
        (self.folder / "tokens.csv").write_text(f"{self._token},admin,admin,system:masters\n")
        self.admin = self._kubeconfig("admin", self._token, "default")
        self.client = self.client_of(self._token)

    # ---- life

    def start(self) -> None:
        """Start what does not run; returns when the server is ready. Raises ``RuntimeError`` with the log's end."""
        if self._etcd is None:
            self._etcd = self._spawn("etcd", self._etcd_flags())
        if self._server is None:
            self._server = self._spawn("kube-apiserver", self._server_flags())
        wait_for(self._ready_or_fail, "a ready API server", START_S)

    def ready(self) -> bool:
        """Whether the server answers requests now."""
        try:
            return self.client.request("GET", "/readyz")[0] == 200
        except OSError:
            return False

    def _ready_or_fail(self) -> bool:
        for name, process in (("etcd", self._etcd), ("kube-apiserver", self._server)):
            if process is not None and process.poll() is not None:
                raise RuntimeError(f"{name} has ended:\n{self.log(name)[-3000:]}")
        return self.ready()

    def stop(self) -> None:
        """End the API server at once, with every connection to it. etcd stays, and with it all objects."""
        for client in self._clients:
            client.close()
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None

    def close(self) -> None:
        """End both and remove the folder."""
        self.stop()
        if self._etcd is not None:
            self._etcd.kill()
            self._etcd.wait()
            self._etcd = None
        shutil.rmtree(self.folder)

    def log(self, name: str = "kube-apiserver") -> str:
        return (self.folder / f"{name}.log").read_text("utf-8", "replace")

    # ---- users

    def client_of(self, token: str) -> KubeClient:
        """A client that shows this token; it is closed with the server."""
        made = KubeClient(self.url, str(self.folder / "server.crt"), token)
        self._clients.append(made)
        return made

    def token_for(self, namespace: str, service_account: str) -> str:
        """A token of a ServiceAccount, which must exist."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{service_account}/token"
        wanted = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": TOKEN_S},
        }
        token: str = self.client.call("POST", path, wanted)["status"]["token"]
        return token

    def kubeconfig_for(self, namespace: str, service_account: str) -> Path:
        """The kubeconfig of a ServiceAccount, which must exist; its namespace is the default one."""
        token = self.token_for(namespace, service_account)
        return self._kubeconfig(f"{namespace}-{service_account}", token, namespace)

    def kubectl(
        self,
        *arguments: str,
        stdin: str | None = None,
        kubeconfig: Path | None = None,
        check: bool = True,
    ) -> "subprocess.CompletedProcess[str]":
        """Run kubectl, as the admin if no kubeconfig is given. ``check``: a failure raises with what it said."""
        command = [str(self.tools / "kubectl"), f"--cache-dir={self.folder / 'kubectl-cache'}", *arguments]
        env = {**os.environ, "KUBECONFIG": str(kubeconfig or self.admin), "HOME": str(self.folder)}
        done = subprocess.run(
            command, input=stdin, env=env, capture_output=True, text=True, timeout=KUBECTL_S, check=False
        )
        if check and done.returncode:
            raise AssertionError(f"kubectl {' '.join(arguments)}: {done.stderr or done.stdout}")
        return done

    # ---- what controllers would make

    def namespace(self, name: str = "", *, labels: dict[str, str] | None = None) -> str:
        """A fresh namespace with the objects that every cluster puts into one; returns its name."""
        name = name or f"test-{next(self._numbers)}-{secrets.token_hex(2)}"
        self.client.create(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels or {}}}
        )
        self.service_account(name, "default")
        self.client.create(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "kube-root-ca.crt", "namespace": name},
                "data": {"ca.crt": (self.folder / "server.crt").read_text()},
            }
        )
        return name

    def service_account(self, namespace: str, name: str) -> None:
        """Make a ServiceAccount; that it is there already is fine."""
        try:
            self.client.create(
                {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": namespace}}
            )
        except Refused as refused:
            if refused.code != 409:
                raise

    def apply_all(self, objects: Sequence[Object], manager: str = "test") -> None:
        """Apply objects in order; those of custom kinds after their CRD is served (``await_kinds``)."""
        for wanted in objects:
            self.client.apply(wanted, manager)

    def await_kinds(self, api_version: str, *kinds: str) -> None:
        """Wait until kinds are served: a CRD is some moments after it was applied, and its storage some more."""

        def served() -> bool:
            status, body = self.client.request("GET", f"/apis/{api_version}")
            found = json.loads(body)["resources"] if status == 200 else []
            plurals = {one["kind"]: one["name"] for one in found if "/" not in one["name"]}
            return plurals.keys() >= set(kinds) and all(
                self.client.request("GET", f"/apis/{api_version}/{plurals[kind]}")[0] == 200 for kind in kinds
            )

        wait_for(served, f"{api_version} to serve {', '.join(kinds)}")

    # ---- processes

    def _spawn(self, name: str, flags: list[str]) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [str(self.tools / name), *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                preexec_fn=_die_with_us,
            )

    def _etcd_flags(self) -> list[str]:
        own = f"http://{HOST}:{self._etcd_port}"
        return [
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={own}",
            f"--advertise-client-urls={own}",
            f"--listen-peer-urls=http://{HOST}:0",
            "--unsafe-no-fsync",
            "--log-level=warn",
        ]

    def _server_flags(self) -> list[str]:
        tokens = self.folder / "tokens.key"
        return [
            f"--etcd-servers=http://{HOST}:{self._etcd_port}",
            f"--bind-address={HOST}",
            f"--advertise-address={HOST}",
            f"--secure-port={self.url.rpartition(':')[2]}",
            f"--tls-cert-file={self.folder / 'server.crt'}",
            f"--tls-private-key-file={self.folder / 'server.key'}",
            f"--cert-dir={self.folder}",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            f"--enable-admission-plugins={','.join(self.admission)}",
            "--service-cluster-ip-range=10.0.0.0/16",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={tokens}",
            f"--service-account-signing-key-file={tokens}",
            "--endpoint-reconciler-type=none",  # it would publish the address, which loopback cannot be
        ]

    def _kubeconfig(self, name: str, token: str, namespace: str) -> Path:
        ca = base64.b64encode((self.folder / "server.crt").read_bytes()).decode()
        made: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": {"server": self.url, "certificate-authority-data": ca}}],
            "users": [{"name": name, "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": name, "namespace": namespace}}],
            "current-context": "test",
        }
        path = self.folder / f"{name}.kubeconfig"
        path.write_text(json.dumps(made, indent=1))
        path.chmod(0o600)
        return path


def _die_with_us() -> None:
    _LIBC.prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG


def _make_certificate(certificate: Path, key: Path) -> None:
    """One certificate that is its own authority, for 127.0.0.1."""
    _run(
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
        "-days", "2", "-subj", "/CN=kube-apiserver", "-keyout", str(key), "-out", str(certificate),
        "-addext", f"subjectAltName=IP:{HOST},DNS:localhost,DNS:kubernetes.default.svc",
        "-addext", "keyUsage=critical,digitalSignature,keyCertSign",
    )  # fmt: skip


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]}: {done.stderr}")


def _free_ports(count: int) -> list[int]:
    found: list[int] = []
    for port in random.SystemRandom().sample(PORTS, 200):
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue  # taken
        found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"no free ports from {PORTS.start} to {PORTS.stop}")
