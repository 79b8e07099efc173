"""`--dry-run` finds what the run itself would stop at, in the run's own sentence, and `train` says it before it loads the model."""

import itertools
import json
import shutil

import pytest
from support.embedded import short_run
from support.paths import SAMPLE_REWARDS
from support.reward_servers import Stub

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.doctor.dry_run import DryRunReport, check_model, dry_run
from flow_grpo.errors import FlowGRPOError
from flow_grpo.plan import estimate
from flow_grpo.plan.estimate import StepEstimator
from flow_grpo.plan.hardware import Rates
from flow_grpo.plan.trace import ModelTrace
from flow_grpo.policy import loading
from flow_grpo.policy.hub import BUNDLED_MODELS
from flow_grpo.policy.pipeline import FlowPipeline
from flow_grpo.rewards import downloads
from flow_grpo.trainer import FlowGRPOTrainer
from flow_grpo.training.start_checks import Start, check_output

SAMPLES = SAMPLE_REWARDS


@pytest.fixture(autouse=True)
def quick(known_traces, monkeypatch):
    """No measurement of this machine."""
    monkeypatch.setattr(StepEstimator, "rates", lambda self, microbatch: Rates(1e12, 1e12))


def refused(args: FlowGRPOConfig) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        dry_run(args)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


EARLY = {
    "device=foo": "device=foo can't be used here",
    "prompts_per_step=3000": "prompts_per_step=3000, but there are only 2232 prompts",
    "prompts=missing.txt": "there is no file missing.txt",
    "rewards={orc: 1}": "Did you mean ocr",
    "rewards={color: {options: {size: 1}}}": "reward color",
    f"rewards={{{SAMPLES}:missing: 1}}": "has no missing",
    f"rewards={{{SAMPLES}:torch: 1}}": "is not callable",
    f"rewards={{{SAMPLES}:torch: {{options: {{a: 1}}}}}}": "is not callable",
    "rewards={color: {remote: 'http://127.0.0.1:9'}}": "no server for the reward color answers",
    f"objective={{name: '{SAMPLES}:missing'}}": "has no missing",
    f"objective.advantage={SAMPLES}:torch": "is not a function",
    "model=./nowhere": "there is no model folder ./nowhere",
    "memory.embedding_cache_dir=/dev/null/x": "memory.embedding_cache_dir=/dev/null/x: nothing can be written to /dev/null",
}


@pytest.mark.parametrize("setting", [pytest.param(s, marks=[pytest.mark.slow] * (i % 2)) for i, s in enumerate(EARLY)])
def test_what_a_dry_run_refuses_the_run_refuses_with_the_same_words_before_it_loads_the_model(
    setting, tmp_path, monkeypatch
):
    args = short_run(tmp_path / "run", setting)
    sentence = refused(args)
    assert EARLY[setting] in sentence
    monkeypatch.setattr(loading.DiffusionPipeline, "from_pretrained", lambda *a, **k: pytest.fail("the model was loaded"))
    with pytest.raises(ValueError) as error:  # noqa: PT011
        FlowGRPOTrainer(args=args)
    assert str(error.value) == sentence
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("height=31", "have to be divisible by 8 but are 31 and 80"),
        ("pipeline_kwargs={max_sequence_length: -1}", "max_sequence_length=-1: OverflowError"),
        ("height=4096", "can't be"),
        (f"rewards={{{SAMPLES}:raises: 1}}", "raised RuntimeError on 2 images"),
        (f"rewards={{{SAMPLES}:nan: 1}}", "returned nan"),
    ],
)
def test_settings_that_fail_once_the_model_is_there_are_found_without_it(setting, sentence, tmp_path, monkeypatch):
    monkeypatch.setattr(loading.DiffusionPipeline, "from_pretrained", lambda *a, **k: pytest.fail("the model was loaded"))
    assert sentence in refused(short_run(tmp_path, setting))


@pytest.mark.parametrize("setting", ["height=31", "pipeline_kwargs={max_sequence_length: -1}"])
def test_the_loaded_model_refuses_them_in_a_clear_error_too(setting, tmp_path):
    args = short_run(tmp_path, setting)
    sentence = refused(args)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        FlowGRPOTrainer(args=args)
    assert str(error.value) == sentence


def test_a_reward_that_only_evaluations_measure_is_called_with_held_out_prompts(tmp_path):
    """`color` needs prompts of its own form, which the held-out signs have."""
    (tmp_path / "p.txt").write_text('a sign with "ZERO"\na sign with "ONE"\n')
    prompts = f"prompts={tmp_path / 'p.txt'}"
    settings = ["rewards={ocr: 1}", "evaluation.rewards=[color]", "evaluation.prompts=prompts/signs_eval.txt"]
    assert "color" in " ".join(dry_run(short_run(tmp_path / "run", prompts, *settings)))
    with pytest.raises(ValueError, match="reward color raised"):
        dry_run(short_run(tmp_path / "run", prompts, "rewards={ocr: 1, color: 1}", "evaluation.prompts=null"))


def test_a_run_folder_that_cant_be_written_or_is_taken_is_refused_and_left_as_it_was(tmp_path):
    (tmp_path / "file").write_text("")
    for output in ("/dev/null", "/proc/nothing/here", str(tmp_path / "file" / "run")):
        args = FlowGRPOConfig.from_yaml("tiny_grpo", [f"output_dir={output}"])
        assert f"output_dir={output}: nothing can be written" in refused(args)
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    without_metrics = tmp_path / "without_metrics"
    (without_metrics / "checkpoints" / "step_000003").mkdir(parents=True)
    for folder in (taken, without_metrics):
        with pytest.raises(ValueError, match="already holds a run"):
            check_output(folder, resume=False)
    assert "have to be divisible by 8 but are 33 and 80" in refused(short_run(taken, "height=33")), "not hidden by it"
    aborted = tmp_path / "aborted"
    (aborted / "checkpoints" / "step_000000").mkdir(parents=True)
    check_output(aborted, resume=False)
    with pytest.raises(ValueError, match="no checkpoint to resume from"):
        check_output(tmp_path / "none", resume=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["aborted", "file", "taken", "without_metrics"]
    assert [path.name for path in without_metrics.rglob("*")] == ["checkpoints", "step_000003"]
    check_output(tmp_path / "a" / "b", resume=False)
    assert not (tmp_path / "a").exists()


def test_held_out_prompts_that_are_trained_on_are_a_warning(tmp_path):
    (tmp_path / "words.txt").write_text("one\ntwo\nthree\n")
    lines = dry_run(
        short_run(tmp_path / "run", *[f"{key}={tmp_path / 'words.txt'}" for key in ("prompts", "evaluation.prompts")])
    )
    assert any(line.startswith("warning: the training prompts include 2 of the 2 held-out prompts") for line in lines)


def test_a_damaged_model_folder_is_refused(tmp_path):
    model = shutil.copytree(BUNDLED_MODELS["tiny"], tmp_path / "model")
    weights = model / "vae" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "vae/diffusion_pytorch_model.safetensors" in refused(short_run(tmp_path / "run", f"model={model}"))


class Refusing(Stub):
    def answer(self, path, body):
        return 401, {"detail": "this server wants its token."}


class Serving(Stub):
    asked = 0

    def answer(self, path, body):
        if path == "/health":
            return 200, {"rewards": ["color"]}
        self.asked += 1
        return 200, {"values": [0.5, 0.25]}


def test_a_remote_reward_is_asked_for_its_health_and_once_for_values(tmp_path, monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", "wrong")
    refusing, serving = Refusing(), Serving()
    try:
        assert "wants its token" in refused(short_run(tmp_path, f"rewards={{color: {{remote: '{refusing.url}'}}}}"))
        lines = dry_run(short_run(tmp_path, f"rewards={{color: {{remote: '{serving.url}'}}}}"))
    finally:
        refusing.close()
        serving.close()
    assert serving.asked == 1
    assert "rewards color, each on 2 images" in lines[0]


class Paid(Serving):
    def answer(self, path, body):
        return (200, {"rewards": ["color"], "costly": ["color"]}) if path == "/health" else super().answer(path, body)


def test_a_costly_reward_on_a_server_is_not_called(tmp_path):
    paid = Paid()
    lines = dry_run(short_run(tmp_path, f"rewards={{color: {{remote: '{paid.url}'}}}}"))
    paid.close()
    assert any("the reward color was not called: its attribute `costly` is set" in line for line in lines)
    assert paid.asked == 0


def test_the_rewards_see_two_images_of_the_models_size_with_their_prompts_metadata(tmp_path, monkeypatch):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one", "answer": 3}\n{"prompt": "two", "answer": 4}\n')
    (tmp_path / "noted.py").write_text(
        "seen = []\ndef noted(images, prompts, answer):\n    seen.append((tuple(images.shape), prompts, answer))\n"
        f"    open({str(tmp_path / 'seen.txt')!r}, 'a').write(repr(seen[-1]))\n    return images.mean((1, 2, 3))\n"
    )
    rewards = f"rewards={{{tmp_path / 'noted.py'}:noted: 1, human: 0.5}}"
    lines = dry_run(short_run(tmp_path / "run", rewards, f"prompts={tmp_path / 'prompts.jsonl'}", "evaluation.prompts=null"))
    assert (tmp_path / "seen.txt").read_text() == "((2, 3, 32, 80), ['one', 'two'], [3, 4])"
    assert "the reward human was not called: a person ranks its images" in lines
    assert not (tmp_path / "run").exists()


def test_a_costly_reward_of_the_users_own_is_not_called(tmp_path):
    called = tmp_path / "called"
    (tmp_path / "paid.py").write_text(
        f"def paid(images, prompts):\n    open({str(called)!r}, 'w')\n    return images.mean((1, 2, 3))\npaid.costly = True\n"
    )
    lines = dry_run(short_run(tmp_path / "run", f"rewards={{{tmp_path / 'paid.py'}:paid: 1}}", "evaluation.prompts=null"))
    assert any("was not called: its attribute `costly` is set" in line for line in lines)
    assert not called.exists()


def test_without_held_out_prompts_the_rewards_of_evaluation_are_not_built(tmp_path):
    rewards = "evaluation={prompts: null, rewards: {clip: {options: {model: none, pretrained: none}}}}"
    args = short_run(tmp_path, rewards)
    assert set(FlowGRPOTrainer(args=args).eval_rewards.rewards) == {"brightness"}
    assert "clip" not in " ".join(dry_run(args))
    with pytest.raises(ValueError, match="reward clip"):
        FlowGRPOTrainer(args=args, eval_dataset=["a word"])


def test_a_dropped_reward_that_fails_is_a_warning(tmp_path):
    rewards = f"rewards={{color: 1, {SAMPLES}:raises: {{on_error: drop}}}}"
    assert any(
        line.startswith("warning: reward") for line in dry_run(short_run(tmp_path, rewards, "evaluation.prompts=null"))
    )


def test_a_size_that_the_model_does_not_draw_is_refused_by_dry_run_and_run(tmp_path, monkeypatch):
    """Some pipelines round the size without a word."""
    monkeypatch.setattr(estimate, "ModelTrace", ModelTrace)  # of a pipeline with that fault
    args, real = short_run(tmp_path, "height=32", "width=80", "evaluation.prompts=null"), FlowPipeline.decode
    monkeypatch.setattr(FlowPipeline, "decode", lambda *given: real(*given)[..., :16, :64])
    for start in (dry_run, lambda args: FlowGRPOTrainer(args=args)):
        with pytest.raises(
            FlowGRPOError, match=r"height and width: .*Pipeline generates 16 x 64 pixels, not 32 x 80: set that size"
        ):
            start(args)


def test_the_size_of_a_published_model_is_checked_without_its_files(monkeypatch):
    """FLUX takes multiples of 16; its configs are in the package."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    args = FlowGRPOConfig.from_yaml("flux_dev_ocr", ["height=504"])
    with pytest.raises(FlowGRPOError, match="FluxPipeline generates 496 x 512 pixels, not 504 x 512"):
        check_model(Start(args), DryRunReport(), estimate=True)


class Counting(Stub):
    """A hub that closes every connection before it has answered."""

    connections = 0

    def process_request(self, request, client_address):
        Counting.connections += 1
        self.shutdown_request(request)


@pytest.fixture
def dead_hub(monkeypatch):
    hub = Counting()
    Counting.connections = 0
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/{revision}/{filename}"
    )
    remembered = downloads._answers  # which a test may replace
    remembered.cache_clear()
    yield hub
    hub.close()
    remembered.cache_clear()


def test_a_dead_hub_is_asked_once_and_named_in_one_line(dead_hub, tmp_path, capfd):
    settings = ["model=nobody/nothing", "rewards={hpsv2: 1, imagereward: 1, color: 1}", "evaluation.prompts=null"]
    lines = dry_run(short_run(tmp_path, *settings))
    assert lines[-2] == (
        "not checked, as it is not in the cache and the hub can't be reached: the model nobody/nothing, the reward hpsv2, "
        "the reward imagereward"
    )
    assert lines[-1] == "The settings go together, as far as they could be checked; nothing was trained."
    assert "rewards color, each on" in lines[0]
    with pytest.raises(
        ValueError, match=r"hpsv2 could not be built: .*HPSv2: not in the cache, and the hub \(http.*reached\.$"
    ):
        FlowGRPOTrainer(args=short_run(tmp_path, "rewards={hpsv2: 1}"))
    with pytest.raises(ValueError, match=r"the model nobody/nothing: not in the cache, and the hub"):
        FlowGRPOTrainer(args=short_run(tmp_path, "model=nobody/nothing"))
    assert dead_hub.connections == 1
    assert "".join(capfd.readouterr()) == "", "other libraries say nothing"


def test_prompts_that_are_not_downloaded_are_not_blamed_for_what_only_they_have(dead_hub, tmp_path):
    (tmp_path / "mine.py").write_text("def answered(images, prompts, answer):\n    return images.mean((1, 2, 3))\n")
    settings = ["prompts=nobody/nothing", "evaluation.prompts=null"]
    lines = dry_run(short_run(tmp_path / "run", f"rewards={{{tmp_path / 'mine.py'}:answered: 1}}", *settings))
    assert any(line.endswith("mine.py:answered was not called, as its prompts are not downloaded") for line in lines)
    assert lines[-2].endswith("the hub can't be reached: the prompts nobody/nothing")
    assert "Did you mean ocr" in refused(short_run(tmp_path / "run", "rewards={orc: 1}", *settings))


def test_a_hub_that_answers_is_not_downloaded_from(dead_hub, tmp_path, monkeypatch):
    monkeypatch.setattr(downloads, "_answers", lambda endpoint: True)
    lines = dry_run(short_run(tmp_path, "rewards={hpsv2: 1}", "evaluation.prompts=null"))
    assert lines[-2] == "not checked, as it is not in the cache and the run will download it: the reward hpsv2"
    assert dead_hub.connections == 0


def test_the_whole_chain_of_causes_is_looked_at():
    first = type("OfflineModeIsEnabled", (ConnectionError,), {})("offline")
    second, third = OSError("no file"), ValueError("could not be built")
    second.__context__, third.__cause__ = first, second
    assert downloads.is_missing_download(third)
    assert not downloads.is_missing_download(ValueError("other"))
    assert list(itertools.islice(downloads._causes(third), 9)) == [third, second, first]


def test_a_trained_reward_without_a_gradient_is_refused_as_by_the_run(tmp_path):
    args = short_run(tmp_path / "run", "objective={name: flowbp}", "rewards={jpeg_size: 1}", "evaluation.prompts=null")
    assert "reward jpeg_size has no gradient: take a differentiable one" in refused(args)
    with pytest.raises(FlowGRPOError) as error:
        FlowGRPOTrainer(args=args)
    assert refused(args) == str(error.value)
    measured = short_run(
        tmp_path / "run", "objective={name: flowbp}", "rewards={clip: 1, jpeg_size: 0}", "evaluation.prompts=null"
    )
    assert dry_run(measured)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("images.detach().mean((1, 2, 3))", "returned values without a gradient of the images"),
        ("(images.mean((1, 2, 3)) * 0).sqrt()", "has a gradient that is not finite"),
    ],
)
def test_a_dry_run_takes_the_gradient_that_the_objective_needs(tmp_path, body, sentence):
    file = tmp_path / "mine.py"
    file.write_text(f"def mine(images, prompts):\n    return {body}\n\n\nmine.differentiable = True\n")
    settings = [f"rewards={{{file}:mine: 1}}", "evaluation.prompts=null"]
    assert sentence in refused(short_run(tmp_path / "run", "objective={name: refl}", *settings))
    assert dry_run(short_run(tmp_path / "run", *settings))
