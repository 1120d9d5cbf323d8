"""The benchmark refuses to time a wrong kernel."""

import dataclasses

import pytest

from hypermlp.bench.gate import check_backend
from hypermlp.bench.op import sweep_cases
from hypermlp.ops.dispatch import BACKENDS


def test_right_kernels_pass(backend):
    assert check_backend(backend) >= (8 if backend == "sdpa" else 64)


def test_a_wrong_kernel_is_refused(monkeypatch):
    right = BACKENDS["blocked"]
    wrong = dataclasses.replace(right, attention=lambda arguments: right.attention(arguments) * 1.000001)
    monkeypatch.setitem(BACKENDS, "blocked", wrong)
    with pytest.raises(
        ValueError, match=r"backend 'blocked' is wrong and will not be timed: .*relative error"
    ):
        check_backend("blocked")


def test_the_sweep_covers_what_it_says():
    cases = sweep_cases(2)
    assert {case.length for case in cases} >= {128, 1024, 4096, 8192}
    assert {case.hidden for case in cases} == {128, 256, 768, 1024}
    assert {case.threads for case in cases} == {1, 2}
    assert {(case.batch, case.length) for case in cases if case.parts == ("decode",)} == {
        (b, t) for b in (1, 8) for t in (256, 1024, 4096)
    }
