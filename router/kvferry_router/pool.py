"""The service's pods as one thing: table, state feeds, prefix index and bookings, and the choices made over them.

No I/O: ``discovery.watch`` feeds it, the proxy asks it. For one event loop's thread.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from kvferry_router.bookings import Bookings
from kvferry_router.breakers import Pair, PairBreakers
from kvferry_router.discovery.pod_table import PodRecord, PodTable
from kvferry_router.explain import DecisionLog
from kvferry_router.flow_messages import Kind, NeedPod
from kvferry_router.index.feed import FeedEffect, FetchSnapshot, Forget, Remove, Replace, Store
from kvferry_router.index.prefix_index import PrefixIndex
from kvferry_router.select.candidates import Ask, Candidate
from kvferry_router.select.pairing import Unpaired, unpaired
from kvferry_router.select.policy import Decision, Policy, choose, choose_again
from kvferry_wire.limits import Limits
from kvferry_wire.pod import PodInfo

KINDS: tuple[Kind, Kind] = ("prefill", "decode")
Hashes = Mapping[int, Sequence[bytes]]  # block size -> the prompt's chained hashes


class PodPool:
    """Pods, and who gets the next leg."""

    def __init__(
        self, *, limits: Limits, policy: Policy, model: str, rng: random.Random, must_ferry: bool = False
    ) -> None:
        """``must_ferry``: KV that cannot be ferried fails requests, so that no pair is left alone for it."""
        self.table = PodTable(limits)
        self.index = PrefixIndex(limits.index_blocks)
        self.bookings = Bookings()
        self.breakers = PairBreakers(limits)
        self.must_ferry = must_ferry
        self.decisions = DecisionLog(limits.decisions)
        self._policy = policy
        self.model = model
        self._rng = rng
        self.undiscovered = ""  # why discovery does not know the pods yet; empty once it does

    def __repr__(self) -> str:
        return f"PodPool(pods={list(self.table)}, {self.index!r}, booked={len(self.bookings)})"

    # ---- what is there -----------------------------------------------------------------------------------------

    def usable(self, kind: Kind) -> list[PodRecord]:
        """Pods of a kind that would take a leg now."""
        return [
            record
            for record in self.table
            if not record.why_unusable(self.model) and _info(record).role in (kind, "both")
        ]

    def expected(self, kind: Kind) -> bool:
        """Whether discovery names a pod of a kind that may be used, whatever the pod itself says."""
        return any(not record.endpoint.withheld and record.endpoint.role in (kind, "both") for record in self.table)

    def text_digest(self, loaded: Iterable[str]) -> str | None:
        """The bundle to tokenize with: of those loaded, the one that most usable decode pods have."""
        counts: dict[str, int] = {}
        for record in self.usable("decode"):
            digest = _info(record).text_digest
            counts[digest] = counts.get(digest, 0) + 1
        known = set(loaded)
        ranked = sorted(((count, digest) for digest, count in counts.items() if digest in known), reverse=True)
        return ranked[0][1] if ranked else None

    def block_sizes(self) -> set[int]:
        return {record.info.block_size for record in self.table if record.info is not None}

    def contexts(self, text_digest: str) -> list[int]:
        """Context lengths of the usable decode pods that have a text bundle; pods of two revisions may differ."""
        infos = [_info(record) for record in self.usable("decode")]
        return sorted({info.max_model_len for info in infos if info.text_digest == text_digest})

    def context_length(self) -> int | None:
        """The shortest context of the usable decode pods; ``None`` without one."""
        return min((_info(record).max_model_len for record in self.usable("decode")), default=None)

    def why_not_ready(self) -> str:
        """Why no request could be answered for want of pods; empty when one could."""
        if self.usable("decode"):
            return ""
        if not len(self.table):
            return self.undiscovered or "no pods are known"
        reasons = [
            f"{record.name}: {record.why_unusable(self.model)}"
            for record in self.table
            if record.endpoint.role != "prefill"
        ]
        return "no decode pod can be used: " + ("; ".join(reasons[:8]) or "there is none")

    def unpaired(self) -> list[Unpaired]:
        """Pods that would take a leg, but between which and the other side no KV is ferried: compat hashes differ."""
        prefill, decode = ([(record.name, _info(record)) for record in self.usable(kind)] for kind in KINDS)
        return unpaired(prefill, decode)

    # ---- choices -----------------------------------------------------------------------------------------------

    def choose(self, ask: Ask, hashes: Hashes, now: float) -> Decision:
        """Select for a new request, and keep the decision."""
        decision = self._choose(ask, hashes, now)
        self.decisions.add(decision)
        return decision

    def _choose(self, ask: Ask, hashes: Hashes, now: float) -> Decision:
        candidates = self.candidates(hashes, now)
        decision = choose(replace(ask, barred=self.barred(now)), candidates, self._policy, self._rng)
        if decision.reason == "no_prefill" and self.must_ferry:
            # The service would rather have a transfer that may fail than none.
            decision = choose(ask, candidates, self._policy, self._rng)
        if decision.reason == "no_prefill" and (alone := self.unpaired()):
            told = {one.pair: f"compat hashes differ: {one.why}" for one in alone}
            pairs = {**decision.filtered.get("pairs", {}), **told}
            decision = replace(decision, filtered={**decision.filtered, "pairs": pairs})
        if decision.prefill is not None and decision.decode is not None:
            self.breakers.chosen(self._pair(decision.prefill, decision.decode), now)
        return decision

    def choose_again(self, ask: Ask, hashes: Hashes, now: float, need: NeedPod) -> Decision:
        """Select for a leg that failed: another pod of its kind, or a new start for an answer that has begun."""
        ask = replace(ask, excluded=need.excluded, compat_hash=need.compat_hash)
        if need.resume and not need.ferried:
            decision = replace(self._choose(ask, hashes, now), reason="resume")
        else:
            decision = self._choose_again(ask, hashes, now, need)
        self.decisions.add(decision)
        return decision

    def _choose_again(self, ask: Ask, hashes: Hashes, now: float, need: NeedPod) -> Decision:
        candidates = self.candidates(hashes, now)
        barred = {name for pair in self.barred(now) if need.beside in pair for name in pair}
        careful = replace(ask, excluded=need.excluded | barred)
        decision = choose_again(careful, candidates, self._policy, self._rng, kind=need.kind, ferried=need.ferried)
        if need.kind == "decode" and decision.decode is None and barred:
            # A pod that can hardly get the KV is better than none: at worst it computes the prompt.
            decision = choose_again(ask, candidates, self._policy, self._rng, kind="decode", ferried=need.ferried)
        return decision

    def ferried(self, prefill: str, decode: str, reason: str, now: float) -> None:
        """How a transfer between two pods went; no reason means that it went well."""
        self.breakers.result(self._pair(prefill, decode), reason, now)

    def barred(self, now: float) -> frozenset[tuple[str, str]]:
        """Pairs of pods, prefill first, that get no KV across at present."""
        barred = self.breakers.barred(now)
        return frozenset((p.prefill, p.decode) for p in barred if p == self._pair(p.prefill, p.decode))

    def _pair(self, prefill: str, decode: str) -> Pair:
        lives = []
        for name in (prefill, decode):
            record = self.table.get(name)
            lives.append("" if record is None or record.info is None else record.info.incarnation)
        return Pair(prefill, decode, *lives)

    def candidates(self, hashes: Hashes, now: float) -> list[Candidate]:
        """All described pods as selection sees them."""
        runs = {size: self.index.match(chain) for size, chain in hashes.items()}
        found = []
        for record in self.table:
            if record.info is not None:
                fresh = record.feed.fresh(now)
                run = runs.get(record.info.block_size, {}).get(record.name, 0) if fresh else 0
                found.append(self._candidate(record, record.info, run, fresh=fresh))
        return found

    def _candidate(self, record: PodRecord, info: PodInfo, run: int, *, fresh: bool) -> Candidate:
        kv_bytes = sum(group.block_bytes(info.layout.block_size) for group in info.layout.groups)
        return Candidate(
            name=record.name,
            role=info.role,
            compat_hash=info.compat_hash,
            text_digest=info.text_digest,
            block_size=info.block_size,
            total_blocks=info.total_blocks,
            max_running=max(1, info.max_running),
            max_model_len=info.max_model_len,
            kv_bytes_per_token=kv_bytes // max(1, info.layout.block_size),
            ready=not record.why_unusable(self.model),
            draining=info.draining,
            cached_blocks=run,
            load=record.feed.load if fresh else None,
            bookings=self.bookings.of(record.name),
        )

    def leaving(self) -> dict[str, int]:
        """Decode pods that drain, as they or discovery say: the longest context of those that could stand in for each.

        A pod without a stand-in is left out.
        """
        stand_ins = [_info(record) for record in self.usable("decode") if not record.drains()]
        longest: dict[str, int] = {}
        for record in self.table:
            if record.drains() and record.info is not None:
                lengths = [other.max_model_len for other in stand_ins if _same_work(other, record.info)]
                if lengths:
                    longest[record.name] = max(lengths)
        return longest

    # ---- what the state streams say ----------------------------------------------------------------------------

    def apply(self, pod: str, effects: Iterable[FeedEffect]) -> list[FetchSnapshot]:
        """Bring the index in step with a feed; returns the snapshots to fetch."""
        fetches = []
        for effect in effects:
            match effect:
                case FetchSnapshot():
                    fetches.append(effect)
                case Replace():
                    self.index.drop(pod)
                    self.index.store(pod, effect.hashes)
                case Store():
                    self.index.store(pod, effect.hashes)
                case Remove():
                    self.index.remove(pod, effect.hashes)
                case Forget():
                    self.index.drop(pod)
        return fetches

    def forget(self, pod: str) -> None:
        """A pod is gone: so are its entries."""
        self.index.drop(pod)


def _same_work(one: PodInfo, other: PodInfo) -> bool:
    """Whether an answer of one could go on at the other, if it has room: as selection asks (``select/filters.py``)."""
    return (one.compat_hash, one.text_digest) == (other.compat_hash, other.text_digest)


def _info(record: PodRecord) -> PodInfo:
    assert record.info is not None, "a usable pod has described itself"
    return record.info
