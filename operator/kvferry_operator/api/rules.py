"""Rules between fields as the API server checks them (CEL), by the type that they stand on.

The types' own validators hold the same rules for `kvferry up`, with the same words and fields; one table of bad
manifests is tried against both. Rules marked ``cluster_only`` are about what no cluster can do. CEL is evaluated after
defaults are filled in.

An API server bounds what a rule may cost by the sizes that its schema allows. A number as text has no bound to it, so
that messages tell values of enumerations only; the loader tells the numbers as well.
"""

import msgspec


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One rule."""

    rule: str  # CEL; ``self`` is the object, ``oldSelf`` makes it a rule on updates
    message: str
    field: str = ""  # the field at fault, below the object
    expression: str = ""  # CEL that makes the message, where it tells a value; ``message`` stands in if it fails
    cluster_only: bool = False


def _equal(field: str, default: str) -> Rule:
    """Prefill and decode must have an equal engine setting: each pool's own, else the service's, else the default."""
    shared = f"has(self.engine.{field}) ? self.engine.{field} : {default}"
    prefill, decode = (
        f"(has(self.{role}.engine.{field}) ? self.{role}.engine.{field} : {shared})" for role in ("prefill", "decode")
    )
    return Rule(
        rule=f"!has(self.prefill) || {prefill} == {decode}",
        message="must be equal for prefill and decode to ferry KV",
        field=f".prefill.engine.{field}",
    )


def _batch(role: str) -> tuple[Rule, Rule]:
    """A step of a pool holds its running batch: where the pool gives one of the numbers and the service the other."""
    pool, there = f"self.{role}.engine", "" if role == "decode" else f"!has(self.{role}) || "
    return (
        Rule(
            rule=f"{there}!has({pool}.tokenBudget) || has({pool}.maxRunning) || !has(self.engine.maxRunning)"
            f" || {pool}.tokenBudget >= self.engine.maxRunning",
            message="accepts at least maxRunning of spec.engine",
            field=f".{role}.engine.tokenBudget",
        ),
        Rule(
            rule=f"{there}!has({pool}.maxRunning) || has({pool}.tokenBudget) || !has(self.engine.tokenBudget)"
            f" || {pool}.maxRunning <= self.engine.tokenBudget",
            message="accepts at most tokenBudget of spec.engine",
            field=f".{role}.engine.maxRunning",
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
            rule="!has(self.s3) || self.source.startsWith('s3://')",
            message="the source is no bucket; accepts it with s3://BUCKET/PREFIX only",
            field=".s3",
        ),
        Rule(
            rule="self.name == oldSelf.name",
            message="cannot be changed: clients ask for this name; serve another name by another InferenceService",
            field=".name",
            cluster_only=True,
        ),
        Rule(
            rule="!self.source.startsWith('.') && !self.source.startsWith('/') && !self.source.startsWith('~')",
            message=(
                "a path of one machine; on a cluster accepts demo:NAME, a hub id, http(s)://HOST/FOLDER/,"
                " s3://BUCKET/PREFIX, pvc://CLAIM/PATH, image://REFERENCE or toy:"
            ),
            field=".source",
            cluster_only=True,
        ),
    ),
    "InferenceServiceSpec": (
        _equal("blockSize", "0"),
        _equal("dtype", "'auto'"),
        *_batch("prefill"),
        *_batch("decode"),
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
