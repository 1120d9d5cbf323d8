"""Random inputs and comparisons that raise, for tests and benchmarks."""

from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from hypermlp.errors import UserError
from hypermlp.ops import Mix


class OpInputs(NamedTuple):
    """The tensors that ``hyper_attention`` takes."""

    q: Tensor
    k: Tensor
    v: Tensor
    mix1: Mix | None
    mix2: Mix | None

    def tensors(self) -> list[Tensor]:
        return [self.q, self.k, self.v, *(self.mix1 or ()), *(self.mix2 or ())]

    def to(self, dtype: torch.dtype) -> "OpInputs":
        """Return detached copies in another dtype."""
        q, k, v = (x.detach().to(dtype, copy=True) for x in (self.q, self.k, self.v))
        mix1, mix2 = (
            mix and Mix(*(x.detach().to(dtype, copy=True) for x in mix)) for mix in (self.mix1, self.mix2)
        )
        return OpInputs(q, k, v, mix1, mix2)

    def requires_grad(self) -> Self:
        for x in self.tensors():
            x.requires_grad_()
        return self


def op_inputs(
    *,
    batch: int = 2,
    queries: int = 9,
    keys: int | None = None,
    heads: int = 2,
    qk_dim: int = 4,
    vo_dim: int = 5,
    slots: int | None = None,
    rank: int = 3,
    activation: str = "glu",
    mixes: str = "12",
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    seed: int = 0,
) -> OpInputs:
    """Return random inputs like those of a trained layer: scores of order one, and mixes with large effects.

    Args:
        batch, queries, heads, qk_dim, vo_dim, rank: the sizes.
        keys: number of keys, at least ``queries`` (None: as many as queries).
        slots: number of slots that the mixes have, at least ``keys`` (None: as many as keys).
        activation: "glu" gives q, k and the first mix two branches for each head.
        mixes: which mixes to make: "", "1", "2" or "12".
        dtype, device, seed: of the tensors and of the random numbers, which are drawn in float64 on the CPU.

    Returns:
        an ``OpInputs`` (q, k, v, mix1, mix2), to be passed on as ``hyper_attention(*inputs,
        activation=activation)``.

    Example::

        from hypermlp.ops import hyper_attention
        from hypermlp.testing import assert_close, op_inputs

        inputs = op_inputs(queries=7, keys=12)
        expected = hyper_attention(*inputs, backend="reference")
        assert_close(hyper_attention(*inputs, backend="blocked"), expected, tolerance=1e-10)
    """
    if mixes not in ("", "1", "2", "12"):
        raise UserError(f"mixes is {mixes!r}; it must be '', '1', '2' or '12'")
    keys = queries if keys is None else keys
    slots = keys if slots is None else slots
    generator = torch.Generator().manual_seed(seed)
    branches = 2 * heads if activation == "glu" else heads

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(device, dtype)

    def mix(count: int) -> Mix:
        left, right = (normal(count, slots, rank, scale=0.3) for _ in range(2))
        return Mix(
            normal(count, slots, scale=0.3), left, right, torch.sigmoid(normal(batch, queries, count, rank))
        )

    return OpInputs(
        normal(batch, queries, branches, qk_dim, scale=qk_dim**-0.5),
        normal(batch, keys, branches, qk_dim),
        normal(batch, keys, heads, vo_dim),
        mix(branches) if "1" in mixes else None,
        mix(heads) if "2" in mixes else None,
    )


def randomise_(module: nn.Module, *, seed: int = 0, scale: float = 0.3) -> nn.Module:
    """Give every parameter a random value, so that no part of a fresh layer hides behind zeros.

    Returns the module.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


def relative_error(actual: Tensor, expected: Tensor, *, floor: float = 0.0) -> float:
    """Return the largest difference over the largest expected magnitude (at least ``floor``), in float64.

    Raise AssertionError for different shapes and for non-finite numbers.
    """
    if actual.shape != expected.shape:
        raise AssertionError(f"shapes differ: {list(actual.shape)} and {list(expected.shape)}")
    actual, expected = (x.detach().to("cpu", torch.float64) for x in (actual, expected))
    if not (torch.isfinite(actual).all() and torch.isfinite(expected).all()):
        raise AssertionError("not finite: NaN or infinity in the comparison")
    if expected.numel() == 0:
        return 0.0
    largest = max(expected.abs().max().item(), floor)
    return (actual - expected).abs().max().item() / (largest if largest > 0 else 1.0)


def assert_close(
    actual: Tensor, expected: Tensor, *, tolerance: float, floor: float = 0.0, what: str = "result"
) -> None:
    """Raise unless ``actual`` agrees with ``expected``, as a whole and element by element.

    With a = ``actual``, e = ``expected`` and M the larger of max|e| and ``floor``, both must hold::

        max|a - e| <= tolerance * M
        |a - e| <= 1000 * tolerance * |e| + max(tolerance / 1000 * M, 256 * eps * max(M, 1))  for each element

    where eps is the rounding of the dtype of ``actual``. The second line finds errors in rows that are small
    beside others.

    Args:
        tolerance: as above.
        floor: the smallest magnitude that errors are measured against, for results that may be all zero.
        what: name of the result in the message.

    Raises:
        AssertionError: if one does not hold, if the shapes differ, or if a number is not finite.
    """
    error = relative_error(actual, expected, floor=floor)
    if not error <= tolerance:
        raise AssertionError(f"{what}: relative error {error:.3g} exceeds {tolerance:.3g}")
    rounding = 256 * torch.finfo(actual.dtype).eps if actual.is_floating_point() else 0.0
    actual, expected = (x.detach().to("cpu", torch.float64) for x in (actual, expected))
    largest = max(expected.abs().max().item() if expected.numel() else 0.0, floor)
    smallest = max(1e-3 * tolerance * largest, rounding * max(largest, 1.0))
    allowed = 1e3 * tolerance * expected.abs() + smallest
    wrong = (actual - expected).abs() > allowed
    if wrong.any():
        place = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(wrong.sum())} elements are wrong, the first at {place}: "
            f"{actual[place].item():.6g} instead of {expected[place].item():.6g}"
        )


def assert_no_worse(
    actual: Tensor, plain: Tensor, exact: Tensor, *, factor: float = 2.0, what: str = "result"
) -> None:
    """Raise AssertionError unless the error of ``actual`` is at most ``factor`` times that of plain PyTorch.

    An error is the largest difference from ``exact`` over the largest magnitude of ``exact``. Four roundings
    in the dtype of ``actual`` are allowed on top.

    Args:
        actual: the result to judge.
        plain: the same computation in plain PyTorch, in the same dtype.
        exact: the same computation in float64.
        factor: how many times the error of ``plain`` is allowed (2).
        what: name of the result in the message.
    """
    error, allowed = relative_error(actual, exact), factor * relative_error(plain, exact)
    rounding = 4 * torch.finfo(actual.dtype).eps
    if not error <= allowed + rounding:
        raise AssertionError(
            f"{what}: relative error {error:.3g} exceeds {factor} x plain PyTorch's, {allowed:.3g}"
        )
