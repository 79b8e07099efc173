"""The doctor's checks of prompts."""

from PIL import Image
from support.checks import HELD_OUT, TRAIN, statuses

from flow_grpo.data.prompt_sources import held_out_overlap, load_prompts
from flow_grpo.doctor import groups
from flow_grpo.doctor.result import OK, WARNING, Status
from flow_grpo.doctor.run import RunChecks, start_results
from flow_grpo.image_prompt import ImagePrompt
from flow_grpo.trainer import FlowGRPOTrainer


def checked(trainer: FlowGRPOTrainer) -> dict[str, Status]:
    return statuses([*start_results(trainer.start_checks), *RunChecks(trainer).check_prompts()])


def test_prompts_that_are_duplicate_leaked_few_or_truncated(trainer):
    assert set(checked(trainer("steps=2")).values()) == {OK}
    assert checked(trainer(train=[*TRAIN, TRAIN[0].upper()]))["duplicate prompts"] == WARNING
    leaks = [checked(trainer(held_out=[*HELD_OUT[n:], *TRAIN[:n]])) for n in (1, 4)]
    assert [statuses["held-out prompts trained on"] for statuses in leaks] == [WARNING, WARNING]
    bench = checked(trainer(train=[*TRAIN, "a photo of a bench"]))
    assert bench["test sets trained on"] == WARNING
    assert bench["held-out prompts trained on"] == OK
    assert checked(trainer("steps=2000"))["training prompts"] == WARNING
    assert checked(trainer(held_out=HELD_OUT[:7]))["held-out prompts"] == WARNING
    long = 'red text "CAT" on a blue background' + " and on a red one" * 20
    assert checked(trainer(train=[*TRAIN, long]))["longest prompt"] == WARNING


def test_prompts_that_are_not_all_sampled_are_counted():
    assert groups.prompt_count(5000, 8, 2).message == "the run samples 16 of them once"
    assert groups.prompt_count(16, 8, 2).message == "each is sampled 1.0 times"
    counts = [groups.prompt_count(count, 2, steps).message for count in range(4, 60) for steps in range(1, 60)]
    assert "sampled 0" not in "".join(counts)


def test_the_advice_fits_the_reason():
    often, few = groups.prompt_count(10, 2, 1000), groups.prompt_count(10, 8, 2)
    assert often.status == few.status == WARNING
    assert "memorise" in often.message
    assert "memorise" not in few.message


def test_the_shipped_prompts_are_clean():
    train, held_out = (load_prompts(f"prompts/signs_{name}.txt").prompts for name in ("train", "eval"))
    assert groups.duplicate_prompts(train).status == OK
    assert held_out_overlap(train, held_out) == 0


def test_edits_of_different_images_are_no_duplicates():
    day, night = (Image.new("L", (8, 8), level) for level in (200, 20))
    edits = [ImagePrompt("make it night", [day]), ImagePrompt("Make it  night", [night]), "make it night"]
    assert groups.duplicate_prompts(edits).value == "0"
    assert groups.duplicate_prompts([*edits, ImagePrompt("MAKE it night", [night])]).value == "1 of 4"
