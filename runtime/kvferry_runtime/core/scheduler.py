"""The scheduler: which sequences get blocks and a share of the next step's token budget.

The policy, first come first served (by the leg's arrival):

1. Running sequences first, in the order of their admission, prefill chunks and decode tokens from one budget. One
   that needs a block when none is free preempts the last admitted; if it is itself the last it gives way. A sequence
   that runs alone is never preempted: it takes ferried blocks back from sequences that wait, or waits a step for
   blocks that leases and transfers hold.
2. If nothing was preempted: waiting sequences. Those that hold ferried blocks come first; then by arrival, each only
   if the whole of it fits (input and emitted ids, and a watermark when it joins others). The first that does not fit
   stops admission, so that none is overtaken for ever. Sequences that wait for a transfer slot stop only each other.
3. When nothing has moved for ``Limits.room_wait_s`` (no row, no transfer), the blocks are with leases whose readers may
   wait for room just as this engine does, and on it: sequences that wait to pull give up their own leases, so that no
   two engines wait for each other. They compute their KV when there is room, or end if they may not.
"""

import bisect
import itertools
from dataclasses import dataclass, field

from kvferry_runtime.core.config import CoreConfig
from kvferry_runtime.core.kv_manager import KVManager
from kvferry_runtime.core.leg import LiveLeg
from kvferry_runtime.core.messages import DropLease, EngineEffect, StartPull
from kvferry_runtime.core.plan import Pick, Row
from kvferry_runtime.core.sequence import Event, Sequence, State

NO_ROOM = "no_room"  # of `transfer.reasons.RecomputeReason`


@dataclass(slots=True)
class _Step:
    """What one call of ``schedule`` has decided so far."""

    budget: int
    rows: list[Row] = field(default_factory=list)
    planned: list[Sequence] = field(default_factory=list)  # the rows' sequences
    effects: list[EngineEffect] = field(default_factory=list)
    preempted: bool = False


class Scheduler:
    """Queues of sequences and the policy over them. It emits no tokens and ends no leg."""

    def __init__(self, config: CoreConfig, kv: KVManager) -> None:
        self._config = config
        self._kv = kv
        self._numbers = itertools.count(1)
        self.running: list[Sequence] = []  # in the order of admission; forks stand behind their root
        self.ready: list[Sequence] = []  # by arrival
        self.waiting: list[Sequence] = []  # by arrival: a preempted sequence is ahead of those that never ran
        self.remote: list[Sequence] = []  # by arrival
        self.pulling: list[Sequence] = []
        self.preemptions = 0
        self._stuck_since: float | None = None
        self._helpless: list[LiveLeg] = []

    # ---- sequences come, go and change ----

    def start(self, leg: LiveLeg, choice: int | None, *, remote: bool) -> None:
        """A new leg's only sequence (for one choice, or a root for all) waits for its turn, or for its KV."""
        sequence = self._new_sequence(leg, choice, State.REMOTE if remote else State.WAITING)
        if remote:
            self.remote.append(sequence)
        else:
            self._queue(sequence)

    def pulled(self, sequence: Sequence, token_count: int) -> None:
        """The sequence's ferried blocks are valid for the first `token_count` positions."""
        sequence.apply(Event.PULLED)
        self.pulling.remove(sequence)
        needs_logits = sequence.choice is None and bool(sequence.leg.unpicked_choices())
        last = len(sequence.tokens) - 1 if sequence.choice is not None or needs_logits else len(sequence.tokens)
        sequence.computed = min(token_count, last)
        self._kv.publish_computed(sequence)
        bisect.insort(self.ready, sequence, key=_order)

    def pull_failed(self, sequence: Sequence) -> None:
        """The sequence computes its KV itself."""
        sequence.apply(Event.PULL_FAILED)
        self.pulling.remove(sequence)
        self._kv.release(sequence)
        self._queue(sequence)

    def go_local(self, sequence: Sequence) -> None:
        """The sequence no longer waits for remote KV."""
        sequence.apply(Event.GO_LOCAL)
        self.remote.remove(sequence)
        self._queue(sequence)

    def end(self, sequence: Sequence) -> None:
        """Take the sequence out, with all its blocks; blocks that a transfer writes stay the transfer's."""
        queue = {
            State.RUNNING: self.running,
            State.READY: self.ready,
            State.WAITING: self.waiting,
            State.REMOTE: self.remote,
            State.PULLING: self.pulling,
        }[sequence.state]
        sequence.apply(Event.END)
        queue.remove(sequence)
        sequence.leg.sequences.remove(sequence)
        self._kv.release(sequence)

    def split(self, root: Sequence) -> None:
        """A running root whose prompt is in KV becomes its first open choice; the others fork off it."""
        leg = root.leg
        first, *others = leg.open_choices()
        children = [self._new_sequence(leg, choice, State.WAITING) for choice in others]
        at = self.running.index(root) + 1
        for child in children:
            if len(self.running) < self._config.max_running and self._kv.can_fork(root):
                self._kv.fork(root, child)
                child.apply(Event.ADMIT)
                self.running.insert(at, child)
                at += 1
            else:
                self._queue(child)
        root.choice = first
        root.tokens.extend(leg.choices[first].emitted)

    def take_helpless(self) -> list[LiveLeg]:
        """Legs that have to give their lease up and may not compute its KV: the caller ends them."""
        helpless, self._helpless = self._helpless, []
        return helpless

    # ---- one step ----

    def schedule(self, now: float) -> tuple[list[Row], list[Sequence], list[EngineEffect]]:
        """Choose the rows of the next step (and say whose they are), and start pulls for which there is room."""
        step = _Step(self._config.token_budget)
        self._schedule_running(step)
        if not step.preempted and self._admit_ready(step):
            self._admit_by_arrival(step, now)
        self._give_way(step, now)
        return step.rows, step.planned, step.effects

    def _schedule_running(self, step: _Step) -> None:
        index = 0
        while index < len(self.running) and step.budget > 0:
            sequence = self.running[index]
            if self._make_room(sequence, step):
                self._add_row(sequence, step)
            if sequence.state is State.RUNNING:
                index += 1

    def _make_room(self, sequence: Sequence, step: _Step) -> bool:
        """Get the block that a running sequence needs; ``False``: it has no row in this step."""
        while not self._kv.can_grow(sequence):
            victim = self.running[-1]
            if len(self.running) > 1:
                self._preempt(victim)
                step.preempted = True
                if victim is sequence:
                    return False
            elif self.ready:
                self._reclaim(self.ready[-1])
            else:
                return False
        self._kv.grow(sequence)
        return True

    def _admit_ready(self, step: _Step) -> bool:
        """Admit sequences that hold ferried blocks; ``False``: one of them has no room, so none else has."""
        while self.ready and step.budget > 0 and len(self.running) < self._config.max_running:
            sequence = self.ready[0]
            while not self._kv.can_grow(sequence):
                if self.running or len(self.ready) == 1:
                    return False
                self._reclaim(self.ready[-1])
            del self.ready[0]
            self._run(sequence, step)
        return True

    def _admit_by_arrival(self, step: _Step, now: float) -> None:
        local_open = pulls_open = True
        while True:
            local_open = local_open and step.budget > 0 and len(self.running) < self._config.max_running
            pulls_open = pulls_open and len(self._kv.pulls) < self._config.limits.transfers
            local = self.waiting[0] if local_open and self.waiting else None
            remote = self.remote[0] if pulls_open and self.remote else None
            if remote is not None and (local is None or remote.order < local.order):
                if not self._serve_remote(remote, step, now):
                    return
            elif local is not None:
                if not self._serve_local(local, step):
                    return
            else:
                return

    def _serve_remote(self, sequence: Sequence, step: _Step, now: float) -> bool:
        """Start the sequence's pull, or let it go local if its prompt is cached; ``False``: no room."""
        leg = sequence.leg
        handle = leg.submit.handle
        assert handle is not None
        if self._kv.covers(self._kv.lookup(sequence), handle.token_count):
            self.go_local(sequence)
            step.effects.append(DropLease(key=leg.key, reason="cached"))
            return True
        if not self._kv.pool.can_allocate(handle.block_count + self._spare()):
            return False
        del self.remote[0]
        sequence.apply(Event.START_PULL)
        self.pulling.append(sequence)
        blocks = self._kv.begin_pull(sequence, handle.block_count)
        deadline_s = max(0.0, leg.deadline - now)
        step.effects.append(StartPull(key=leg.key, handle=handle, blocks=(blocks,), deadline_s=deadline_s))
        return True

    def _serve_local(self, sequence: Sequence, step: _Step) -> bool:
        """Admit the first waiting sequence; ``False``: no room."""
        hits = self._kv.lookup(sequence)
        if not self._kv.can_admit(sequence, hits, self._spare()):
            return False
        del self.waiting[0]
        self._kv.admit(sequence, hits)
        if sequence.leg.cached_tokens is None:
            sequence.leg.cached_tokens = min(sequence.computed, sequence.leg.prompt_len)
        self._run(sequence, step)
        return True

    def _give_way(self, step: _Step, now: float) -> None:
        """Rule 3."""
        if step.rows or self._kv.pulls or not self.remote:
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = now
        elif now - self._stuck_since >= self._config.limits.room_wait_s:
            self._stuck_since = None
            for sequence in tuple(self.remote):
                if sequence.leg.submit.must_pull:
                    self._helpless.append(sequence.leg)
                    continue
                sequence.leg.recomputed = NO_ROOM
                self.go_local(sequence)
                step.effects.append(DropLease(key=sequence.leg.key, reason=NO_ROOM))

    def _spare(self) -> int:
        """Blocks to leave free: the watermark, when a sequence joins others."""
        return self._config.watermark_blocks if self.running else 0

    def _run(self, sequence: Sequence, step: _Step) -> None:
        """Put an admitted sequence into the running batch, and into this step."""
        sequence.apply(Event.ADMIT)
        self.running.append(sequence)
        if sequence.choice is None and sequence.computed == len(sequence.tokens):
            before = len(self.running) - 1
            self.split(sequence)
            members = self.running[before:]
        else:
            members = [sequence]
        for member in members:
            if step.budget > 0 and self._kv.can_grow(member):
                self._kv.grow(member)
                self._add_row(member, step)

    def _add_row(self, sequence: Sequence, step: _Step) -> None:
        first = sequence.computed
        end = min(len(sequence.tokens), first + step.budget)
        step.budget -= end - first
        picks: tuple[Pick, ...] = ()
        if end == len(sequence.tokens):
            leg = sequence.leg
            choices = leg.unpicked_choices() if sequence.choice is None else (sequence.choice,)
            picks = tuple([leg.pick_for(choice) for choice in choices])
        tokens = tuple(sequence.tokens[first:end])
        step.planned.append(sequence)
        step.rows.append(Row(sequence.number, first, tokens, tuple(sequence.table), picks))

    # ---- moves ----

    def _new_sequence(self, leg: LiveLeg, choice: int | None, state: State) -> Sequence:
        tokens = list(leg.submit.prompt_ids) if choice is None else leg.tokens_of(choice)
        sequence = Sequence(next(self._numbers), leg, choice, tokens, state)
        leg.sequences.append(sequence)
        return sequence

    def _queue(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, sequence, key=_order)

    def _preempt(self, sequence: Sequence) -> None:
        sequence.apply(Event.PREEMPT)
        self.running.remove(sequence)
        self._kv.release(sequence)
        self._queue(sequence)
        self.preemptions += 1

    def _reclaim(self, sequence: Sequence) -> None:
        sequence.apply(Event.RECLAIM)
        self.ready.remove(sequence)
        self._kv.release(sequence)
        self._queue(sequence)
        self.preemptions += 1


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
