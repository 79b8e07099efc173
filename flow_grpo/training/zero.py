"""DeepSpeed's ZeRO, stages 1 and 2 (arXiv 1910.02054): AdamW's moments are sharded over the processes, in stage 2 gradients too."""

import gc
import os
from typing import Any, ClassVar

import torch
from torch import Tensor

from flow_grpo.config.sections import OptimizerConfig
from flow_grpo.distributed.processes import BUCKET_NUMEL, Processes
from flow_grpo.errors import FlowGRPOError
from flow_grpo.policy.policy import Policy
from flow_grpo.text import first_line
from flow_grpo.training.optimizer import adamw

STAGES = {"zero1": 1, "zero2": 2}  # of `memory.shard`
MOMENTS = ("exp_avg", "exp_avg_sq")


class ZeroOptimizer:
    """Replaces `Optimizer`: each process updates its shard of the weights and receives the others.

    Stage 1 reduces gradients once a step; stage 2 in each backward pass, after which a process keeps its shard.

    Raises:
        FlowGRPOError: DeepSpeed is not installed, or the policy is in fp16.
    """

    is_sharded = synchronous_backward = True
    _active: ClassVar["ZeroOptimizer | None"] = None  # its hooks stay on the weights until it is closed

    def __init__(self, policy: Policy, config: OptimizerConfig, processes: Processes, shard: str) -> None:
        if policy.dtype == torch.float16:
            raise FlowGRPOError(f"memory.shard={shard} scales no loss, as fp16 needs: load the policy in bf16 or fp32.")
        self.parameters, self.processes = list(policy.trainable_parameters().values()), processes
        self.adamw = adamw(self.parameters, config)
        bucket = min(BUCKET_NUMEL, sum(p.numel() for p in self.parameters) + 1 & ~1)  # DeepSpeed wants an even number
        settings = {
            "train_micro_batch_size_per_gpu": 1,  # required by DeepSpeed, unused
            "managed_gradient_accumulation": False,  # a step has as many backward passes as were run before it
            "gradient_clipping": config.max_grad_norm,
            "zero_optimization": {"stage": STAGES[shard], "reduce_bucket_size": bucket, "allgather_bucket_size": bucket},
        }
        deepspeed = import_deepspeed(shard, policy.device)
        if ZeroOptimizer._active is not None:
            ZeroOptimizer._active.close()
        # the pipeline itself calls the transformer, so the engine only needs the trained parameters
        trained = torch.nn.ParameterList(self.parameters)
        self.engine = deepspeed.initialize(model=trained, optimizer=self.adamw, config=settings)[0]
        ZeroOptimizer._active = self

    def close(self) -> None:
        """Release the weights and all memory, so that another optimizer can take them over."""
        self.engine.destroy()
        del self.engine, self.adamw
        gc.collect()  # frees the engine, which has reference cycles

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a loss."""
        # DeepSpeed averages the gradients of all processes; we need their sum
        self.engine.backward(loss * self.processes.world_size)

    def reduce_gradients(self) -> None:
        """Do nothing: DeepSpeed reduces and clips the gradients in its step, or has reduced them in the backward pass."""

    def step(self, lr: float, norm: float | None = None) -> float:
        """Run an optimizer step at a learning rate. Returns the gradient's norm over all processes, before clipping.

        Args:
            norm: ignored, as DeepSpeed computes it.
        """
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.engine.step()  # skips gradients that are not finite
        return float(self.engine.get_global_grad_norm())

    def zero_grad(self) -> None:
        """Discard the gradients."""
        self.engine.optimizer.zero_grad()
        self.engine.optimizer.all_grad_tensors.clear()  # stage 2's own sums

    def state_dict(self, keep_on_this_rank: bool = True) -> dict[str, Any]:
        """Return the full state in `Optimizer`'s format, which can load it."""
        from deepspeed.utils import safe_get_full_optimizer_state

        moments = {}
        for index, parameter in enumerate(self.parameters if self.adamw.state else ()):
            full = {name: safe_get_full_optimizer_state(parameter, name) for name in MOMENTS}
            if keep_on_this_rank:
                moments[index] = {
                    "step": self.adamw.state[self._flat_shard]["step"].clone(),
                    **{name: v.cpu() for name, v in full.items()},
                }
        groups = [{**g, "params": list(range(len(self.parameters)))} for g in self.adamw.state_dict()["param_groups"]]
        return {"optimizer": {"state": moments, "param_groups": groups}, "scaler": {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state, also one of an `Optimizer`, which has no moments for a weight without a gradient."""
        from deepspeed.utils import lazy_init_hp_params_optimizer_state, safe_set_full_optimizer_state

        self.engine.optimizer.refresh_fp32_params()  # the fp32 copy that it updates is older than the loaded weights
        flat_shard, moments = self._flat_shard, state["optimizer"]["state"]
        if not self.adamw.state:  # AdamW creates its moments in the first step
            self.adamw.state[flat_shard] = {
                "step": torch.zeros(()),
                **{name: torch.zeros_like(flat_shard) for name in MOMENTS},
            }
            lazy_init_hp_params_optimizer_state(self.parameters, flat_shard, self.adamw.state)
        self.adamw.state[flat_shard]["step"].fill_(max((float(values["step"]) for values in moments.values()), default=0.0))
        for index, parameter in enumerate(self.parameters):
            for name in MOMENTS:
                value = moments[index][name] if index in moments else torch.zeros_like(parameter)
                safe_set_full_optimizer_state(parameter, value, name)

    @property
    def _flat_shard(self) -> Tensor:
        """This process's shard of the weights as one flat tensor, the only parameter of its AdamW."""
        return self.adamw.param_groups[0]["params"][0]


def import_deepspeed(shard: str, device: torch.device) -> Any:
    """Import DeepSpeed with logging off and without compiling extensions. FlowGRPOError if it is not installed."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise it uses a GPU if there is one
    try:
        import deepspeed
    except ImportError as error:
        raise FlowGRPOError(
            f"memory.shard={shard} needs DeepSpeed, which can't be imported ({first_line(error)}): "
            "pip install 'deepspeed>=0.19.8', or set memory.shard=fsdp2."
        ) from error
    deepspeed.utils.logger.setLevel("ERROR")  # `PolicyUpdate` reports skipped steps
    if device.type == "cpu":
        deepspeed.ops.__compatible_ops__ = {}  # otherwise it first compiles its own communication; gloo is there already
    return deepspeed
