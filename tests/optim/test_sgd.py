"""SGD that decides on the device: torch's numbers, and nothing at all in a step that is skipped, be it the first."""

from __future__ import annotations

import pytest
import torch

from fp8cfg.optim.mixed_precision import SGD


def parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in ((5, 7), (0, 7), (3,))]


@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.1}, {"momentum": 0.9}, {"momentum": 0.9, "weight_decay": 0.1}],
    ids=str,
)
@pytest.mark.parametrize("skipped", [set(), {0}, {0, 1, 3}], ids=str)
def test_steps_are_torchs_but_for_those_that_are_skipped(
    options: dict[str, float], skipped: set[int]
) -> None:
    ours, theirs = parameters(), parameters()
    mine, want = (
        SGD(ours, lr=0.1, **options),
        torch.optim.SGD(theirs, lr=0.1, fused=True, **options),
    )
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        for p, q in zip(
            ours[step == 4 :], theirs[step == 4 :], strict=True
        ):  # in the last step the first has no gradient
            q.grad = torch.randn(p.shape, generator=generator)
            p.grad = q.grad / 0 if step in skipped else q.grad.clone()
        mine.found_inf = torch.tensor(float(step in skipped))
        mine.step()
        if step not in skipped:
            want.step()
        mine.zero_grad(), want.zero_grad()
        assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))
    momenta = [
        [state["momentum_buffer"] for state in made.state_dict()["state"].values()]
        for made in (mine, want)
        if options.get("momentum")
    ]
    assert not momenta or all(torch.equal(a, b) for a, b in zip(*momenta, strict=True))
