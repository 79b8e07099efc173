"""A pipeline or a policy of the user's own as the model of a run."""

import pytest
from diffusers import DiffusionPipeline
from peft import LoraConfig
from support import small_policy as small

from flow_grpo import FlowGRPOConfig, FlowGRPOTrainer, load_policy
from flow_grpo.config.sections import MemoryConfig
from flow_grpo.errors import FlowGRPOError
from flow_grpo.run_folder import layout


def brightness(images, prompts):
    return images.mean((1, 2, 3))


def settings(folder, **changes):
    return small.settings(
        output_dir=str(folder), steps=1, height=8, width=8, rewards={"brightness": 1.0}, **{"dtype": "auto", **changes}
    )


def pipeline() -> DiffusionPipeline:
    return small.policy(lora=False).pipe


@pytest.mark.usefixtures("no_report")
def test_a_pipeline_is_a_model_to_which_the_settings_are_applied(tmp_path):
    args = settings(tmp_path / "run", guidance=2.0, memory={"gradient_checkpointing": True, "vae_slicing": True})
    pipe = pipeline()
    trainer = FlowGRPOTrainer(pipe, brightness, args, train_dataset=["a", "b"])
    assert trainer.policy.pipe is pipe
    assert {"height": 8, "width": 8, "guidance_scale": 2.0}.items() <= trainer.policy.call.items()
    assert pipe.transformer.is_gradient_checkpointing
    assert pipe.vae.use_slicing
    assert trainer.policy.lora.transformer.peft_config["default"].r == args.lora.rank
    trainer.train()
    recorded = FlowGRPOConfig.from_yaml(tmp_path / "run" / layout.CONFIG)
    assert (recorded.model, recorded.height, recorded.guidance) == ("StableDiffusion3Pipeline", 8, 2.0)


def test_the_settings_of_a_given_policy_are_those_of_the_run(tmp_path, capsys):
    args = settings(tmp_path / "run", lora={"rank": 7}).model_copy(update={"height": 64, "guidance": 5.0, "dtype": "bf16"})
    trainer = FlowGRPOTrainer(small.policy(), brightness, args, train_dataset=["a", "b"])
    told = trainer.args
    assert (told.height, told.width, told.guidance, told.dtype) == (8, 8, 1.0, "fp32")
    assert (told.lora.rank, told.lora.alpha, told.lora.targets) == (2, 4, ["to_out.0", "to_q"])


def test_the_targets_of_a_policy_with_a_loaded_lora_are_its_layers(tmp_path):
    policy = small.policy()
    policy.save(tmp_path / "lora")
    loaded = small.policy(lora=False)
    loaded.load_lora(tmp_path / "lora")
    told = FlowGRPOTrainer(loaded, brightness, settings(tmp_path / "run"), train_dataset=["a", "b"]).args
    blocks = [f"transformer_blocks.{i}.attn" for i in range(2)]
    assert told.lora.targets == [f"{block}.{layer}" for block in blocks for layer in ("to_out.0", "to_q")]
    again = small.policy(lora=False)
    again.add_lora(told.lora.rank, told.lora.alpha, told.lora.targets, seed=0)
    assert again.trainable_parameters().keys() == loaded.trainable_parameters().keys()


@pytest.mark.usefixtures("no_report")
def test_a_policy_that_was_trained_is_trained_on_and_the_run_says_so(tmp_path, capsys):
    policy = small.policy(lora=False)
    for name in ("first", "second"):
        args = settings(tmp_path / name, objective={"name": "nft"})
        FlowGRPOTrainer(policy, brightness, args, train_dataset=["a", "b"]).train()
        assert ("it goes on from the LoRA that the policy has" in capsys.readouterr().out) is (name == "second")


def test_a_pipeline_with_a_lora_of_its_own_is_refused_in_a_sentence(tmp_path):
    pipe = pipeline()
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"]), "style")
    with pytest.raises(ValueError, match="the pipeline has a LoRA, style: load it anew"):
        FlowGRPOTrainer(pipe, brightness, settings(tmp_path), train_dataset=["a", "b"])


def test_a_pipeline_that_an_earlier_trainer_has_trained_is_refused_and_its_policy_is_not(tmp_path):
    pipe = pipeline()
    first = FlowGRPOTrainer(pipe, brightness, settings(tmp_path / "first"), train_dataset=["a", "b"])
    with pytest.raises(ValueError, match=r"the pipeline has a LoRA, default.* or give the trainer's `policy`"):
        FlowGRPOTrainer(pipe, brightness, settings(tmp_path / "second"), train_dataset=["a", "b"])
    again = FlowGRPOTrainer(first.policy, brightness, settings(tmp_path / "second"), train_dataset=["a", "b"])
    assert all(parameter.requires_grad for parameter in again.policy.trainable_parameters().values())


@pytest.mark.parametrize(("setting", "value"), [("quantize", "nf4"), ("embedding_cache_dir", "c")])
def test_settings_that_a_loaded_pipeline_comes_too_late_for_are_refused(setting, value):
    with pytest.raises(FlowGRPOError, match=f"memory.{setting} is for a model"):
        load_policy(pipeline(), "cpu", memory=MemoryConfig(**{setting: value}), height=8, width=8)


def test_a_model_that_is_none_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(ValueError, match="model is of type int: give a diffusers folder"):
        FlowGRPOTrainer(3, brightness, settings(tmp_path), train_dataset=["a", "b"])


def test_load_policy_takes_a_pipeline(tmp_path):
    assert load_policy(pipeline(), "cpu", height=8, width=8).call["height"] == 8
