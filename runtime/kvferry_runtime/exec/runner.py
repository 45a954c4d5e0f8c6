"""The model runner: computes one step of a plan. It keeps nothing between steps but the KV memory."""

import torch

from kvferry_runtime.core.plan import StepPlan, StepResult
from kvferry_runtime.exec.inputs import build_inputs
from kvferry_runtime.exec.kv_memory import KVMemory
from kvferry_runtime.exec.sampler import sample
from kvferry_runtime.model.interface import Model


class ModelRunner:
    """A model and the KV memory that its steps read and write.

    Raises ``ValueError`` when the model has not exactly one KV group: block tables per group are not built yet.
    """

    def __init__(self, model: Model, memory: KVMemory) -> None:
        groups = model.kv_groups()
        if len(groups) != 1:
            raise ValueError(f"the model has {len(groups)} KV groups; exactly 1 is supported")
        if memory.groups != groups:
            raise ValueError(f"the KV memory is made for {memory.groups}, the model needs {groups}")
        self.model = model
        self.memory = memory

    def step(self, plan: StepPlan) -> StepResult:
        """Do the plan's block copies, compute its rows, and pick tokens where the plan asks for them.

        Raises:
            NonFiniteLogitsError: the model's scores for a pick are not numbers; nothing was picked.
        """
        with torch.inference_mode():
            if plan.copies:
                self.memory.copy_blocks([(copy.source, copy.target) for copy in plan.copies])
            inputs = build_inputs(plan, self.memory.block_size)
            hidden = self.model.forward(inputs.token_ids, inputs.positions, self.memory, inputs.batch)
            if not inputs.picks:
                return StepResult(())
            logits = self.model.logits(hidden[inputs.last_tokens])
            return StepResult(tuple(sample(logits, inputs.logits_rows, inputs.picks)))
