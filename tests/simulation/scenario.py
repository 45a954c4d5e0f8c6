"""A scenario is all that a seed stands for: sizes, requests, how bad the links are, and the faults with their times.

It is plain data, so that a failing one can be made smaller: dropping a request or a fault leaves the rest as it is.
"""

import random
from dataclasses import dataclass, field, replace

import msgspec

from kvferry_router.flow_messages import FailurePolicy
from kvferry_wire.leg import Sampling
from kvferry_wire.limits import DEFAULT_LIMITS, Limits
from kvferry_wire.pod import Role
from tests.simulation.answers import Answer, oracle_answer
from tests.simulation.links import GOOD, LinkFaults
from tests.simulation.models import TOY, Model

BLOCK_SIZE = 4
DEADLINE_S = 20.0
LEASE_S = 2.0
LIMITS = msgspec.structs.replace(
    DEFAULT_LIMITS,
    request_deadline_s=DEADLINE_S,
    queue=6,
    alive_interval_s=0.25,
    stall_timeout_s=1.0,
    lease_s=LEASE_S,
    answer_s=4.0,
    ended_lease_s=8.0,
    control_reply_s=0.4,
    connect_s=1.0,
    transfer_floor_s=1.0,
    transfer_stall_s=2.0,
    transfer_min_bytes_per_s=150,
    transfers=2,
    peer_ttl_s=10.0,
    room_wait_s=1.0,
    connect_timeout_s=0.5,
    queue_wait_s=3.0,
    inflight=6,
    end_grace_s=0.1,
    resume_wait_s=5.0,
    resume_longest_pause_s=0.5,
    resumes_per_s=20.0,
    resume_burst=4,
    capacity_wait_s=0.4,
    pair_open_s=0.5,
    pair_open_cap_s=4.0,
    pair_trial_s=4.0,
)


@dataclass(frozen=True, slots=True)
class Request:
    """One client's request.

    ``leaves_at``: seconds until the client goes; ``leaves_after``: messages until then; ``leaves_in``: the stage of the
    request in which it goes.
    """

    name: str
    at: float
    prompt: tuple[int, ...]
    n: int
    sampling: Sampling
    stream: bool
    salt: bytes
    deadline_s: float = DEADLINE_S
    leaves_at: float | None = None
    leaves_after: int | None = None
    leaves_in: str = ""
    poison: bool = False  # whatever begins to compute it ends

    def answers(self, max_model_len: int, model: Model) -> tuple[Answer, ...]:
        """What each choice is to say."""
        return tuple([oracle_answer(self.prompt, self.sampling, i, max_model_len, model) for i in range(self.n)])


@dataclass(frozen=True, slots=True)
class PodSetup:
    """One pod of the service."""

    name: str
    role: Role
    blocks: int  # usable ones
    token_budget: int
    max_running: int
    prefix_caching: bool = True
    model: str = TOY.compat_hash
    context: int = 0  # tokens of prompt and answer; 0: as many as any pod takes


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong at a time: ``kind`` is a method of ``faults.Faults``."""

    kind: str
    at: float
    seconds: float
    target: str  # a pod, or a router
    other: str = ""  # the other end of a link


@dataclass(frozen=True, slots=True)
class Profile:
    """What kind of bad weather a seed has."""

    name: str
    http: LinkFaults = GOOD
    control: LinkFaults = GOOD
    data: LinkFaults = GOOD
    kinds: tuple[str, ...] = ()  # of faults
    faults: tuple[int, int] = (0, 0)  # how many
    leaving: float = 0.0  # share of clients that leave
    leaving_in: float = 0.0  # share of clients that leave at a stage of their request
    blocks: tuple[int, int] = (36, 72)  # usable ones of a pod
    decode_blocks: tuple[int, int] | None = None  # of a decode pod, if others
    lease_share: float = 0.5
    transfer_floor_s: float = 1.0
    longest_prompt: int = 40
    spread: float = 0.0  # seconds within which most requests come; 0: by chance
    hurried: float = 0.0  # share of requests with a deadline that is hard to meet
    failing_steps: float = 0.0  # share of steps that cannot be computed
    wild: bool = False  # sizes at the edge of what works: one token a step, one sequence at a time, four choices
    shape: tuple[Role, ...] = ()  # roles of the pods; none: by chance
    opposed: bool = False  # decode's clocks run slow and all others fast, as far as drift goes
    forged: float = 0.0  # share of handles that are swapped for another request's, or changed
    checksums: tuple[bool, ...] = (True, False)  # whether ferried blocks have them, by chance
    damaged: float = 0.0  # share of ferried blocks in which a bit flips on the way
    slow_data: float = 0.0  # seconds between two blocks on the data plane, at most
    requests: tuple[int, int] = (6, 14)
    slowness: float = 1.0  # steps take so many times as long
    longest_answer: bool = False  # answers are long
    models: tuple[str, ...] = ()  # of the pods; none: all serve the toy
    policies: tuple[FailurePolicy, ...] = ("recompute",)
    poison: bool = False  # one request ends each pod that computes it, and comes twice
    forgetful: bool = False  # the router has room for few ids
    routers: tuple[str, ...] = ("router",)
    drift: float = 0.0  # clocks run up to so much faster or slower
    short_contexts: bool = False  # each second decode pod has room for shorter answers only

    @property
    def prompt_cancel(self) -> bool:
        """Whether nothing keeps pods from hearing at once of a client that leaves."""
        return not self.kinds and self.http == GOOD and self.control == GOOD and not self.slow_answers

    @property
    def slow_answers(self) -> bool:
        return self.slowness > 10

    @property
    def answers_all(self) -> bool:
        """Whether nothing keeps the service from answering whom it takes: KV may be lost or late, requests not."""
        if self.poison:
            return False
        harmless = {"reset_cache", "part_control", "squeeze", "crash_router", "stop_router"}
        return self.http == GOOD and set(self.kinds) <= harmless and not self.hurried and not self.failing_steps


@dataclass(frozen=True, slots=True)
class Scenario:
    """One seed's world."""

    seed: int
    profile: Profile
    pods: tuple[PodSetup, ...]
    max_model_len: int
    requests: tuple[Request, ...]
    faults: tuple[Fault, ...]
    min_prefill_tokens: int
    transfers: int = 2
    policy: FailurePolicy = "recompute"
    drift: dict[str, float] = field(default_factory=dict)

    @property
    def limits(self) -> Limits:
        profile = self.profile
        return msgspec.structs.replace(
            LIMITS,
            lease_share=profile.lease_share,
            transfer_floor_s=profile.transfer_floor_s,
            transfers=self.transfers,
            resume_ids=12 if profile.forgetful else LIMITS.resume_ids,
        )

    def without_request(self, name: str) -> "Scenario":
        return replace(self, requests=tuple([each for each in self.requests if each.name != name]))

    def without_fault(self, index: int) -> "Scenario":
        return replace(self, faults=self.faults[:index] + self.faults[index + 1 :])


_SLOW = LinkFaults(delayed=0.05, delay_s=10 * LEASE_S)
_LOSSY = LinkFaults(lost=0.15, doubled=0.1)
_LOSSY_STREAM = LinkFaults(lost=0.05, cut=0.02)

PROFILES = (
    Profile("calm", drift=0.0),
    Profile("drifting", drift=0.2),
    Profile("lossy", http=_LOSSY_STREAM, control=_LOSSY, data=_LOSSY_STREAM, drift=0.2),
    Profile("late", http=LinkFaults(delayed=0.02, delay_s=10 * LEASE_S), control=_SLOW, data=_SLOW, slow_data=0.1),
    Profile("reordered", control=LinkFaults(delayed=0.4, delay_s=1.0, doubled=0.3), slow_data=0.4, drift=0.2),
    Profile("crashing", kinds=("crash",), faults=(1, 4), slow_data=0.2),
    Profile("paused", kinds=("pause",), faults=(1, 4), slow_data=0.3, drift=0.2),
    Profile("slow", kinds=("slow_steps",), faults=(1, 3), slow_data=0.4),
    Profile("leaving", leaving=0.7),
    Profile("tight", blocks=(8, 16), requests=(8, 14), drift=0.1),
    Profile("tight_leaving", blocks=(8, 14), requests=(8, 14), leaving=0.4, slow_data=0.2),
    Profile("parted", kinds=("part", "part_one_way"), faults=(1, 3), control=_LOSSY, slow_data=0.2),
    Profile("forged", forged=0.5, requests=(12, 18), longest_prompt=16),
    Profile("damaged", damaged=0.1, checksums=(True,), slow_data=0.05, policies=("recompute", "retry", "fail")),
    Profile("cut", kinds=("cut_streams",), faults=(2, 6), slow_data=0.2),
    Profile("restless", kinds=("reset_cache", "drain", "slow_steps"), faults=(1, 4), blocks=(10, 24)),
    Profile("hurried", hurried=0.6, blocks=(12, 24), slow_data=0.2, kinds=("slow_steps",), faults=(0, 1), drift=0.2),
    Profile("wild", wild=True, blocks=(5, 20), lease_share=0.7, slow_data=0.1, leaving=0.2),
    Profile(
        "wild_and_cut",
        wild=True,
        blocks=(5, 20),
        lease_share=1.0,
        slow_data=0.2,
        hurried=0.1,
        kinds=("cut_streams", "reset_cache", "pause"),
        faults=(1, 4),
        control=_LOSSY,
    ),
    # Two engines that lease to each other have room for little else.
    Profile("facing", shape=("both", "both"), blocks=(8, 14), lease_share=0.8, spread=0.2, requests=(8, 14)),
    Profile(
        "failing",
        failing_steps=0.02,
        kinds=("engine_dies",),
        faults=(0, 3),
        blocks=(12, 40),
        slow_data=0.1,
    ),
    # Leases end early by the owner's clock while their bytes are still on the way, and their blocks are taken at once.
    Profile(
        "stale",
        kinds=("part_control", "part_control", "reset_cache"),
        faults=(5, 8),
        blocks=(8, 10),
        lease_share=1.0,
        transfer_floor_s=2.5,
        checksums=(False,),  # the leases alone must do
        decode_blocks=(40, 60),
        slow_data=1.5,
        requests=(20, 26),
        longest_prompt=16,
        drift=0.2,
        shape=("both", "decode"),
        opposed=True,
        spread=4.5,
    ),
    # Pods of two models at a time, of which only one goes on with an answer.
    Profile(
        "mixed",
        shape=("prefill", "decode", "prefill", "decode"),
        models=("toy", "toy", "other", "other"),
        kinds=("crash", "cut_streams", "pause"),
        faults=(2, 6),
        slowness=8.0,
        spread=2.0,
        longest_answer=True,
        slow_data=0.1,
    ),
    # Answers that take a while, on pods that die under them again and again.
    Profile(
        "dying",
        shape=("prefill", "decode", "prefill", "decode"),
        kinds=("crash", "crash", "engine_dies", "pause", "cut_streams"),
        faults=(6, 12),
        slowness=20.0,
        spread=4.0,
        longest_answer=True,
        policies=("recompute", "retry"),
    ),
    # The same with one pod of each kind: it is its next life that goes on.
    Profile(
        "dying_alone",
        shape=("prefill", "decode"),
        kinds=("crash", "engine_dies", "cut_streams"),
        faults=(4, 8),
        slowness=20.0,
        spread=4.0,
        longest_answer=True,
        forgetful=False,
    ),
    Profile(
        "forgetful",
        shape=("prefill", "decode", "decode"),
        kinds=("crash", "cut_streams"),
        faults=(2, 5),
        slowness=10.0,
        spread=2.0,
        forgetful=True,
    ),
    # KV is lost in all ways, and the service would rather try again, or fail, than compute it.
    Profile(
        "insisting",
        shape=("prefill", "decode", "prefill", "decode"),
        control=LinkFaults(lost=0.25, doubled=0.1),
        data=LinkFaults(lost=0.1, cut=0.05),
        kinds=("crash_prefill", "part_control", "reset_cache"),
        faults=(2, 5),
        blocks=(10, 24),
        policies=("retry", "fail"),
        slow_data=0.4,
    ),
    Profile(
        "poison",
        shape=("prefill", "decode", "prefill", "decode", "both"),
        poison=True,
        slowness=8.0,
        spread=2.0,
        longest_answer=True,
        faults=(0, 0),
        kinds=("crash",),
    ),
    # Pods drain under running answers and come back; some are lost while they do.
    Profile(
        "departing",
        shape=("prefill", "decode", "prefill", "decode"),
        kinds=("depart", "depart", "depart", "crash", "pause", "cut_streams", "part_control"),
        faults=(4, 9),
        slowness=15.0,
        spread=4.0,
        longest_answer=True,
        slow_data=0.1,
        policies=("recompute", "retry", "fail"),
    ),
    # Nothing else goes wrong: no request fails, and answers move.
    Profile(
        "rolling",
        shape=("prefill", "decode", "prefill", "decode"),
        kinds=("depart",),
        faults=(1, 3),
        slowness=15.0,
        spread=3.0,
        longest_answer=True,
        slow_data=0.05,
    ),
    # A rollout that changes the context's length: an answer goes on only where there is room for all of it.
    Profile(
        "two_contexts",
        shape=("prefill", "decode", "prefill", "decode"),
        kinds=("depart", "crash", "pause"),
        faults=(1, 4),
        slowness=15.0,
        spread=3.0,
        longest_answer=True,
        slow_data=0.05,
        short_contexts=True,
    ),
    # Clients leave at each stage, and what they leave is free at once.
    Profile("staged", leaving_in=0.8, requests=(14, 22), slow_data=0.1, blocks=(16, 40), spread=0.1, slowness=6.0),
    Profile(
        "ending_router",
        kinds=("crash_router", "stop_router"),
        faults=(1, 3),
        slowness=6.0,
        spread=2.0,
        slow_data=0.1,
        longest_answer=True,
    ),
    # Two routers over the same pods: what one of them suffers, the clients of the other never feel.
    Profile(
        "two_routers",
        shape=("prefill", "decode", "prefill", "decode"),
        kinds=("crash_router", "stop_router"),
        faults=(1, 3),
        slowness=6.0,
        spread=2.0,
        slow_data=0.1,
        longest_answer=True,
        routers=("router", "router-1"),
        requests=(12, 18),
    ),
    # The same while pods drain and die: each router moves and resumes its own.
    Profile(
        "two_routers_departing",
        shape=("prefill", "decode", "prefill", "decode"),
        kinds=("crash_router", "pause", "crash", "depart", "cut_streams", "part_one_way"),
        faults=(3, 7),
        slowness=10.0,
        spread=3.0,
        longest_answer=True,
        slow_data=0.1,
        routers=("router", "router-1"),
    ),
    # For a while no block can be had: allocation fails, under answers that run and for KV that comes.
    Profile(
        "squeezed",
        kinds=("squeeze", "squeeze", "squeeze", "reset_cache"),
        faults=(2, 6),
        blocks=(14, 30),
        slow_data=0.1,
        slowness=4.0,
        spread=2.0,
        policies=("recompute", "recompute", "retry", "fail"),
    ),
    # Decode has room for few answers at a time: most wait there for many times their lease, which they renew.
    Profile(
        "queued",
        decode_blocks=(12, 18),
        shape=("prefill", "decode"),
        requests=(14, 20),
        slowness=15.0,
        longest_answer=True,
        longest_prompt=20,
        spread=2.0,
        drift=0.2,
    ),
    # Reads break off, and nobody says so.
    Profile("unheard", data=LinkFaults(lost=0.1, cut=0.15), requests=(10, 16)),
    # Prefill dies and comes back while decode still waits for blocks to pull into.
    Profile("reborn", kinds=("crash_prefill",), faults=(2, 5), decode_blocks=(9, 12), slow_data=0.3, requests=(10, 14)),
    Profile(
        "everything",
        http=LinkFaults(lost=0.03, cut=0.01, delayed=0.01, delay_s=5.0),
        control=LinkFaults(lost=0.1, doubled=0.1, delayed=0.1, delay_s=10 * LEASE_S),
        data=LinkFaults(lost=0.03, cut=0.02, delayed=0.02, delay_s=5.0),
        kinds=("crash", "pause", "slow_steps", "part", "part_one_way", "cut_streams", "reset_cache"),
        faults=(2, 6),
        leaving=0.2,
        blocks=(10, 30),
        forged=0.1,
        slow_data=0.3,
        drift=0.2,
        policies=("recompute", "retry", "fail"),
    ),
)

# Where a client may be when it leaves.
STAGES = (*("router_queue", "prefill", "reply", "decode_queue", "transfer", "first_token", "mid_stream", "non_stream"),)

FAULTY_S = 8.0  # faults begin within the first so many seconds


def make_scenario(seed: int, profile_name: str | None = None) -> Scenario:
    """What a seed stands for; its profile follows from the seed, unless another one is named."""
    rng = random.Random(f"scenario/{seed}")
    profile = PROFILES[seed % len(PROFILES)]
    if profile_name is not None:
        profile = next(each for each in PROFILES if each.name == profile_name)
    pods = _make_pods(rng, profile)
    max_model_len = min(64, min(pod.blocks for pod in pods) * BLOCK_SIZE)
    if profile.short_contexts:
        short = [pod.name for pod in pods if pod.role == "decode"][1::2]
        pods = tuple([replace(pod, context=max_model_len * 5 // 8) if pod.name in short else pod for pod in pods])
    names = [pod.name for pod in pods]
    spread = profile.spread or rng.choice((0.1, 0.5, 2.0))
    return Scenario(
        seed=seed,
        profile=profile,
        pods=pods,
        max_model_len=max_model_len,
        requests=_make_requests(rng, profile, max_model_len, spread),
        faults=_make_faults(rng, profile, names, spread),
        min_prefill_tokens=8 if profile.opposed else rng.choice((1, 1, 1, 8)),
        transfers=rng.randint(1, 4) if profile.wild else 2,
        policy=rng.choice(profile.policies),
        drift=_make_drift(rng, profile, names),
    )


def _make_drift(rng: random.Random, profile: Profile, pods: list[str]) -> dict[str, float]:
    drift = {name: 1 + profile.drift * rng.uniform(-1, 1) for name in [*pods, *profile.routers, "client"]}
    if profile.opposed:
        drift |= {name: 1 + profile.drift * (-1 if name.startswith("d") else 1) for name in pods}
    return drift


def _make_pods(rng: random.Random, profile: Profile) -> tuple[PodSetup, ...]:
    pair: tuple[Role, ...] = ("prefill", "decode")
    shape = profile.shape or rng.choice((pair, pair, pair, pair, (*pair, *pair), ("both", "both")))
    pods = []
    for index, role in enumerate(shape):
        name = f"{role[0]}{index}"
        model = profile.models[index] if profile.models else TOY.compat_hash
        span = profile.decode_blocks if role == "decode" and profile.decode_blocks else profile.blocks
        blocks = rng.randint(*span)
        if profile.wild:
            budget, running = rng.choice((1, 3, 8, 64)), rng.randint(1, 8)
            pods.append(PodSetup(name, role, blocks, budget, running, prefix_caching=rng.random() < 0.6))
        else:
            pods.append(PodSetup(name, role, blocks, rng.choice((6, 16, 64)), rng.choice((2, 4, 8)), model=model))
    return tuple(pods)


def _make_requests(rng: random.Random, profile: Profile, max_model_len: int, spread: float) -> tuple[Request, ...]:
    """Requests that come within `spread` seconds, and a few much later."""
    documents = [tuple(rng.randrange(256) for _ in range(40)) for _ in range(3)]
    longest = min(profile.longest_prompt, max_model_len - 6)
    lengths = [rng.randint(9 if profile.opposed else 5, longest) for _ in range(3)]
    salts = [b"", b"tenant-1", b"tenant-2"][: rng.randint(1, 3)]
    requests: list[Request] = []
    for index in range(rng.randint(*profile.requests)):
        length = rng.choice(lengths) if rng.random() < 0.7 else rng.randint(2, longest)
        shared = rng.randint(0, min(length - 1, 40)) if rng.random() < 0.7 else 0
        prompt = documents[rng.randrange(3)][:shared] + tuple(rng.randrange(256) for _ in range(length - shared))
        if requests and rng.random() < 0.2:
            prompt = rng.choice(requests).prompt  # the very same prompt, perhaps of another tenant
        leaves = rng.random() < profile.leaving
        by_count = rng.random() < 0.3
        stream = rng.random() < (0.6 if profile.leaving_in else 0.8)
        n = rng.choice((1, 2, 3, 4)) if profile.wild else rng.choice((1, 1, 1, 2, 3))
        requests.append(
            Request(
                name=f"r{index}",
                at=spread * rng.random() if rng.random() < 0.8 else 0.6 * FAULTY_S * rng.random(),
                prompt=prompt,
                n=n,
                sampling=_make_sampling(rng, prompt, max_model_len, profile),
                stream=stream,
                salt=rng.choice(salts),
                deadline_s=0.02 + 0.8 * rng.random() ** 2 if rng.random() < profile.hurried else DEADLINE_S,
                leaves_at=0.5 * rng.random() ** 2 if leaves and not by_count else None,
                leaves_after=rng.randint(1, 4) if leaves and by_count else None,
                leaves_in=_stage(rng, profile, stream),
            )
        )
    return tuple(requests + (_poison(requests[0], rng) if profile.poison else []))


def _poison(request: Request, rng: random.Random) -> list[Request]:
    """A request that comes again when it must have failed."""
    first = replace(
        request, name="x0", at=0.5 + rng.random(), prompt=tuple(rng.randrange(256) for _ in range(11)), poison=True
    )
    return [first, replace(first, name="x1", at=first.at + 7.0)]


def _stage(rng: random.Random, profile: Profile, stream: bool) -> str:
    if rng.random() >= profile.leaving_in:
        return ""
    return rng.choice([stage for stage in STAGES if stage != ("non_stream" if stream else "mid_stream")])


def _make_sampling(rng: random.Random, prompt: tuple[int, ...], max_model_len: int, profile: Profile) -> Sampling:
    max_tokens = rng.choice((14, 20, 20)) if profile.longest_answer else rng.choice((1, 2, 5, 9, 14, 20))
    max_tokens = min(max_tokens, max_model_len - len(prompt))  # as every request is cut to the context
    base = Sampling(
        seed=rng.getrandbits(63),
        max_tokens=max_tokens,
        min_tokens=rng.choice((0, 0, 0, min(3, max_tokens))),
        temperature=rng.choice((0.0, 0.0, 0.7, 1.5)),
        top_k=rng.choice((0, 0, 2)),
        ignore_eos=rng.random() < 0.2,
    )
    # Some stop where the answer really passes.
    stop_by = rng.random()
    if stop_by < 0.3:
        answer = oracle_answer(prompt, base, 0, max_model_len)
        if stop_by < 0.15 and base.min_tokens == 0 and len(answer.text) > 2:
            at = rng.randrange(len(answer.text) - 1)
            return msgspec.structs.replace(base, stop=(answer.text[at : at + rng.randint(1, 2)], "\x01\x02"))
        return msgspec.structs.replace(base, stop_token_ids=(rng.choice(answer.ids),))
    return base


def _make_faults(rng: random.Random, profile: Profile, pods: list[str], spread: float) -> tuple[Fault, ...]:
    if not profile.kinds:
        return ()
    faults = []
    for _ in range(rng.randint(*profile.faults)):
        kind = rng.choice(profile.kinds)
        target = rng.choice(pods)
        others = [name for name in [*pods, *profile.routers] if name != target]
        if kind == "crash_prefill":
            target = pods[0]
        if kind == "part_control":
            target, others = pods[-1], pods[:1]
        if kind.endswith("_router") or (kind == "pause" and rng.random() < 0.25):
            target = rng.choice(profile.routers)
        seconds = {
            "engine_dies": 0.2 + 0.5 * rng.random(),
            "crash": 0.2 + 3 * rng.random(),
            "crash_router": 0.2 + rng.random(),
            "stop_router": 0.2 + rng.random(),
            "part_control": 1.0 + 1.4 * rng.random(),
            "crash_prefill": 0.02 + 0.3 * rng.random(),
            "slow_steps": 1 + 2 * rng.random(),
            "squeeze": 0.1 + 2.4 * rng.random(),
        }.get(kind, 0.2 + 4 * rng.random() ** 2)
        at = 1.2 * spread * rng.random() if rng.random() < 0.7 else 0.8 * FAULTY_S * rng.random()
        faults.append(Fault(kind, at, seconds, target, rng.choice(others)))
    return tuple(sorted(faults, key=lambda fault: fault.at))
