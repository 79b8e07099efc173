"""The trained weights that a run has left, loaded into a policy."""

from pathlib import Path

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.errors import FlowGRPOError
from flow_grpo.policy.loading import add_trainable_weights
from flow_grpo.policy.policy import Policy
from flow_grpo.policy.weights import check_weights
from flow_grpo.run_folder import checkpoint, layout


def load_trained_weights(policy: Policy, path: str) -> None:
    """Load what a run has trained: whatever `Policy.load_lora` takes, or a checkpoint.

    Of a checkpoint it is the moving average, where it has one, as that is what a run evaluates and saves. FlowGRPOError as there, or
    if the checkpoint is damaged.
    """
    folder = Path(path).resolve()
    if not (folder / layout.MANIFEST).is_file():
        policy.load_lora(path)
        return
    config, step = folder.parent.parent / layout.CONFIG, layout.step_of(folder)
    if not config.is_file() or step is None:
        raise FlowGRPOError(
            f"the checkpoint {path} is not where its run left it, as checkpoints/step_000100 of a run folder."
        )
    state = checkpoint.read(folder.parent, step)
    args = FlowGRPOConfig.from_yaml(config)
    if args.lora and args.lora.init_from:
        policy.load_lora(args.lora.init_from)
    add_trainable_weights(policy, args.lora, args.seed)
    policy.store_base_weights("cpu")
    if not isinstance(state.get("adapter"), dict):
        raise FlowGRPOError(f"the checkpoint {path} was not written by flow-grpo: it holds no adapter.")
    trained = state.get("ema") or state["adapter"]
    check_weights(trained, f"the checkpoint {path}")
    policy.load_adapter_state(trained)
