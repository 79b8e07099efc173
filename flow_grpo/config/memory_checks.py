"""Checks of the settings of `memory`."""

from flow_grpo.config.settings import RunSettings
from flow_grpo.errors import FlowGRPOError


def check_offloading(args: RunSettings) -> None:
    """Raise FlowGRPOError if settings conflict with `memory.offload`, weights on the GPU only while their block computes."""
    memory = args.memory
    if memory.offload is None:
        return
    refused = {
        "lora=null": args.lora is None,
        "memory.compile": memory.compile,
        f"memory.shard={memory.shard}": memory.shard is not None,
        f"memory.quantize={memory.quantize}": memory.quantize not in (None, "fp8_layerwise"),
    }
    if conflict := next((name for name, is_set in refused.items() if is_set), None):
        raise FlowGRPOError(f"memory.offload=groups does not go with {conflict}: leave one of them out.")


def check_cuda_graphs(args: RunSettings) -> None:
    """Raise FlowGRPOError if settings move weights, whose addresses `memory.cuda_graphs` records."""
    memory = args.memory
    refused = {"memory.offload=groups": memory.offload is not None, "memory.shard=fsdp2": memory.shard == "fsdp2"}
    conflict = next((name for name, is_set in refused.items() if is_set), None)
    if memory.cuda_graphs and conflict:
        raise FlowGRPOError(f"memory.cuda_graphs does not go with {conflict}, which moves weights: leave one of them out.")


def check_layerwise_casting(args: RunSettings) -> None:
    """Raise FlowGRPOError if settings conflict with `memory.quantize=fp8_layerwise`, weights that are cast for each layer's computation."""
    memory = args.memory
    if memory.quantize != "fp8_layerwise":
        return
    refused = {
        "memory.compile, which can't trace the casts": memory.compile,
        "memory.shard=fsdp2, which casts the weights itself": memory.shard == "fsdp2",
    }
    if conflict := next((name for name, is_set in refused.items() if is_set), None):
        raise FlowGRPOError(f"memory.quantize=fp8_layerwise does not go with {conflict}: leave one of them out.")
