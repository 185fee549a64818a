"""The loss scale against Megatron's update rule, and its state through JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8cfg.optim import LossScaler

overflows = st.lists(st.booleans(), max_size=120)


class Megatron:
    """`DynamicGradScaler.update` of megatron/core/optimizer/grad_scaler.py, line by line."""

    def __init__(self, initial: float, minimum: float, window: int, hysteresis: int) -> None:
        self.scale, self.minimum, self.window, self.hysteresis = (
            initial,
            minimum,
            window,
            hysteresis,
        )
        self.growth_tracker, self.hysteresis_tracker = 0, hysteresis

    def update(self, found_inf: bool) -> None:
        if found_inf:
            self.growth_tracker = 0
            self.hysteresis_tracker -= 1
            if self.hysteresis_tracker <= 0:
                self.scale = max(self.scale * 0.5, self.minimum)
        else:
            self.growth_tracker += 1
            if self.growth_tracker == self.window:
                self.growth_tracker = 0
                self.hysteresis_tracker = self.hysteresis
                self.scale = self.scale * 2.0


@given(overflows, st.integers(1, 6), st.integers(1, 4), st.sampled_from([1.0, 2.0**28]))
def test_it_follows_megatron(
    steps: list[bool], window: int, hysteresis: int, minimum: float
) -> None:
    ours = LossScaler(min_loss_scale=minimum, loss_scale_window=window, hysteresis=hysteresis)
    theirs = Megatron(2.0**32, minimum, window, hysteresis)
    for found_inf in steps:
        ours.update(found_inf)
        theirs.update(found_inf)
        assert ours.state() == {
            "scale": theirs.scale,
            "growth_tracker": theirs.growth_tracker,
            "hysteresis_tracker": theirs.hysteresis_tracker,
        }


@given(overflows, overflows)
def test_state_survives_json(before: list[bool], after: list[bool]) -> None:
    first, second = (LossScaler(loss_scale_window=3) for _ in range(2))
    for found_inf in before:
        first.update(found_inf)
    second.load_state(json.loads(json.dumps(first.state())))
    for found_inf in after:
        first.update(found_inf)
        second.update(found_inf)
    assert first.state() == second.state()


def test_a_shorter_window_takes_effect_after_a_resume() -> None:
    before = LossScaler(loss_scale_window=10)
    for _ in range(6):
        before.update(False)
    resumed = LossScaler(loss_scale_window=3)
    resumed.load_state(before.state())
    resumed.update(False)
    assert resumed.scale == 2.0**33
    assert resumed.state()["growth_tracker"] == 0


def test_the_defaults_are_nemos() -> None:
    scaler = LossScaler()
    assert scaler.scale == 4294967296.0
    scaler.update(True)
    assert scaler.scale == 2.0**32  # the first overflow is forgiven
    scaler.update(False)
    scaler.update(True)
    assert scaler.scale == 2.0**31  # and a good step between does not make the second a first
    for _ in range(1000):
        scaler.update(False)
    assert scaler.scale == 2.0**32


def test_a_given_scale_stays() -> None:
    scaler = LossScaler(loss_scale=1024.0)
    for found_inf in (True, True, True, False):
        scaler.update(found_inf)
    assert scaler.scale == 1024.0
    scaler.load_state(LossScaler().state())
    assert scaler.scale == 1024.0


def test_other_state_is_refused() -> None:
    with pytest.raises(ValueError, match="not the state of a loss scaler"):
        LossScaler().load_state({"scale": 1.0})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_scale": 0.0}, "loss_scale=0.0 must be positive"),
        ({"min_loss_scale": 0.0}, "min_loss_scale=0.0 must be positive"),
        ({"initial_loss_scale": 0.5}, "at most initial_loss_scale=0.5"),
        ({"loss_scale_window": 0}, "loss_scale_window=0"),
        ({"hysteresis": 0}, "hysteresis=0"),
    ],
)
def test_values_that_never_work_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossScaler(**change)
