"""Decisions against a cluster in memory: they converge, keep what serves, repair what others change, and stop."""

import copy
from typing import Any

import pytest

from kvferry_operator.api.crds import crds
from kvferry_operator.plan.decide import NOTHING
from kvferry_operator.plan.effects import Apply, ApplyFault, Create, Delete, Patch
from kvferry_operator.plan.manifests.meta import REVISION, SEEDED, Object
from tests.operator.cluster import DEMO, make_found, role_of
from tests.operator.fake_cluster import FakeCluster
from tests.operator.structural import refusals

SCHEMAS = {
    crd["spec"]["names"]["kind"]: crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"] for crd in crds().values()
}
TWO = {"spec__prefill__replicas": 2, "spec__decode__replicas": 2}


def make_cluster(**changes: Any) -> FakeCluster:
    cluster = FakeCluster(make_found(**changes))
    cluster.settle()
    cluster.log.clear()
    cluster.deleted_pods.clear()
    return cluster


def edit(cluster: FakeCluster, **changes: Any) -> None:
    """Replace the spec, as `kubectl apply` of another manifest does."""
    found = make_found(**changes)
    found["metadata"]["generation"] = cluster.found["metadata"]["generation"] + 1
    found["status"] = cluster.found.get("status", {})
    cluster.found = found


def conditions(cluster: FakeCluster) -> dict[str, tuple[str, str]]:
    return {one["type"]: (one["status"], one["reason"]) for one in cluster.found["status"]["conditions"]}


def deployments(cluster: FakeCluster, role: str) -> list[Object]:
    return [child for (kind, _), child in cluster.objects.items() if kind == "Deployment" and role_of(child)[0] == role]


def ready_pods(cluster: FakeCluster, role: str) -> int:
    return sum(cluster.ready(pod) and role_of(pod)[0] == role for pod in cluster.pods.values())


def test_a_manifest_becomes_a_ready_service() -> None:
    """All objects are made once, the status says Ready with its endpoint, and then there is silence."""
    cluster = make_cluster(**TWO)
    assert conditions(cluster) == {
        "Ready": ("True", "Answering"),
        "Progressing": ("True", "Complete"),
        "PrefillReady": ("True", "AllReady"),
        "DecodeReady": ("True", "AllReady"),
        "RouterReady": ("True", "AllReady"),
        "KVTransferEffective": ("True", "SameRevision"),
    }
    status = cluster.found["status"]
    assert status["url"] == "http://demo-router.ns.svc:8000/v1"
    assert status["path"] == "disaggregated"
    assert [(one["name"], one["ready"]) for one in status["roles"]] == [
        ("prefill", "2/2"), ("decode", "2/2"), ("router", "1/1"),
    ]  # fmt: skip
    assert not list(refusals(status, SCHEMAS["InferenceService"]["properties"]["status"]))
    for (kind, _), child in cluster.objects.items():
        if kind == "InferenceServiceRole":
            assert not list(refusals(child, SCHEMAS[kind]))
    decision = cluster.decide()
    assert decision.effects == ()
    assert decision.status == status
    assert decision.role_statuses == {}
    assert decision.events == ()


@pytest.mark.parametrize("kind", ["create", "scale", "update", "delete a child", "shrink"])
def test_a_crash_after_any_effect_changes_nothing_in_the_end(kind: str) -> None:
    """Stopped after each of its effects and begun anew: the same objects, and no pod replaced without need."""
    changes: dict[str, Any] = dict(TWO)

    def disturbed() -> FakeCluster:
        cluster = FakeCluster(make_found(**TWO))
        if kind == "create":
            return cluster
        cluster.settle()
        if kind == "scale":
            cluster.objects["InferenceServiceRole", "demo-decode"]["spec"]["replicas"] = 4
        elif kind == "update":
            edit(cluster, **changes, spec__engine={"dtype": "float32"})
        elif kind == "shrink":
            edit(cluster, spec__prefill=..., spec__decode__replicas=1)
        else:
            del cluster.objects["Service", "demo-decode"]
            del cluster.objects["NetworkPolicy", "demo-deny"]
        cluster.deleted_pods.clear()
        return cluster

    straight = disturbed()
    straight.settle()
    effects = len(disturbed().decide().effects)
    assert effects > 0
    for most in range(effects + 1):
        cluster = disturbed()
        cluster.reconcile(most)
        cluster.run()
        cluster.settle()
        mine, theirs = cluster.snapshot(), straight.snapshot()
        assert mine[0] == theirs[0]
        assert mine[1] == theirs[1]
        assert len(mine[2]) == len(theirs[2])
        assert len(cluster.deleted_pods) == len(straight.deleted_pods)


def test_scaling_is_the_role_objects() -> None:
    """`kubectl scale` holds until the manifest's own number changes, and touches replicas alone."""
    cluster = make_cluster()
    role = cluster.objects["InferenceServiceRole", "demo-decode"]
    role["spec"]["replicas"] = 3
    cluster.settle()
    assert ready_pods(cluster, "decode") == 3
    assert cluster.deleted_pods == []
    assert [type(effect) for effect in cluster.log] == [Apply]
    assert role["status"]["replicas"] == role["status"]["readyReplicas"] == 3
    assert role["status"]["selector"].count("=") == 3
    edit(cluster, spec__decode__labels={"team": "x"})
    cluster.settle()
    assert ready_pods(cluster, "decode") == 3
    edit(cluster, spec__decode={"replicas": 2, "labels": {"team": "x"}})
    cluster.settle()
    assert ready_pods(cluster, "decode") == role["spec"]["replicas"] == 2
    assert role["metadata"]["annotations"][SEEDED] == "2"


def test_a_lost_seed_keeps_the_number_that_is_there() -> None:
    """Whoever removes the annotation does not change how many pods run."""
    cluster = make_cluster()
    role = cluster.objects["InferenceServiceRole", "demo-decode"]
    role["spec"]["replicas"] = 3
    del role["metadata"]["annotations"][SEEDED]
    cluster.settle()
    assert (role["spec"]["replicas"], role["metadata"]["annotations"][SEEDED]) == (3, "1")


def test_a_new_revision_comes_up_beside_the_old() -> None:
    """At every moment as many pods answer as are wanted; the old go when both pools have new ones, and then wholly."""
    cluster = make_cluster(**TWO)
    old = {role_of(pod)[1] for pod in cluster.pods.values()} - {None}
    edit(cluster, **TWO, spec__engine={"dtype": "float32"})
    seen_both = []

    def watch() -> None:
        for role in ("prefill", "decode"):
            assert ready_pods(cluster, role) >= 2
            assert sum(role_of(pod)[0] == role for pod in cluster.pods.values()) <= 3
        new = {role_of(pod)[0] for pod in cluster.pods.values() if role_of(pod)[1] not in (*old, None)}
        seen_both.append(len(new))
        if cluster.deleted_pods:
            assert new == {"prefill", "decode"}

    cluster.settle(watch=watch)
    assert not old & {role_of(pod)[1] for pod in cluster.pods.values()}
    for role in ("prefill", "decode"):
        (left,) = deployments(cluster, role)
        assert role_of(left)[1] not in old
    kept = [name for kind, name in cluster.objects if kind == "NetworkPolicy"]
    assert not [name for name in kept if any(revision in name for revision in old if revision)]
    assert conditions(cluster)["Ready"] == ("True", "Answering")


def test_a_broken_revision_leaves_the_serving_one_alone() -> None:
    """New pods that never become ready cost no old one; Ready says why; a further edit recovers at once."""
    cluster = make_cluster(**TWO)
    (good,) = {role_of(pod)[1] for pod in cluster.pods.values()} - {None}
    cluster.ready = lambda pod: role_of(pod)[1] in (good, None)
    edit(cluster, **TWO, spec__engine={"dtype": "bfloat16"})
    for _ in range(10):
        cluster.reconcile()
        cluster.run()
    cluster.reconcile()
    assert cluster.deleted_pods == []
    assert (ready_pods(cluster, "prefill"), ready_pods(cluster, "decode")) == (2, 2)
    assert conditions(cluster)["Ready"] == ("False", "Loading")
    ready = cluster.found["status"]["conditions"][0]
    assert "still answer" in ready["message"]
    cluster.ready = lambda pod: True
    broken = [role_of(child)[1] for child in deployments(cluster, "decode") if role_of(child)[1] != good]
    edit(cluster, **TWO)
    cluster.settle()
    assert conditions(cluster)["Ready"] == ("True", "Answering")
    assert {role_of(pod)[1] for pod in cluster.pods.values()} - {None} == {good}
    assert broken and not [child for child in deployments(cluster, "decode") if role_of(child)[1] in broken]


def test_less_is_asked_for_before_more() -> None:
    """Where one pool shrinks and another grows, the shrinking is written first: never more pods than were bounded."""
    cluster = make_cluster(spec__prefill__replicas=3, spec__decode__replicas=1)
    edit(cluster, spec__prefill__replicas=1, spec__decode__replicas=3)
    cluster.reconcile()
    written = [effect for effect in cluster.log if isinstance(effect, Apply) and effect.object["kind"] == "Deployment"]
    assert [role_of(effect.object)[0] for effect in written] == ["prefill", "decode"]


def test_children_that_are_deleted_or_changed_come_back() -> None:
    """Each child of each kind; what others add beside our fields stays."""
    cluster = make_cluster(spec__model__source=DEMO)
    for key in [key for key in cluster.objects if key[0] != "Secret"]:
        del cluster.objects[key]
        decision = cluster.decide()
        made = [effect.object for effect in decision.effects if isinstance(effect, Apply | Create)]
        assert [(one["kind"], one["metadata"]["name"]) for one in made] == [key]
        cluster.settle()
    service = cluster.objects["Service", "demo-decode"]
    service["spec"]["selector"] = {"app": "evil"}
    service["metadata"]["labels"]["other"] = "stays"
    service["spec"]["ipFamilies"] = ["IPv4"]
    (effect,) = cluster.decide().effects
    assert isinstance(effect, Apply)
    assert effect.why.startswith("spec.selector.app.kubernetes.io/name: kvferry is wanted, nothing is there")
    cluster.settle()
    assert service["metadata"]["labels"]["other"] == "stays"


def test_a_field_that_is_no_longer_asked_for_is_taken_away() -> None:
    """Though the object has all that is asked for."""
    cluster = make_cluster(spec__router={"auth": "none", "annotations": {"a": "b"}})
    edit(cluster)
    (effect,) = cluster.decide().effects
    assert isinstance(effect, Apply)
    assert effect.why == "a field that was asked for before is not any more"
    cluster.settle()
    (router,) = deployments(cluster, "router")
    assert "annotations" not in router["spec"]["template"]["metadata"]


def test_what_is_not_wanted_any_more_is_pruned_and_nothing_else() -> None:
    """Objects of an older version that belong to the service go; those of others, and unmarked ones, stay."""
    cluster = make_cluster()
    ours = copy.deepcopy(cluster.objects["ConfigMap", "demo-plan"])
    for name in ("demo-left", "demo-foreign", "demo-unmarked"):
        one = copy.deepcopy(ours)
        one["metadata"] |= {"name": name, "uid": name}
        cluster.objects["ConfigMap", name] = one
    cluster.objects["ConfigMap", "demo-foreign"]["metadata"]["ownerReferences"][0]["uid"] = "other"
    del cluster.objects["ConfigMap", "demo-unmarked"]["metadata"]["labels"]["app.kubernetes.io/managed-by"]
    cluster.settle()
    left = {name for kind, name in cluster.objects if kind == "ConfigMap"}
    assert left == {"demo-plan", "demo-foreign", "demo-unmarked"}
    (effect,) = cluster.log
    assert isinstance(effect, Delete)
    assert (effect.uid, effect.why) == ("demo-left", "not wanted any more")


def test_a_pool_that_is_taken_out_of_the_manifest_goes_with_all_it_had() -> None:
    """Deployment, Service, budget, policies and role object of prefill."""
    cluster = make_cluster()
    edit(cluster, spec__prefill=...)
    cluster.settle()
    assert not [key for key in cluster.objects if "prefill" in key[1] and key[0] != "NetworkPolicy"]
    assert cluster.found["status"]["path"] == "aggregated"
    assert conditions(cluster)["KVTransferEffective"] == ("False", "NotUsed")
    assert conditions(cluster)["Ready"] == ("True", "Answering")


def test_a_name_that_is_taken_is_told_and_not_written() -> None:
    """An object of the same name that belongs to another is never overwritten."""
    cluster = FakeCluster(make_found())
    foreign = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "demo-router", "uid": "x"}, "spec": {}}
    cluster.objects["Service", "demo-router"] = copy.deepcopy(foreign)
    decision = cluster.reconcile()
    assert decision.effects == ()
    assert cluster.objects["Service", "demo-router"] == foreign
    assert conditions(cluster)["Ready"] == ("False", "NameTaken")
    assert "Service demo-router exists already" in cluster.found["status"]["conditions"][0]["message"]


def test_a_spec_that_cannot_run_is_told_and_what_runs_stays() -> None:
    """An object older than a rule of its CRD: the fields at fault in the status, no effect, and recovery by an edit."""
    cluster = make_cluster()
    edit(cluster, spec__model__source="./model", spec__decode__replicas=0)
    decision = cluster.reconcile()
    assert decision.effects == ()
    ready = cluster.found["status"]["conditions"][0]
    assert (ready["status"], ready["reason"]) == ("False", "InvalidSpec")
    assert "spec.model.source" in ready["message"]
    assert cluster.found["status"]["revision"]
    assert [event.type for event in decision.events] == ["Warning"]
    edit(cluster)
    cluster.settle()
    assert conditions(cluster)["Ready"] == ("True", "Answering")
    assert cluster.deleted_pods == []


def test_every_fault_of_a_stored_object_is_named() -> None:
    """As `kvferry up` would name them."""
    found = make_found()
    found["spec"]["decode"]["replicas"] = "two"
    found["spec"]["engine"] = {"nosuch": 1}
    cluster = FakeCluster(found)
    cluster.reconcile()
    message = cluster.found["status"]["conditions"][0]["message"]
    assert 'spec.decode.replicas: got "two" (string); accepts an integer from 0 to 64' in message
    assert "spec.engine.nosuch: unknown field" in message


def test_a_service_that_is_being_deleted_is_left_to_the_garbage_collector() -> None:
    """Nothing is written, nothing is waited for."""
    cluster = make_cluster()
    cluster.found["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert cluster.decide() == NOTHING


def test_keys_are_made_once_and_never_looked_at() -> None:
    """The Secret is created where the caller does not know it to be there; nothing is decided from it."""
    cluster = FakeCluster(make_found())
    cluster.reconcile()
    secrets = [effect for effect in cluster.log if isinstance(effect, Create) and effect.object["kind"] == "Secret"]
    assert len(secrets) == 1
    assert not cluster.seen().of_kind("Secret")
    cluster.settle()
    assert sum(isinstance(effect, Create) and effect.object["kind"] == "Secret" for effect in cluster.log) == 1


def test_a_change_of_placement_keeps_the_revision() -> None:
    """The same Deployment gets another template: its own rolling update replaces the pods in order."""
    cluster = make_cluster()
    before = cluster.found["status"]["revision"]
    edit(cluster, spec__decode={"nodeSelector": {"a": "b"}})
    cluster.settle(watch=lambda: _at_least_one(cluster))
    assert cluster.found["status"]["revision"] == before
    assert all(pod["spec"].get("nodeSelector") for pod in cluster.pods.values() if role_of(pod)[0] == "decode")


def _at_least_one(cluster: FakeCluster) -> None:
    assert ready_pods(cluster, "decode") >= 1


def test_a_long_name_works_throughout() -> None:
    """63 characters: made, scaled, rolled out."""
    cluster = make_cluster(metadata__name="a" * 63)
    cluster.objects["InferenceServiceRole", "a" * 63 + "-decode"]["spec"]["replicas"] = 2
    cluster.settle()
    edit(cluster, metadata__name="a" * 63, spec__engine={"dtype": "float32"})
    cluster.settle()
    assert ready_pods(cluster, "decode") == 2
    assert conditions(cluster)["Ready"] == ("True", "Answering")
    assert all(child["metadata"]["labels"].get(REVISION, "x") for child in cluster.objects.values())


def test_refusals_are_told_while_the_rest_goes_on() -> None:
    """One object that may not be written keeps no other from being written."""
    cluster = FakeCluster(make_found())

    def refuse(effect: Any) -> ApplyFault | None:
        if isinstance(effect, Apply) and effect.object["kind"] == "Deployment":
            name = effect.object["metadata"]["name"]
            return ApplyFault(kind="Deployment", name=name, code=403, message='User "x" cannot patch deployments')
        return None

    cluster.refuse = refuse
    cluster.reconcile()
    cluster.reconcile()
    assert ("Service", "demo-router") in cluster.objects
    assert conditions(cluster)["Ready"] == ("False", "RBACRefused")
    assert conditions(cluster)["Progressing"] == ("False", "RBACRefused")
    assert "watchNamespaces" in cluster.found["status"]["conditions"][0]["message"]
    cluster.refuse = lambda effect: None
    cluster.settle()
    assert conditions(cluster)["Ready"] == ("True", "Answering")


def test_old_pools_are_only_ever_made_smaller() -> None:
    """Their template is unknown by then: a patch of replicas, never an apply."""
    cluster = make_cluster(**TWO)
    edit(cluster, **TWO, spec__engine={"dtype": "float32"})
    cluster.settle()
    patches = [effect for effect in cluster.log if isinstance(effect, Patch) and effect.kind == "Deployment"]
    assert patches
    assert all(effect.body.keys() == {"spec"} and effect.body["spec"].keys() == {"replicas"} for effect in patches)
