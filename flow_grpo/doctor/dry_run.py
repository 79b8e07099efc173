"""`train --dry-run`: checks settings, prompts, model files and rewards as the run would, and estimates a step. It trains nothing."""

from pathlib import Path

from flow_grpo.config import FlowGRPOConfig
from flow_grpo.config.sections import PromptSetConfig
from flow_grpo.data import prompt_overlap
from flow_grpo.data.prompt_mixture import load_run_prompts
from flow_grpo.data.prompt_syntax import syntax_warnings
from flow_grpo.data.prompts import PromptSet
from flow_grpo.doctor.dry_run_model import check_model, cost_lines
from flow_grpo.doctor.dry_run_report import DryRunReport
from flow_grpo.doctor.dry_run_rewards import check_rewards
from flow_grpo.rewards.downloads import is_missing_download
from flow_grpo.run_folder.opening import check_begun
from flow_grpo.training import early_checks
from flow_grpo.training.offline import load_examples


def dry_run(args: FlowGRPOConfig, num_processes: int = 1, resume: bool = False) -> list[str]:
    """Check everything that a run of `num_processes` processes starts with, as far as it needs no weights of the model.

    It downloads nothing but prompts and the model's configs.

    Returns:
        Lines for the user: what was checked, what a step costs, warnings.

    Raises:
        FlowGRPOError: the run would fail, with the same sentence. A folder that holds a run already is a warning.
    """
    report, folder = DryRunReport(["settings"]), Path(args.output_dir)
    early_checks.check_writable(folder)
    early_checks.check_settings(args, num_processes)
    prompts, held_out = _check_prompts(args, num_processes, report)
    estimator = check_model(args, num_processes, report, estimate=prompts is not None)
    check_rewards(args, prompts, held_out, None if estimator is None else estimator.trace.image_shape, report)
    if estimator is not None:  # after what may fail, as it takes seconds
        report.notes += cost_lines(estimator, args, num_processes, len(held_out or []))
    _check_begun(folder, resume, report)
    return report.lines()


def _check_begun(folder: Path, resume: bool, report: DryRunReport) -> None:
    """Last, since a run of the same settings is often there, and its folder would hide every other error."""
    try:
        check_begun(folder, resume)
    except ValueError as error:
        report.notes.append(f"warning: a run would be refused: {error}")
    else:
        report.checked.append(f"the run folder {folder}")


def _check_prompts(
    args: FlowGRPOConfig, num_processes: int, report: DryRunReport
) -> tuple[PromptSet | None, PromptSet | None]:
    """Return the training prompts and the held-out ones, None for those that are not downloaded or not set."""
    prompts = _load_prompts(args.training_prompts, report)
    held_out = None if args.evaluation.prompts is None else _load_prompts(args.evaluation.prompts, report)
    held_out = held_out and held_out.head(args.evaluation.max_prompts)
    source = args.prompts if isinstance(args.prompts, str) else None
    if prompts is not None:
        early_checks.check_prompts(args, prompts, held_out, num_processes)
        report.checked.append(f"{len(prompts)} prompts")
        held_out_prompts = held_out.prompts if held_out else []
        report.notes += dict.fromkeys([*prompts.notes, *(held_out.notes if held_out else ())])
        warnings = syntax_warnings([*prompts.prompts, *held_out_prompts])
        warnings += prompt_overlap.overlap_warnings(prompts.prompts, held_out_prompts, source)
        report.notes += [f"warning: {sentence}" for sentence in warnings]
    if held_out is not None:
        report.checked.append(f"{len(held_out)} held-out prompts")
    for _, stage in args.resolved_stages():
        if stage.dataset is not None:
            examples = load_examples(stage.dataset, stage.objective.needs.rows_per_pair)
            report.checked.append(f"{len(examples.prompts)} given images")
    return prompts, held_out


def _load_prompts(source: str | list[PromptSetConfig], report: DryRunReport) -> PromptSet | None:
    try:
        return load_run_prompts(source)
    except ValueError as error:
        if not is_missing_download(error):
            raise
        report.missing.append(f"the prompts {source}")
        return None
