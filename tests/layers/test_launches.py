"""How many kernels a layer launches on a GPU with the backend "triton", counted without one.

The layer runs on the meta device, and the operators' kernels run on its tensors: Triton's launcher records
what it would launch, and every other operator of PyTorch that is no view and no allocation counts as a
launch. The numbers in MOST are checked in, so that no chain of small operations creeps in.
"""

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hypermlp import Mixer
from hypermlp.ops import convolution, dispatch, gating, layout, ring
from hypermlp.ops import layer as operators
from hypermlp.ops.arguments import Attention

pytest.importorskip("triton")
from hypermlp.ops.triton.backward import backward as triton_backward
from hypermlp.ops.triton.forward import forward as triton_forward
from hypermlp.ops.triton.launch import recording

ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
VIEWS = (
    "promote_types",
    "_unsafe_view",
    "_reshape_alias",
    "detach",
    "alias",
    "lift_fresh",
    "sym_size",
    "sym_stride",
    "sym_numel",
)
GEMMS = ("mm", "addmm", "bmm", "baddbmm")
OPERATOR = ("triton", "triton_gradients", "triton_ring")
KERNELS = {
    "triton": lambda *flat: triton_forward(Attention.unflatten(flat)),
    "triton_gradients": lambda grads, kept, *flat: triton_backward(*grads, *kept, Attention.unflatten(flat)),
    "triton_conv": convolution._triton,
    "triton_conv_gradients": convolution._triton_gradients,
    "triton_gates": gating._gates,
    "triton_gates_gradients": gating._gates_gradients,
    "triton_product": torch.mul,
    "triton_product_gradients": gating._product_gradients,
    "triton_ring": ring._triton_ring,
    "triton_step": operators._run_triton_step,
    "row_starts": layout.row_starts._init_fn,
    "ring_positions": ring.ring_positions._init_fn,
    "ring_starts": ring.ring_starts._init_fn,
}


class Launches(TorchDispatchMode):
    """Count what would be launched."""

    def __init__(self):
        super().__init__()
        self.names = []
        self.around = []
        """Those that are neither in the operator nor GEMMs."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[1].split(".")[0]
        if func.namespace == "hypermlp":
            around = list(self.around)
            with self, recording() as record:
                result = KERNELS[name](*args)
            launched = [one.name for one in record.launches]
            self.names += launched
            self.around = around if name in OPERATOR else self.around + launched
            return result
        result = func(*args, **(kwargs or {}))
        nothing = isinstance(result, torch.Tensor) and result.numel() == 0
        if not (func.is_view or nothing or name in ALLOCATIONS or name in VIEWS):
            self.names.append(name)
            self.around += [name] if name not in GEMMS else []
        return result


@pytest.fixture(autouse=True)
def on_meta(monkeypatch):
    """Let the backend take tensors on the meta device, and nothing else."""
    willing = dataclasses.replace(
        dispatch.BACKENDS["triton"], unavailable=lambda: None, unsupported=lambda request: None
    )
    monkeypatch.setitem(dispatch.BACKENDS, "triton", willing)


def build(label="G-cg-q-12o"):
    with torch.device("meta"):
        layer = Mixer.from_label(label, hidden_size=768, max_length=1024)
        x = torch.empty(2, 1024, 768, requires_grad=True)
    layer.backend = "triton"
    return layer, x


MOST = {  # of forward and backward: launches in all, and those that are neither in the operator nor GEMMs
    "G-cg-q-12o": ((23, 3), (85, 8)),
    "R-cg-q-12o": ((23, 3), (70, 8)),
    "R-g-q": ((18, 2), (44, 7)),
}


@pytest.mark.parametrize("label", MOST)
def test_forward_and_backward(label):
    layer, x = build(label)
    with Launches() as forward:
        out = layer(x)
    with Launches() as backward:
        torch.autograd.grad(out, [x, *layer.parameters()], torch.empty_like(out))
    for counted, (total, rest) in zip((forward, backward), MOST[label], strict=True):
        assert len(counted.names) <= total, counted.names
        assert len(counted.around) <= rest, counted.around


def test_a_decoding_step():
    layer, x = build()
    with torch.no_grad():
        state = layer.new_state(2)
        layer(x[:, :100], state=state)
        layer(x[:, 100:101], state=state)  # the buffers have room now
        with Launches() as step:
            layer(x[:, 101:102], state=state)
    assert len(step.names) <= 16, step.names


def test_a_decoding_step_with_a_state_of_fixed_size():
    layer, x = build()
    with torch.no_grad():
        state = layer.new_state(2, capacity=1024)
        layer(x[:, :100], state=state)
        with Launches() as step:
            layer(x[:, 100:101], state=state)
    check = ["clone", "ge", "bitwise_not", "_assert_async"]  # of the position, once for all layers of a model
    assert [name for name in step.names if name in check] == check
    assert len(step.names) <= 12 + len(check), step.names
    assert step.names.count("mm") == 5


@pytest.mark.parametrize("label", ["R-12!", "S-p", "R-pcg-12!"])
def test_other_layers_step(label):
    """A layer that the fused step cannot take (softmax, RoPE) takes the general path."""
    layer, x = build(label)
    with torch.no_grad():
        state = layer.new_state(2, capacity=1024)
        layer(x[:, :100], state=state)
        with Launches() as step:
            out = layer(x[:, 100:101], state=state)
    assert out.shape == (2, 1, 768)
    assert ("step_gates" in step.names) == (label == "R-12!")


def test_a_chain_of_small_operations_is_noticed():
    """The same layer with plain gates launches more around the operator."""
    layer, x = build()
    layer.gates.register_forward_hook(lambda *_: None)
    with Launches() as forward:
        layer(x)
    assert len(forward.around) > MOST["G-cg-q-12o"][0][1], forward.around
