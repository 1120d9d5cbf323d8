"""The strict gap: functions that mixing adds, with the paper's three examples built as layers."""

import torch
from torch import Tensor

from hypermlp.config import MixerConfig
from hypermlp.layers.mixer import Mixer
from hypermlp.theory.check import check
from hypermlp.theory.geometry import bend, boundary
from hypermlp.theory.mlp import T
from hypermlp.theory.objects import Step, random_layer, random_rows


def example(base: str, rows: Tensor, sources: list[int], target: int, directions: Tensor) -> Step:
    """A head over the rows, given newest first, with x L1 = x, whose slot ``target`` also gets the scores of the ``sources``.

    R1 = I + sum over k of e_source sigmoid(x w_k) e_targetᵀ: ``directions`` are the w.
    """
    t, d = rows.shape
    branches = 2 if base == "G" else 1
    config = MixerConfig.from_label(
        f"{base}-1o!", hidden_size=d, max_length=t, num_heads=1, rank=len(sources), qk_width=branches * d
    )
    layer = Mixer(config).double().requires_grad_(False)
    eye = torch.eye(d, dtype=torch.float64)
    for projection in (layer.q_proj, layer.k_proj):
        projection.weight.copy_(eye.repeat(branches, 1))
    layer.v_proj.weight.copy_(eye)
    layer.o_proj.weight.copy_(eye)
    assert layer.mix1 is not None
    assert layer.gates is not None
    for parameter in (layer.mix1.left, layer.mix1.right, layer.gates.weight, layer.gates.bias):
        parameter.zero_()
    for k, (source, w) in enumerate(zip(sources, directions, strict=True)):
        layer.mix1.left[0, source, k] = 1.0
        layer.mix1.right[0, target, k] = 1.0
        layer.gates.weight[k] = w
    return Step(layer, rows.flip(0))


def grid(count: int = 41) -> Tensor:
    """Points of the plane."""
    line = torch.linspace(-4, 4, count, dtype=torch.float64) + 0.013
    return torch.cartesian_prod(line, line)


def disagreements(step: Step, slot: int, g: Tensor, points: Tensor) -> float:
    """Share of the points at which the operator activates the slot although g is not positive, or the other way round."""
    found = torch.stack([step.real_weights(x, mixed=False)[0, slot] > 0 for x in points])
    return float((found != (g > 0)).double().mean())


def curvature(g_zero: Tensor, along: Tensor) -> float:
    straight = g_zero[0] + (g_zero[-1] - g_zero[0]) * (along - along[0]) / (along[-1] - along[0])
    return float((g_zero - straight).abs().max())


@check(
    "Example 1: sigmoid-warped halfspaces",
    where="Proposition thm:app_strict_gap_summary, appendix sec:app:examples",
    says="points of a grid at which the operator's active set is not that of x2 + sigmoid(3 x1) x1 > 0; not a number if that is straight",
    within=0,
)
def example_of_a_warped_halfspace(base: str) -> float:
    c, points = 3.0, grid(25)
    step = example(
        base, torch.eye(2, dtype=torch.float64), [0], 1, torch.tensor([[c, 0.0]], dtype=torch.float64)
    )
    along = torch.linspace(-2, 2, 9, dtype=torch.float64)
    if curvature(-torch.sigmoid(c * along) * along, along) < 0.1:
        return float("nan")
    return disagreements(step, 1, points[:, 1] + torch.sigmoid(c * points[:, 0]) * points[:, 0], points)


@check(
    "Example 2: moving normals",
    where="Proposition thm:app_strict_gap_summary, appendix sec:app:examples",
    says="points at which the operator's active set is not that of x b + sigmoid(w x) x a > 0; not a number if the normal does not turn",
    within=0,
)
def example_of_a_moving_normal(base: str) -> float:
    a, b, w = torch.tensor([[1.0, 0.4], [-0.3, 1.0], [1.5, -0.7]], dtype=torch.float64)
    step, points = example(base, torch.stack([a, b]), [0], 1, w[None]), grid(25)
    one, other = (
        b + torch.sigmoid(w @ x) * a for x in torch.tensor([[-2.0, 1.0], [2.0, -1.0]], dtype=torch.float64)
    )
    if abs(float(torch.nn.functional.cosine_similarity(one, other, dim=0))) > 0.99:
        return float("nan")
    return disagreements(step, 1, points @ b + torch.sigmoid(points @ w) * (points @ a), points)


@check(
    "Example 3: warped splines with several knots",
    where="Proposition thm:app_strict_gap_summary, appendix sec:app:examples",
    says="points at which the operator's active set is not that of x b + sigmoid(w1 x) x a1 + sigmoid(w2 x) x a2 > 0",
    within=0,
)
def example_of_several_knots(base: str) -> float:
    a1, a2, b = torch.tensor([[1.0, 0.4], [-1.2, 0.2], [-0.3, 1.0]], dtype=torch.float64)
    w = torch.tensor([[2.0, -0.5], [-1.0, 1.5]], dtype=torch.float64)
    step, points = example(base, torch.stack([a1, a2, b]), [0, 1], 2, w), grid(25)
    g = (
        points @ b
        + torch.sigmoid(points @ w[0]) * (points @ a1)
        + torch.sigmoid(points @ w[1]) * (points @ a2)
    )
    return disagreements(step, 2, g, points)


@check(
    "Token-wise attention cannot bend",
    where="Proposition thm:app_strict_gap_summary",
    says="bend of the example's boundary over that of heads without mixing, or over 1e-9 where theirs is less",
    at_least=1e3,
)
def attention_without_mixing_cannot_bend(base: str) -> float:
    c = torch.tensor([[3.0, 0.0]], dtype=torch.float64)
    step = example(base, torch.eye(2, dtype=torch.float64), [0], 1, c)
    along = torch.linspace(-2, 2, 9, dtype=torch.float64)
    origin, right, up = (
        torch.zeros(2).double(),
        torch.tensor([1.0, 0.0]).double(),
        torch.tensor([0.0, 1.0]).double(),
    )
    curved = curvature(boundary(step, 1, origin, right, up, along), along)
    return curved / max(bend(Step(random_layer(base, num_heads=1), random_rows(T))), 1e-9)
