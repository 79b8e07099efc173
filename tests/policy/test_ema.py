"""The moving average of the trained weights."""

import pytest
import torch
from support.embedded import stir


def test_without_an_average_what_is_trained_stands_for_it(policy):
    before = policy.adapter_state()
    with policy.ema.applied():
        assert all(torch.equal(value, before[name]) for name, value in policy.adapter_state().items())
    assert policy.ema.state_dict() == {}


def test_an_average_that_is_loaded_moves_on_by_itself(policy):
    policy.ema.start()
    policy.ema.load_state_dict(policy.adapter_state())
    trained = policy.adapter_state()
    for value in policy.ema.average.values():
        value.zero_()
    assert all(torch.equal(value, trained[name]) for name, value in policy.adapter_state().items())


def test_the_average_is_in_place_only_within_its_context(policy):
    policy.ema.start()
    before = policy.adapter_state()
    stir(policy, seed=1)
    policy.ema.update(0.75)
    trained = policy.adapter_state()
    with policy.ema.applied():
        for name, value in policy.adapter_state().items():
            torch.testing.assert_close(value, 0.75 * before[name] + 0.25 * trained[name])
    assert all(torch.equal(value, trained[name]) for name, value in policy.adapter_state().items())


def test_an_average_of_other_parameters_or_where_none_is_kept_is_refused(policy):
    state = policy.adapter_state()
    with pytest.raises(ValueError, match="other names or shapes"):
        policy.ema.load_state_dict(state)
    policy.ema.start()
    with pytest.raises(ValueError, match="other names or shapes"):
        policy.ema.load_state_dict({name: value[:1] for name, value in state.items()})
