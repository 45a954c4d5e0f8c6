"""The router's part of the manifest: the endpoint, its clients, and when prefill pods are used."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from kvferry_operator.api.base import (
    ACCEPTS,
    Annotations,
    DnsName,
    ManifestModel,
    RequestDuration,
    SecretReference,
    raise_broken,
)
from kvferry_operator.api.pods import PodSettings

Port = Annotated[int, Field(ge=1, le=65535)]
HostName = Annotated[
    str,
    Field(
        pattern=r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
        max_length=253,
        json_schema_extra={ACCEPTS: "a host name such as llm.example.com"},
    ),
]


class ApiKeys(ManifestModel):
    """Where the router finds the API keys of its clients: a Secret on Kubernetes, a file on one machine."""

    secret_ref: SecretReference | None = None
    """The Secret that holds the keys, one client per entry: the entry's name is the client's, its value the key (16
    characters or more), or several, one per line. An entry `*.keys` is a list as in `keysFile`."""

    keys_file: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """For `kvferry up`: a file with one `client:digest` per line, the digest being the SHA-256 (hex) of the client's
    key. A relative path is taken from the manifest's folder."""

    @model_validator(mode="after")
    def _rules(self) -> "ApiKeys":
        if self.secret_ref is None and self.keys_file is None:
            raise_broken([("", "empty; accepts secretRef, keysFile or both")])
        return self


class Disaggregation(ManifestModel):
    """When a prompt is computed by a prefill pod and its KV ferried to the decode pod."""

    mode: Literal["auto", "always", "never"] = "auto"
    """`auto` goes by the two thresholds; `always` and `never` leave them out."""

    min_uncached_tokens: Annotated[int, Field(ge=0, le=2**24)] | None = None
    """`auto`: a prompt with fewer tokens to compute stays on the decode pod. Absent: the router's default."""

    max_cached_share: Annotated[float, Field(ge=0, le=1)] | None = None
    """`auto`: a prompt of which the decode pod holds more than this share stays there. Absent: the router's default."""

    @model_validator(mode="after")
    def _rules(self) -> "Disaggregation":
        thresholds = (("minUncachedTokens", self.min_uncached_tokens), ("maxCachedShare", self.max_cached_share))
        if self.mode != "auto":
            told = f"mode is {self.mode}, which uses no threshold; accepts it with mode auto only"
            raise_broken([(field, told) for field, value in thresholds if value is not None])
        return self


class Ingress(ManifestModel):
    """An Ingress whose one rule leads to the router."""

    host: HostName
    """The host name that clients use."""

    class_name: DnsName | None = None
    """The IngressClass. Absent: the cluster's default."""

    tls_secret_ref: SecretReference | None = None
    """The Secret with the certificate of the host. Absent: no TLS."""

    annotations: Annotations = Field(default_factory=dict)
    """Annotations for the ingress controller, such as its time limits."""


class HttpRoute(ManifestModel):
    """An HTTPRoute that hangs on a Gateway and leads to the router."""

    gateway: DnsName
    """The Gateway's name."""

    gateway_namespace: DnsName | None = None
    """The Gateway's namespace. Absent: the service's own."""

    section_name: DnsName | None = None
    """The listener of the Gateway. Absent: all of them."""

    hostnames: Annotated[list[HostName], Field(max_length=16)] = Field(default_factory=list)
    """Host names that are routed. Absent: those of the listener."""


class Router(PodSettings):
    """The router: the service's one endpoint."""

    replicas: Annotated[int, Field(ge=1, le=16)] = 1
    """Number of routers. `kvferry up` runs one."""

    port: Port = 8000
    """The endpoint's port; `kvferry up` binds it on 127.0.0.1 only."""

    service_type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    """How the endpoint's Kubernetes Service is reached."""

    ingress: Ingress | None = None
    """An Ingress in front of the endpoint."""

    http_route: HttpRoute | None = None
    """An HTTPRoute of the Gateway API in front of the endpoint."""

    auth: Literal["none", "apiKeys"] = "apiKeys"
    """Whether clients need an API key. `none` lets in everyone who reaches the port."""

    api_keys: ApiKeys | None = None
    """The clients' keys, for `auth: apiKeys`."""

    disaggregation: Disaggregation = Disaggregation()
    """When prefill pods are used."""

    request_deadline: RequestDuration | None = None
    """Time from accepting a request to the end of its answer. Absent: 600 s."""

    @model_validator(mode="after")
    def _rules(self) -> "Router":
        if self.auth == "apiKeys" and self.api_keys is None:
            raise_broken([("apiKeys", "missing; auth apiKeys (the default) needs it, auth none lets everyone in")])
        if self.auth == "none" and self.api_keys is not None:
            raise_broken([("apiKeys", "auth is none, which uses no keys; accepts it with auth apiKeys only")])
        return self
