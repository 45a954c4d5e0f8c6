"""The operator on a real API server as the chart installs it: its own account with the chart's rules and no more."""

import json
from pathlib import Path
from typing import Any

import yaml

from kvferry_operator.plan.manifests.meta import Object
from tests.support.api_server import ApiServer

ROOT = Path(__file__).parents[3]
RULES = ROOT / "charts" / "kvferry" / "files" / "rbac"
ACCOUNT = "kvferry"
ROUTER_ACCOUNT = "kvferry-router"
RBAC = "rbac.authorization.k8s.io/v1"
SETTINGS = {
    "runtimeImage": "kvferry/runtime:1",
    "routerImage": "kvferry/router:1",
    "ingresses": True,
    "routerServiceAccount": ROUTER_ACCOUNT,
}
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


class Installation:
    """A release: its namespace, its account, and the namespaces that it watches."""

    def __init__(self, server: ApiServer, folder: Path, *, namespaces: int = 1, clusterwide: bool = False) -> None:
        self.server = server
        self.folder = folder
        self.clusterwide = clusterwide
        self.release = server.namespace(labels=RESTRICTED)
        server.service_account(self.release, ACCOUNT)
        self.namespaces: list[str] = []
        self._bind("Role", self.release, f"{ACCOUNT}-lease", rules("leases"))
        if clusterwide:
            self._bind("ClusterRole", None, f"{ACCOUNT}-{self.release}", rules("operator", "ingresses"))
        for _ in range(namespaces):
            self.add_namespace()
        self.kubeconfig = server.kubeconfig_for(self.release, ACCOUNT)
        self.settings = folder / "settings.json"
        self.settings.write_text(json.dumps(SETTINGS))

    @property
    def namespace(self) -> str:
        """The newest one."""
        return self.namespaces[-1]

    def add_namespace(self) -> str:
        """Another watched namespace, for pods that keep the strictest Pod Security Standard."""
        made = self.server.namespace(labels=RESTRICTED)
        self.server.service_account(made, ROUTER_ACCOUNT)
        if not self.clusterwide:
            self._bind("Role", made, ACCOUNT, rules("operator", "ingresses"))
        self.namespaces.append(made)
        return made

    def _bind(self, kind: str, namespace: str | None, name: str, allowed: list[Object]) -> None:
        where = {"name": name} | ({} if namespace is None else {"namespace": namespace})
        subject = {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": self.release}
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name}
        create = self.server.client.create
        create({"apiVersion": RBAC, "kind": kind, "metadata": where, "rules": allowed})
        create(
            {
                "apiVersion": RBAC,
                "kind": f"{kind}Binding",
                "metadata": where,
                "roleRef": reference,
                "subjects": [subject],
            }
        )


def rules(*files: str) -> list[Object]:
    """The chart's rules of these files."""
    made: list[Any] = []
    for name in files:
        made += yaml.safe_load((RULES / f"{name}.yaml").read_text())
    return made
