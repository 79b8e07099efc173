"""What we write is compared with its checksum when it is read: one changed bit is one sentence."""

import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.embedded import PROMPTS, stir, tiny_policy

from flow_grpo.config.sections import MemoryConfig
from flow_grpo.files import CHECKSUM, DATA_HASH, check_safetensors
from flow_grpo.policy.hub import BUNDLED_MODELS, WEIGHTS
from flow_grpo.policy.loading import load_policy, save_merged


def flip(file, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    policy = tiny_policy()
    policy.add_lora(2, 4, ["to_q"], seed=0)
    stir(policy)
    return policy.save(tmp_path_factory.mktemp("lora"))


def test_any_changed_bit_of_a_lora_is_noticed(lora, tmp_path):
    policy, file = tiny_policy(), tmp_path / WEIGHTS
    bits = torch.randint(8 * lora.stat().st_size, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    header = 8 + int.from_bytes(lora.read_bytes()[:8], "little")
    bits += torch.randint(64, 8 * header, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    name = lora.read_bytes().index(CHECKSUM.encode())
    kept = range(8 * (name - 1), 8 * (name + len(CHECKSUM) + 6))  # without the name of the checksum, nothing else is wrong
    for bit in bits:
        shutil.copy(lora, file)
        flip(file, bit)
        if bit not in kept:
            with pytest.raises(ValueError, match=f"{WEIGHTS} (has another checksum|is damaged)"):
                policy.load_lora(tmp_path)


def test_the_header_has_the_hash_of_the_tensors_alone(lora, tmp_path):
    with safe_open(lora, "pt") as opened:
        stated = opened.metadata()[DATA_HASH]
    save_file(load_file(lora), tmp_path / "bare.safetensors", {DATA_HASH: stated})
    check_safetensors(tmp_path / "bare.safetensors")  # of another program, so not compared
    import hashlib

    content = (tmp_path / "bare.safetensors").read_bytes()
    data = content[8 + int.from_bytes(content[:8], "little") :]
    assert stated == f"0x{hashlib.sha256(data).hexdigest()}"


def test_equal_weights_are_equal_files(lora, tmp_path):
    again = tiny_policy()
    again.load_lora(lora)
    files = [again.save(tmp_path / name).read_bytes() for name in "ab"]
    assert files[0] == files[1]


def test_a_changed_bit_of_a_written_transformer_is_noticed(tmp_path):
    policy = tiny_policy()
    policy.enable_full_finetuning()
    policy.save(tmp_path / "transformer")
    file = next((tmp_path / "transformer").glob("*.safetensors"))
    tiny_policy().load_lora(tmp_path / "transformer")
    flip(file, 8 * file.stat().st_size - 9)
    with pytest.raises(ValueError, match="has another checksum than it was written with"):
        tiny_policy().load_lora(tmp_path / "transformer")


def test_a_changed_bit_of_a_merged_model_is_noticed(tmp_path):
    policy = tiny_policy()
    policy.add_lora(2, 4, ["to_q"], seed=0)
    save_merged(policy, tmp_path, "tiny")
    load_policy(str(tmp_path), "cpu", "fp32")
    file = next((tmp_path / "transformer").glob("*.safetensors"))
    flip(file, 8 * file.stat().st_size - 9)
    with pytest.raises(ValueError, match=r"could not be loaded: .* has another checksum"):
        load_policy(str(tmp_path), "cpu", "fp32")
    check_safetensors(BUNDLED_MODELS["tiny"] / "transformer" / file.name)


def test_a_changed_bit_of_a_cached_embedding_is_computed_again(tmp_path):
    def encoded() -> list[torch.Tensor]:
        memory = MemoryConfig(embedding_cache_dir=str(tmp_path))
        policy = load_policy("tiny", "cpu", "fp32", memory=memory, prompts=PROMPTS, height=32, width=80)
        return [part for part in policy.encode(PROMPTS).encoder_outputs[0][0][1] if part is not None]

    expected = encoded()
    files = sorted(tmp_path.rglob("*.pt"))
    for file in files:
        flip(file, 8 * (file.stat().st_size * 2 // 3))
    damaged = [file.read_bytes() for file in files]
    assert all(torch.equal(one, other) for one, other in zip(encoded(), expected, strict=True))
    assert all(file.read_bytes() != content for file, content in zip(files, damaged, strict=True))
