"""Both sides of a comparison are manifests that `kvferry up` would take."""

from pathlib import Path

import pytest

from kvferry_cli.bench.manifests import aggregated, disaggregated, faults_of, notes_of
from kvferry_operator.api import InferenceService, load_manifest
from kvferry_operator.plan import Observed, plan

EXAMPLE = (Path(__file__).parents[3] / "examples" / "smollm2.yaml").read_text()


def load(text: str = EXAMPLE) -> InferenceService:
    return load_manifest(text, "m.yaml")


def test_aggregated_has_as_many_engines_with_the_same_flags_and_splits_nothing() -> None:
    """Threads, KV memory and token budget are those of the decode pods; the router never uses a prefill pod."""
    split = plan(disaggregated(load(), "/k"), Observed(cores=2))
    whole = plan(aggregated(load(), "/k"), Observed(cores=2))
    assert [pod.name for pod in split.pods] == ["prefill-0", "decode-0", "router"]
    assert [pod.name for pod in whole.pods] == ["decode-0", "decode-1", "router"]
    assert {pod.argv for pod in whole.of_role("decode")} == {pod.argv for pod in split.of_role("decode")}
    router = whole.pods[-1].argv
    assert router[router.index("--disaggregate") + 1] == "never"
    assert "--disaggregate-min-tokens" not in router


def test_the_disaggregated_side_keeps_the_manifests_own_policy() -> None:
    """Nothing but the clients' key is another."""
    mine, theirs = load(), disaggregated(load(), "/k")
    assert theirs.spec.router.disaggregation == mine.spec.router.disaggregation
    assert (theirs.spec.prefill, theirs.spec.decode, theirs.spec.engine) == (
        mine.spec.prefill,
        mine.spec.decode,
        mine.spec.engine,
    )


@pytest.mark.parametrize("make", [disaggregated, aggregated])
def test_only_the_load_generator_may_ask(make: type) -> None:
    """Also where the manifest lets everyone in."""
    made = plan(make(load(), "/folder/client.keys"), Observed(cores=2))
    assert (made.auth, made.api_keys_file) == ("apiKeys", "/folder/client.keys")


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("  prefill:\n    replicas: 1", "  prefill:\n    replicas: 0", "spec.prefill.replicas: got 0"),
        ("mode: auto  ", "mode: never", "spec.router.disaggregation.mode: got never; accepts auto or always"),
    ],
)
def test_a_manifest_with_nothing_to_compare_is_refused(old: str, new: str, fault: str) -> None:
    """By its field."""
    text = EXAMPLE.replace(old, new)
    if "never" in new:
        text = text.replace("      minUncachedTokens: 16", "      #")
    assert text != EXAMPLE
    assert [found for found in faults_of(load(text)) if found.startswith(fault)]
    assert not faults_of(load())


def test_settings_that_only_prefill_has_are_told() -> None:
    """The aggregated pods have decode's."""
    text = EXAMPLE.replace(
        "  prefill:\n    replicas: 1", "  prefill:\n    replicas: 1\n    engine: {tokenBudget: 512}\n"
    )
    assert notes_of(load(text)) == [
        "spec.prefill.engine differs from spec.decode.engine, which all aggregated pods have"
    ]
    assert notes_of(load()) == []
