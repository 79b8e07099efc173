"""A look at each reward before a run: what it says of pictures of the run, and a verdict on each of its ills."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from flow_grpo.doctor.result import FINE, WARNING, WRONG, Level, Verdict
from flow_grpo.doctor.reward_probe import Glance, Look, glance_at, look_at
from flow_grpo.evaluation.group_dependence import GROUP_DEPENDENT, RewardInputs
from rewards import WeightedSum

PERSON = "human"  # the reward that is never looked at


def scores(
    sums: WeightedSum, rolled: Collection[str], pictures: RewardInputs, images: int, drawing: float
) -> tuple[dict[str, Glance], list[Verdict]]:
    """What each reward that could score the pictures says of them, and the verdicts on all. A person is not asked.

    Args:
        sums: of all rewards; a weight of 0 is not trained on.
        rolled: the names of those that a rollout calls; of the others, which evaluations call, one call has to do.
        images: of a prompt.
        drawing: seconds that drawing the pictures took.
    """
    looks: dict[str, Glance] = {}
    broken, trained = {}, sums.weights
    names = sorted(sums.rewards, key=lambda name: not trained[name])  # the trained ones first
    for name in names:
        if name == PERSON:
            continue
        try:
            looks[name] = (look_at if name in rolled else glance_at)(name, sums.rewards[name], pictures)
        except ValueError as error:
            broken[name] = str(error)
    scoring = sum(look.seconds for name, look in looks.items() if name in rolled)
    whole, found = drawing / len(pictures.prompts) + scoring, []
    for name in names:
        title, drop = name, name in sums.drop_on_error
        if name == PERSON:
            found.append(not_asked(title))
            continue
        if name in broken:
            found.append(failed(title, broken[name], drop))
            continue
        look, others = looks[name], [one for other, one in looks.items() if other != name and trained[other]]
        if trained[name]:
            assert isinstance(look, Look)
            found += judge_trained(title, look, images, drop, [one for one in others if isinstance(one, Look)])
        else:
            found += judge_watched(title, look, drop)
        found.append(latency(title, look.seconds, look.seconds / whole if name in rolled else None))
    return looks, found


def by_brightness(images: Tensor, prompts: list[str], **metadata: Any) -> Tensor:
    """In a person's place, for whom nothing is shown: of a prompt's pictures the brightest is the best."""
    return images.mean((1, 2, 3))


def judge_trained(title: str, look: Look, images: int, drop: bool, others: list[Look]) -> list[Verdict]:
    """The verdicts on a reward that is trained on: `images` in a group, `others` that are trained on beside it."""
    alone = all(other.constant for other in others)
    found = [values(title, look.values, drop, WRONG if alone else WARNING)]
    if look.usable and not look.constant:
        by_group = look.values.view(-1, images)
        within = by_group.std(1, correction=0).mean().item()
        found += [spread(title, by_group), repeats(title, look.once, look.again, within)]
    if look.usable and look.mismatched is not None:
        change = (look.mismatched - look.once).mean().item()
        found.append(reads_prompt(title, look.reads, change, any(other.reads for other in others)))
    return [*found, group_free(title, look.by_group), side_effects(title, look)]


def judge_watched(title: str, look: Glance, drop: bool) -> list[Verdict]:
    """Of a reward that is measured and not trained on."""
    found = [values(title, look.values, drop, FINE)]
    return [*found, side_effects(title, look)] if look.changed or look.settings else found


# -- from numbers to verdicts -----------------------------------------------------------------------------------------


def not_asked(name: str) -> Verdict:
    says = "a person's time is for the run; where a rollout wants a ranking, the brightest picture is the best."
    return Verdict(f"{name}: values", "not asked", FINE, says)


def failed(name: str, error: str, drops: bool) -> Verdict:
    """drops: whether its on_error leaves out what it can't score."""
    more = "" if drops else " Mend it; on_error=drop leaves out what it can't score now and then."
    return Verdict(f"{name}: values", "none", WRONG, f"{error.rstrip('.')}.{more}")


def values(name: str, found: Tensor, drops: bool, constant: Level) -> Verdict:
    """found (B,): of pictures of several prompts; constant: how bad it is if all are the same, FINE for one that is not trained on."""
    check, finite = f"{name}: values", found[found.isfinite()]
    missing = len(found) - len(finite)
    if missing:
        level = WARNING if drops and len(finite) else WRONG
        says = "are not finite: " + ("those groups are left out." if drops else "mend it, or set its on_error=drop.")
        return Verdict(check, f"{missing} of {len(found)}", level, says)
    low, high = found.min(), found.max()
    if low == high:
        says = "all are the same" + ("" if constant == FINE else ", so it tells no picture from another.")
        return Verdict(check, f"{low:.3g}", constant, says)
    number, solved, hopeless = f"{low:.3g} to {high:.3g}", (found == high).float().mean(), (found == low).float().mean()
    if constant != FINE and solved >= 0.9:
        return Verdict(check, number, WARNING, f"{solved:.0%} get the highest: take harder prompts or a stricter reward.")
    if constant != FINE and hopeless >= 0.9:
        says = f"{hopeless:.0%} get the lowest: take easier prompts or a milder reward, or fine-tune first (`stages`)."
        return Verdict(check, number, WARNING, says)
    return Verdict(check, number, FINE, f"mean {found.mean():.3g}")


def spread(name: str, found: Tensor) -> Verdict:
    """found (P, G), not all the same: whether there are differences between the images of a prompt, which alone can be learnt from."""
    check, within, whole = f"{name}: within a group", found.std(1, correction=0).mean(), found.std(correction=0)
    number = f"std {within:.2g}"
    if within > 1e-5 * whole:
        return Verdict(check, number, FINE, f"of {whole:.2g} in all")
    return Verdict(
        check, number, WRONG, "the images of a prompt all get the same: it looks at the prompt, not at the picture."
    )


def repeats(name: str, once: Tensor, again: Tensor, within: float) -> Verdict:
    """once, again (n,): of the very same pictures; within: std of the reward within a group."""
    check = f"{name}: scored twice"
    if torch.equal(once, again):
        return Verdict(check, "the same", FINE)
    noise = ((once - again).square().mean() / 2).sqrt().item()
    number = f"std {noise:.2g}"
    if noise**2 > 0.5 * within**2:
        return Verdict(check, number, WRONG, "most of what tells images apart is its own chance: seed it, or average calls.")
    says = f"chance, beside {within:.2g} within a group: seed it if you can."
    return Verdict(check, number, WARNING, says)


def reads_prompt(name: str, reads: bool, change: float, others: bool) -> Verdict:
    """change: what another picture's prompt does to it on average; others: whether another trained reward reads prompts."""
    check = f"{name}: reads the prompt"
    if reads:
        return Verdict(check, "yes", FINE, f"{change:+.2g} with a wrong prompt")
    if others:
        return Verdict(check, "no", FINE, "another one does")
    says = "pictures may forget what was asked for: add a reward that reads it, such as clip, or a kl_weight."
    return Verdict(check, "no", WARNING, says)


def group_free(name: str, by_group: bool) -> Verdict:
    """by_group: whether an image's value depends on the other images of its prompt."""
    check = f"{name}: other images of a prompt"
    return Verdict(check, "matter", WARNING, GROUP_DEPENDENT) if by_group else Verdict(check, "don't matter", FINE)


def side_effects(name: str, look: Glance) -> Verdict:
    """Whether it wrote into the images that it was given, changed the process, or keeps a graph."""
    check = f"{name}: side effects"
    if look.changed:
        return Verdict(
            check, "images changed", WRONG, "it writes into its images, which other rewards see: let it copy them."
        )
    if look.settings:
        says = f"it changes {', '.join(look.settings)} for the whole process, which is set back after each call."
        return Verdict(check, "settings changed", WARNING, says)
    if look.gradient:
        return Verdict(check, "a gradient", WARNING, "its values keep a graph that nothing uses: run it under no_grad.")
    return Verdict(check, "none", FINE)


def latency(name: str, seconds: float, share: float | None) -> Verdict:
    """seconds: of a picture; share: of the time that drawing and scoring take in a rollout, None if it is not called there."""
    check, number = f"{name}: a picture", f"{1000 * seconds:.1f} ms"
    if share is None:
        return Verdict(check, number, FINE, "in evaluations alone, loading included")
    if share <= 0.5:
        return Verdict(check, number, FINE, f"{share:.0%} of a rollout")
    return Verdict(check, number, WARNING, f"{share:.0%} of a rollout: score in larger batches, or elsewhere by `remote`.")
