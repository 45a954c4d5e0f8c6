"""The plan: pure, complete, and understood by the processes that it starts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry_operator.api.faults import SchemaView
from kvferry_operator.api.validate import manifest_schema
from kvferry_operator.plan import Observed, PlanError, ServicePlan, Slot, plan
from kvferry_operator.plan.revision import OTHER_FIELDS, REVISION_FIELDS
from kvferry_wire.limits import DEFAULT_LIMITS
from tests.operator.manifests import make_service

SLOTS = {
    Slot.HOST: "127.0.0.1",
    Slot.HTTP_PORT: "8000",
    Slot.CONTROL_PORT: "5600",
    Slot.DATA_PORT: "5601",
    Slot.STATE_PORT: "5557",
    Slot.KEYS_DIR: "/keys",
    Slot.MODEL: "toy",
    Slot.PODS_FILE: "/pods.json",
    Slot.API_KEYS_FILE: "/api-keys",
}


def make_plan(cores: int | None = 4, **changes: object) -> ServicePlan:
    return plan(make_service(**changes), Observed(cores=cores))


def flag(argv: list[str], name: str) -> str | None:
    return argv[argv.index(name) + 1] if name in argv else None


engine_settings = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["auto", "float32", "bfloat16"]),
        "maxModelLen": st.integers(8, 2**20),
        "blockSize": st.integers(1, 1024),
        "kvBlocks": st.integers(2, 10**6),
        "maxRunning": st.integers(1, 64),
        "tokenBudget": st.integers(64, 10**5),
        "prefixCaching": st.booleans(),
        "threads": st.integers(1, 64),
    },
)


@settings(deadline=None, max_examples=50)
@given(prefill=st.integers(0, 4), decode=st.integers(1, 4), cores=st.integers(1, 64), engine=engine_settings)
def test_a_plan_has_the_pods_asked_for_and_is_the_same_each_time(
    prefill: int, decode: int, cores: int, engine: dict[str, object]
) -> None:
    """Equal manifests give equal plans: engines first, the router last, names unique, threads within the cores."""
    changes = {"spec__prefill__replicas": prefill, "spec__decode__replicas": decode, "spec__engine": engine}
    first, second = make_plan(cores, **changes), make_plan(cores, **changes)
    assert first == second
    assert [len(first.of_role(role)) for role in ("prefill", "decode", "router")] == [prefill, decode, 1]
    assert first.pods[-1].role == "router"
    assert len({pod.name for pod in first.pods}) == len(first.pods)
    engines = [pod for pod in first.pods if pod.role != "router"]
    for pod in engines:
        assert pod.threads is not None
        assert dict(pod.env)["OMP_NUM_THREADS"] == str(pod.threads)
    if "threads" not in engine:
        used = sum(pod.threads or 0 for pod in engines)
        assert used <= max(cores, len(engines))


@settings(deadline=None, max_examples=50)
@given(engine=engine_settings)
def test_the_engines_parser_takes_what_the_plan_writes(engine: dict[str, object]) -> None:
    """Every engine command line is free of faults for the real parser, and means what the manifest says."""
    from kvferry_runtime.server.config import parse

    for pod in make_plan(spec__engine=engine).pods[:-1]:
        config = parse([*pod.rendered(SLOTS), "--parent-fd", "3"])
        assert config.role == pod.role
        assert config.served_name == "tiny"
        assert config.threads == pod.threads
        assert config.limits.lease_s == DEFAULT_LIMITS.lease_s
        assert config.prefix_caching is engine.get("prefixCaching", True)
        assert config.dtype == engine.get("dtype", "auto")
        for name, value in (
            ("blockSize", config.block_size),
            ("kvBlocks", config.kv_blocks),
            ("maxModelLen", config.max_model_len),
            ("maxRunning", config.max_running),
            ("tokenBudget", config.token_budget),
        ):
            if name in engine:
                assert value == engine[name]


@pytest.mark.parametrize(
    "router",
    [
        {"auth": "none"},
        {"auth": "apiKeys", "apiKeys": {"keysFile": "keys"}, "requestDeadline": "90s"},
        {"auth": "none", "disaggregation": {"minUncachedTokens": 7, "maxCachedShare": 0.25}},
        {"auth": "none", "disaggregation": {"mode": "always"}},
        {"auth": "none", "disaggregation": {"mode": "never"}},
    ],
)
def test_the_routers_parser_takes_what_the_plan_writes(router: dict[str, object]) -> None:
    """Every router command line is free of faults for the real parser."""
    from kvferry_router.config import parse_config

    argv = make_plan(spec__router=router).pods[-1].rendered(SLOTS)
    config = parse_config([*argv, "--parent-fd", "3"])
    assert config.model_name == "tiny"
    assert config.auth == {"none": "none", "apiKeys": "api-keys"}[str(router["auth"])]
    chosen = router.get("disaggregation", {})
    assert isinstance(chosen, dict)
    assert config.disaggregate == chosen.get("mode", "auto")
    if "minUncachedTokens" in chosen:
        assert config.disaggregate_min_tokens == chosen["minUncachedTokens"]
        assert config.disaggregate_max_cached_share == chosen["maxCachedShare"]
    assert config.request_deadline_s == (90.0 if "requestDeadline" in router else DEFAULT_LIMITS.request_deadline_s)


def test_numbers_of_the_manifest_reach_the_flags() -> None:
    """Durations and quantities become seconds and bytes."""
    made = make_plan(
        spec__engine={"kvMemory": "64Mi"},
        spec__transfer={"lease": "1m", "failurePolicy": "retry", "checksums": False},
        spec__router={"auth": "none", "requestDeadline": "2m"},
    )
    engine, router = made.pods[0].rendered(SLOTS), made.pods[-1].rendered(SLOTS)
    assert flag(engine, "--kv-memory") == str(64 * 2**20)
    assert flag(engine, "--lease") == "60"
    assert "--no-checksums" in engine
    assert "--no-checksums" not in make_plan().pods[0].rendered(SLOTS)
    assert flag(router, "--request-deadline") == "120"
    assert flag(router, "--transfer-failure") == "retry"


def test_defaults_come_from_the_limits() -> None:
    """Lease and deadline that the manifest leaves out are those of kvferry_wire.limits."""
    made = make_plan()
    assert flag(made.pods[0].rendered(SLOTS), "--lease") == f"{DEFAULT_LIMITS.lease_s:g}"
    assert flag(made.pods[-1].rendered(SLOTS), "--request-deadline") == f"{DEFAULT_LIMITS.request_deadline_s:g}"


def test_the_users_environment_wins_and_the_router_gets_no_kv_key() -> None:
    """`env` of a role overrides what the plan sets; the kv key is the engines' alone."""
    made = make_plan(spec__decode__env=[{"name": "OMP_NUM_THREADS", "value": "3"}, {"name": "A", "value": "b"}])
    decode = made.of_role("decode")[0]
    assert decode.env == (("A", "b"), ("OMP_NUM_THREADS", "3"))
    assert "kv" in decode.keys
    assert "kv" not in made.pods[-1].keys


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"spec__decode__replicas": 0}, "spec.decode.replicas"),
        ({"spec__router": {"auth": "none", "replicas": 2}}, "spec.router.replicas"),
        ({"spec__router": {"apiKeys": {"secretRef": {"name": "keys"}}}}, "spec.router.apiKeys.keysFile"),
        ({"spec__model__source": "pvc://claim/model"}, "spec.model.source"),
        ({"spec__model__source": "image://registry/model:1"}, "spec.model.source"),
    ],
)
def test_what_one_machine_cannot_run_is_refused_there_only(changes: dict[str, object], field: str) -> None:
    """A manifest for a cluster is no fault on a cluster."""
    with pytest.raises(PlanError, match=field.replace(".", r"\.")):
        make_plan(4, **changes)
    assert make_plan(None, **changes).pods


def test_a_pods_cpu_limit_sets_its_threads_where_it_has_its_own_cores() -> None:
    """On a cluster threads follow the CPU limit, else the request, else the engine chooses."""
    limited = make_plan(None, spec__decode__resources={"limits": {"cpu": "3500m"}, "requests": {"cpu": 1}})
    assert limited.of_role("decode")[0].threads == 3
    assert limited.of_role("prefill")[0].threads is None
    assert any("3 threads for 3500m CPU" in note for note in limited.notes)


def test_the_plan_says_why() -> None:
    """Threads and a missing prefill pool are explained in the notes."""
    made = make_plan(2, spec__prefill=..., spec__decode__replicas=3)
    assert "decode: 1 thread: 2 cores shared by 3 engines (more engines than cores: they take turns)" in made.notes
    assert "no prefill pool: decode pods compute prompts themselves" in made.notes


def _leaves(view: SchemaView) -> set[str]:
    found: set[str] = set()

    def walk(path: tuple[str, ...]) -> None:
        for name in view.at(("spec", *path)).get("properties", {}):
            here = (*path, name)
            covered = ".".join(here)
            if covered in REVISION_FIELDS or covered in OTHER_FIELDS:
                found.add(covered)
            elif view.at(("spec", *here)).get("properties"):
                walk(here)
            else:
                found.add(f"? {covered}")

    walk(())
    return found


def test_every_field_is_in_one_of_the_two_tables() -> None:
    """A new field of the spec must be placed: it changes the revision, or it does not."""
    assert not set(REVISION_FIELDS) & set(OTHER_FIELDS)
    assert _leaves(manifest_schema()) == set(REVISION_FIELDS) | set(OTHER_FIELDS)


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"spec__decode__replicas": 3}, True),
        ({"spec__router": {"auth": "none", "port": 9000}}, True),
        ({"spec__decode__labels": {"team": "a"}}, True),
        ({"spec__prefill": ...}, True),
        ({"spec__engine": {"dtype": "float32"}}, False),
        ({"spec__model__source": "toy:ctx=64"}, False),
        ({"spec__decode__env": [{"name": "A", "value": "b"}]}, False),
        ({"spec__transfer": {"lease": "20s"}}, False),
    ],
)
def test_the_revision_follows_what_the_engines_compute(changes: dict[str, object], same: bool) -> None:
    """Scale, router and placement keep the revision; what changes an engine's work changes it."""
    assert (make_plan(**changes).revision == make_plan().revision) is same


@settings(deadline=None, max_examples=50)
@given(first=engine_settings, second=engine_settings)
def test_engines_with_other_arguments_have_another_revision(
    first: dict[str, object], second: dict[str, object]
) -> None:
    """Two manifests whose engine pods are started differently never share a revision."""
    one, two = make_plan(spec__engine=first), make_plan(spec__engine=second)
    if one.pods[:-1] != two.pods[:-1]:
        assert one.revision != two.revision
