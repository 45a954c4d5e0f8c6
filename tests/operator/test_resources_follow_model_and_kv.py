"""Requests and limits: as the manifest says, else from the model, its KV and the threads."""

from typing import Any

import pytest

from kvferry_operator.api.quantities import parse_bytes
from kvferry_operator.plan.manifests.objects import all_notes
from kvferry_operator.plan.resources import ENGINE_BASE
from tests.operator.cluster import DEMO, container_of, make_context, make_objects

MIB, GIB = 2**20, 2**30


def resources(role: str = "decode", **changes: Any) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = container_of(make_objects(**changes), role)["resources"]
    return found


@pytest.mark.parametrize(
    ("engine", "least", "most"),
    [
        ({"kvMemory": "1Gi", "dtype": "float32"}, 2.5 * GIB, 2.8 * GIB),
        ({"kvMemory": "1Gi", "dtype": "bfloat16"}, 2.2 * GIB, 2.4 * GIB),
        ({"kvMemory": "8Gi"}, 9.5 * GIB, 9.8 * GIB),
        ({"kvBlocks": 1000}, 2.2 * GIB, 2.4 * GIB),
        ({}, 2.5 * GIB, 2.8 * GIB),
    ],
)
def test_memory_is_what_weights_and_kv_need(engine: dict[str, Any], least: float, most: float) -> None:
    """For a model that is known: request and limit are equal and hold weights, KV and the process itself."""
    found = resources(spec__model__source=DEMO, spec__engine=engine)
    assert found["requests"]["memory"] == found["limits"]["memory"]
    assert least <= parse_bytes(found["requests"]["memory"]) <= most


def test_the_size_in_the_manifest_makes_a_request() -> None:
    """Files of 16-bit weights are twice as large in float32; what is not known for sure is no limit."""
    model = {"name": "m", "source": "org/m", "size": "10Gi"}
    full = resources(spec__model=model, spec__engine={"kvMemory": "2Gi"})
    half = resources(spec__model=model, spec__engine={"kvMemory": "2Gi", "dtype": "bfloat16"})
    assert "limits" not in full
    assert parse_bytes(full["requests"]["memory"]) >= ENGINE_BASE + 22 * GIB
    assert parse_bytes(half["requests"]["memory"]) <= ENGINE_BASE + 13.1 * GIB


def test_nothing_is_invented_for_a_model_of_unknown_size() -> None:
    """No memory is asked for, and the notes say what to give."""
    context = make_context(spec__model__source="org/m")
    assert resources(spec__model__source="org/m") == {"requests": {"cpu": "1"}}
    assert any("give spec.model.size or spec.decode.resources" in note for note in all_notes(context))


def test_what_the_manifest_gives_stays_as_it_is() -> None:
    """A request or limit of the manifest is neither raised nor joined by a derived one of its kind."""
    given = {"limits": {"memory": "3Gi", "nvidia.com/gpu": 1}}
    found = resources(spec__model__source=DEMO, spec__decode__resources=given)
    assert found == {"requests": {"cpu": "1"}, "limits": {"memory": "3Gi", "nvidia.com/gpu": "1"}}


@pytest.mark.parametrize(
    ("settings", "threads", "cpu"),
    [
        ({"resources": {"limits": {"cpu": "3500m"}}}, "3", None),
        ({"resources": {"requests": {"cpu": 2}}}, "2", "2"),
        ({"engine": {"threads": 4}}, "4", "4"),
        ({}, None, "1"),
    ],
)
def test_threads_and_cores_agree(settings: dict[str, Any], threads: str | None, cpu: str | None) -> None:
    """OMP threads come from the CPU limit; explicit threads make the request."""
    container = container_of(make_objects(spec__decode=settings), "decode")
    env = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert env.get("OMP_NUM_THREADS") == threads
    assert container["resources"].get("requests", {}).get("cpu") == cpu


def test_the_router_has_room_for_its_index() -> None:
    """Bounded, since its tables are."""
    found = resources("router")
    assert found["requests"]["memory"] == found["limits"]["memory"]
    assert parse_bytes(found["limits"]["memory"]) >= 512 * MIB
