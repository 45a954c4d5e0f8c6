"""An answer is asked to leave a draining pod only while another pod would pass every filter of the next choice."""

import random

import pytest

from kvferry_router.discovery.endpoints import TERMINATING, Endpoint
from kvferry_router.discovery.pod_table import Probe
from kvferry_router.pool import PodPool
from kvferry_router.select.policy import Policy
from kvferry_wire import PROTOCOL_VERSION
from kvferry_wire.limits import DEFAULT_LIMITS, Limits
from kvferry_wire.pod import PodInfo, PodPorts

from .scripted_pod import make_layout


def make_info(name: str, compat: str, text: str, context: int = 1024) -> PodInfo:
    return PodInfo(
        version="0",
        protocol_version=PROTOCOL_VERSION,
        incarnation=name,
        epoch=1,
        role="decode",
        model="m",
        model_digest="m",
        text_digest=text,
        compat_hash=compat,
        dtype="float32",
        threads=1,
        block_size=16,
        total_blocks=100,
        max_model_len=context,
        max_running=8,
        token_budget=512,
        layout=make_layout(),
        ports=PodPorts(http=1, control=0, data=0, state=1),
        transfer_backends={},
        attention_backends={},
        draining=False,
        limits=Limits(),
    )


@pytest.mark.parametrize(
    ("compat", "text", "context", "longest"),
    [
        ("c", "t", 1024, {"old": 1024}),
        ("c", "t", 512, {"old": 512}),
        ("another", "t", 1024, {}),
        ("c", "another", 1024, {}),
    ],
    ids=["same revision", "another context length", "another KV", "another template"],
)
def test_only_a_pod_that_passes_every_filter_stands_in(
    compat: str, text: str, context: int, longest: dict[str, int]
) -> None:
    """A rollout that changes only the context's length moves the answers that fit into the new one."""
    pool = PodPool(limits=DEFAULT_LIMITS, policy=Policy(), model="m", rng=random.Random(0))
    old = Endpoint(name="old", role="decode", host="127.0.0.1", http=1, state=1, withheld=TERMINATING)
    new = Endpoint(name="new", role="decode", host="127.0.0.1", http=2, state=2)
    pool.table.replace((old, new))
    for record, info in zip(
        pool.table, (make_info("old", "c", "t"), make_info("new", compat, text, context)), strict=True
    ):
        record.probed(Probe("ready"))
        record.informed(info)
    assert pool.leaving() == longest
    assert pool.contexts("t") == ([context] if text == "t" else [])  # what drains takes nothing new
