"""Whether disaggregation pays on this machine under this load, and why not. Pure: a table over the figures."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from kvferry_cli.bench.figures import HAND_OFF, ITL, TTFT, Figure, gap_s, percentile, prompts_of, second_token_s
from kvferry_cli.bench.manifests import Side
from kvferry_cli.bench.records import PodUse, Round

Pays = Literal["yes", "no", "in part"]
JUDGED = (f"{TTFT} p50", f"{ITL} p99", "tokens written")  # a gain or a loss in one of these decides


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the reasons rest on; shares are 0 to 1, of all rounds together."""

    cores: int
    engine_threads: int
    pinned: bool
    prefill_busy: float  # CPU time of the prefill pods over the time of their threads
    decode_busy: float
    aggregated_busy: float
    split_share: float  # of the long prompts that took the disaggregated path
    recomputed: int
    pull_s: float  # of a long prompt, by its share of all bytes that were pulled
    hand_off_s: float  # median from the first to the second token of a long prompt
    first_token_s: float  # median of the disaggregated side
    stall: float  # aggregated: p99 over p50 of the running streams' inter-token latency
    front_cores: float  # that router and load generator used, disaggregated
    foreign_share: float  # of the machine's CPU time that went to other processes
    preemptions: int


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The plain word."""

    pays: Pays
    headline: str
    gains: tuple[str, ...]
    losses: tuple[str, ...]
    reasons: tuple[str, ...]  # why it does not pay, or not wholly
    cautions: tuple[str, ...]  # what limits what the figures say


class _Because(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    holds: Callable[[Facts, Mapping[str, Figure]], bool]
    words: Callable[[Facts, Mapping[str, Figure]], str]


def _lost(figures: Mapping[str, Figure], name: str) -> bool:
    return figures[name].lost


REASONS: tuple[_Because, ...] = (
    _Because(
        name="nothing was split",
        holds=lambda facts, figures: facts.split_share < 0.9,
        words=lambda facts, figures: (
            f"only {facts.split_share:.0%} of the long prompts went through a prefill pod; spec.router.disaggregation "
            "decides, and a prefill pod that is full or away"
        ),
    ),
    _Because(
        name="KV was not usable",
        holds=lambda facts, figures: facts.recomputed > 0,
        words=lambda facts, figures: f"decode computed {facts.recomputed} prompts anew, the ferried KV was not usable",
    ),
    _Because(
        name="shared cores",
        holds=lambda facts, figures: facts.engine_threads > facts.cores,
        words=lambda facts, figures: (
            f"the pods share cores: {facts.engine_threads} compute threads on {facts.cores} cores, so that a prompt at "
            "the prefill pod takes time from the streams at the decode pod"
        ),
    ),
    _Because(
        name="nothing to win",
        holds=lambda facts, figures: facts.stall < 2,
        words=lambda facts, figures: (
            f"aggregated, long prompts hardly disturb the running streams (p99 is {facts.stall:.1f} times p50)"
        ),
    ),
    _Because(
        name="decode is full",
        holds=lambda facts, figures: facts.decode_busy > 0.9 and not figures["tokens written"].won,
        words=lambda facts, figures: (
            f"the decode pods are busy {facts.decode_busy:.0%} of the time: all streams are theirs alone"
        ),
    ),
    _Because(
        name="prefill is idle",
        holds=lambda facts, figures: facts.prefill_busy < 0.5,
        words=lambda facts, figures: (
            f"the prefill pods are busy {facts.prefill_busy:.0%} of the time; aggregated, they would write answers too"
        ),
    ),
    _Because(
        name="prefill is full",
        holds=lambda facts, figures: facts.prefill_busy > 0.9 and _lost(figures, f"{TTFT} p50"),
        words=lambda facts, figures: (
            f"the prefill pods are busy {facts.prefill_busy:.0%} of the time: long prompts are theirs alone"
        ),
    ),
    _Because(
        name="the ferry is slow",
        holds=lambda facts, figures: facts.pull_s > 0.2 * facts.first_token_s,
        words=lambda facts, figures: (
            f"moving a prompt's KV takes {1000 * facts.pull_s:.0f} ms, {facts.pull_s / facts.first_token_s:.0%} of the "
            "time to compute it"
        ),
    ),
    _Because(
        name="the second token is late",
        holds=lambda facts, figures: _lost(figures, f"{HAND_OFF} p50") and facts.hand_off_s > 3 * facts.pull_s,
        words=lambda facts, figures: (
            f"a long prompt's second token comes {1000 * facts.hand_off_s:.0f} ms after its first, of which the pull "
            f"takes {1000 * facts.pull_s:.0f} ms: the rest is waiting for the decode pod's steps"
        ),
    ),
)

CAUTIONS: tuple[_Because, ...] = (
    _Because(
        name="other work",
        holds=lambda facts, figures: facts.foreign_share > 0.1,
        words=lambda facts, figures: (
            f"other processes took {facts.foreign_share:.0%} of the machine; measure again on a quiet one"
        ),
    ),
    _Because(
        name="the front shares",
        holds=lambda facts, figures: facts.engine_threads >= facts.cores and facts.front_cores > 0.02 * facts.cores,
        words=lambda facts, figures: (
            f"router and load generator have no core of their own: they took {facts.front_cores:.2f} of the pods' cores"
        ),
    ),
    _Because(
        name="not pinned",
        holds=lambda facts, figures: not facts.pinned and facts.engine_threads <= facts.cores,
        words=lambda facts, figures: "the pods were not pinned to cores: the kernel moved them about",
    ),
    _Because(
        name="KV is full",
        holds=lambda facts, figures: facts.preemptions > 0,
        words=lambda facts, figures: (
            f"{facts.preemptions} sequences lost their KV blocks to others and were computed again; more "
            "spec.engine.kvMemory is needed for this load"
        ),
    ),
    _Because(
        name="few prompts",
        holds=lambda facts, figures: min(figures[f"{TTFT} p99"].samples) < 100,
        words=lambda facts, figures: (
            f"p99 of the time to first token is the slowest of each round: {min(figures[f'{TTFT} p99'].samples)} "
            "prompts in all"
        ),
    ),
)


def judge(figures: Mapping[str, Figure], facts: Facts) -> Verdict:
    """The verdict."""
    gains = [figures[name] for name in JUDGED if figures[name].won]
    losses = [figures[name] for name in JUDGED if figures[name].lost]
    pays: Pays = "no" if not gains else "in part" if losses else "yes"
    told = {
        "yes": "disaggregation pays on this machine under this load",
        "no": "disaggregation does not pay on this machine under this load",
        "in part": "disaggregation pays in part on this machine under this load",
    }
    return Verdict(
        pays=pays,
        headline=told[pays],
        gains=tuple(map(_told, gains)),
        losses=tuple(map(_told, losses)),
        reasons=() if pays == "yes" else _words(REASONS, facts, figures) or _no_reason(gains),
        cautions=_words(CAUTIONS, facts, figures),
    )


def _told(figure: Figure) -> str:
    ratio = figure.ratio
    return f"{figure.name}: {ratio.median:.2f} times that of aggregated ({ratio.low:.2f} to {ratio.high:.2f})"


def _no_reason(gains: Sequence[Figure]) -> tuple[str, ...]:
    return () if gains else ("no figure is clearly better, and none of the known reasons holds",)


def _words(table: Sequence[_Because], facts: Facts, figures: Mapping[str, Figure]) -> tuple[str, ...]:
    return tuple(because.words(facts, figures) for because in table if because.holds(facts, figures))


# ---- facts from rounds ---------------------------------------------------------------------------------------------


def facts_of(rounds: Sequence[Round], *, cores: int) -> Facts:
    """What the rounds of both sides say. Raises ``ValueError`` without any of a side."""
    split = _side(rounds, "disaggregated")
    whole = _side(rounds, "aggregated")
    prompts = [trace for measured in split for trace in prompts_of(measured)]
    pods = [pod for measured in split for pod in measured.pods]
    window_s = sum(measured.window_s for measured in split)
    gaps = [gap for measured in whole for gap in gap_s(measured)]
    return Facts(
        cores=cores,
        engine_threads=sum(pod.threads for pod in split[0].pods),
        pinned=all(pod.cores for pod in pods),
        prefill_busy=busy(split, "prefill"),
        decode_busy=busy(split, "decode"),
        aggregated_busy=busy(whole, "decode"),
        split_share=sum(trace.path == "disaggregated" for trace in prompts) / len(prompts),
        recomputed=sum(pod.recomputed for pod in pods),
        pull_s=long_pull_s(split),
        hand_off_s=_median([value for measured in split for value in second_token_s(measured)]),
        first_token_s=_median([trace.events[0] - trace.sent for trace in prompts if trace.events]),
        stall=percentile(gaps, 99) / percentile(gaps, 50),
        front_cores=sum(measured.router_cpu_s + measured.client_cpu_s for measured in split) / window_s,
        foreign_share=_foreign(rounds, cores),
        preemptions=sum(pod.preemptions for measured in rounds for pod in measured.pods),
    )


def long_pull_s(rounds: Sequence[Round]) -> float:
    """Mean seconds that a long prompt's KV was under way: of all time in pulls, its share of the tokens."""
    ferried = [trace.request for measured in rounds for trace in measured.traces if trace.path == "disaggregated"]
    long = [len(request.prompt_ids) for request in ferried if request.kind == "prompt"]
    if not long:
        return 0.0
    tokens = sum(len(request.prompt_ids) for request in ferried)
    return sum(pod.pull_s for measured in rounds for pod in measured.pods) * sum(long) / tokens / len(long)


def busy(rounds: Sequence[Round], role: str) -> float:
    """CPU time of a role's pods over the time that their compute threads had."""
    used = sum(pod.cpu_s for measured in rounds for pod in measured.pods if pod.role == role)
    had = sum(pod.threads * measured.window_s for measured in rounds for pod in measured.pods if pod.role == role)
    return used / had if had else 0.0


def pods_of(rounds: Sequence[Round], side: Side) -> list[list[PodUse]]:
    """What each pod of a side did, by round."""
    measured = _side(rounds, side)
    return [list(uses) for uses in zip(*(each.pods for each in measured), strict=True)]


def _foreign(rounds: Sequence[Round], cores: int) -> float:
    ours = sum(
        measured.router_cpu_s + measured.client_cpu_s + sum(pod.cpu_s for pod in measured.pods) for measured in rounds
    )
    everyone = sum(measured.machine_cpu_s for measured in rounds)
    return max(0.0, everyone - ours) / (cores * sum(measured.window_s for measured in rounds))


def _side(rounds: Sequence[Round], side: Side) -> list[Round]:
    found = [measured for measured in rounds if measured.side == side]
    if not found:
        raise ValueError(f"no round of the {side} side")
    return found


def _median(values: list[float]) -> float:
    return percentile(values, 50) if values else 0.0
