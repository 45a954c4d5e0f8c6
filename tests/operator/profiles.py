"""Manifests that together use every field and render every object. Each is tried against a real API server."""

from typing import Any

KEYS = {"auth": "apiKeys", "apiKeys": {"secretRef": {"name": "clients"}}}
NOWHERE = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["no"]}]}]}
PRIORITY = "serving"  # a PriorityClass that a test makes before it uses the profile "placed"

PLACED: dict[str, Any] = {
    "nodeSelector": {"kubernetes.io/os": "linux", "pool": ""},
    "tolerations": [
        {"operator": "Exists"},
        {"key": "gpu", "value": "yes", "effect": "NoSchedule"},
        {"key": "example.com/slow", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 0},
    ],
    "affinity": {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": NOWHERE},
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {
                    "weight": 1,
                    "podAffinityTerm": {
                        "topologyKey": "kubernetes.io/hostname",
                        "labelSelector": {"matchLabels": {"noisy": "yes"}},
                    },
                }
            ]
        },
    },
    "topologySpreadConstraints": [
        {"topologyKey": "topology.kubernetes.io/zone"},
        {"topologyKey": "kubernetes.io/hostname", "maxSkew": 2, "whenUnsatisfiable": "DoNotSchedule"},
    ],
    "priorityClassName": PRIORITY,
    "labels": {"team": "llm", "example.com/tier": ""},
    "annotations": {"example.com/note": "größer · 大", "empty": ""},
}

# Quantities that the API server writes in another way.
ODD_SIZES = {
    "requests": {"cpu": "0.5", "memory": "1024Mi", "ephemeral-storage": "1.5Gi"},
    "limits": {"cpu": "1000m", "memory": 2147483648, "nvidia.com/gpu": 1, "ephemeral-storage": "3000M"},
}

PROFILES: dict[str, dict[str, Any]] = {
    "as small as it goes": {"spec__prefill": ...},
    "prefill and decode": {"spec__prefill__replicas": 2, "spec__decode__replicas": 3},
    "nothing runs": {"spec__prefill__replicas": 0, "spec__decode__replicas": 0},
    "demo model": {"spec__model": {"name": "smollm2", "source": "demo:smollm2"}},
    "gated hub model": {
        "spec__model": {
            "name": "org/model:v1",
            "source": "hf://org/model@0123456789abcdef",
            "size": "13.5Gi",
            "tokenSecretRef": {"name": "hub"},
        }
    },
    "hub model of unknown size": {"spec__model": {"name": "m", "source": "org/model"}},
    "claim": {"spec__model": {"name": "m", "source": "pvc://models/llama/8b", "size": "16Gi"}},
    "image volume": {"spec__model": {"name": "m", "source": "image://registry.example/models/llama:8b"}},
    "placed": {"spec__prefill": {"replicas": 1, **PLACED}, "spec__decode": PLACED, "spec__router": {**PLACED, **KEYS}},
    "odd sizes": {
        "spec__prefill__resources": ODD_SIZES,
        "spec__decode__resources": ODD_SIZES,
        "spec__router__resources": {"limits": {"cpu": "2000m", "memory": "1Ti"}},
    },
    "variables": {
        "spec__decode__env": [
            {"name": "EMPTY", "value": ""},
            {"name": "REFERENCE", "value": "$(POD_IP) $$(HOME) $x"},
            {"name": "TEXT", "value": "ä\n\t 🚢"},
            {"name": "HOME", "value": "/elsewhere"},
        ],
        "spec__router__env": [{"name": "PYTHONUNBUFFERED", "value": "0"}],
    },
    "all engine settings": {
        "spec__engine": {
            "dtype": "bfloat16",
            "maxModelLen": 4096,
            "blockSize": 32,
            "kvMemory": "1.5Gi",
            "maxRunning": 16,
            "tokenBudget": 512,
            "prefixCaching": False,
            "threads": 3,
            "attentionBackend": "torch",
        },
        "spec__transfer": {"backend": "tcp", "lease": "1m30s", "trustNetwork": True},
        "spec__router": {
            "auth": "none",
            "requestDeadline": "1h",
            "disaggregation": {"mode": "auto", "minUncachedTokens": 0, "maxCachedShare": 0.25},
        },
    },
    "own images": {
        "spec__prefill__image": "registry.example:5000/runtime@sha256:" + "0" * 64,
        "spec__decode__image": "registry.example:5000/runtime:v2",
        "spec__router__image": "router",
    },
    "ingress": {
        "spec__router": {
            "auth": "none",
            "port": 80,
            "ingress": {
                "host": "*.llm.example.com",
                "className": "nginx",
                "tlsSecretRef": {"name": "tls"},
                "annotations": {"nginx.ingress.kubernetes.io/proxy-read-timeout": "600"},
            },
        }
    },
    "plain ingress": {"spec__router": {"auth": "none", "ingress": {"host": "llm.example.com"}}},
    "route": {
        "spec__router": {
            "auth": "none",
            "httpRoute": {
                "gateway": "public",
                "gatewayNamespace": "gateways",
                "sectionName": "https",
                "hostnames": ["llm.example.com", "*.example.org"],
            },
        }
    },
    "plain route": {"spec__router": {"auth": "none", "httpRoute": {"gateway": "public"}}},
    "node port": {"spec__router": {"auth": "none", "serviceType": "NodePort", "replicas": 3}},
    "load balancer": {"spec__router": {"auth": "none", "serviceType": "LoadBalancer", "port": 65535}},
    "long name": {"metadata__name": "a" * 62 + "9"},
    "a digit first": {"metadata__name": "0", "spec__prefill__replicas": 64},
}
