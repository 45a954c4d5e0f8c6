"""Discovery: the pods file, what pods say of themselves, and text bundles."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry_router.discovery.endpoints import Endpoint
from kvferry_router.discovery.pod_table import PodRecord, PodTable, Probe
from kvferry_router.discovery.static import PodsFile, PodsFileError, parse_pods
from kvferry_runtime.model.text_toy import toy_text
from kvferry_runtime.model.toy_spec import ToySpec
from kvferry_wire.limits import Limits

from .harness import Router, running, until
from .scripted_pod import ScriptedPod


def make_endpoint(name: str = "d1", **changes: Any) -> dict[str, Any]:
    return {"name": name, "role": "decode", "host": "127.0.0.1", "http": 1000, "state": 1001} | changes


def parse(*pods: dict[str, Any]) -> tuple[Endpoint, ...]:
    return parse_pods(json.dumps({"pods": pods}).encode(), where="f", max_pods=3)


@pytest.mark.parametrize(
    ("pods", "told"),
    [
        ((make_endpoint(http=0),), "http is 0"),
        ((make_endpoint(state=70000),), "state is 70000"),
        ((make_endpoint(http="80"),), "pods[0].http"),
        ((make_endpoint(role="router"),), "pods[0].role"),
        ((make_endpoint(), make_endpoint()), "used twice"),
        ((make_endpoint(name=""),), "empty"),
        (tuple(make_endpoint(str(i)) for i in range(4)), "at most 3"),
    ],
)
def test_wrong_pods_file_names_the_field(pods: tuple[dict[str, Any], ...], told: str) -> None:
    """The fault, the pod and what is accepted."""
    with pytest.raises(PodsFileError) as caught:
        parse(*pods)
    assert told in str(caught.value)


def test_pods_file_is_read_on_change_only(tmp_path: Path) -> None:
    """Unchanged: nothing. Wrong or missing: told once. Right again: read."""
    path = tmp_path / "pods.json"
    file = PodsFile(path, 10)
    with pytest.raises(PodsFileError):
        file.changed()
    assert file.changed() is None
    path.write_text(json.dumps({"pods": [make_endpoint()]}))
    assert [pod.name for pod in file.changed() or ()] == ["d1"]
    assert file.changed() is None
    path.write_text("{")
    with pytest.raises(PodsFileError):
        file.changed()
    assert file.changed() is None
    path.write_text(json.dumps({"pods": []}))
    assert file.changed() == ()


def test_table_keeps_a_pod_that_stays_and_renews_one_that_moved() -> None:
    """A changed address is another pod: nothing of the old one's record is used."""
    table = PodTable(Limits())
    new, gone = table.replace(parse(make_endpoint("a"), make_endpoint("b")))
    assert ([record.name for record in new], gone) == (["a", "b"], [])
    kept = table.get("a")
    new, gone = table.replace(parse(make_endpoint("a"), make_endpoint("b", http=2000)))
    assert ([record.name for record in new], [record.name for record in gone]) == (["b"], ["b"])
    assert table.get("a") is kept


def test_one_late_answer_is_forgiven_and_a_refused_connection_is_not() -> None:
    """Two late probes in a row, one refusal, or one leg that broke: out, until it describes itself again."""
    record = PodRecord(parse(make_endpoint())[0], Limits())
    record.probed(Probe("ready"))
    assert record.why_unusable("m") == "it has not said what it is yet"
    record.probed(Probe("late", "no answer"))
    assert record.answers
    record.probed(Probe("ready"))
    record.probed(Probe("late", "no answer"))
    record.probed(Probe("late", "no answer"))
    assert record.why_unusable("m") == "no answer"
    for put_out in (
        lambda: record.probed(Probe("refused", "not reachable")),
        lambda: record.probed(Probe("not_ready", "loading")),
        lambda: record.suspected("a leg broke"),
    ):
        record.probed(Probe("ready"))
        assert record.answers
        put_out()
        assert not record.answers
        assert record.info_due


async def wait_reason(router: Router, told: str) -> None:
    async def same() -> bool:
        async with router.session.get(router.url + "/readyz") as response:
            return response.status == 503 and told in (await response.json())["reason"]

    await until(same, 5.0)


async def test_pod_of_another_model_is_not_used(tmp_path: Path) -> None:
    """Its name is not the one that clients are promised."""
    d = ScriptedPod("d1", "decode")
    d.model = "other"
    async with running(tmp_path, d, wait=False) as router:
        await wait_reason(router, "d1: it serves another model")


async def test_bundle_that_is_not_what_its_digest_says_is_refused(tmp_path: Path) -> None:
    """A pod that sends another tokenizer than it names is of no use, and is told of once."""
    wrong = msgspec.structs.replace(toy_text(ToySpec()), digest="0" * 64)
    d = ScriptedPod("d1", "decode", bundle=wrong)
    async with running(tmp_path, d, wait=False) as router:
        await wait_reason(router, "text bundle")
        calls = d.text_calls
        await router.wait_pods(1)
        assert d.text_calls == calls == 1


async def test_one_bundle_is_fetched_once_for_all_pods(tmp_path: Path) -> None:
    """Cached by digest, however many pods have it."""
    pods = [ScriptedPod(f"d{number}", "decode") for number in range(4)]
    async with running(tmp_path, *pods) as router:
        async with router.complete() as response:
            assert response.status == 200
        assert sum(pod.text_calls for pod in pods) == 1


async def test_pods_of_two_tokenizers_do_not_mix(tmp_path: Path) -> None:
    """The prompt goes to a pod with the tokenizer that made it; the other is left out with that reason."""
    common = [ScriptedPod(f"d{number}", "decode") for number in range(2)]
    odd = ScriptedPod("odd", "decode", bundle=toy_text(ToySpec(vocab=1024)))
    async with running(tmp_path, *common, odd) as router:
        for _ in range(6):
            async with router.complete() as response:
                assert response.status == 200
        assert odd.legs == []
        assert (await router.decisions())[0]["filtered"]["decode"]["odd"] == "another tokenizer or chat template"
