"""What a benchmark has measured, as values. Times are seconds of one monotonic clock."""

import msgspec

from kvferry_cli.bench.load import Request
from kvferry_cli.bench.manifests import Side


class Trace(msgspec.Struct, kw_only=True):
    """One request as its client saw it; filled while the answer comes.

    ``finish`` is empty for an answer that was cut because the round was over.
    """

    request: Request
    sent: float
    path: str = ""  # x-kvferry-path
    events: list[float] = []  # arrivals of text
    text: str = ""
    finish: str = ""
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def complete(self) -> bool:
        return self.finish != ""


class PodUse(msgspec.Struct, frozen=True, kw_only=True):
    """What a pod did in a round. The CPU time is that of the window, the counters are those of the whole round."""

    name: str
    role: str
    cores: tuple[int, ...]  # empty: any
    threads: int
    cpu_s: float
    pulls: int
    pull_s: float
    pull_bytes: int
    pulls_failed: int
    recomputed: int
    preemptions: int


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One round of one side. The window reaches from the first long prompt's start to the last one's end."""

    side: Side
    number: int
    began: float
    ended: float
    traces: tuple[Trace, ...]
    pods: tuple[PodUse, ...]  # engines
    router_cpu_s: float  # within the window, as all below
    client_cpu_s: float  # of the load generator, which is the launcher as well
    machine_cpu_s: float  # of all processes of the machine, time stolen from it included

    @property
    def window_s(self) -> float:
        return self.ended - self.began
