"""Comparisons that raise. ``hypermlp.testing`` has them for users."""

import torch
from torch import Tensor


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
