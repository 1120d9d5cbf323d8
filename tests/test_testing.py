"""The comparisons do fail."""

import pytest
import torch

from hypermlp.testing import assert_close, assert_no_worse, relative_error

X = torch.tensor([1.0, -2.0, 4.0])


def test_equal_passes():
    assert relative_error(X, X) == 0
    assert_close(X, X, tolerance=0)


@pytest.mark.parametrize("wrong", [X + 1e-3, X * 1.001, -X, X * float("nan"), X / 0, X[:2], X[None]])
def test_a_perturbed_value_fails(wrong):
    with pytest.raises(AssertionError, match=r"relative error|not finite|shapes differ"):
        assert_close(wrong, X, tolerance=1e-5)


def test_a_wrong_element_that_is_small_beside_others_fails():
    expected = torch.tensor([[1.0, 2.0], [1e-5, 2e-5]], dtype=torch.float64)
    wrong = expected + torch.tensor([[0.0, 0.0], [1e-11, 0.0]])
    assert relative_error(wrong, expected) < 1e-10
    with pytest.raises(AssertionError, match=r"1 elements are wrong, the first at \(1, 0\)"):
        assert_close(wrong, expected, tolerance=1e-10)


def test_nan_on_both_sides_fails():
    with pytest.raises(AssertionError, match="not finite"):
        assert_close(X * float("nan"), X * float("nan"), tolerance=1)


def test_an_expected_zero_is_compared_absolutely():
    with pytest.raises(AssertionError, match=r"relative error 0\.1"):
        assert_close(torch.tensor([0.1]), torch.tensor([0.0]), tolerance=1e-3)


def test_worse_than_twice_plain_fails():
    exact = X.double()
    assert_no_worse(X + 2e-3, X + 1e-3, exact)
    with pytest.raises(AssertionError, match=r"exceeds 2.0 x plain PyTorch's"):
        assert_no_worse(X + 3e-3, X + 1e-3, exact)
