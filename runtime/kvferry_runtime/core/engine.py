"""The decision core of an engine: events and the time in, effects and steps to compute out.

A shell calls, in a loop on one thread: ``handle`` for each event, ``expire``, ``schedule``, and, when that gives a
plan, the model runner and then ``commit`` (or ``abandon``) before anything else. The core reads no clock, does no I/O
and knows no tensor.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

from kvferry_runtime.core.admission import Refusal, fault_of, handle_fault, no_room_for_lease, queue_full
from kvferry_runtime.core.config import CoreConfig
from kvferry_runtime.core.handoff import parcel_of
from kvferry_runtime.core.idle_walk import IdleWalk
from kvferry_runtime.core.integrity import IntegrityError
from kvferry_runtime.core.kv_manager import KVManager
from kvferry_runtime.core.leg import Choice, LiveLeg
from kvferry_runtime.core.messages import (
    AbortLeg,
    Drain,
    DropLease,
    EngineEffect,
    EngineInput,
    FailOut,
    GrantLease,
    HandedOver,
    HandOver,
    HoldLease,
    LeaseEnded,
    LegKey,
    PrefilledOut,
    PullFinished,
    StopChoice,
    Submit,
    TokensOut,
)
from kvferry_runtime.core.plan import StepPlan, StepResult
from kvferry_runtime.core.scheduler import NO_ROOM, Scheduler
from kvferry_runtime.core.sequence import Sequence, State
from kvferry_runtime.core.tombstones import Tombstones
from kvferry_wire.frames import FailKind
from kvferry_wire.hashing import prompt_digest
from kvferry_wire.state import Load, StateEvent

_HOLDS_LEASE = (State.REMOTE, State.PULLING)


class EngineCore:
    """Legs, their sequences, leases and pulls of one engine."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self._kv = KVManager(config)
        self._walk = IdleWalk(self._kv)
        self._scheduler = Scheduler(config, self._kv)
        self._legs: dict[LegKey, LiveLeg] = {}
        self._tombstones = Tombstones(config.limits.tombstone_s, config.limits.tombstones)
        self._arrivals = itertools.count(1)
        self._lease_ids = itertools.count(1)
        self._steps = 0
        self._plan: StepPlan | None = None
        self._planned: list[Sequence] = []
        self._reserved = 0
        self._draining = False
        self._leaving: set[LegKey] = set()  # legs to be handed over as soon as no transfer works for them
        self._next_deadline = math.inf
        self._handlers: dict[type[Any], Callable[[Any, float], list[EngineEffect]]] = {
            Submit: self._submit,
            AbortLeg: self._abort,
            StopChoice: self._stop_choice,
            Drain: self._drain,
            HandOver: self._hand_over,
            PullFinished: self._pull_finished,
            LeaseEnded: self._lease_ended,
        }

    # ---- the contract ----

    def handle(self, event: EngineInput, now: float) -> list[EngineEffect]:
        """Take one event. Never call it between ``schedule`` and ``commit``."""
        self._between_steps("handle")
        return self._handlers[type(event)](event, now)

    def expire(self, now: float) -> list[EngineEffect]:
        """Fail the legs whose deadline has passed and free all they hold."""
        self._between_steps("expire")
        if now < self._next_deadline:
            return []
        effects: list[EngineEffect] = []
        for leg in [leg for leg in self._legs.values() if leg.deadline <= now]:
            effects += self._fail(leg, "deadline", "the request's deadline has passed")
        self._next_deadline = min((leg.deadline for leg in self._legs.values()), default=math.inf)
        return effects

    def schedule(self, now: float) -> tuple[StepPlan | None, list[EngineEffect]]:
        """The next step, ``None`` when there is nothing to compute now, and pulls that can start."""
        self._between_steps("schedule")
        left = [effect for key in tuple(self._leaving) for effect in self._try_hand_over(self._legs[key])]
        rows, planned, effects = self._scheduler.schedule(now)
        effects = left + effects
        for leg in self._scheduler.take_helpless():
            effects += self._not_ferried(leg, NO_ROOM)
        if not rows:
            return None, effects
        self._steps += 1
        self._plan = StepPlan(self._steps, tuple(rows), self._kv.pending_copies())
        self._planned = planned
        return self._plan, effects

    def commit(self, plan: StepPlan, picked: StepResult, now: float) -> list[EngineEffect]:
        """Take the results of the step that ``schedule`` gave last."""
        planned = self._end_step(plan)
        if len(picked.picks) != sum(len(row.picks) for row in plan.rows):
            raise IntegrityError(f"{plan!r} has {sum(len(row.picks) for row in plan.rows)} picks, {picked} came")
        self._kv.copied(plan.copies)
        tokens = iter(picked.picks)
        effects: list[EngineEffect] = []
        for row, sequence in zip(plan.rows, planned, strict=True):
            sequence.computed = row.first + len(row.token_ids)
            self._kv.publish_computed(sequence)
            if sequence.computed < len(sequence.tokens):
                continue
            leg = sequence.leg
            if sequence.choice is not None:
                effects.append(self._picked(leg, sequence, sequence.choice, next(tokens)))
            elif leg.submit.kind == "prefill":
                effects += self._prompt_prefilled(leg, sequence, [next(tokens) for _ in row.picks])
            else:
                effects += [self._picked(leg, None, pick.choice, next(tokens)) for pick in row.picks]
                if leg.open_choices():
                    self._scheduler.split(sequence)
            self._close_if_done(leg)
        return effects

    def abandon(self, plan: StepPlan, message: str) -> list[EngineEffect]:
        """The step could not be computed: fail every leg in it. `message` is fit for the client."""
        legs = {sequence.leg.key: sequence.leg for sequence in self._end_step(plan)}
        effects: list[EngineEffect] = []
        for leg in legs.values():
            effects += self._fail(leg, "internal", message)
        return effects

    @property
    def next_deadline(self) -> float:
        """When ``expire`` may have something to do at the earliest; infinity when no leg lives."""
        return self._next_deadline

    @property
    def preemptions(self) -> int:
        """Sequences that lost their blocks to another one, since the start."""
        return self._scheduler.preemptions

    @property
    def steps(self) -> int:
        """Steps planned since the start."""
        return self._steps

    def load(self) -> Load:
        """What the router balances by."""
        queues = self._scheduler
        waiting = (*queues.waiting, *queues.remote, *queues.pulling, *queues.ready)
        return Load(
            running=len(queues.running),
            waiting=len({sequence.leg.key for sequence in waiting}),
            queued_tokens=sum(len(sequence.tokens) - sequence.computed for sequence in waiting),
            free_blocks=self._kv.pool.available,
            total_blocks=self._kv.pool.total,
            leases=len(self._kv.leases),
            draining=self._draining,
        )

    def drain_kv_events(self) -> list[StateEvent]:
        """Changes of the prefix cache since the last call."""
        return self._kv.cache.drain_events()

    def snapshot_hashes(self) -> tuple[bytes, ...]:
        """All blocks in the prefix cache. Events of earlier changes are to be drained before."""
        return self._kv.cache.hashes()

    def idle(self) -> bool:
        """No leg lives and no transfer writes; leases may still be held."""
        return not self._legs and not self._kv.pulls and self._plan is None

    def has_work(self) -> bool:
        """Whether ``schedule`` may give a step without another event."""
        queues = self._scheduler
        return bool(queues.running or queues.waiting or queues.ready or queues.remote)

    def reset_prefix_cache(self) -> None:
        """Unpublish every cached block. Running sequences and leases keep theirs."""
        self._kv.reset_cache()

    def check_accounts(self) -> None:
        """Check what is live: queues, reservations, and an owner for each reference.

        Raises:
            IntegrityError: an account does not add up; the message prints every term.
        """
        self._kv.check_accounts(self._check_queues())

    def walk_idle(self) -> bool:
        """Check a slice of all blocks; whether every one has been since one has changed hands. See ``IdleWalk``.

        Raises:
            IntegrityError: naming the block.
        """
        return self._walk.turn()

    def check_integrity(self) -> None:
        """Check all of the engine's books at once, which takes as long as it has blocks.

        Raises:
            IntegrityError: an account does not add up; the message prints every term.
        """
        self._kv.check_integrity(self._check_queues())

    def _check_queues(self) -> list[Sequence]:
        """All sequences, each in one queue and of one leg."""
        queues = self._scheduler
        queued = [*queues.running, *queues.waiting, *queues.ready, *queues.remote, *queues.pulling]
        owned = [sequence for leg in self._legs.values() for sequence in leg.sequences]
        if {sequence.number for sequence in queued} != {sequence.number for sequence in owned} or len(queued) != len(
            owned
        ):
            raise IntegrityError(f"queues hold {queued}, legs own {owned}")
        reserved = sum(leg.reserved for leg in self._legs.values())
        if reserved != self._reserved:
            raise IntegrityError(f"{self._reserved} blocks are reserved for leases, legs reserved {reserved}")
        if self._kv.leased + reserved > self.config.lease_blocks:
            raise IntegrityError(f"leases hold {self._kv.leased} + {reserved} of {self.config.lease_blocks} blocks")
        return owned

    def __repr__(self) -> str:
        queues = self._scheduler
        return (
            f"EngineCore(legs={len(self._legs)}, running={len(queues.running)}, waiting={len(queues.waiting)}, "
            f"ready={len(queues.ready)}, remote={len(queues.remote)}, pulling={len(queues.pulling)}, "
            f"leases={len(self._kv.leases)}, {self._kv.pool!r})"
        )

    # ---- events ----

    def _submit(self, submit: Submit, now: float) -> list[EngineEffect]:
        refusal = self._refusal(submit, now)
        if refusal is not None:
            return [FailOut(key=submit.key, kind=refusal.kind, message=refusal.message)]
        leg = LiveLeg(
            submit=submit,
            arrival=next(self._arrivals),
            deadline=now + submit.deadline_s,
            extras=submit.extras.canonical(),
            max_model_len=self.config.max_model_len,
            choices=[Choice(list(emitted)) for emitted in submit.emitted],
            recomputed=submit.recompute,
        )
        effects: list[EngineEffect] = []
        if submit.handle is not None:
            effects.append(HoldLease(key=leg.key, handle=submit.handle, deadline_s=submit.deadline_s))
        effects += self._end_choices_at_submit(leg)
        open_choices = leg.open_choices()
        if not open_choices:
            if submit.handle is not None:
                effects.append(DropLease(key=leg.key, reason="ended"))
            if submit.kind == "prefill":
                effects.append(PrefilledOut(key=leg.key, first=self._first_tokens(leg), cached_tokens=0))
            return effects
        fault = handle_fault(submit, self.config)
        if submit.must_pull and (fault or submit.handle is None):
            if submit.handle is not None:
                effects.append(DropLease(key=leg.key, reason=fault))
            return [*effects, _not_ferried(leg, fault or submit.recompute)]
        if fault:
            leg.recomputed = fault
            effects.append(DropLease(key=leg.key, reason=fault))
        if submit.kind == "prefill":
            leg.reserved = self.config.blocks_for(leg.prompt_len)
            self._reserved += leg.reserved
        self._legs[leg.key] = leg
        self._next_deadline = min(self._next_deadline, leg.deadline)
        alone = submit.kind == "generate" and len(open_choices) == 1
        self._scheduler.start(leg, open_choices[0] if alone else None, remote=submit.handle is not None and not fault)
        return effects

    def _refusal(self, submit: Submit, now: float) -> Refusal | None:
        """Why the leg is not taken."""
        if self._tombstones.holds(submit.key, now):
            return Refusal("cancelled", "the request was cancelled before it arrived")
        if submit.key in self._legs or submit.key in self._kv.pulls:
            return Refusal("invalid", "a request with this internal id and attempt is being served")
        if submit.deadline_s <= 0:
            return Refusal("deadline", "the request's deadline has passed")
        if self._draining:
            return Refusal("draining", "this engine is being drained and takes no new request")
        queued = {sequence.leg.key for sequence in (*self._scheduler.waiting, *self._scheduler.remote)}
        return (
            fault_of(submit, self.config)
            or queue_full(len(queued), self.config)
            or no_room_for_lease(submit, self._kv.leased + self._reserved, self.config)
        )

    def _end_choices_at_submit(self, leg: LiveLeg) -> list[EngineEffect]:
        """Choices whose emitted ids end them already need nothing more."""
        effects: list[EngineEffect] = []
        for index, choice in enumerate(leg.choices):
            end = leg.ending_of(index)
            if end is None:
                continue
            choice.ended = True
            if leg.submit.kind == "generate":
                effects.append(
                    TokensOut(key=leg.key, choice=index, ids=(), finish=end.finish, stop_token=end.stop_token)
                )
        return effects

    def _abort(self, event: AbortLeg, now: float) -> list[EngineEffect]:
        self._tombstones.add(event.key, now)
        leg = self._legs.get(event.key)
        return [] if leg is None else self._remove(leg, "cancelled")

    def _stop_choice(self, event: StopChoice, now: float) -> list[EngineEffect]:
        leg = self._legs.get(event.key)
        if leg is None or leg.submit.kind == "prefill" or not 0 <= event.choice < len(leg.choices):
            return []
        if leg.choices[event.choice].ended:
            return []
        leg.choices[event.choice].ended = True
        for sequence in [sequence for sequence in leg.sequences if sequence.choice == event.choice]:
            if sequence.state not in _HOLDS_LEASE:
                self._scheduler.end(sequence)
        return [] if leg.open_choices() else self._remove(leg, "ended")

    def _drain(self, event: Drain, now: float) -> list[EngineEffect]:
        self._draining = True
        return []

    def _hand_over(self, event: HandOver, now: float) -> list[EngineEffect]:
        leg = self._legs.get(event.key)
        if leg is None or leg.submit.kind != "generate":
            return []
        self._leaving.add(leg.key)
        return self._try_hand_over(leg)

    def _try_hand_over(self, leg: LiveLeg) -> list[EngineEffect]:
        """End a leg that leaves: with a lease on its KV, or to be computed anew. Nothing yet while its KV is pulled."""
        if any(sequence.state in _HOLDS_LEASE for sequence in leg.sequences):
            return []  # whoever went on would find the lease of its prompt given up
        parcel = parcel_of(leg, self.config.block_size)
        if parcel is None:
            if leg.submit.must_pull:
                return []  # it has to be computed somewhere, and the lease of its prompt is gone: so here
            return self._fail(leg, "draining", "this engine is being drained and gives the request back")
        lease_id = next(self._lease_ids)
        self._kv.hand_over(parcel.blocks, lease_id)
        grant = GrantLease(
            key=leg.key,
            lease_id=lease_id,
            epoch=self.config.epoch,
            prompt_digest=prompt_digest(self.config.kv_key, parcel.ids, leg.submit.extras),
            blocks=(parcel.blocks,),
            token_count=len(parcel.ids),
        )
        return [*self._remove(leg, "moved"), grant, HandedOver(key=leg.key)]

    def _pull_finished(self, event: PullFinished, now: float) -> list[EngineEffect]:
        if not self._kv.end_pull(event.key):
            return []
        leg = self._legs.get(event.key)
        sequence = None if leg is None else next((s for s in leg.sequences if s.state is State.PULLING), None)
        if leg is None or sequence is None:
            return []  # the leg ended meanwhile; its blocks are free now
        if event.reason:
            leg.recomputed = event.reason
            self._scheduler.pull_failed(sequence)
            if leg.submit.must_pull:
                return self._not_ferried(leg, event.reason)
        else:
            assert leg.submit.handle is not None
            self._scheduler.pulled(sequence, leg.submit.handle.token_count)
        return []

    def _lease_ended(self, event: LeaseEnded, now: float) -> list[EngineEffect]:
        self._kv.end_lease(event.lease_id)
        return []

    # ---- results of a step ----

    def _picked(self, leg: LiveLeg, sequence: Sequence | None, choice: int, token: int) -> TokensOut:
        """Book a picked token; a sequence that it does not end goes on with it as input."""
        leg.choices[choice].emitted.append(token)
        end = leg.ending_of(choice)
        if end is not None:
            leg.choices[choice].ended = True
            if sequence is not None:
                self._scheduler.end(sequence)
        elif sequence is not None:
            sequence.tokens.append(token)
        return TokensOut(
            key=leg.key,
            choice=choice,
            ids=(token,),
            finish=None if end is None else end.finish,
            stop_token=None if end is None else end.stop_token,
            cached_tokens=leg.cached_tokens or 0,
            recomputed=leg.take_recomputed(),
        )

    def _prompt_prefilled(self, leg: LiveLeg, root: Sequence, tokens: list[int]) -> list[EngineEffect]:
        """Keep the prompt's blocks under a lease for whoever decodes, and end the leg."""
        for choice, token in zip(leg.unpicked_choices(), tokens, strict=True):
            leg.choices[choice].emitted.append(token)
            leg.choices[choice].ended = leg.ending_of(choice) is not None
        effects: list[EngineEffect] = []
        if leg.open_choices():
            lease_id = next(self._lease_ids)
            effects.append(
                GrantLease(
                    key=leg.key,
                    lease_id=lease_id,
                    epoch=self.config.epoch,
                    prompt_digest=prompt_digest(self.config.kv_key, leg.submit.prompt_ids, leg.submit.extras),
                    blocks=(self._kv.to_lease(root, lease_id),),
                    token_count=leg.prompt_len,
                )
            )
        effects.append(PrefilledOut(key=leg.key, first=self._first_tokens(leg), cached_tokens=leg.cached_tokens or 0))
        self._remove(leg, "ended")
        return effects

    @staticmethod
    def _first_tokens(leg: LiveLeg) -> tuple[int, ...]:
        return tuple(choice.emitted[0] for choice in leg.choices)

    # ---- ends of legs ----

    def _close_if_done(self, leg: LiveLeg) -> None:
        if leg.key in self._legs and not leg.open_choices():
            self._remove(leg, "ended")

    def _not_ferried(self, leg: LiveLeg, reason: str) -> list[EngineEffect]:
        """The KV of a leg that may not compute it could not be had."""
        return [*self._remove(leg, reason), _not_ferried(leg, reason)]

    def _fail(self, leg: LiveLeg, kind: FailKind, message: str) -> list[EngineEffect]:
        return [*self._remove(leg, kind), FailOut(key=leg.key, kind=kind, message=message)]

    def _remove(self, leg: LiveLeg, reason: str) -> list[EngineEffect]:
        """End all of a leg's sequences and forget it; its lease, if one is held for it, is dropped."""
        holds_lease = any(sequence.state in _HOLDS_LEASE for sequence in leg.sequences)
        for sequence in list(leg.sequences):
            self._scheduler.end(sequence)
        self._reserved -= leg.reserved
        leg.reserved = 0
        del self._legs[leg.key]
        self._leaving.discard(leg.key)
        return [DropLease(key=leg.key, reason=reason)] if holds_lease else []

    # ---- order of calls ----

    def _between_steps(self, call: str) -> None:
        if self._plan is not None:
            raise RuntimeError(f"{call}: step {self._plan.number} is not committed")

    def _end_step(self, plan: StepPlan) -> list[Sequence]:
        if plan is not self._plan:
            raise RuntimeError(f"{plan!r} is not the step in progress")
        self._plan = None
        planned, self._planned = self._planned, []
        return planned


def _not_ferried(leg: LiveLeg, reason: str) -> FailOut:
    return FailOut(
        key=leg.key, kind="transfer", message=f"the prompt's KV could not be ferried: {reason}", reason=reason
    )
