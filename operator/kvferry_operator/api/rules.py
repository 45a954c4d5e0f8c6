"""Rules between fields as the API server checks them (CEL), by the type that they stand on.

The types' own validators hold the same rules for `kvferry up`, with the same words and fields; one table of bad
manifests is tried against both. Rules marked ``cluster_only`` are about what no cluster can do. CEL is evaluated after
defaults are filled in; optional fields are read with ``?`` (Kubernetes 1.29 and later).
"""

import msgspec


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One rule."""

    rule: str  # CEL; ``self`` is the object, ``oldSelf`` makes it a rule on updates
    message: str
    field: str = ""  # the field at fault, below the object
    expression: str = ""  # CEL that makes the message, where it tells values; ``message`` stands in if it fails
    cluster_only: bool = False


def _differs(field: str, default: str, shown: str, told: str) -> Rule:
    """Prefill and decode must have an equal engine setting: each pool's own, else the service's, else the default."""
    own = {
        role: f"self.prefill.?engine.?{field}.or(self.?engine.?{field}).orValue({default})"
        if role == "prefill"
        else f"self.decode.?engine.?{field}.or(self.?engine.?{field}).orValue({default})"
        for role in ("prefill", "decode")
    }
    return Rule(
        rule=f"!has(self.prefill) || {own['prefill']} == {own['decode']}",
        message=f"{told} of prefill and decode; they must be equal to ferry KV",
        field=f".prefill.engine.{field}",
        expression=(
            f"{shown.format(own['prefill'])} + ' for prefill, ' + {shown.format(own['decode'])}"
            " + ' for decode; they must be equal to ferry KV'"
        ),
    )


RULES: dict[str, tuple[Rule, ...]] = {
    "EngineSettings": (
        Rule(
            rule="!has(self.kvBlocks) || !has(self.kvMemory)",
            message="kvBlocks is given too; accepts one of the two",
            field=".kvMemory",
        ),
        Rule(
            rule="!has(self.tokenBudget) || !has(self.maxRunning) || self.tokenBudget >= self.maxRunning",
            message="accepts at least maxRunning",
            field=".tokenBudget",
            expression=(
                "'got ' + string(self.tokenBudget) + '; accepts at least maxRunning (' + string(self.maxRunning) + ')'"
            ),
        ),
    ),
    "ApiKeys": (
        Rule(
            rule="has(self.secretRef) || has(self.keysFile)",
            message="empty; accepts secretRef, keysFile or both",
        ),
        Rule(
            rule="has(self.secretRef) || !has(self.keysFile)",
            message="missing; on a cluster API keys are read from a Secret",
            field=".secretRef",
            cluster_only=True,
        ),
    ),
    "Disaggregation": tuple(
        Rule(
            rule=f"self.mode == 'auto' || !has(self.{field})",
            message="the mode uses no threshold; accepts it with mode auto only",
            field=f".{field}",
            expression="'mode is ' + self.mode + ', which uses no threshold; accepts it with mode auto only'",
        )
        for field in ("minUncachedTokens", "maxCachedShare")
    ),
    "Router": (
        Rule(
            rule="self.auth != 'apiKeys' || has(self.apiKeys)",
            message="missing; auth apiKeys (the default) needs it, auth none lets everyone in",
            field=".apiKeys",
        ),
        Rule(
            rule="self.auth != 'none' || !has(self.apiKeys)",
            message="auth is none, which uses no keys; accepts it with auth apiKeys only",
            field=".apiKeys",
        ),
    ),
    "Transfer": (
        Rule(
            rule="self.backend != 'nixl' && self.backend != 'mooncake'",
            message="not built yet; accepts auto or tcp",
            field=".backend",
            expression="self.backend + ' is not built yet; accepts auto or tcp'",
        ),
    ),
    "Toleration": (
        Rule(
            rule="self.operator != 'Exists' || !has(self.value)",
            message="operator Exists takes no value",
            field=".value",
        ),
        Rule(
            rule="self.operator != 'Equal' || has(self.key)",
            message="missing; operator Equal needs a key",
            field=".key",
        ),
    ),
    "PodSettings": (
        Rule(
            rule=(
                "!has(self.labels) || self.labels.all(key, !key.startsWith('app.kubernetes.io/')"
                " && !key.startsWith('serving.kvferry.dev/'))"
            ),
            message="labels of this domain are the operator's own",
            field=".labels",
        ),
    ),
    "Model": (
        Rule(
            rule="self.name == oldSelf.name",
            message="cannot be changed: clients ask for this name; serve another name by another InferenceService",
            field=".name",
            cluster_only=True,
        ),
        Rule(
            rule="!self.source.startsWith('.') && !self.source.startsWith('/') && !self.source.startsWith('~')",
            message=(
                "a path of one machine; on a cluster accepts demo:NAME, a hub id, pvc://CLAIM/PATH,"
                " image://REFERENCE or toy:"
            ),
            field=".source",
            cluster_only=True,
        ),
    ),
    "InferenceServiceSpec": (
        _differs("blockSize", "0", "({0} == 0 ? 'the engine\\'s default' : string({0}))", "other block sizes"),
        _differs("dtype", "'auto'", "{0}", "other types"),
        Rule(
            rule="self.router.disaggregation.mode != 'always' || self.?prefill.?replicas.orValue(0) > 0",
            message="always needs a prefill pool; spec.prefill.replicas is 0",
            field=".router.disaggregation.mode",
        ),
    ),
    "RoleSpec": (
        Rule(rule="self.service == oldSelf.service", message="cannot be changed", field=".service", cluster_only=True),
        Rule(rule="self.role == oldSelf.role", message="cannot be changed", field=".role", cluster_only=True),
        Rule(
            rule="self.role != 'router' || self.replicas >= 1",
            message="a service has at least 1 router",
            field=".replicas",
            cluster_only=True,
        ),
    ),
}

# Types whose rules hold for those that extend them.
BASES = {"EngineRole": ("PodSettings",), "Router": ("PodSettings",)}


def rules_of(type_name: str) -> tuple[Rule, ...]:
    """The rules that stand on a type, those of its bases first."""
    inherited = [rule for base in BASES.get(type_name, ()) for rule in RULES[base]]
    return (*inherited, *RULES.get(type_name, ()))
