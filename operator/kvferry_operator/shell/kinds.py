"""The kinds that the operator reads and writes, and where the API server has them."""

import msgspec

from kvferry_operator.api.role import ROLE_KIND
from kvferry_operator.api.service import API_VERSION
from kvferry_operator.api.service import KIND as SERVICE_KIND
from kvferry_operator.plan.manifests.settings import ClusterSettings


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """One namespaced kind."""

    api_version: str
    kind: str
    plural: str
    ours: bool = True  # watched by our label; else all objects are

    @property
    def group(self) -> str:
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        return self.api_version.rpartition("/")[2]

    def path(self, namespace: str, name: str = "", sub: str = "") -> str:
        """The path of a collection, an object or a subresource, below the server's URL."""
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"
        parts = [root, "namespaces", namespace, self.plural, name, sub]
        return "/".join(part for part in parts if part)


SERVICE = Kind(api_version=API_VERSION, kind=SERVICE_KIND, plural="inferenceservices", ours=False)
ROLE = Kind(api_version=API_VERSION, kind=ROLE_KIND, plural="inferenceserviceroles")
POD = Kind(api_version="v1", kind="Pod", plural="pods")
LEASE = Kind(api_version="coordination.k8s.io/v1", kind="Lease", plural="leases")
EVENT = Kind(api_version="events.k8s.io/v1", kind="Event", plural="events")
SECRET = Kind(api_version="v1", kind="Secret", plural="secrets")
INGRESS = Kind(api_version="networking.k8s.io/v1", kind="Ingress", plural="ingresses")
HTTP_ROUTE = Kind(api_version="gateway.networking.k8s.io/v1", kind="HTTPRoute", plural="httproutes")
_ALWAYS = (
    SERVICE,
    ROLE,
    POD,
    Kind(api_version="apps/v1", kind="Deployment", plural="deployments"),
    Kind(api_version="v1", kind="Service", plural="services"),
    Kind(api_version="v1", kind="ConfigMap", plural="configmaps"),
    Kind(api_version="v1", kind="ServiceAccount", plural="serviceaccounts"),
    Kind(api_version="policy/v1", kind="PodDisruptionBudget", plural="poddisruptionbudgets"),
    Kind(api_version="networking.k8s.io/v1", kind="NetworkPolicy", plural="networkpolicies"),
)
_KNOWN = {kind.kind: kind for kind in (*_ALWAYS, LEASE, EVENT, SECRET, INGRESS, HTTP_ROUTE)}


def kind_of(name: str) -> Kind:
    """A kind by its name. Raises ``KeyError`` for one that is no business of the operator."""
    return _KNOWN[name]


def watched(settings: ClusterSettings) -> tuple[Kind, ...]:
    """The kinds that are watched: those that may be written but for Secrets, services and pods."""
    optional = ((INGRESS, settings.ingresses), (HTTP_ROUTE, settings.http_routes))
    return (*_ALWAYS, *(kind for kind, allowed in optional if allowed))
