"""Embeddings of any structure: where their batch axes are, and that taking them apart and putting them together is exact."""

import pytest
import torch

from flow_grpo.policy.encoding import (
    ABSENT,
    CUMULATIVE,
    LIST,
    SHARED,
    build_conditioning,
    collate,
    copy_to_cpu,
    infer_batch_axes,
    merge_axes,
    select_row,
    to_device,
)


def encoded(lengths: list[int], seed: int = 0) -> tuple:
    """What an encoder might return for prompts of these lengths, with everything that the families do."""
    made = [torch.randn(n, 4, generator=torch.Generator().manual_seed(seed + n)) for n in lengths]
    longest = max(lengths)
    padded = torch.stack([torch.nn.functional.pad(m, (0, 0, 0, longest - len(m))) for m in made])
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    layers = torch.stack([padded, 2 * padded])  # (layers, B, L, C)
    return padded, [m.clone() for m in made], ends, layers, torch.zeros(longest, 3), None, [padded, padded + 1], 7


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def test_axes_are_found_by_doubling():
    assert infer_batch_axes(encoded([5]), encoded([5, 5])) == [0, LIST, CUMULATIVE, 1, SHARED, ABSENT, [0, 0], SHARED]
    with pytest.raises(ValueError, match=r"\(3, 2\) alone and \(4, 2\) in pairs"):
        infer_batch_axes(torch.zeros(3, 2), torch.zeros(4, 2))


def test_rows_taken_apart_and_put_together_are_the_batch():
    axes = infer_batch_axes(encoded([5]), encoded([5, 5]))
    batch = encoded([5, 5, 5])
    rows = [select_row(batch, axes, row, 3) for row in range(3)]
    assert same(rows[0], encoded([5]))
    assert same(collate(rows, axes), batch)


def test_a_mask_that_only_some_prompts_need_is_known_from_those():
    axes = merge_axes(infer_batch_axes([None], [None]), infer_batch_axes([torch.ones(1, 3)], [torch.ones(2, 3)]))
    assert axes == [0]
    assert collate([[None], [None]], axes) == [None]
    assert collate([[torch.ones(1, 3)]] * 2, axes)[0].shape == (2, 3)


def test_rows_of_one_shape_share_a_call_and_others_do_not():
    axes = {0: [infer_batch_axes(encoded([5]), encoded([5, 5]))]}
    recordings = {"a": [("encode", encoded([5]))], "b": [("encode", encoded([5], seed=9))], "c": [("encode", encoded([6]))]}
    made = build_conditioning(["c", "a", "b", "c"], recordings, axes, encode_separately=False)
    assert made.call_group[0] == made.call_group[3] != made.call_group[1] == made.call_group[2]
    prompts, taken = made.select(torch.tensor([1, 2, 1]))
    assert prompts == ["a", "b", "a"]
    assert same(taken[0][1][0], torch.cat([recordings[name][0][1][0] for name in "aba"]))
    assert len(build_conditioning(["a", "b"], recordings, axes, encode_separately=True).call_group.unique()) == 2
    torch.testing.assert_close(made.pooled()[0], recordings["c"][0][1][0][0].mean(0))


def test_recordings_move_whole():
    there = to_device([("encode", (torch.ones(2), [torch.ones(1), None], 3))], torch.device("meta"))
    assert there[0][1][0].device.type == there[0][1][1][0].device.type == "meta"
    assert there[0][1][1][1] is None


def test_a_copy_on_the_cpu_is_no_view_of_the_batch_that_it_is_from():
    batch = torch.arange(24.0).view(2, 3, 4)
    recorded = [("encode", (batch[:1], None, batch[0, 0, 0].bfloat16(), [batch[1].T > 20]))]
    [(name, (row, absent, number, [mask]))] = copy_to_cpu(recorded)
    assert (name, absent) == ("encode", None)
    assert same(row, batch[:1])
    assert same(number, batch[0, 0, 0].bfloat16())
    assert same(mask, batch[1].T > 20)
    assert row.untyped_storage().nbytes() == 12 * 4, "a file would have the whole storage"
