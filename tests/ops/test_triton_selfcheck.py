"""The self-check of the Triton kernels: when it runs, who decides, and what follows, with a fake GPU."""

import json
import re
import warnings
from pathlib import Path

import pytest
import torch

from hypermlp.commands import info
from hypermlp.layers import mixer
from hypermlp.ops import api, contract, dispatch
from hypermlp.ops.arguments import Request
from hypermlp.ops.dispatch import BACKENDS, choose_backend
from hypermlp.ops.triton import selfcheck
from hypermlp.ops.triton.selfcheck import Verdict

pytest.importorskip("triton")
ON_GPU = Request("attention", "cuda", torch.bfloat16, "glu", mixed=True)
PASSED, FAILED = Verdict(True, "11 of 11 cases", 9.0), Verdict(False, "gates, float32, q: error 1", 2.0)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A machine with a GPU, as far as the choice of a backend can see; counts the checks."""
    monkeypatch.delenv("HYPERMLP_BACKEND", raising=False)
    monkeypatch.setenv("HYPERMLP_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Fake GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(selfcheck, "_known", {})
    dispatch._warn_once.cache_clear()

    class Gpu:
        verdict, runs = PASSED, 0

        def failure(self, case, dtype, device):
            self.runs += 1
            return "" if self.verdict.passed else self.verdict.detail

    gpu = Gpu()
    monkeypatch.setattr(selfcheck, "failure", gpu.failure)
    return gpu


def test_it_runs_once_and_is_announced(gpu, capsys, monkeypatch):
    assert selfcheck.outcome() == "not run yet"
    for _ in range(2):
        assert choose_backend("auto", ON_GPU).name == "triton"
    assert gpu.runs == len(selfcheck.cases())
    assert "checking the Triton kernels on Fake GPU, once, up to 30 s" in capsys.readouterr().err
    monkeypatch.setattr(selfcheck, "_known", {})  # as in a new process
    assert choose_backend("auto", ON_GPU).name == "triton"
    assert gpu.runs == len(selfcheck.cases())
    assert selfcheck.outcome() == "passed: 11 of 11 cases"
    assert info.gather()["triton self-check"] == "passed: 11 of 11 cases"


def test_it_fails_with_one_warning(gpu):
    gpu.verdict = FAILED
    with pytest.warns(UserWarning, match="on Fake GPU failed .gates, float32, q: error 1."):
        assert choose_backend("auto", ON_GPU).name == "blocked"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_backend("auto", ON_GPU._replace(dtype=torch.float32)).name == "blocked"
    assert choose_backend("triton", ON_GPU).name == "triton"  # asked for by name
    assert selfcheck.outcome().startswith("failed: gates")


@pytest.mark.parametrize("fact", ["device", "driver", "torch", "triton", "sources"])
def test_the_verdict_holds_for_this_machine_only(gpu, monkeypatch, fact):
    selfcheck.self_check()
    right = selfcheck.facts()
    assert selfcheck._stored() is not None
    monkeypatch.setattr(selfcheck, "facts", lambda: right | {fact: "another"})
    assert selfcheck._stored() is None


def test_a_damaged_verdict_is_no_verdict(gpu):
    selfcheck.self_check()
    selfcheck._path().write_text("{}")
    assert selfcheck._stored() is None


def test_it_does_not_run_while_a_graph_is_captured(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.warns(UserWarning, match="have not been checked on this GPU yet.*call the layer once"):
        assert choose_backend("auto", ON_GPU).name == "blocked"
    assert gpu.runs == 0
    selfcheck._known[selfcheck._key()] = PASSED  # a known verdict holds
    assert choose_backend("auto", ON_GPU).name == "triton"


def test_tracing_is_noticed():
    seen = []

    def probe():
        seen.append(selfcheck._recorded_now())
        return 1

    probe._dynamo_marked_constant = True
    probe()
    torch.compile(lambda x: x + probe(), backend="eager")(torch.ones(2))
    with torch._subclasses.FakeTensorMode():
        probe()
    assert seen == [False, True, True]


def test_time_runs_out(gpu):
    verdict = selfcheck.self_check(seconds=-1.0)
    assert verdict == (True, f"0 of {len(selfcheck.cases())} cases", verdict.seconds)


def test_a_verdict_that_cannot_be_kept_still_holds(gpu, monkeypatch, tmp_path):
    (tmp_path / "checks").write_text("in the way")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_backend("auto", ON_GPU).name == "triton"


def test_an_exception_is_a_failure():
    def explode(backend, *tensors):
        raise RuntimeError("no such instruction\nmore")

    case = contract.convolution()._replace(compute=explode)
    failed = selfcheck.failure(case, torch.float32, "cpu")
    assert failed == "convolution, float32: RuntimeError: no such instruction"


@pytest.mark.parametrize(
    ("mistake", "message"), [(1.1, "relative error 0.1 exceeds"), (torch.nan, "not finite")]
)
def test_a_wrong_number_is_a_failure(mistake, message):
    right = contract.gates()
    wrong = right._replace(
        compute=lambda backend, *tensors: [
            out * (mistake if backend == "triton" else 1) for out in right.compute("reference", *tensors)
        ]
    )
    assert message in selfcheck.failure(wrong, torch.float32, "cpu")


def test_the_record_is_json(gpu):
    selfcheck.self_check()
    content = json.loads(selfcheck._path().read_text())
    assert content["passed"] is True
    assert content["device"] == "Fake GPU"
    assert BACKENDS["triton"].distrusted() is None


def test_the_first_lines_of_a_gpu_user(gpu, monkeypatch):
    """The block in docs/layer.md runs with the CPU as a fake GPU, and its requests would take the kernels."""
    document = (Path(__file__).parents[2] / "docs" / "layer.md").read_text()
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", document, re.S) if '"cuda" if' in b)
    seen = set()

    def choose(name, request, required=True):
        seen.add(choose_backend("auto", request._replace(device_type="cuda")).name)
        return choose_backend("reference", request)

    monkeypatch.setattr(api, "choose_backend", choose)
    monkeypatch.setattr(mixer, "fast_path", lambda *_: None)
    exec(block.replace('"cuda" if', '"cpu" if'), {})
    assert seen == {"triton"}
    assert gpu.runs == len(selfcheck.cases())
