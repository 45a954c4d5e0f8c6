"""Every default and cap, in one place; ``GET /internal/v1/info`` shows them.

Durations are seconds, sizes are bytes, counts are counts. A value that a manifest or a flag can change is the default
of that flag; the others are fixed.
"""

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Caps and deadlines of one process."""

    # Requests
    request_deadline_s: float = 600.0  # from the router's accept to the end of the answer; sent on as time remaining
    queue: int = 512  # requests waiting in one engine, and in one router
    choices: int = 8  # `n`
    messages: int = 1024  # of one chat request
    content_parts: int = 1024  # of one message
    stop_strings: int = 16
    stop_string_chars: int = 256
    stop_token_ids: int = 64
    text_chars: int = 1_000_000  # of all prompt text in a request, before it is tokenized
    rendered_chars: int = 2_000_000  # of what a chat template makes of the messages

    # HTTP
    body_bytes: int = 4 * 2**20
    bodies_bytes: int = 256 * 2**20  # of all requests at one router; a request that would exceed it is refused
    header_bytes: int = 16 * 2**10  # of one header line
    connections: int = 2048
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    request_id_chars: int = 128

    # Frames between router and pod
    frame_bytes: int = 8 * 2**20
    alive_interval_s: float = 1.0
    stall_timeout_s: float = 5.0  # no frame for this long is the leg's death
    tombstone_s: float = 60.0  # an aborted leg that arrives later than its abort is refused for this long
    tombstones: int = 8192
    leg_outputs: int = 65536  # outputs of one leg that wait for its connection; more than that ends it

    # Between a pod's API server and its EngineCore
    engine_messages: int = 10_000  # that wait in one direction
    engine_start_s: float = 900.0  # load of the model included
    engine_wedged_s: float = 9.0  # no step and no idle tick for this long: the pod is not live
    engine_kill_s: float = 20.0  # and for this long: the EngineCore is killed and started again
    engine_stop_s: float = 5.0  # an ordered end that takes longer is a hard one

    # Leases and transfers
    lease_s: float = 15.0
    renew_fraction: float = 1 / 6  # of the lease: the interval between renewals
    first_renew_s: float = 0.02  # the first one, which a pull that is over by then does without
    answer_s: float = 30.0  # a granted lease whose answer nobody reports as written ends after this
    leases: int = 65_536  # live in one engine; its blocks bound them earlier
    ended_lease_s: float = 60.0  # an expired lease is answered `expired` for this long, then `unknown`
    ended_leases: int = 4096  # ended leases remembered at most
    lease_share: float = 0.5  # of a prefill pod's blocks that leases may hold; beyond it prefill answers busy
    control_message_bytes: int = 1 * 2**20
    control_reply_s: float = 2.0  # a reply that takes longer is lost; the message is sent again
    challenge_s: float = 1.0  # a peer of the KV and state ports that has not proved its key by then is closed
    connect_s: float = 2.0
    transfer_floor_s: float = 2.0  # deadline of a pull: this much plus its bytes at the least bandwidth
    transfer_min_bytes_per_s: float = 20 * 2**20
    read_blocks: int = 64  # of one read request on the data plane
    read_bytes: int = 8 * 2**20  # of one read request, about; one block at least
    transfer_stall_s: float = 5.0  # no byte moves on a data connection in use for this long: it is closed
    data_message_bytes: int = 4096  # of one request or reply head on the data plane
    data_connections: int = 256  # proved ones, and as many that have yet to prove their key
    pulls: int = 1024  # legs whose lease is held or whose KV is pulled, in one decode engine
    peers: int = 256  # other engines known to one decode engine
    transfers: int = 4  # pulls in flight in one decode engine
    room_wait_s: float = 5.0  # legs that wait for blocks while nothing moves give their leases up after this
    peer_ttl_s: float = 300.0  # an idle peer's connection and handshake are forgotten
    reply_memory: int = 4096  # answers to `Release` kept for repeats

    # State stream
    load_interval_s: float = 1.0
    state_silence_s: float = 3.0  # an index entry whose pod was silent for longer is not used
    state_buffer: int = 10_000  # messages kept while a snapshot is fetched; more than that joins again

    # Router
    index_blocks: int = 2_000_000
    decisions: int = 100  # the last ones of a router, for the explain API
    text_bundle_bytes: int = 64 * 2**20
    connect_timeout_s: float = 2.0
    retry_after_s: int = 1
    tenants: int = 1024
    inflight: int = 1536  # requests that one router works on; more wait in its queue
    queue_wait_s: float = 5.0  # a request that waited for so long in the router's queue is refused
    capacity_wait_s: float = 0.75  # for a pod to come back, before a request with nothing to lose is refused
    prefill_share: float = 0.25  # of the request deadline: what one prefill leg may take before decode goes on alone
    prefill_attempts: int = 3  # prefill legs of one request, where a service asks for others to be tried
    pair_failures: int = 3  # transfers between two pods that fail in a row: the pair is left alone
    pair_open_s: float = 1.0  # for so long at first, doubled with each further failure
    pair_open_cap_s: float = 30.0
    pair_trial_s: float = 10.0  # one request may try it again, alone for so long
    pairs: int = 4096
    decode_attempts: int = 3  # decode legs of one request before there is anything of its answer
    resume_wait_s: float = 30.0  # for a pod that goes on with an answer that has begun, before it fails
    resume_pause_s: float = 0.1  # between two looks for one, doubled each time
    resume_longest_pause_s: float = 1.0
    leg_losses: int = 16  # legs of one request that may be lost, whatever they gave
    barren_losses: int = 3  # and in a row without a new token: such a request may itself be what ends its pods
    suspect_s: float = 60.0  # a request that did is refused for so long when it comes again
    suspects: int = 1024
    resume_ids: int = 32_000_000  # ids of running answers that one router keeps, 4 bytes each
    resume_ids_per_request: int = 500_000
    resumes_per_s: float = 64.0  # of one router; those beyond wait
    resume_burst: int = 512
    moves: int = 64  # running legs that one router asks to leave draining pods, ten times a second at most
    move_again_s: float = 1.0  # one that is still there is asked again
    end_grace_s: float = 0.25  # after `End`, for the leg's stream to close
    client_stall_s: float = 30.0  # a client that takes no byte for so long has left
    client_buffer_bytes: int = 4 * 2**20  # of one answer, written by decode and not yet taken by the client
    pod_poll_s: float = 0.5  # between two questions whether a pod is ready
    pod_reply_s: float = 0.5  # for its answer; two late ones in a row, or one refused connection, and it is out
    pods: int = 1024  # of one service
    api_reply_s: float = 10.0  # for the API server to answer a list, or to begin a watch
    api_watch_s: float = 300.0  # a watch is asked to end by itself after this, less up to a fifth
    api_silence_s: float = 75.0  # a watch that hears nothing for so long, not even a bookmark, is opened again
    api_spacing_s: float = 0.2  # between two watches, at least
    api_backoff_s: float = 0.25  # after the first failure, then doubled, less up to a half
    api_backoff_cap_s: float = 15.0
    api_away_s: float = 5.0  # without a word from the API server: what it last said of pods' readiness counts no more
    api_list_bytes: int = 32 * 2**20
    api_event_bytes: int = 4 * 2**20

    # Fetching a model
    fetch_s: float = 6 * 3600.0  # the whole of it
    fetch_connect_s: float = 10.0
    fetch_stall_s: float = 60.0  # no byte for this long: the connection is given up, the transfer goes on with another
    fetch_tries: int = 6  # in a row without a byte more
    fetch_wait_s: float = 30.0  # between two of them, at most; also what a server may ask for
    fetch_parallel: int = 4  # files at a time
    fetch_bytes: int = 4 * 2**40  # of one model
    fetch_text_bytes: int = 64 * 2**20  # of one of its small files
    fetch_files: int = 1024
    fetch_listing: int = 10_000  # names that a store may list
    fetch_redirects: int = 5
    fetch_lock_s: float = 1800.0  # while another process of the machine fetches the same model


DEFAULT_LIMITS = Limits()
