"""The operators of the C++ library check every tensor before they use its memory."""

from functools import partial

import pytest
import torch

import hypermlp.layers.fused
import hypermlp.layers.step  # noqa: F401  (they define operators)
from hypermlp.bench.measure import peak_bytes
from hypermlp.ops import hyper_attention, native
from hypermlp.testing import assert_close, op_inputs

pytestmark = pytest.mark.skipif(
    native.unavailable() is not None, reason=f"native is not available: {native.unavailable()}"
)
CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
GATES = ("q", "output", "mix1", "mix2")
OPTIONS = {"activation": "glu", "layout": "lag", "eps": 1e-12}


def normal(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


def attention():
    """Arguments of ``native`` by their names in the schema."""
    inputs = op_inputs(queries=6)
    names = ["q", "k", "v", *(f"{field}{i}" for i in (1, 2) for field in ("diag", "left", "right", "gate"))]
    starts = torch.tensor([[0, 0, 0, 2, 2, 2], [0, 1, 2, 3, 4, 5]])
    return dict(zip(names, inputs.tensors(), strict=True)) | {"starts": starts} | OPTIONS


def attention_backward():
    arguments = attention()
    out, kept = torch.ops.hypermlp.native(*arguments.values())
    return {"grad_out": normal(*out.shape), "kept": kept} | arguments


def conv():
    reach = torch.tensor([[1, 2, 3, 4, 5], [5, 5, 5, 5, 5]])
    return {
        "x": normal(2, 7, 6),
        "weight1": normal(6, 4),
        "weight2": normal(6, 4),
        "length": 5,
        "reach": reach,
    }


def conv_backward():
    return {"grad1": normal(2, 5, 6), "grad2": normal(2, 5, 6)} | conv()


def step():
    """Hidden size 12, 4 branches of width 4, 2 heads of width 5, rank 2; 2 positions after 5, 3 registers."""
    mixes = {
        f"{name}{i}": normal(heads, 10, 2) for i, heads in ((1, 4), (2, 2)) for name in ("left", "right")
    }
    return {
        "x": normal(2, 2, 12),
        "history": normal(2, 9, 12),
        "past_inputs": 5,
        "k_conv": normal(12, 4),
        "v_conv": normal(12, 4),
        "registers": normal(3, 12),
        "cos": normal(2, 2, 4, 2),
        "sin": normal(1, 2, 4, 2),
        "q_weight": normal(16, 12),
        "k_weight": normal(16, 12),
        "v_weight": normal(10, 12),
        "o_weight": normal(12, 10),
        "gate_weight": normal(38, 12),
        "gate_bias": normal(38),
        "q_gate": 0,
        "output_gate": 16,
        "mix1_gate": 26,
        "mix2_gate": 34,
        "keys": normal(2, 9, 4, 4),
        "values": normal(2, 9, 2, 5),
        "past": 5,
        "diag1": normal(4, 10),
        "left1": mixes["left1"],
        "right1": mixes["right1"],
        "diag2": normal(2, 10),
        "left2": mixes["left2"],
        "right2": mixes["right2"],
        "starts": torch.tensor([[0, 0], [3, 3]]),
        "reach": torch.tensor([[6, 7], [3, 4]]),
    } | OPTIONS


def project():
    """Two sequences of 5 positions, hidden size 6, q and k of width 4, v of width 3, 12 gates."""
    weights = {name: normal(width, 6) for name, width in (("q", 4), ("k", 4), ("v", 3), ("gate", 12))}
    return {
        "x": normal(2, 5, 6),
        "k_conv": normal(6, 4),
        "v_conv": normal(6, 4),
        **{f"{name}_weight": weight for name, weight in weights.items()},
        "gate_bias": normal(12),
        "reach": torch.tensor([[1, 2, 3, 4, 5], [1, 2, 1, 2, 3]]),
        "q_gate": 0,
    }


def project_backward():
    widths = {"grad_q": 4, "grad_k": 4, "grad_v": 3, "grad_o": 3, "grad_gate1": 3, "grad_gate2": 2}
    given = {name: normal(10, width) for name, width in (widths | {"q": 4, "o": 3, "gates": 12}).items()}
    return given | project() | {"output_gate": 4, "mix1_gate": 7, "mix2_gate": 10}


def read_out():
    return {"o": normal(10, 3), "gates": normal(10, 12), "weight": normal(6, 3), "output_gate": 4}


def read_out_backward():
    return {"grad": normal(10, 6)} | read_out()


ARGUMENTS = {
    "native": attention,
    "native_grad": attention_backward,
    "native_conv_pair": conv,
    "native_conv_pair_backward": conv_backward,
    "native_decoding_step": step,
    "native_project": project,
    "native_project_grad": project_backward,
    "native_read_out": read_out,
    "native_read_out_grad": read_out_backward,
}
IN_PLACE = ("grad_q", "grad_o", "grad_gate1", "grad_gate2")
CACHES = ("history", "keys", "values")


def call(operator, arguments):
    """Call the kernel; without the choice of a device, which a meta tensor would send to the fake kernel."""
    out = getattr(torch.ops.hypermlp, operator).default.redispatch(CPU, *arguments.values())
    return [out] if isinstance(out, torch.Tensor) else out


def tensors(operator):
    return [name for name, value in ARGUMENTS[operator]().items() if isinstance(value, torch.Tensor)]


@pytest.fixture(params=ARGUMENTS)
def operator(request):
    return request.param


def test_good_arguments_pass(operator):
    assert all(torch.isfinite(out).all() for out in call(operator, ARGUMENTS[operator]()))


def test_wrong_dtypes_are_refused(operator):
    for name in tensors(operator):
        arguments = ARGUMENTS[operator]()
        with pytest.raises(RuntimeError, match=rf"hypermlp: {name} is int32; it must be (int|float)"):
            call(operator, arguments | {name: arguments[name].int()})


def test_wrong_devices_are_refused(operator):
    for name in tensors(operator):
        arguments = ARGUMENTS[operator]()
        with pytest.raises(RuntimeError, match=rf"hypermlp: {name} is not on the CPU"):
            call(operator, arguments | {name: arguments[name].to("meta")})


@pytest.mark.parametrize("change", [lambda x: x[None], lambda x: x[:0]], ids=["rank", "empty"])
def test_wrong_ranks_and_empty_tensors_are_refused(operator, change):
    for name in tensors(operator):
        arguments = ARGUMENTS[operator]()
        with pytest.raises(RuntimeError, match=rf"hypermlp: {name} has shape \[.*; it must be \["):
            call(operator, arguments | {name: change(arguments[name])})


def test_wrong_sizes_are_refused(operator):
    """Dimensions that no other tensor shares are free; the message may name another tensor of the pair."""
    free = {(cache, 1) for cache in CACHES}  # room
    if operator == "native_decoding_step":
        free.add(("sin", 0))  # one row of angles, or one for each sequence
    if operator.startswith("native_conv"):
        free.add(("x", 1))  # earlier positions
    free |= {
        "native": {("v", 3)},
        "native_project": {("v_weight", 0)},
        "native_read_out": {("gates", 1), ("weight", 0)},
        "native_read_out_grad": {("gates", 1)},
    }.get(operator, set())
    for name in tensors(operator):
        for dim in range(ARGUMENTS[operator]()[name].dim()):
            arguments = ARGUMENTS[operator]()
            x = arguments[name]
            arguments[name] = torch.cat([x, x.narrow(dim, 0, 1)], dim)
            if (name, dim) in free:
                call(operator, arguments)
                continue
            with pytest.raises(
                RuntimeError,
                match=r"hypermlp: (\w+ has shape .* must be|there are more queries|a rotation needs|"
                r"\w+ is .* first of|gate_weight has rows)",
            ):
                call(operator, arguments)


def test_starts_of_int32_are_not_misread():
    arguments = attention()
    arguments["starts"] = arguments["starts"].int()
    with pytest.raises(RuntimeError, match="starts is int32; it must be int64"):
        torch.ops.hypermlp.native(*arguments.values())


def test_tensors_that_are_not_contiguous_are_copied(operator):
    def strided(x):
        wide = torch.stack([x, torch.full_like(x, -1)], dim=-1)
        return wide[..., 0]

    expected = call(operator, ARGUMENTS[operator]())
    for name in tensors(operator):
        arguments = ARGUMENTS[operator]()
        arguments[name] = strided(arguments[name])
        if name in CACHES:
            with pytest.raises(
                RuntimeError, match=f"{name} is a cache; its last dimension must have stride 1"
            ):
                call(operator, arguments)
            continue
        if name in IN_PLACE and operator == "native_project_grad":
            with pytest.raises(RuntimeError, match=f"{name} is written in place; it must be contiguous"):
                call(operator, arguments)
            continue
        for a, e in zip(call(operator, arguments), expected, strict=True):
            assert_close(a, e, tolerance=1e-12)


@pytest.mark.parametrize(
    ("operator", "changes", "message"),
    [
        ("native", {"activation": "softmax"}, "activation must be 'relu' or 'glu'"),
        ("native", {"layout": "ring"}, "layout must be 'lag' or 'forward'"),
        (
            "native",
            {"activation": "relu"},
            r"q has shape \[2, 6, 4, 4\]; it must be \[2, at least 1, 2, at least 1\]",
        ),
        ("native", {"left1": None}, "diag, left and right of a mix must be given together"),
        ("native", {"gate2": None}, "a mix and its gate must be given together"),
        (
            "native",
            {"diag2": None, "left2": None, "right2": None},
            "a mix and its gate must be given together",
        ),
        ("native_grad", {"diag1": None}, "diag, left and right of a mix must be given together"),
        ("native_conv_pair", {"length": 0}, "length must be between 1 and the number of positions of x"),
        ("native_conv_pair", {"length": 8}, "length must be between 1 and the number of positions of x"),
        ("native_decoding_step", {"past": 8}, "no room for the new positions after `past`"),
        ("native_decoding_step", {"past": -1}, "no room for the new positions after `past`"),
        ("native_decoding_step", {"past_inputs": 8}, "no room for the new positions after `past_inputs`"),
        ("native_decoding_step", {"k_conv": None}, "history, k_conv and v_conv must be given together"),
        ("native_decoding_step", {"mix2_gate": -1}, "a mix and its gate must be given together"),
        (
            "native_decoding_step",
            {"mix2_gate": 35},
            "mix2_gate is 35; it must be -1, or the first of 4 of the 38 rows",
        ),
        ("native_decoding_step", {"q_gate": -2}, "q_gate is -2; it must be -1"),
        (
            "native_decoding_step",
            {"gate_weight": None},
            "q_gate is 0; it must be -1, or the first of 16 of the 0 rows",
        ),
        ("native_decoding_step", {"cos": None}, "cos and sin must be given together"),
        ("native_decoding_step", {"reach": None}, "starts and reach must be given together"),
        ("native_decoding_step", {"activation": "softmax"}, "activation must be 'relu' or 'glu'"),
        ("native_project", {"k_conv": None}, "k_conv and v_conv must be given together"),
        ("native_project", {"q_gate": 9}, "q_gate is 9; it must be -1, or the first of 4 of the 12 gates"),
        ("native_project_grad", {"output_gate": 10}, "output_gate is 10; it must be -1, or the first of 3"),
        ("native_project_grad", {"output_gate": -1}, "gate_weight has rows that belong to no gate"),
        ("native_project_grad", {"mix1_gate": -1}, "a gate of a mix and its gradient must be given together"),
        ("native_project_grad", {"mix2_gate": 11}, "grad_gate2 is 11; it must be -1, or the first of 2"),
        ("native_read_out", {"output_gate": -2}, "output_gate is -2; it must be -1"),
    ],
)
def test_wrong_options_are_refused(operator, changes, message):
    with pytest.raises(RuntimeError, match=message):
        call(operator, ARGUMENTS[operator]() | changes)


def test_positions_must_fit():
    arguments = attention() | {"starts": None}
    short = {name: arguments[name][:, :5].contiguous() for name in ("k", "v")}
    with pytest.raises(RuntimeError, match="more queries than keys"):
        call("native", arguments | short)
    slots = {name: arguments[name][:, :5].contiguous() for name in ("diag1", "left1", "right1")}
    with pytest.raises(RuntimeError, match="fewer slots than there are keys"):
        call("native", arguments | slots)


def test_a_step_does_not_depend_on_the_order_of_the_gates():
    expected = call("native_decoding_step", step())[0]
    arguments = step()
    ranges = {"q_gate": (0, 16), "output_gate": (16, 26), "mix1_gate": (26, 34), "mix2_gate": (34, 38)}
    order = ("mix2_gate", "output_gate", "q_gate", "mix1_gate")
    rows = torch.cat([torch.arange(*ranges[name]) for name in order])
    offsets = {name: int((rows == ranges[name][0]).nonzero()) for name in order}
    moved = {name: arguments[name][rows] for name in ("gate_weight", "gate_bias")}
    assert offsets["mix2_gate"] == 0
    assert torch.equal(call("native_decoding_step", arguments | offsets | moved)[0], expected)
    without = call("native_decoding_step", step() | {"q_gate": -1, "output_gate": -1})[0]
    assert not torch.allclose(without, expected)


def test_tensors_on_several_devices_are_refused(operator):
    """PyTorch runs the fake kernel as soon as one tensor is on the meta device."""
    arguments = ARGUMENTS[operator]()
    last = tensors(operator)[-1]
    with pytest.raises(RuntimeError, match="has tensors on cpu, meta; move them to one device"):
        getattr(torch.ops.hypermlp, operator)(*(arguments | {last: arguments[last].to("meta")}).values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decoding_in_half_precision_copies_no_tensor(dtype):
    inputs = op_inputs(batch=1, queries=1, keys=4096, qk_dim=64, vo_dim=64, dtype=dtype)
    work = partial(hyper_attention, *inputs, activation="glu", layout="lag", backend="native")
    assert peak_bytes(torch.no_grad()(work)) < inputs.v.numel() * inputs.v.element_size()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [32, 33])
def test_numbers_of_16_bits_are_read_and_rounded_as_in_pytorch(dtype, width):
    """The new values of a step are sums of two columns of a weight that holds all finite numbers."""
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    numbers = numbers[torch.isfinite(numbers)]
    weight = torch.zeros(numbers.numel(), width, dtype=dtype)
    weight[:, 1], weight[:, -1] = numbers, numbers[torch.randperm(numbers.numel())]
    zeros = partial(torch.zeros, dtype=dtype)
    values = zeros(2, 1, 1, numbers.numel())
    x = zeros(2, 1, width)
    x[:, :, 1], x[1, :, -1] = 1, 1
    caches = {"keys": zeros(2, 1, 1, 2), "values": values, "past": 0}
    weights = {"q_weight": zeros(2, width), "k_weight": zeros(2, width), "v_weight": weight}
    weights["o_weight"] = zeros(width, numbers.numel())
    absent = dict.fromkeys(step()) | {"past_inputs": 0} | {f"{name}_gate": -1 for name in GATES}
    call("native_decoding_step", absent | {"x": x} | weights | caches | OPTIONS | {"activation": "relu"})
    expected = weight[:, 1].float() + weight[:, -1].float()
    assert torch.equal(values[0, 0, 0], numbers)
    assert torch.equal(values[1, 0, 0], expected.to(dtype))
