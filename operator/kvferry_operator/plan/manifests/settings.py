"""What the operator's own configuration says about the objects that it makes: the chart's ``settings``."""

from typing import Literal

import msgspec


class ClusterSettings(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """One installation's choices, equal for all its services."""

    runtime_image: str  # of engines, where the manifest names none
    router_image: str
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()  # names of Secrets in the services' namespaces
    router_service_account: str = "kvferry-router"  # made and bound by the chart, in each watched namespace
    ingresses: bool = False  # whether the operator may write them
    http_routes: bool = False
    network_policies: bool = True
    dns_namespace: str = "kube-system"
    monitoring_namespaces: tuple[str, ...] = ()  # whose pods may read metrics of engines
    api_server_ports: tuple[int, ...] = (443, 6443)  # that routers may reach, to watch their pods
    model_store_ports: tuple[int, ...] = (443,)  # that pods which fetch a model may reach


def decode_settings(content: bytes) -> ClusterSettings:
    """Read the settings' JSON. Raises ``msgspec.ValidationError`` that names the field."""
    return msgspec.json.decode(content, type=ClusterSettings)
