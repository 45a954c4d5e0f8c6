"""What clients tell of their requests: one record each, a line of JSON between the clients' process and the harness."""

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One request as its client saw it. Times are of time.monotonic, the same clock in all processes of a machine."""

    client: int
    number: int
    router: str
    begun: float
    ended: float
    status: int = 0  # 0: no answer began
    path: str = ""  # as the router says: disaggregated, aggregated, recomputed
    whole: bool = False  # answered to its end, and rightly
    error: str = ""  # the code of an explicit error
    silent: str = ""  # how it ended without a right end and without an error: `cut`, `refused`, `hung`
    wrong: str = ""  # why the answer is none that the model gives
    done: bool = False  # [DONE] came
    resumed: tuple[str, ...] = ()  # how decode legs were lost
    recomputed: str = ""  # why the prompt was computed by decode
    first_s: float = 0.0  # to the first text
    gap_s: float = 0.0  # the longest between two pieces of text
    pieces: int = 0
    prompt: str = ""  # of a real model, whose judge comes later
    text: str = ""


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What a clients' process is to do, until its standard input ends."""

    routers: dict[str, str]  # name -> URL
    clients: int
    seed: int
    model: str  # as clients name it
    source: str  # as the manifest names it: which toy it is, if it is one
    deadline_s: float  # the service's own for a request
    prompts: tuple[str, ...] = ()  # of a real model
    max_tokens: int = 40  # of a real model
