"""Values of a manifest: quantities, durations, model sources, defaults and overrides."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry_operator.api.quantities import (
    DURATION_PATTERN,
    QUANTITY_PATTERN,
    format_seconds,
    parse_bytes,
    parse_duration,
    parse_quantity,
)
from kvferry_operator.api.service import EngineSettings
from kvferry_operator.api.source import ModelSource, parse_source
from tests.operator.manifests import make_service


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), ("512Mi", 512 * 2**20), ("1.5Gi", 3 * 2**29), ("2k", 2000), ("1T", 10**12)],
)
def test_bytes_are_exact(text: str, value: int) -> None:
    """A quantity of bytes is the very integer it says."""
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "Mi", "1 Mi", "1mi", "-1", "1e3", "0", "1m", "0.5", "1Mi\n", "9" * 40, "٣"])
def test_what_is_no_number_of_bytes_is_refused(text: str) -> None:
    """Fractions of a byte, signs, blanks, foreign digits and endless texts are refused."""
    with pytest.raises(ValueError, match="not a"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "value"), [("15s", 15.0), ("1m30s", 90.0), ("250ms", 0.25), ("1.5h", 5400.0), ("1h1m1s", 3661.0)]
)
def test_durations_are_seconds(text: str, value: float) -> None:
    """Durations add up to seconds."""
    assert parse_duration(text) == value


@pytest.mark.parametrize("text", ["", "15", "s", "1 s", "-1s", "1s\n", "1d", "1s2", "1m" * 40])
def test_what_is_no_duration_is_refused(text: str) -> None:
    """A number without unit and everything else that is no duration are refused."""
    with pytest.raises(ValueError, match="not a duration"):
        parse_duration(text)


@settings(deadline=None, max_examples=50)
@given(st.text(alphabet="0123456789.msmhkMGTi", max_size=10))
def test_patterns_of_the_schema_and_parsers_agree(text: str) -> None:
    """What the published pattern lets through the parser reads, and the reverse."""
    for pattern, parse in ((QUANTITY_PATTERN, parse_quantity), (DURATION_PATTERN, parse_duration)):
        try:
            parse(text)
            parsed = True
        except ValueError:
            parsed = False
        assert parsed == (re.fullmatch(pattern, text, re.ASCII) is not None)


@pytest.mark.parametrize(
    ("seconds", "text"), [(600.0, "600"), (0.25, "0.25"), (15.0, "15"), (1.5, "1.5"), (100.0, "100")]
)
def test_seconds_are_written_short(seconds: float, text: str) -> None:
    """Flags get plain decimal numbers."""
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("demo:smollm2", ModelSource(kind="demo", name="smollm2")),
        ("org/name", ModelSource(kind="hub", name="org/name")),
        ("hf://org/na.me@refs/pr/1", ModelSource(kind="hub", name="org/na.me", revision="refs/pr/1")),
        ("./model", ModelSource(kind="path", name="./model")),
        ("/models/a b.gguf", ModelSource(kind="path", name="/models/a b.gguf")),
        ("~/m", ModelSource(kind="path", name="~/m")),
        ("toy", ModelSource(kind="toy", name="")),
        ("pvc://claim", ModelSource(kind="pvc", name="claim")),
        ("pvc://claim/a/b.gguf", ModelSource(kind="pvc", name="claim", inside="a/b.gguf")),
        ("image://registry:5000/a/b@sha256:0f", ModelSource(kind="image", name="registry:5000/a/b@sha256:0f")),
        ("toy:vocab=512,ctx=64", ModelSource(kind="toy", name="vocab=512,ctx=64")),
    ],
)
def test_sources_are_told_apart(text: str, source: ModelSource) -> None:
    """Each form of a source is read as what it is, and written back as it was."""
    assert parse_source(text) == source
    assert parse_source(str(source)) == source


@pytest.mark.parametrize(
    "text",
    [
        "",
        "name",
        "a/b/c",
        "demo:",
        "demo:../x",
        "s3://a/b",
        "org/../x",
        "a/b@",
        "./a\n",
        "hf://",
        "pvc://",
        "pvc://a-/b",
        "pvc://a/../b",
        "image://",
    ],
)
def test_other_sources_are_refused(text: str) -> None:
    """A source of no known form is refused with the forms that are known."""
    with pytest.raises(ValueError, match="accepts demo:NAME"):
        parse_source(text)


def test_absent_pool_means_no_prefill_pods() -> None:
    """Prefill is optional; decode then does the whole work."""
    assert make_service(spec__prefill=...).spec.prefill_replicas == 0
    assert make_service(spec__prefill__replicas=0).spec.prefill_replicas == 0
    assert make_service(spec__prefill={}).spec.prefill_replicas == 1


def test_a_pools_settings_win_over_the_services() -> None:
    """Overrides replace single fields; the two forms of KV memory replace each other."""
    service = make_service(
        spec__engine={"maxRunning": 8, "kvMemory": "1Gi", "dtype": "float32"},
        spec__decode__engine={"maxRunning": 16, "kvBlocks": 100},
    )
    assert service.spec.engine_of("decode") == EngineSettings.model_validate(
        {"maxRunning": 16, "kvBlocks": 100, "dtype": "float32"}
    )
    assert service.spec.engine_of("prefill") == service.spec.engine


def test_plain_integers_are_quantities_too() -> None:
    """Kubernetes takes integers where quantities are expected; so does the manifest."""
    service = make_service(
        spec__decode__resources={"limits": {"cpu": 2, "memory": "4Gi"}}, spec__engine={"kvMemory": 4096}
    )
    assert service.spec.decode.resources.limits == {"cpu": "2", "memory": "4Gi"}
    assert service.spec.engine.kv_memory == "4096"


def test_types_are_frozen() -> None:
    """A loaded manifest cannot be changed by those who read it."""
    service = make_service()
    with pytest.raises(ValueError, match="frozen"):
        service.spec.decode.replicas = 3


def test_a_field_without_a_value_is_not_there() -> None:
    """As an API server takes it: the default holds, an entry of a mapping goes, free-form mappings keep theirs."""
    free = {"nodeAffinity": {"a": None}}
    service = make_service(
        spec__router={"auth": "none", "port": None, "labels": {"a": None, "b": "c"}, "affinity": free},
        spec__prefill=None,
        spec__transfer=None,
    )
    assert service.spec.router.port == 8000
    assert service.spec.router.labels == {"b": "c"}
    assert service.spec.router.affinity is not None
    assert service.spec.router.affinity.node_affinity == {"a": None}
    assert service.spec.prefill is None
    assert service.spec.transfer.backend == "auto"


def test_a_whole_number_is_an_integer_however_it_is_written() -> None:
    """`2.0` is 2, where an integer or a quantity is asked for."""
    service = make_service(spec__decode__replicas=2.0, spec__engine={"kvMemory": 1073741824.0})
    assert service.spec.decode.replicas == 2
    assert service.spec.engine.kv_memory == "1073741824"
