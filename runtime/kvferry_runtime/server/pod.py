"""What the routes of one pod share."""

import time
from dataclasses import dataclass

from kvferry_runtime.engine.client import EngineClient
from kvferry_runtime.engine.messages import Ready
from kvferry_runtime.server.config import ServerConfig
from kvferry_runtime.server.legs import Legs
from kvferry_runtime.server.metrics import PodMetrics
from kvferry_text.bundle import TextTools
from kvferry_text.openai.models import ModelList, model_list
from kvferry_wire import PROTOCOL_VERSION
from kvferry_wire.pod import PodInfo, PodPorts


@dataclass(slots=True)
class Pod:
    """One API server's parts. ``text`` and ``legs`` are there once the engine has started."""

    config: ServerConfig
    engine: EngineClient
    metrics: PodMetrics
    model_digest: str
    port: int
    version: str
    text: TextTools | None = None
    legs: Legs | None = None
    created: int = 0

    def __post_init__(self) -> None:
        self.created = int(time.time())

    def not_ready(self) -> str:
        """Why a request would not be answered now; empty when it would."""
        if self.engine.draining:
            return "draining: nothing new is taken"
        return self.engine.not_ready()

    def context(self) -> int:
        """Tokens of the longest prompt and answer; 0 until the engine has said it."""
        return 0 if self.engine.info is None else self.engine.info.max_model_len

    def models(self) -> ModelList:
        return model_list((self.config.served_name,), created=self.created, max_model_len=self.context())

    def ports(self, ready: Ready) -> PodPorts:
        return PodPorts(http=self.port, control=ready.control_port, data=ready.data_port, state=ready.state_port)

    def info(self, ready: Ready) -> PodInfo:
        """``GET /internal/v1/info``."""
        config = self.config
        assert self.text is not None  # set before the engine counts as ready
        return PodInfo(
            version=self.version,
            protocol_version=PROTOCOL_VERSION,
            incarnation=ready.incarnation.hex(),
            epoch=ready.epoch,
            role=config.role,
            model=config.served_name,
            model_digest=self.model_digest,
            text_digest=self.text.bundle.digest,
            compat_hash=ready.compat_hash,
            dtype=ready.dtype,
            threads=ready.threads,
            block_size=ready.block_size,
            total_blocks=ready.total_blocks,
            max_model_len=ready.max_model_len,
            max_running=config.max_running,
            token_budget=ready.token_budget,
            layout=ready.layout,
            ports=self.ports(ready),
            transfer_backends=ready.transfer_backends,
            attention_backends=ready.attention_backends,
            draining=self.engine.draining,
            legs=self.engine.running(),
            leases=0 if self.engine.load is None else self.engine.load.leases,
            limits=config.limits,
        )
