"""The measurements of gpu.py: their rows, and the goals of these."""

from dataclasses import dataclass, field

SIZE = {False: ["height=512", "width=512"], True: ["height=32", "width=32"]}  # by whether it is `--small`
ALWAYS = [
    "pipeline_kwargs={max_sequence_length: 128}", "dtype=bf16", "prompts=prompts/ocr_train.txt", "evaluation.prompts=null",
    "trackers=[]", "prompts_per_step=2", "images_per_prompt=12", "microbatch=12", "lora={rank: 32, alpha: 64}",
    "memory.compile=false",
]  # fmt: skip
SMALL = ["prompts_per_step=1", "images_per_prompt=2", "microbatch=2", "pipeline_kwargs={max_sequence_length: 16}"]
GRPO = [
    "sampling={steps: 10}",
    "objective={name: grpo, transition: cps, noise_level: 0.8, window: {schedule: random, size: 3, last_step: 4}, "
    "advantage: batch_std, clip_low: 1.0e-5, clip_high: 1.0e-5}",
]
AWM = [
    "sampling={steps: 10}",
    "objective={name: awm, advantage: batch_std, clip_low: 1.0, clip_high: 1.0, num_noise_levels: 3}",
]
# configs/sd35_medium_ocr_guided.yaml, which has the first nine steps as the published code; the paper trains all ten
PAPER = [
    "guidance=4.5", "microbatch=6",
    "sampling={steps: 10}",
    "objective={name: grpo, transition: flow_sde, noise_level: 0.7, window: {schedule: all, last_step: 9}, "
    "advantage: batch_std, clip_low: 1.0e-4, clip_high: 1.0e-4, kl: flow_grpo, kl_weight: 0.04}",
]  # fmt: skip
# configs/flux_dev_ocr.yaml
FLUX = [
    "guidance=3.5", "microbatch=6", "images_per_prompt=6",
    "sampling={steps: 6}",
    "objective={name: grpo, transition: cps, noise_level: 0.8, window: {schedule: random, size: 3, last_step: 2}, "
    "advantage: batch_std, clip_low: 1.0e-5, clip_high: 1.0e-5}",
    "lora={rank: 64, alpha: 128, targets: [to_q, to_k, to_v, to_out.0, add_q_proj, add_k_proj, add_v_proj, to_add_out, "
    "ff.net.0.proj, ff.net.2, ff_context.net.0.proj, ff_context.net.2]}",
]  # fmt: skip
# configs/flux2_klein_ocr.yaml, qwen_image_ocr.yaml and z_image_ocr.yaml
ATTENTION = "to_q, to_k, to_v, to_out.0"
JOINT = f"{ATTENTION}, add_q_proj, add_k_proj, add_v_proj, to_add_out"
SDE = (
    "objective={{name: grpo, transition: flow_sde, noise_level: {}, window: {{schedule: random, {}}}, advantage: batch_std}}"
)
ONE_STEP = SDE.format(0.7, "size: 1, first_step: 1, last_step: 3")
KLEIN = [
    "guidance=4.0", "sampling={steps: 8}", ONE_STEP,
    f"lora={{rank: 64, alpha: 128, targets: [{JOINT}, ff.linear_in, ff.linear_out, ff_context.linear_in, ff_context.linear_out, "
    "to_qkv_mlp_proj]}",
]  # fmt: skip
QWEN = [
    "guidance=4.0", "sampling={steps: 10}", SDE.format(1.2, "size: 2, last_step: 4"),
    f"lora={{rank: 64, alpha: 128, targets: [{JOINT}, img_mlp.net.0.proj, img_mlp.net.2, txt_mlp.net.0.proj, txt_mlp.net.2]}}",
]  # fmt: skip
Z_IMAGE = [
    "guidance=4.0", "sampling={steps: 10}", ONE_STEP,
    f"lora={{rank: 64, alpha: 128, targets: [{ATTENTION}, feed_forward.w1, feed_forward.w2, feed_forward.w3]}}",
]  # fmt: skip
# a few steps: memory and waits do not depend on their number
BRIEF = [
    "prompts_per_step=1", "images_per_prompt=4", "microbatch=4",
    "sampling={steps: 4}",
    "objective={name: grpo, transition: cps, noise_level: 0.8, window: {schedule: fixed, size: 2, first_step: 0}, "
    "advantage: batch_std, clip_low: 1.0e-3, clip_high: 1.0e-3}",
]  # fmt: skip
CHECKPOINTING, COMPILED = "memory.gradient_checkpointing=true", "memory.compile=true"
SPEED = {
    "plain": [],
    "checkpointing": [CHECKPOINTING],
    "compile": [COMPILED],
    "compile and checkpointing": [COMPILED, CHECKPOINTING],
}
BLOCKS_OFFLOADED = ["memory.offload=groups", CHECKPOINTING]
THRIFTY = [CHECKPOINTING, "memory.vae_slicing=true"]
NF4 = "memory.quantize=nf4"
# configs/sd35_medium_hpsv2_flowbp.yaml with fewer images
FLOWBP = [
    *THRIFTY, "guidance=3.5", "prompts_per_step=8", "images_per_prompt=2", "microbatch=8", "sampling={steps: 25}",
    "objective={name: flowbp, kl_weight: 0.0, smoothing: 0.0}",
    "optimizer={lr: 1.0e-5, weight_decay: 1.0e-4, eps: 1.0e-8}", "ema_decay=0.995",
]  # fmt: skip
# configs/compare/mend.yaml
MEND = [
    *THRIFTY, "prompts_per_step=16", "images_per_prompt=2", "microbatch=8", "sampling={steps: 5}", "objective={name: mend}",
    "lora={rank: 32, alpha: 64, targets: all}",
]  # fmt: skip

SHARES = ("rollout", "decode", "forward", "backward", "optimizer")  # of a step's time, as the phases of its metrics
SPEED_COLUMNS = ("images/s", "MFU", *SHARES, "peak GB", "ratio off 1")
MEMORY_COLUMNS = ("peak GB", "planned GB", "planned / measured", "reserved GB", "images/s", "ratio off 1")
EXACT = {"ratio off 1": "= 0"}
REWARD_COLUMNS = ("images/s", "MFU", "rollout", "decode", "reward", "wait", "forward", "backward", "peak GB")
WITHIN_15_PERCENT = {"planned / measured": "0.85 to 1.15"}


@dataclass(frozen=True)
class Row:
    """A setting that is measured in a process of its own.

    Attributes:
        overrides: of the run's config.
        goals: by column, `>= number`, `<= number`, `= number` or `number to number`.
        model: a kind of random_models.py.
        seconds: left of the time, without which the row is not begun.
        card: GiB of the card that the row is to fit, all that the process takes of it counted.
        package: without which the setting can't be used.
        reward: of gpu_rewards.py; None for one that takes no time.
        cache: the title of the row whose cache of torch's compiler it uses, which is emptied if it is its own.
        kernels: of gpu_kernels.py, in passes without a gradient.
    """

    overrides: list[str]
    goals: dict[str, str] = field(default_factory=dict)
    model: str = "sd35_medium"
    seconds: int = 60
    card: float | None = None
    package: str | None = None
    reward: str | None = None
    cache: str | None = None
    kernels: tuple[str, ...] = ()

    @property
    def is_alone(self) -> bool:
        """Whether no other row may run beside it from its start on: it measures the whole card, or its first step."""
        return self.card is not None or self.cache is not None

    @property
    def trains_on_gradient(self) -> bool:
        """Whether it trains on its reward's gradient."""
        return any("flowbp" in override or "mend" in override for override in self.overrides)

    @property
    def is_loaded(self) -> bool:
        """Whether the model is loaded from files, since only loading quantises; else it is built on the GPU."""
        return any("quantize" in override for override in self.overrides)


@dataclass(frozen=True)
class Measurement:
    """Rows with the same columns, and a goal in words."""

    goal: str
    columns: tuple[str, ...]
    rows: dict[str, Row]


def _speed_rows(
    prefix: str, base: list[str], settings: dict[str, list[str]], goals: dict[str, str], **of_row
) -> dict[str, Row]:
    return {
        f"{prefix}{name}": Row([*base, *more], {**goals, **EXACT}, seconds=150 if COMPILED in more else 60, **of_row)
        for name, more in settings.items()
    }


def _memory_rows() -> dict[str, Row]:
    """Each option against `plain` or `checkpointing`, and the VAE's at 1536 px, where decoding is the peak and is tiled."""
    decoding = [CHECKPOINTING, "height=1536", "width=1536", "microbatch=4"]
    settings: dict[str, tuple[list[str], str | None]] = {
        "plain": ([], None),
        "checkpointing": ([CHECKPOINTING], None),
        "compile": ([COMPILED], None),
        "offload groups, checkpointing": (BLOCKS_OFFLOADED, None),
        "offload_trajectories": (["memory.offload_trajectories=true"], None),
        "offload_text_encoders": (["memory.offload_text_encoders=true"], None),
        "fp8_layerwise": (["memory.quantize=fp8_layerwise"], None),
        "nf4": (["memory.quantize=nf4"], "bitsandbytes"),
        "8-bit AdamW": (["optimizer.name=adamw_8bit"], "bitsandbytes"),
        "1536 px, checkpointing": (decoding, None),
        "1536 px, checkpointing, vae_slicing": ([*decoding, "memory.vae_slicing=true"], None),
        "1536 px, checkpointing, vae_slicing: tiles": ([*decoding, "memory.vae_slicing=tiles"], None),
    }
    return {
        name: Row([*BRIEF, *more], {**WITHIN_15_PERCENT, **EXACT}, package=package, seconds=120 if COMPILED in more else 40)
        for name, (more, package) in settings.items()
    }


def _card_rows() -> dict[str, Row]:
    """The models on each card on which `flow-grpo plan` says that they fit, once their prompts are encoded."""
    kinds = {
        "SD3.5-M": (GRPO, "sd35_medium", 60),
        "FLUX.2-klein": (KLEIN, "flux2_klein", 90),
        "Z-Image": (Z_IMAGE, "z_image", 120),
        "FLUX": (FLUX, "flux_dev", 240),
        "Qwen-Image": (QWEN, "qwen_image", 300),
    }
    rows = {}
    for title, microbatches in _CARDS.items():
        overrides, model, seconds = kinds[title.removesuffix(" nf4")]
        quantized = title.endswith("nf4")
        for card, microbatch in microbatches.items():
            more = [*THRIFTY, "images_per_prompt=8", "prompts_per_step=1", f"microbatch={microbatch}"]
            rows[f"{title}, {card} GB"] = Row(
                [*overrides, *more, *([NF4] if quantized else [])],
                {"reserved + context GiB": f"<= {card}", **WITHIN_15_PERCENT, **EXACT},
                model,
                seconds=max(seconds, 180) if quantized else seconds,
                card=card,
                package="bitsandbytes" if quantized else None,
            )
    return rows


def _reward_rows() -> dict[str, Row]:
    packages = {"ocr": "rapidocr", "remote": "uvicorn"}
    return {
        f"{name}, {reward or 'none'}": Row([*base, COMPILED], reward=reward, seconds=150, package=packages.get(reward or ""))
        for name, base in (("grpo", GRPO), ("awm", AWM))
        for reward in (None, "pickscore", "hpsv3", "ocr", "remote")
    }


def _gradient_rows() -> dict[str, Row]:
    settings = {"flowbp, all weights": [*FLOWBP, "lora=null"], "flowbp, LoRA": FLOWBP, "mend, LoRA": MEND}
    return {
        name: Row(overrides, dict(WITHIN_15_PERCENT), reward="pickscore", seconds=120)
        for name, overrides in settings.items()
    }


def _compile_rows() -> dict[str, Row]:
    """A run that compiles, another process with its cache, and a long run that decides by itself."""
    rows = {}
    for name, base in (("grpo", GRPO), ("awm", AWM)):
        first = f"{name}, empty cache"
        rows[f"{name}, not compiled"] = Row(base)
        rows[first] = Row([*base, COMPILED], seconds=180, cache=first)
        rows[f"{name}, the same cache"] = Row([*base, COMPILED], seconds=180, cache=first)
        rows[f"{name}, auto"] = Row([*base, "memory.compile=auto", "steps=100000"], seconds=180, cache=first)
    return rows


def _kernel_rows() -> dict[str, Row]:
    choices: tuple[tuple[str, ...], ...] = ((), ("cuDNN attention",), ("float8",), ("cuDNN attention", "float8"))
    return {
        " and ".join(kernels) or "torch's default": Row([*AWM, COMPILED], kernels=kernels, seconds=150)
        for kernels in choices
    }


# micro-batch of the eight images by GiB of the card
_CARDS: dict[str, dict[int, int]] = {
    "SD3.5-M": {8: 4, 12: 8},
    "FLUX.2-klein nf4": {8: 1},
    "FLUX.2-klein": {12: 2, 16: 8},
    "Z-Image nf4": {8: 1, 12: 2},
    "Z-Image": {16: 1, 24: 4},
    "FLUX nf4": {12: 1, 16: 4, 24: 8},
    "Qwen-Image nf4": {24: 2},
}
_WAITS = {
    **SPEED,
    "offload groups, checkpointing": BLOCKS_OFFLOADED,
    "offload_trajectories": ["memory.offload_trajectories=true"],
}
_FLUX_SPEED = {name: more for name, more in SPEED.items() if CHECKPOINTING in more}
_OURS = {"images/s": ">= 6", "MFU": ">= 0.30"}
MEASUREMENTS = {
    "paper": Measurement(
        "SD3.5-M at 512 px by the paper's recipe (guidance 4.5, ten of ten steps trained, KL 0.04): 1.5 images/s",
        SPEED_COLUMNS,
        _speed_rows("", PAPER, SPEED, {"images/s": ">= 1.5"}),
    ),
    "ours": Measurement(
        "SD3.5-M at 512 px without guidance, three steps or noise levels trained: 6 images/s, MFU 0.30, stretch 0.45",
        SPEED_COLUMNS,
        {
            **_speed_rows("grpo, ", GRPO, SPEED, _OURS),
            **_speed_rows("awm, ", AWM, SPEED, _OURS),
        },
    ),
    "flux": Measurement(
        "FLUX.1-dev at 512 px, LoRA: 1 image/s",
        SPEED_COLUMNS,
        _speed_rows("", FLUX, _FLUX_SPEED, {"images/s": ">= 1"}, model="flux_dev"),
    ),
    "small_cards": Measurement(
        "training steps on encoded prompts within the memory of a small card, which the process can't exceed; plan within 15 %",
        ("reserved + context GiB", "context GiB", *MEMORY_COLUMNS),
        _card_rows(),
    ),
    "memory": Measurement("each memory option; plan within 15 % of the measured peak", MEMORY_COLUMNS, _memory_rows()),
    "waits": Measurement(
        "times that a training step waits for the GPU; the ratio before the first update is exactly 1",
        ("waits", "ratio off 1", "images/s"),
        {name: Row([*BRIEF, *more], dict(EXACT), seconds=120 if COMPILED in more else 40) for name, more in _WAITS.items()},
    ),
    "rewards": Measurement(
        "what a reward adds to a step of `ours`, and how much of it the step waits for", REWARD_COLUMNS, _reward_rows()
    ),
    "gradients": Measurement(
        "gradients of PickScore's shape; plan, with the reward's weights added, within 15 %",
        ("images/s", "peak GB", "planned GB", "planned / measured"),
        _gradient_rows(),
    ),
    "compile": Measurement(
        "how long a run waits for its first step, with an empty cache of torch's compiler and with that of the run before",
        ("first step s", "later step s"),
        _compile_rows(),
    ),
    "kernels": Measurement(
        "awm with other kernels in passes without a gradient; relative RMS change of the final latents, of random weights",
        ("images/s", "rollout", "latents changed by", "peak GB", "ratio off 1"),
        _kernel_rows(),
    ),
}  # fmt: skip
