"""Names of a service's objects: deterministic, at most 63 characters, different for different services.

No suffix ends with ``-`` and another suffix, so that two services of different names never name one object.
"""

import hashlib

MAX_NAME = 63
ENGINE_ROLES = ("prefill", "decode")
ROLES = (*ENGINE_ROLES, "router")


def child(service: str, suffix: str) -> str:
    """``<service>-<suffix>``; where that is too long, the service's name is cut and marked with its hash."""
    whole = f"{service}-{suffix}"
    if len(whole) <= MAX_NAME:
        return whole
    mark = _mark(service)
    room = MAX_NAME - len(suffix) - len(mark) - 2
    return f"{service[:room].rstrip('-')}-{mark}-{suffix}"


def service_name(service: str, role: str) -> str:
    """The name of a Kubernetes Service, which must begin with a letter."""
    base = service if service[0].isalpha() else f"s-{service}-{_mark(service)}"
    return child(base, role)


def role_name(service: str, role: str) -> str:
    """The role object's name; never cut, since only a label or a Service must be short."""
    return f"{service}-{role}"


def engine_name(service: str, role: str, revision: str) -> str:
    """The Deployment of a pool at one revision."""
    return child(service, f"{role}-{revision}")


def keys_name(service: str, uid: str) -> str:
    """The key Secret: fixed for one service object, so that it is made without ever being read.

    A service that is deleted and made anew has another one: the old may still wait for its collection.
    """
    return child(service, f"keys-{hashlib.blake2s(uid.encode(), digest_size=4).hexdigest()}")


def _mark(service: str) -> str:
    return hashlib.blake2s(service.encode(), digest_size=4).hexdigest()
