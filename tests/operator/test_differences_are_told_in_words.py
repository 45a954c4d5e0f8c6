"""What differs between an object as it should be and as an API server has it."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry_operator.plan.diff import first_difference, same, stamped
from kvferry_operator.plan.manifests.meta import Object
from tests.operator.cluster import DEMO, find, make_objects


def made() -> Object:
    return find(make_objects(spec__model__source=DEMO), "Deployment", "demo-decode")


def container(found: Object) -> Any:
    return found["spec"]["template"]["spec"]["containers"][0]


def test_defaults_and_spelling_of_the_api_server_are_no_difference() -> None:
    """Fields that it adds, empty values that it drops, quantities that it writes its own way."""
    found = stamped(copy.deepcopy(made()))
    found["metadata"]["resourceVersion"] = "7"
    found["spec"]["template"]["spec"]["restartPolicy"] = "Always"
    container(found)["terminationMessagePath"] = "/dev/termination-log"
    assert first_difference(made(), found) is None
    wanted = made()
    container(wanted)["resources"] = {"requests": {"cpu": "1.5", "memory": "2048Mi", "x/big": "1024Ti"}}
    container(wanted)["env"][-1]["value"] = ""
    stored = stamped(copy.deepcopy(wanted))
    container(stored)["resources"] = {"requests": {"cpu": "1500m", "memory": "2Gi", "x/big": "1Pi"}}
    del container(stored)["env"][-1]["value"]
    assert first_difference(wanted, stored) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda found: container(found).update(image="evil"),
            "spec.template.spec.containers[decode].image: registry/kvferry-runtime:1 is wanted, evil is there",
        ),
        (
            lambda found: container(found).update(command=["python", "-P"]),
            "spec.template.spec.containers[decode].command: 4 items are wanted, 2 are there",
        ),
        (
            lambda found: found["spec"].pop("strategy"),
            "spec.strategy: missing",
        ),
        (
            lambda found: container(found)["env"][1].update(value="secret"),
            "spec.template.spec.containers[decode].env[HOME].value: another value is wanted",
        ),
        (
            lambda found: found["metadata"]["annotations"].clear(),
            "not applied before",
        ),
    ],
)
def test_the_first_difference_is_named(change: Any, words: str) -> None:
    """With its place, what is wanted and what is there; values of the environment are not shown."""
    found = stamped(copy.deepcopy(made()))
    change(found)
    assert first_difference(made(), found) == words


LEAVES = st.none() | st.booleans() | st.integers(0, 2) | st.sampled_from(["", "a", "1Gi", "1024Mi", "x" * 70])
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=12,
)


@given(wanted=VALUES, found=VALUES)
def test_the_quick_look_and_the_words_agree(wanted: Any, found: Any) -> None:
    """Words are looked for only where something differs: neither may see what the other does not."""
    body: Object = {"metadata": {"name": "x"}, "spec": {"value": wanted, "kept": 1}}
    there = stamped(body) | {"spec": {"value": found, "kept": 1}}
    told = first_difference(body, there)
    assert (told is None) == same(wanted, found)
    assert first_difference(body, stamped(body)) is None
