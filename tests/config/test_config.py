"""The config: every shipped one is valid, every mistake is one sentence that says what to set instead."""

import pytest
import torch
import yaml
from pydantic import ValidationError
from support.cli_process import run
from support.embedded import tiny_policy
from support.families import TINY

from flow_grpo.cli.options import parse_reward
from flow_grpo.config.loading import TRAINING_PROMPTS, bundled_file, parse_yaml
from flow_grpo.config.run_config import FlowGRPOConfig
from flow_grpo.config.sections import EvaluationConfig
from flow_grpo.data.prompt_sources import load_prompts
from flow_grpo.errors import FlowGRPOError
from flow_grpo.policy import hub
from flow_grpo.policy.policy import Policy
from flow_grpo.trainer import FlowGRPOTrainer
from flow_grpo.training.rollouts import trained_steps


@pytest.mark.parametrize("name", sorted(str(p.relative_to(bundled_file("")))[:-5] for p in bundled_file("").rglob("*.yaml")))
def test_every_shipped_config_is_valid_and_names_prompts_that_exist(name, tmp_path):
    args = FlowGRPOConfig.from_yaml(name)
    sources = [args.training_prompts, args.evaluation.prompts]
    named = [one.file for given in sources if isinstance(given, list) for one in given]
    for source in [*named, *(one for one in sources if isinstance(one, str))]:
        if source.startswith("prompts/"):  # the others are on the web
            assert load_prompts(source).prompts
    (tmp_path / "again.yaml").write_text(args.to_yaml())
    assert FlowGRPOConfig.from_yaml(tmp_path / "again.yaml") == args


PRESETS = {file.stem: FlowGRPOConfig.from_yaml(file) for file in sorted(bundled_file("").glob("*.yaml"))}
EDITS = ("flux2_klein_edit", "flux_kontext_edit", "qwen_image_edit_plus")
REAL = {name: args for name, args in PRESETS.items() if args.model not in hub.BUNDLED_MODELS}


def test_presets_of_real_models_use_prompts_that_suit_their_reward():
    prompts = {"ocr": ("prompts/ocr_train.txt", "prompts/ocr_test.txt")}
    prompts["geneval"] = ("prompts/geneval_train.jsonl", "prompts/geneval_eval.jsonl")
    for name, args in REAL.items():
        used = (args.prompts, args.evaluation.prompts)
        if name in EDITS:
            assert used == ("prompts/edits_train.jsonl", "prompts/edits_test.jsonl")
            assert list(args.rewards) == ["ocr", "fidelity"]
            continue
        (reward,) = args.rewards
        published = {"pickscore": "/pickscore_sfw/train.txt", "hpsv2": "/FlowBP/main/assets/prompts.txt"}
        assert used == prompts.get(reward) or published[reward] in used[0], name
    assert {args.objective.name for args in REAL.values()} == {"grpo", "awm", "nft", "pepg", "flowbp"}


def test_presets_train_the_published_steps():
    """Flow-GRPO draws the window's start up to sde_window_range[1] - size, half of the steps; Flow-Factory one of steps 1 to 3."""
    for name, args in REAL.items():
        if not args.objective.stepwise:
            continue
        window, steps = args.objective.window, args.sampling.steps
        if window.schedule == "random":
            last = 3 if name in ("flux2_klein_edit", "flux2_klein_ocr", "z_image_ocr") else steps // 2 - 1
            assert window.last_step == last, name
            trained = {step for k in range(200) for step in trained_steps(window, steps, k, seed=0)}
            assert trained == set(range(window.first_step, last + 1)), name


def test_presets_of_real_models_state_their_lora_and_moving_average_themselves():
    """A default of ours may change, a published setting does not."""
    for name in REAL:
        own = yaml.safe_load(bundled_file(f"{name}.yaml").read_text())
        assert "ema_decay" in own, name
        assert own["lora"] is None or {"rank", "alpha"} <= own["lora"].keys(), name
        assert "eps" in own["optimizer"], name


# guidance, rank, alpha, ema_decay, ema_every, eps of AdamW
SD3_UNGUIDED, SD3_GUIDED = (1.0, 32, 64, 0.9, 8, 1e-8), (4.5, 32, 64, 0.9, 8, 1e-8)
FLUX, FLOW_FACTORY = (3.5, 64, 128, 0.9, 8, 1e-8), (4.0, 64, 128, 0.9, 8, 1e-8)
QWEN = (4.0, 64, 128, 0.0, 1, 1e-8)  # without a moving average
PUBLISHED = {
    # yifan123/flow_grpo: config/grpo.py over config/base.py, and scripts/train_*.py for the LoRA and the moving average
    "geneval_sd3_fast_nocfg": SD3_UNGUIDED,
    "pickscore_sd3_fast_nocfg": SD3_UNGUIDED,
    "geneval_sd3": SD3_GUIDED,
    "general_ocr_sd3": SD3_GUIDED,
    "pickscore_sd3": SD3_GUIDED,
    "general_ocr_wan2_1": SD3_GUIDED,
    "geneval_flux_fast": FLUX,
    "counting_flux_kontext": (2.5, *FLUX[1:]),
    "pickscore_qwenimage_8gpu": QWEN,
    "counting_qwenimage_edit_fast": QWEN,
    # X-GenGroup/Flow-Factory; its moving average counts rollouts, here of two updates each
    "examples/grpo/lora/flux2_klein_base/default.yaml": FLOW_FACTORY,
    "examples/grpo/lora/z_image/default.yaml": FLOW_FACTORY,
    "ocr_sd3_no_cfg_1node": (1.0, 32, 64, 0.99, 1, 1e-8),  # scxue/advantage_weighted_matching, config/dgx_awm.py
    "sd3_ocr": (1.0, 32, 64, 0.9, 1, 1e-8),  # NVlabs/DiffusionNFT, config/nft.py
    "sd3_geneval": (1.0, 32, 64, 0.9, 1, 1e-8),  # the same
    "sd3_5_flowbp_sparse": (3.5, None, None, 0.995, 1, 1e-8),  # RuoyuWang-2077/FlowBP, configs/final; all weights
}


ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
JOINT_ATTENTION = [*ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
# the LoRA's target modules, where the published ones are not those of the attention alone
PUBLISHED_TARGETS = {
    "geneval_flux_fast": [*JOINT_ATTENTION, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"],
    "counting_flux_kontext": [
        *JOINT_ATTENTION,
        *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2", "proj_mlp"),
    ],
    "pickscore_qwenimage_8gpu": [
        *JOINT_ATTENTION,
        *("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
    ],
    "examples/grpo/lora/flux2_klein_base/default.yaml": [
        *JOINT_ATTENTION,
        *("ff.linear_in", "ff.linear_out", "ff_context.linear_in", "ff_context.linear_out", "to_qkv_mlp_proj"),
    ],
    "examples/grpo/lora/z_image/default.yaml": [
        *ATTENTION,
        *("feed_forward.w1", "feed_forward.w2", "feed_forward.w3"),
    ],
}
PUBLISHED_TARGETS["counting_qwenimage_edit_fast"] = PUBLISHED_TARGETS["pickscore_qwenimage_8gpu"]


def source_of(preset: str) -> str:
    """The published config that the preset's file names."""
    text = bundled_file(f"{preset}.yaml").read_text()
    words = [word.strip(",.") for word in text.partition("# Upstream values (`there`): ")[2].partition("\n")[0].split()]
    (source,) = PUBLISHED.keys() & set(words)
    return source


@pytest.mark.parametrize("name", REAL)
def test_a_preset_has_the_settings_of_the_published_config_that_it_names(name):
    args, source = REAL[name], source_of(name)
    lora = args.lora
    size = (None, None) if lora is None else (lora.rank, lora.alpha)
    assert (args.guidance, *size, args.ema_decay, args.ema_every, args.optimizer.eps) == PUBLISHED[source]
    assert lora is None or lora.targets == PUBLISHED_TARGETS.get(source, FlowGRPOConfig().lora.targets)


def test_dppo_and_nft_have_the_published_threshold_and_ramp():
    assert FlowGRPOConfig.from_yaml("tiny_grpo", ["objective.name=dppo"]).objective.threshold == 1e-5
    ramp = REAL["sd35_medium_ocr_nft"].objective.old_policy_decay
    assert (ramp.after, ramp.rate, ramp.max) == (75, 0.0075, 0.999)


def test_overrides_reach_into_sections():
    args = FlowGRPOConfig.from_yaml("tiny_ocr", ["optimizer.lr=1e-4", "rewards.color=0.5", "steps=7", "evaluation.every=0"])
    assert args.optimizer.lr == 1e-4
    assert args.rewards["color"].weight == 0.5
    assert args.rewards["ocr"].weight == 1.0
    assert (args.steps, args.evaluation.every, args.output_dir) == (7, 0, "runs/tiny_ocr")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimiser.lr=1", "there is no setting optimiser. Did you mean optimizer?"),
        ("optimizer.Lr=1", "there is no setting optimizer.Lr. Did you mean optimizer.lr?"),
        ("steps=0", "steps is 0, but it should be greater than 0"),
        ("steps=many", "on the command line: steps is 'many', but it should be a whole number."),
        ("steps=1.5", "steps is 1.5, but it should be a whole number."),
        ("optimizer.lr=big", "optimizer.lr is 'big', but it should be a number."),
        ("steps 3", "'steps' is not of the form key.sub=value: write steps=3."),
        ("+steps=2", "there is no setting +steps. Did you mean steps?"),
        ("optimizer.+lr=2", "there is no setting optimizer.+lr. Did you mean optimizer.lr?"),
        ("steps=2 lora.rank 3", "'lora.rank' is not of the form key.sub=value: write lora.rank=3."),
        ("optimizer.learning_rate=1", "there is no setting optimizer.learning_rate. Did you mean optimizer.lr?"),
        ("learning_rate=1", "there is no setting learning_rate. Did you mean optimizer.lr?"),
        ("optimizer.momentum=1", "there is no setting optimizer.momentum. optimizer has name, lr, "),
        ("evaluation.rewards=ocr", "evaluation.rewards is 'ocr', but it should have weights: write {ocr: 1.0}."),
        (
            "rewards={ocr:abc}",
            "rewards.ocr is 'abc', but it should be a weight such as 0.5, or {weight: 0.5, options: {...}}.",
        ),
        ("optimizer=3", "optimizer is 3, but it should be a section of settings, {setting: value}."),
        ("images_per_prompt=1", "images_per_prompt is 1"),
        ("updates=3", "does not divide prompts_per_step"),
        ("rewards={}", "rewards is empty"),
        ("objective.transition=ode objective.name=grpo", "ode is no transition that adds noise"),
        ("objective.transition=cps objective.name=nft", "nft does not use transition; grpo, reinforce, grpo_guard"),
        ("objective.name=grpo objective.noise_level=0", "objective.noise_level is 0, but it should be greater than 0"),
        ("objective.name=grpo objective.transition=cps objective.noise_level=1.5", "at most 1"),
        (
            "objective.name=grpo sampling.steps=10 objective.transition=cps objective.window.last_step=9",
            "the trainable ones are 0 to 8",
        ),
        (
            "objective.name=grpo objective.transition=cps objective.window={schedule: fixed, size: 9, first_step: 3}",
            "does not fit",
        ),
        ("objective.sigma_range=[0.5,0.5]", "must rise"),
        (
            "objective.name=nft objective.old_policy_decay=2",
            "objective.old_policy_decay is 2, but it should be less than or equal to 1",
        ),
        (
            "objective.name=nft objective.old_policy_decay={rat:1}",
            "give a number, or a ramp such as {rate: 0.001, max: 0.5}",
        ),
        (
            "objective.name=nft objective.old_policy_decay={rate:0.001,max:0.5,start:0.6}",
            "old_policy_decay starts at 0.6, above its max of 0.5: set a smaller start",
        ),
        ("objective.name=grppo", "there is no objective grppo. Did you mean grpo?"),
        (
            "objective.name=dppo objective.transition=cps objective.clip_low=0.1",
            "objective dppo does not use clip_low; grpo",
        ),
        ("objective.advantage=rlo", "objective.advantage: there is no advantage 'rlo'. Did you mean rloo?"),
        ("objective.kl=gaussian", "set objective.kl=velocity"),
        ("objective.clip_low=auto updates=2", "objective.clip_low is 'auto', but"),
        (
            "objective.name=grpo_guard objective.transition=cps objective.step_weight=std",
            "grpo_guard does not use step_weight; grpo, reinforce, dppo, ppo and your own function do",
        ),
        ("objective.name=ppo objective.transition=cps objective.advantage=rloo", "its critic makes the advantages"),
        ("objective.dataset=pictures", "objective awm does not use dataset; sft and dpo do: remove it"),
        ("objective.name=dpo microbatch=1", "set an even one"),
        ("microbatch=5", "does not divide prompts_per_step x images_per_prompt = 64"),
        ("objective.clip_low=abc", "objective.clip_low is 'abc', but"),
        ("objective.name=reinforce objective.transition=cps updates=2", "set updates=1 and epochs=1"),
        ("objective.name=grpo objective.transition=cps objective.clip_high=auto", "they are all 1"),
        ("objective.name=grpo objective.transition=cps objective.kl=flow_grpo", "cps has none"),
        ("rewards.ocr=0", "nothing to train on"),
        ("rewards.ocr=.nan", "rewards.ocr.weight is nan"),
        ("steps", "not of the form key.sub=value"),
        ("steps.more=1", "steps is a single value"),
        ("dtype=fp8", "dtype is 'fp8'"),
        ("optimizer.lr=.inf", "optimizer.lr is inf, but it should be a finite number"),
        ("guidance=.nan", "guidance is nan, but it should be a finite number"),
        ("lora.alpha=0", "lora.alpha is 0, but it should be greater than 0"),
        ("lora.alpha=.nan", "lora.alpha is nan, but it should be a finite number"),
        ("pipeline_kwargs={x:.nan}", "pipeline_kwargs.x is nan, but it should be a finite number"),
        ("rewards={ocr:{options:{x:.inf}}}", "rewards.ocr.options.x is inf, but it should be a finite number"),
        ("height=100000000", "height is 100000000, but it should be less than or equal to 16384"),
        ("prompts=3", ": prompts is 3, but it should be a file or a list of prompt sets."),
        ("evaluation.prompts=3", "evaluation.prompts is 3, but it should be a file or a list of prompt sets."),
        ("prompts=[{file:a.txt,weigth:2}]", "there is no setting prompts.weigth. Did you mean weight?"),
        ("prompts=[{file:a.txt,weight:-2}]", "prompts.weight is -2, but it should be greater than 0"),
        ("prompts=[{file:a.txt,rewards:{ocr:a}}]", "prompts.rewards.ocr is 'a', but it should be a number"),
        ("prompts=[{weight:2}]", "prompts.file is missing"),
        ("objective.anchors=[{to:base}]", "objective.anchors.weight is missing"),
        ("objective.sigma_range=[0.2]", "objective.sigma_range is [0.2], but it should have more values"),
        ("objective.name=nft objective.old_policy_decay={rate:a,max:1}", "objective.old_policy_decay.rate is 'a', but"),
        ("memory.vae_slicing=tile", "it should be true or false or 'tiles'"),
        ("rewards.ocr.frames=middle", "it should be a whole number or 'first', 'last' or 'all'"),
        ("trackers={wandb:false}", "trackers.wandb is False, but"),
        ("trackers.wandb=false", "trackers.wandb is False, but"),
        ("rewards.ocr=[]", "rewards.ocr is [], but it should be a weight"),
        ("stages=[{steps:3}] stages.0.steps=4", "stages is a list: give all of it, it has no steps"),
        ("optimizer={1:2}", "optimizer has the key 1: a key should be a name"),
        ("rewards={5:1}", "rewards has the key 5: a key should be a name"),
        ("lora=", "'lora=' has no value: write lora=null for none"),
        ("device= seed=3", "'device=' has no value"),
    ],
)
def test_every_mistake_is_a_clear_error(override, words):
    pairs = override.replace("{schedule: fixed, size: 9, first_step: 3}", "{schedule:fixed,size:9,first_step:3}").split(" ")
    pairs = [p.replace(",", ", ").replace(":", ": ") for p in pairs]
    with pytest.raises(ValueError) as error:  # noqa: PT011
        FlowGRPOConfig.from_yaml("tiny_ocr", pairs)
    message = " ".join(str(error.value).split())
    assert words in message
    assert len(message) < 300


def test_an_error_names_the_file_or_the_command_line_whichever_has_it(tmp_path):
    (tmp_path / "odd.yaml").write_text("steps: many\n")
    with pytest.raises(ValueError, match=r"^odd\.yaml: steps is 'many'"):
        FlowGRPOConfig.from_yaml(tmp_path / "odd.yaml", ["seed=1"])
    (tmp_path / "fine.yaml").write_text("steps: 3\nstages: [{steps: 3}]\n")
    with pytest.raises(ValueError, match=r"^on the command line: stage 1: steps is 'many'"):
        FlowGRPOConfig.from_yaml(tmp_path / "fine.yaml", ["stages=[{steps: many}]"])
    assert FlowGRPOConfig.from_yaml(tmp_path / "odd.yaml", ["steps=3"]).steps == 3


def test_a_reward_without_a_weight_gets_the_one_to_write():
    with pytest.raises(ValueError, match=r"it should have weights: write \{my_reward\.py:dark: 1\.0\}\.$"):
        FlowGRPOConfig.from_yaml("tiny_ocr", ["rewards=my_reward.py:dark"])
    with pytest.raises(ValueError, match=r"^rewards is 3, but it should have weights: write \{ocr: 1\.0\}\.$"):
        FlowGRPOConfig(rewards=3)


def test_the_error_of_a_section_built_in_python_names_the_setting_too():
    with pytest.raises(ValidationError) as error:
        EvaluationConfig(prompts=3)
    assert [one["loc"] for one in error.value.errors()] == [("prompts",)]


def test_only_an_embedded_model_has_training_prompts_of_its_own():
    assert TRAINING_PROMPTS.keys() == hub.BUNDLED_MODELS.keys()
    assert FlowGRPOConfig().training_prompts == FlowGRPOConfig(model="tiny").training_prompts == "prompts/signs_train.txt"
    other = FlowGRPOConfig.for_model("me/model", ["steps=3"])
    assert other.with_model("tiny").training_prompts == "prompts/signs_train.txt"
    for args in (other, FlowGRPOConfig().with_model("me/model"), FlowGRPOConfig(prompts=None)):
        with pytest.raises(ValueError, match=f"no prompts to train {args.model} on: set prompts to a file"):
            _ = args.training_prompts
    assert FlowGRPOConfig(prompts="mine.txt").with_model("me/model").training_prompts == "mine.txt"


@pytest.mark.parametrize("words", [["train"], ["train", "--dry-run"], ["plan", "--gpu", "H100"], ["doctor"]])
def test_a_config_without_prompts_is_refused_for_another_model(tmp_path, words):
    (tmp_path / "own.yaml").write_text(f"model: {hub.BUNDLED_MODELS['tiny']}\nrewards: {{jpeg_size: 1}}\n")
    said = run(words[0], "own.yaml", *words[1:], cwd=tmp_path, code=2)
    assert said.count("error: there are no prompts to train") == 1


def test_from_python_prompts_are_those_that_are_given_or_the_embedded_models():
    with pytest.raises(ValueError, match="no prompts to train me/model on"):
        FlowGRPOTrainer("me/model", ["jpeg_size"])
    with pytest.raises(ValueError, match="no prompts to train FluxPipeline on"):
        FlowGRPOTrainer(Policy(TINY["flux"].build(), torch.float32), ["jpeg_size"])
    train_sets = [
        FlowGRPOTrainer(tiny_policy(), ["jpeg_size"], train_dataset=given).train_set for given in (None, ["a"] * 8)
    ]
    assert [set_.prompts for set_ in train_sets] == [load_prompts("prompts/signs_train.txt").prompts, ["a"] * 8]


def test_a_missing_or_broken_file_is_a_clear_error(tmp_path):
    with pytest.raises(ValueError, match=r"there is no config tiny_orc\. Did you mean tiny_ocr\? Bundled ones: "):
        FlowGRPOConfig.from_yaml("tiny_orc")
    with pytest.raises(ValueError, match=r"there is no file tiny_orc\.yaml\. Did you mean tiny_ocr\?"):
        FlowGRPOConfig.from_yaml("tiny_orc.yaml")
    with pytest.raises(
        ValueError, match=r"there is no file .*/mine\.yaml\. `flow-grpo init .*/mine\.yaml` writes a new config\.$"
    ):
        FlowGRPOConfig.from_yaml(tmp_path / "mine.yaml")
    (tmp_path / "mien.yaml").write_text("steps: 1")
    with pytest.raises(ValueError, match=r"Did you mean .*/mien\.yaml\?"):
        FlowGRPOConfig.from_yaml(tmp_path / "mine.yaml")
    with pytest.raises(ValueError, match=r"is a folder and no config: give a config in it, .*/mien\.yaml\."):
        FlowGRPOConfig.from_yaml(tmp_path)
    (tmp_path / "bad.yaml").write_text("steps: [1,")
    with pytest.raises(ValueError, match="not valid YAML"):
        FlowGRPOConfig.from_yaml(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ValueError, match="key: value"):
        FlowGRPOConfig.from_yaml(tmp_path / "list.yaml")
    (tmp_path / "empty.yaml").touch()
    with pytest.raises(ValueError, match=r"empty\.yaml is empty"):
        FlowGRPOConfig.from_yaml(tmp_path / "empty.yaml")


@pytest.mark.parametrize("name", ["steps", "height", "sampling.steps", "lora.rank", "optimizer.lr"])
def test_yes_and_no_are_no_numbers(name):
    with pytest.raises(ValueError, match=f"{name} is True, but it should be a number"):
        FlowGRPOConfig.from_yaml("tiny_ocr", [f"{name}=true"])
    assert FlowGRPOConfig.from_yaml("tiny_ocr", ["memory.compile=true"]).memory.compile


def test_prompt_files_of_every_kind(tmp_path):
    (tmp_path / "p.txt").write_text("one\n\ntwo\n")
    (tmp_path / "p.jsonl").write_text('{"prompt": "one", "n": 1}\n{"prompt": "two", "n": 2}\n')
    (tmp_path / "p.csv").write_text("prompt,n\none,1\ntwo,2\n")
    for name in ("p.txt", "p.jsonl", "p.csv"):
        prompts_read = load_prompts(tmp_path / name)
        assert prompts_read.prompts == ["one", "two"]
        assert name == "p.txt" or prompts_read.metadata == [{"n": 1}, {"n": 2}]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("p.txt", "", "holds no prompts"),
        ("p.jsonl", '{"words": "one"}\n', "no column `prompt`"),
        ("p.jsonl", '{"prompt": "  "}\n', "is not a prompt"),
        ("p.docx", "x", "is not a .txt"),
        ("missing.txt", None, "there is no file"),
    ],
)
def test_a_bad_prompt_file_is_a_clear_error(tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=words):
        load_prompts(tmp_path / name)


BOMB = "a: &a [x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdef", "bcdefg", strict=True)
)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"steps: 5\nseed: 1\nsteps: 7\n", r"bad\.yaml has the key 'steps' twice, in lines 1 and 3: keep one of them\."),
        (b"optimizer: {lr: 1, lr: 2}", r"has the key 'lr' twice, in line 1"),
        (b"optimizer:\n  lr: 1\n  eps: 2\n  'lr': 3\n", r"has the key 'lr' twice, in lines 2 and 4"),
        (b"steps: " + b"[" * 20_000, "nested too deeply"),
        (b"".join(b" " * i + b"a:\n" for i in range(1000)), "nested too deeply"),
        (BOMB.encode(), "holds more than 100,000 values"),
        (b"rewards: &a {ocr: *a}", "has an alias of itself, in line 1"),
        (b"optimizer:\n\tlr: 1\n", "line 2: lines are indented by spaces, and this one has a tab"),
        (b"- 1", "must hold `key: value` lines"),
        (b"1: 2", r"^bad\.yaml: there is no setting 1\."),
        (b"on: {steps: 3}", r"^bad\.yaml: there is no setting True\."),
        (b"just words", "must hold `key: value` lines"),
        (b"steps: 1\n---\nsteps: 2\n", "found another document"),
        ("prompts: Kätzchen.txt".encode("latin-1"), r"bad\.yaml is not UTF-8 text: line 1 has the byte 0xe4"),
        ("steps: 1".encode("utf-16"), r"bad\.yaml is UTF-16 text: save it as UTF-8"),
        ("steps: 1".encode("utf-16-le"), "zero bytes"),
        (b"output: \x01", "special characters are not allowed"),
        (b"output: 2024-13-45", "not valid YAML"),
        (b"steps: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
    ],
)
def test_a_config_that_is_no_yaml_for_us_is_a_clear_error(tmp_path, content, sentence):
    (tmp_path / "bad.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=sentence) as error:
        FlowGRPOConfig.from_yaml(tmp_path / "bad.yaml")
    assert len(str(error.value)) < 300


def test_a_config_may_have_a_byte_order_mark_umlauts_and_merged_sections(tmp_path):
    text = "\ufeffoutput_dir: runs/Kätzchen\nsampling: &s {steps: 4}\nstages:\n- {steps: 3, sampling: {<<: *s, steps: 5}}"
    (tmp_path / "good.yaml").write_text(text, encoding="utf-8")
    args = FlowGRPOConfig.from_yaml(tmp_path / "good.yaml", ["objective.name=awm"])
    assert args.output_dir == "runs/Kätzchen"
    assert (args.sampling.steps, args.resolved_stages()[0][1].sampling.steps) == (4, 5)


def test_line_ends_of_windows_are_read(tmp_path):
    (tmp_path / "own.yaml").write_bytes(b"model: tiny\r\nprompts: p.txt\r\nrewards: {jpeg_size: 1}\r\n")
    args = FlowGRPOConfig.from_yaml(tmp_path / "own.yaml")
    assert (args.model, args.prompts, [*args.rewards]) == ("tiny", "p.txt", ["jpeg_size"])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("base: &o {lr: 1e-3}\noptimizer: *o\n", "there is no setting base"),
        ("defaults: &d {model: tiny}\n<<: *d\n", "there is no setting defaults"),
        ("prompts: [yes, no, 007, 1e3, null, a fox]\n", "prompts is True, but it should be a file or"),
        ("rewards:\n\tjpeg_size: 1\n", "line 2: lines are indented by spaces, and this one has a tab"),
        ("import ml_collections\ndef ocr_sd3():\n    return 1\n", "is not valid YAML, line 2"),
        ("rewards:\n  - name: OCR\n    weight: 1.0\n", r"but it should have weights: write {ocr: 1\.0}"),
        ("model: ${MODEL_DIR}/sd3\n", "variables are not replaced here"),
    ],
)
def test_configs_of_other_programs_are_one_sentence(tmp_path, text, sentence):
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(FlowGRPOError, match=sentence) as error:
        FlowGRPOConfig.from_yaml(tmp_path / "own.yaml")
    assert len(str(error.value).splitlines()) == 1


def test_a_number_needs_no_dot_in_a_file_in_braces_or_in_an_override_and_quoted_it_is_text(tmp_path):
    rewards = "{jpeg_size: 1e-3, my.py:fn: {weight: 2E5, options: {eps: -1e-6, half: -.5, name: '1e-6', id: 12e45f}}}"
    (tmp_path / "own.yaml").write_text(f"rewards: {rewards}\n")
    pairs = [f"rewards={rewards}"]
    for args in (FlowGRPOConfig.from_yaml(tmp_path / "own.yaml"), FlowGRPOConfig.from_yaml("tiny_ocr", pairs)):
        assert [reward.weight for reward in args.rewards.values()] == [1e-3, 2e5]
        assert args.rewards["my.py:fn"].options == {"eps": -1e-6, "half": -0.5, "name": "1e-6", "id": "12e45f"}
    assert parse_reward("my.py:fn={eps: 1e-6, name: '1e-6'}") == ("my.py:fn", {"eps": 1e-6, "name": "1e-6"})
    assert FlowGRPOConfig.from_yaml("tiny_ocr", ["optimizer.lr=+.5e0"]).optimizer.lr == 0.5


@pytest.mark.parametrize(
    ("text", "value"), [("seed: 0123", 123), ("seed: 1_000", 1000), ("seed: 0x10", 16), ("seed: -07", -7)]
)
def test_a_number_may_begin_with_zeros(tmp_path, text, value):
    (tmp_path / "own.yaml").write_text(text)
    assert FlowGRPOConfig.from_yaml(tmp_path / "own.yaml").seed == value


def test_a_ratio_is_a_text(tmp_path):
    (tmp_path / "own.yaml").write_text("prompts: [{file: wide.txt, name: 16:9}]")
    assert FlowGRPOConfig.from_yaml(tmp_path / "own.yaml").prompts[0].label == "16:9"


def test_an_override_goes_into_a_section_that_is_null(tmp_path):
    (tmp_path / "own.yaml").write_text("lora: null\nevaluation:\n")
    args = FlowGRPOConfig.from_yaml(tmp_path / "own.yaml", ["lora.rank=8", "evaluation.every=7"])
    assert (args.lora.rank, args.evaluation.every) == (8, 7)


@pytest.mark.parametrize("text", ["1e5", "-1e-6", "+.5", "12", "010", "1_000", ".inf", ".nan"])
def test_a_text_that_looks_like_a_number_is_written_and_read_back_as_text(text):
    args = FlowGRPOConfig.from_yaml("tiny_ocr", [f"output_dir='{text}'"])
    assert args.output_dir == text
    assert FlowGRPOConfig.model_validate(parse_yaml(args.to_yaml(), "the dump")) == args


def test_a_key_that_stands_twice_in_an_override_or_in_options_is_a_clear_error():
    with pytest.raises(ValueError, match=r"the value of rewards has the key 'ocr' twice"):
        FlowGRPOConfig.from_yaml("tiny_ocr", ["rewards={ocr: 1, ocr: 2}"])
    with pytest.raises(ValueError, match="has the key 'case' twice"):
        parse_reward("ocr={case: true, case: false}")
    with pytest.raises(ValueError, match="has the option 1, which is not a name"):
        parse_reward("ocr={1: 2}")


@pytest.mark.parametrize(
    ("pairs", "weights"),
    [
        (["rewards.my.py:redness=0.5"], {"my.py:redness": 0.5}),
        (['rewards."my.py:redness"=0.5'], {"my.py:redness": 0.5}),
        (["rewards.'a=b/my.py:redness'.weight=0.5"], {"a=b/my.py:redness": 0.5}),
        (["rewards.../a.b/my.py:redness.weight=0.5"], {"../a.b/my.py:redness": 0.5}),
        (["rewards.my_package.colors:redness=1e-1"], {"my_package.colors:redness": 0.1}),
        (["rewards={v1.5: {isolate: true}}", "rewards.v1.5=2"], {"v1.5": 2.0}),
        (["rewards=[ocr, a.py:f]", "rewards.ocr.weight=2", "rewards.a.py:f=3"], {"ocr": 2.0, "a.py:f": 3.0}),
        (["rewards.a.py:f=1", "rewards.a.py:f_2=2"], {"a.py:f": 1.0, "a.py:f_2": 2.0}),
    ],
)
def test_a_rewards_name_may_have_dots_in_an_override(pairs, weights):
    args = FlowGRPOConfig.from_yaml("tiny_grpo", pairs)
    assert weights.items() <= {name: reward.weight for name, reward in args.rewards.items()}.items()
    moved = FlowGRPOConfig.from_yaml("tiny_grpo", [f"evaluation.{pair}" for pair in pairs])
    assert weights.items() <= {name: reward.weight for name, reward in moved.evaluation.rewards.items()}.items()


def test_a_weight_given_by_an_override_leaves_the_rewards_options_alone():
    pairs = ["rewards={a.py:f: {isolate: true, options: {x: 1}}}", "rewards.a.py:f=0.5", "rewards.a.py:f.options.y=2"]
    (reward,) = FlowGRPOConfig.from_yaml("tiny_grpo", pairs).rewards.values()
    assert (reward.weight, reward.isolate, reward.options) == (0.5, True, {"x": 1, "y": 2})
    with pytest.raises(ValueError, match=r"no setting rewards.a.py:f.wieght. Did you mean weight"):
        FlowGRPOConfig.from_yaml("tiny_grpo", ["rewards.a.py:f.wieght=0.5"])


@pytest.mark.parametrize("setting", ["prompts", "evaluation.prompts", "model", "lora.init_from"])
def test_an_address_with_a_password_is_refused_and_not_shown(setting):
    with pytest.raises(ValueError, match="an address with a user or password"):
        FlowGRPOConfig.from_yaml("tiny_ocr", [f"{setting}=https://me:pa55@host/prompts.txt"])


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        (
            "{remote: 'http://x', options: {token: pa55}}",
            "options.token would be written .* environment variable REWARD_TOKEN",
        ),
        (
            "{options: {url: 'http://x', api_key: pa55}}",
            "options.api_key would be written .* environment variable OPENAI_API_KEY",
        ),
        ("{remote: 'http://me:pa55@x:8000'}", "has a user or password, .* environment variable REWARD_TOKEN"),
        ("{remote: ['http://x', 'https://pa55@x']}", "has a user or password"),
        ("{options: {urls: 'http://me:pa55@x:8000'}}", "has a user or password"),
    ],
)
def test_a_secret_of_a_reward_is_refused_and_not_shown(setting, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        FlowGRPOConfig.from_yaml("tiny_ocr", [f"rewards={{clip: {setting}}}"])
    assert "pa55" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "steps",
        "prompts_per_step",
        "images_per_prompt",
        "epochs",
        "seed",
        "sampling.steps",
        "evaluation.steps",
    ],
)
def test_absurd_numbers_are_refused_by_the_settings_name(name):
    for number in (10**19, -(10**19)):
        with pytest.raises(FlowGRPOError, match=name) as error:
            FlowGRPOConfig.from_yaml("tiny_ocr", [f"{name}={number}"])
        assert "\n" not in str(error.value)
