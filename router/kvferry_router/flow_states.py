"""The states of a request's flow and, for each state and event, the name of what ``flow.RequestFlow`` does.

new -> prefilling <-> choosing_prefill <-> waiting_for_prefill
new, prefilling, choosing_prefill -> decoding -> streaming -> ending -> done
decoding, streaming, ending -> choosing_decode <-> waiting_for_decode
choosing_decode -> decoding, streaming, prefilling
any -> done
"""

import enum

from kvferry_router.flow_messages import ClientGone, Event, LegClosed, LegFrames, PodChosen, Start, Stopping, Tick


class State(enum.Enum):
    NEW = "new"
    PREFILLING = "prefilling"
    CHOOSING_PREFILL = "choosing_prefill"
    WAITING_FOR_PREFILL = "waiting_for_prefill"  # every prefill pod is full
    CHOOSING_DECODE = "choosing_decode"
    WAITING_FOR_DECODE = "waiting_for_decode"  # no pod can go on with the answer now
    DECODING = "decoding"  # the client has no byte yet
    STREAMING = "streaming"  # the client has bytes
    ENDING = "ending"  # `End` is here; waiting for the leg's stream to close behind it
    DONE = "done"


class IllegalEventError(RuntimeError):
    """An event that cannot happen in this state; nothing was changed."""

    def __init__(self, state: State, event: object) -> None:
        super().__init__(f"{type(event).__name__} in state {state.value}")


EVENTS: tuple[type[Event], ...] = (Start, PodChosen, LegFrames, LegClosed, ClientGone, Stopping, Tick)

_LEG = ("_frames", "_closed")
_LATE = ("_ignore", "_ignore")  # news of a leg that was given up
_END = ("_gone", "_stopped", "_tick")

# By state, a method per event, in the order of EVENTS; none where the event cannot happen.
_ROWS: dict[State, tuple[str | None, ...]] = {
    State.NEW: ("_start", None, None, None, *_END),
    State.PREFILLING: (None, None, *_LEG, *_END),
    State.CHOOSING_PREFILL: (None, "_prefill_chosen", *_LATE, *_END),
    State.WAITING_FOR_PREFILL: (None, None, *_LATE, *_END),
    State.CHOOSING_DECODE: (None, "_decode_chosen", *_LATE, *_END),
    State.WAITING_FOR_DECODE: (None, None, *_LATE, *_END),
    State.DECODING: (None, None, *_LEG, *_END),
    State.STREAMING: (None, None, *_LEG, *_END),
    State.ENDING: (None, None, *_LEG, "_gone", "_stopped_at_end", "_tick"),
    State.DONE: (None, "_ignore", *_LATE, "_ignore", "_ignore", "_ignore"),
}

TRANSITIONS: dict[tuple[State, type[Event]], str | None] = {
    (state, event): name for state, row in _ROWS.items() for event, name in zip(EVENTS, row, strict=True)
}
