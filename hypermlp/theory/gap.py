"""The strict gap: functions that need mixing, with the paper's three examples built as layers."""

from typing import NamedTuple

import torch
from torch import Tensor

from hypermlp.layers.internals import gate_parameters
from hypermlp.theory.check import check, provided
from hypermlp.theory.geometry import bend, boundary, off_line
from hypermlp.theory.objects import BRANCHES, Step, random_layer, random_step


class Example(NamedTuple):
    """A slot that is active where g(x) = x b + sum over k of sigmoid(w_k x) x a_k > 0, for x in the plane."""

    a: list[list[float]]
    b: list[float]
    w: list[list[float]]

    def g(self, points: Tensor) -> Tensor:
        a, b, w = (points.new_tensor(numbers) for numbers in self)
        return points @ b + (torch.sigmoid(points @ w.T) * (points @ a.T)).sum(-1)

    def step(self, base: str) -> Step:
        """Return a step of one head over the rows a, b (newest first) whose last slot is the example's.

        The head has x L1 = x and R1 = I + sum over k of e_k sigmoid(w_k x) e_lastᵀ: the last slot also gets
        the scores of the others.
        """
        rows, eye = torch.tensor([*self.a, self.b], dtype=torch.float64), torch.eye(2, dtype=torch.float64)
        layer = random_layer(
            f"{base}-1o!",
            hidden_size=2,
            max_length=len(rows),
            num_heads=1,
            rank=len(self.a),
            qk_width=2 * BRANCHES[base],
        )
        for parameter in layer.parameters():
            parameter.zero_()
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj):
            projection.weight.copy_(eye.repeat(len(projection.weight) // 2, 1))
        assert layer.mix1 is not None
        gates = gate_parameters(layer)[0]["mix1"]
        for k, w in enumerate(self.w):
            layer.mix1.left[0, k, k] = layer.mix1.right[0, -1, k] = 1.0
            gates[:, k] = torch.tensor(w)
        return Step(layer, rows.flip(0))

    def wrong_points(self, base: str) -> float:
        """Return the share of the points of a grid at which the slot's state in the operator is not g > 0."""
        line = torch.linspace(-4, 4, 25, dtype=torch.float64) + 0.013
        points = torch.cartesian_prod(line, line)
        states = self.step(base).active(points)[:, -1]
        return float((states != (self.g(points) > 0)).double().mean())


HALFSPACE = Example(a=[[1.0, 0.0]], b=[0.0, 1.0], w=[[3.0, 0.0]])
NORMAL = Example(a=[[1.0, 0.4]], b=[-0.3, 1.0], w=[[1.5, -0.7]])
KNOTS = Example(a=[[1.0, 0.4], [-1.2, 0.2]], b=[-0.3, 1.0], w=[[2.0, -0.5], [-1.0, 1.5]])
PLACES = torch.linspace(-2, 2, 9, dtype=torch.float64)
GAP = "Proposition thm:app_strict_gap_summary"
EXAMPLES = "Section sec:app:examples"


@check(GAP, EXAMPLES, within=0)
def example_of_a_warped_halfspace(base: str) -> float:
    """Example 1: sigmoid-warped halfspaces.

    Measured: the share of the points of a grid at which the operator's active set is not that of x2 +
    sigmoid(3 x1) x1 > 0; NaN if the border of the latter is straight.
    """
    border = -torch.sigmoid(3 * PLACES) * PLACES
    return provided(off_line(PLACES, border) >= 0.1, HALFSPACE.wrong_points(base))


@check(GAP, EXAMPLES, within=0)
def example_of_a_moving_normal(base: str) -> float:
    """Example 2: moving normals.

    Measured: the share of the points of a grid at which the operator's active set is not that of x b +
    sigmoid(w x) x a > 0; NaN if the normal does not turn.
    """
    a, b, w = (torch.tensor(numbers) for numbers in (NORMAL.a[0], NORMAL.b, NORMAL.w[0]))
    one, other = (b + torch.sigmoid(w @ x) * a for x in torch.tensor([[-2.0, 1.0], [2.0, -1.0]]))
    cosine = float(torch.cosine_similarity(one, other, dim=0))
    return provided(abs(cosine) <= 0.99, NORMAL.wrong_points(base))


@check(GAP, EXAMPLES, within=0)
def example_of_several_knots(base: str) -> float:
    """Example 3: warped splines with several knots.

    Measured: the share of the points of a grid at which the operator's active set is not that of
    x b + sigmoid(w1 x) x a1 + sigmoid(w2 x) x a2 > 0.
    """
    return KNOTS.wrong_points(base)


@check(GAP, at_least=1e3)
def attention_without_mixing_cannot_bend(base: str) -> float:
    """Attention without mixing has straight boundaries.

    Measured: the bend of the first example's boundary over the bend of boundaries without mixing, or over
    1e-9 if that is less.
    """
    plane = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    curved = off_line(PLACES, boundary(HALFSPACE.step(base), 1, plane, PLACES))
    return curved / max(bend(random_step(base, num_heads=1)), 1e-9)
