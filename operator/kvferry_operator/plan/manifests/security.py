"""Restricted pod security: the same for every pod that is made."""

from kvferry_operator.plan.manifests.meta import Object

USER = 10001  # as in the images
KEY_MODE = 0o440  # readable by the pod's group, which the kubelet gives to the files


def pod_security() -> Object:
    """A pod's securityContext."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> Object:
    """A container's securityContext."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
    }
