"""What differs between an object as it should be and as an API server has it."""

import copy
from typing import Any

import pytest

from kvferry_operator.plan.diff import first_difference, stamped
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
