"""Values of the chart that together use each of them, and wrong ones."""

from typing import Any

DIGEST = "sha256:" + "0123456789abcdef" * 4

# By name. Namespaces that they watch are made by whoever applies what is rendered.
PROFILES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "several namespaces": {"watchNamespaces": ["team-a", "team-b"]},
    "all namespaces": {"watchAllNamespaces": True, "routerNamespaces": ["team-a", "team-b"]},
    "all namespaces, routers nowhere yet": {"watchAllNamespaces": True},
    "highly available": {"replicas": 3},
    "no operator for now": {"replicas": 0},
    "ingresses and routes": {"ingresses": {"enabled": True}, "httpRoutes": {"enabled": True}},
    "all namespaces, ingresses and routes": {
        "watchAllNamespaces": True,
        "routerNamespaces": ["team-a"],
        "ingresses": {"enabled": True},
        "httpRoutes": {"enabled": True},
    },
    "images by digest": {
        "images": {
            name: {"repository": f"registry.example:5000/kvferry/{name}", "digest": DIGEST, "tag": "ignored"}
            for name in ("operator", "runtime", "router")
        },
        "imagePullPolicy": "Always",
        "imagePullSecrets": ["registry"],
    },
    "everything said": {
        "replicas": 2,
        "watchNamespaces": ["team-a"],
        "resources": {"requests": {"cpu": "100m", "memory": "1Gi"}, "limits": {"cpu": 2, "memory": "1Gi"}},
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"key": "control", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {
            "nodeAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {
                        "weight": 1,
                        "preference": {"matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}]},
                    }
                ]
            }
        },
        "priorityClassName": "system-cluster-critical",
        "podLabels": {"team": "platform", "number": "1"},
        "podAnnotations": {"example.com/note": "on: off", "empty": ""},
        "serviceAccount": {"annotations": {"example.com/role": "arn:x:y"}},
        "logLevel": "debug",
        "crds": {"install": False},
        "settings": {
            "routerServiceAccount": "routers",
            "dnsNamespace": "dns",
            "monitoringNamespaces": ["monitoring", "more-monitoring"],
            "apiServerPorts": [8443],
            "modelStorePorts": [443, 9000],
        },
    },
    "no network policies": {"settings": {"networkPolicies": False}},
}

# What is wrong, and what Helm must say: where, and what is accepted or not.
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"watchNamespace": "default"}, "additional properties 'watchNamespace' not allowed"),
    ({"watchNamespaces": "default"}, "at '/watchNamespaces': got string, want array"),
    ({"watchNamespaces": []}, "at '/watchNamespaces': minItems: got 0, want 1"),
    ({"watchNamespaces": ["a", "a"]}, "at '/watchNamespaces': items at 0 and 1 are equal"),
    ({"watchNamespaces": ["Team"]}, "at '/watchNamespaces/0': 'Team' does not match pattern"),
    ({"routerNamespaces": ["a"]}, "at '/routerNamespaces': maxItems: got 1, want 0"),
    ({"replicas": 6}, "at '/replicas': maximum: got 6, want 5"),
    ({"replicas": "2"}, "at '/replicas': got string, want integer"),
    ({"imagePullPolicy": "Sometimes"}, "at '/imagePullPolicy': value must be one of 'Always', 'IfNotPresent', 'Never'"),
    ({"imagePullSecrets": [{"name": "x"}]}, "at '/imagePullSecrets/0': got object, want string"),
    ({"images": {"operator": {"digest": "md5:1"}}}, "at '/images/operator/digest': 'md5:1' does not match pattern"),
    ({"images": {"operator": {"repository": ""}}}, "at '/images/operator/repository': minLength: got 0, want 1"),
    ({"images": {"operators": {}}}, "at '/images': additional properties 'operators' not allowed"),
    ({"crds": {"install": "yes"}}, "at '/crds/install': got string, want boolean"),
    ({"logLevel": "trace"}, "at '/logLevel': value must be one of 'debug', 'info', 'warning', 'error'"),
    ({"podLabels": {"a": 1}}, "at '/podLabels/a': got number, want string"),
    ({"settings": {"dnsNamspace": "x"}}, "at '/settings': additional properties 'dnsNamspace' not allowed"),
    ({"settings": {"apiServerPorts": [0]}}, "at '/settings/apiServerPorts/0': minimum: got 0, want 1"),
    ({"settings": {"apiServerPorts": []}}, "at '/settings/apiServerPorts': minItems: got 0, want 1"),
]
