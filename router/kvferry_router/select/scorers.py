"""What it costs to give a leg to a pod, in seconds to the first token; the least is best.

Prefill on pod p, then decode on pod d:

    prefill  = queued_p / r + (n - h_p) / r
    transfer = t0 + n * kv / b
    decode   = w * (active_d / max_running_d + pressure_d)

Decode alone on pod d:

    alone    = queued_d / r + (n - h_d) / r + w * (active_d / max_running_d + pressure_d)

n: prompt tokens. h: of them, in the pod's prefix cache. queued: prompt tokens before this one. r: prefill tokens/s.
t0, b: a transfer's set-up and bandwidth. kv: KV bytes of a token. w: seconds that a full batch costs a first token.
pressure: the share of the blocks needed that are not free, 0..1.
"""

from dataclasses import dataclass

from kvferry_router.select.candidates import Ask, Candidate


@dataclass(frozen=True, slots=True)
class CostModel:
    """Rates. Only their ratios decide, and all pods of a service run on like hardware."""

    prefill_tokens_per_s: float = 2000.0
    transfer_setup_s: float = 0.005
    transfer_bytes_per_s: float = 500e6
    full_batch_s: float = 0.5


@dataclass(frozen=True, slots=True)
class Score:
    """A pod's cost and the terms that it is the sum of, in seconds."""

    pod: str
    total_s: float
    terms: dict[str, float]

    def __lt__(self, other: "Score") -> bool:
        return self.total_s < other.total_s


def score_prefill(pod: Candidate, ask: Ask, model: CostModel) -> Score:
    """Queue, uncached prefill and the transfer of the whole prompt's KV."""
    cached = pod.cached_tokens(ask)
    queue = pod.queued_tokens() / model.prefill_tokens_per_s
    compute = (ask.prompt_tokens - cached) / model.prefill_tokens_per_s
    transfer = model.transfer_setup_s + ask.prompt_tokens * pod.kv_bytes_per_token / model.transfer_bytes_per_s
    terms = {"queue_s": queue, "prefill_s": compute, "transfer_s": transfer, "cached_tokens": float(cached)}
    return Score(pod.name, queue + compute + transfer, terms)


def score_decode(pod: Candidate, ask: Ask, model: CostModel) -> Score:
    """Batch load and KV room: what a decode leg that gets its KV waits for."""
    share = pod.active() / pod.max_running
    needed = max(1, pod.blocks_needed(ask))
    pressure = min(1.0, max(0.0, needed - max(0, pod.free_blocks())) / needed)
    load = model.full_batch_s * (share + pressure)
    return Score(pod.name, load, {"load_s": load, "active_share": share, "kv_pressure": pressure})


def score_alone(pod: Candidate, ask: Ask, model: CostModel) -> Score:
    """Queue, uncached prefill and the decode pod's own load."""
    cached = pod.cached_tokens(ask)
    queue = pod.queued_tokens() / model.prefill_tokens_per_s
    compute = (ask.prompt_tokens - cached) / model.prefill_tokens_per_s
    decode = score_decode(pod, ask, model)
    terms = {"queue_s": queue, "prefill_s": compute, "cached_tokens": float(cached)} | decode.terms
    return Score(pod.name, queue + compute + decode.total_s, terms)


def explain(score: Score) -> str:
    """The cost as a sum with its numbers."""
    seconds = " + ".join(f"{name[:-2]} {value:.4f}" for name, value in score.terms.items() if name.endswith("_s"))
    others = ", ".join(f"{name} {value:g}" for name, value in score.terms.items() if not name.endswith("_s"))
    return f"{seconds} = {score.total_s:.4f} s ({others})"
