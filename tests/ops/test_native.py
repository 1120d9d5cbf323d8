"""The operators of the C++ library check every tensor before they use its memory."""

from functools import partial

import pytest
import torch

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


def attention_gradients():
    arguments = attention()
    out, kept = torch.ops.hypermlp.native(*arguments.values())
    return {"grads": [normal(*out.shape)], "kept": [kept]} | arguments


def conv():
    reach = torch.tensor([[1, 2, 3, 4, 5], [5, 5, 5, 5, 5]])
    return {"x": normal(2, 7, 6), "weights": [normal(6, 4), normal(6, 4)], "length": 5, "reach": reach}


def conv_gradients():
    return {"grads": [normal(2, 5, 6), normal(2, 5, 6)], "kept": []} | conv()


def weights(hidden, qk, vo, *, taps=4, rank=2, slots=10):
    """Parameters with 4 branches and 2 heads, all gates in their usual order."""
    gates = {"q_gate": qk, "output_gate": vo, "mix1_gate": 4 * rank, "mix2_gate": 2 * rank}
    firsts = [0, *torch.tensor(list(gates.values())).cumsum(0).tolist()]
    mixes = {
        f"{name}{i}": normal(heads, slots, *([] if name == "diag" else [rank]))
        for i, heads in ((1, 4), (2, 2))
        for name in ("diag", "left", "right")
    }
    return {
        "k_conv": normal(hidden, taps),
        "v_conv": normal(hidden, taps),
        "q_weight": normal(qk, hidden),
        "k_weight": normal(qk, hidden),
        "v_weight": normal(vo, hidden),
        "o_weight": normal(hidden, vo),
        "gate_weight": normal(firsts[-1], hidden),
        "gate_bias": normal(firsts[-1]),
        **mixes,
        **dict(zip(gates, firsts, strict=False)),
        **OPTIONS,
    }


def layer():
    """Two sequences of 5 positions, hidden size 6, 4 branches of width 1, 2 heads of width 3."""
    starts = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 2, 2, 2]])
    reach = torch.arange(1, 6) - starts
    tail = {"starts": starts, "reach": reach, "heads": 2, "keep": True}
    return {"x": normal(2, 5, 6)} | weights(6, 4, 6) | tail


def layer_gradients():
    arguments = layer()
    out, *kept = torch.ops.hypermlp.native_layer(*arguments.values())
    return {"grads": [normal(*out.shape)], "kept": kept} | arguments


def step():
    """Hidden size 12, 4 branches of width 4, 2 heads of width 5; 2 positions after 5, 3 registers."""
    return {
        "x": normal(2, 2, 12),
        **weights(12, 16, 10),
        "registers": normal(3, 12),
        "cos": normal(2, 2, 4, 2),
        "sin": normal(1, 2, 4, 2),
        "history": normal(2, 9, 12),
        "past_inputs": 5,
        "keys": normal(2, 9, 4, 4),
        "values": normal(2, 9, 2, 5),
        "past": 5,
        "starts": torch.tensor([[0, 0], [3, 3]]),
        "reach": torch.tensor([[6, 7], [3, 4]]),
    }


ARGUMENTS = {
    "native": attention,
    "native_gradients": attention_gradients,
    "native_conv": conv,
    "native_conv_gradients": conv_gradients,
    "native_layer": layer,
    "native_layer_gradients": layer_gradients,
    "native_step": step,
}
CACHES = ("history", "keys", "values")


def call(operator, arguments):
    """Call the kernel; without the choice of a device, which a meta tensor would send to the fake kernel."""
    out = getattr(torch.ops.hypermlp, operator).default.redispatch(CPU, *arguments.values())
    return [out] if isinstance(out, torch.Tensor) else out


def places(operator):
    """Return where tensors are among the arguments: a name, and an index where it names a list."""
    values = ARGUMENTS[operator]()
    alone = [(name, None) for name, value in values.items() if isinstance(value, torch.Tensor)]
    return alone + [(name, i) for name, x in values.items() if isinstance(x, list) for i in range(len(x))]


def changed(operator, place, change):
    """Return the arguments with one tensor changed."""
    name, index = place
    arguments = ARGUMENTS[operator]()
    if index is None:
        return arguments | {name: change(arguments[name])}
    items = arguments[name]
    return arguments | {name: [*items[:index], change(items[index]), *items[index + 1 :]]}


def get(operator, place):
    value = ARGUMENTS[operator]()[place[0]]
    return value if place[1] is None else value[place[1]]


@pytest.fixture(params=ARGUMENTS)
def operator(request):
    return request.param


def test_good_arguments_pass(operator):
    assert all(torch.isfinite(out).all() for out in call(operator, ARGUMENTS[operator]()))


def test_wrong_dtypes_are_refused(operator):
    for place in places(operator):
        with pytest.raises(RuntimeError, match=r"hypermlp: \w+ is int32; it must be (int|float)"):
            call(operator, changed(operator, place, lambda x: x.int()))


def test_wrong_devices_are_refused(operator):
    for place in places(operator):
        with pytest.raises(RuntimeError, match=r"hypermlp: \w+ is not on the CPU"):
            call(operator, changed(operator, place, lambda x: x.to("meta")))


@pytest.mark.parametrize("change", [lambda x: x[None], lambda x: x[:0]], ids=["rank", "empty"])
def test_wrong_ranks_and_empty_tensors_are_refused(operator, change):
    for place in places(operator):
        with pytest.raises(RuntimeError, match=r"hypermlp: \w+ has shape \[.*; it must be \["):
            call(operator, changed(operator, place, change))


def test_wrong_sizes_are_refused(operator):
    """Dimensions that no other tensor shares are free; the message may name another tensor of the pair."""
    free = {
        "native": {("v", 3)},
        "native_conv": {("x", 1)},  # earlier positions
        "native_conv_gradients": {("x", 1)},
        # Room in the caches; one row of angles, or one for each sequence.
        "native_step": {("history", 1), ("keys", 1), ("values", 1), ("sin", 0)},
    }.get(operator, set())
    for place in places(operator):
        for dim in range(get(operator, place).dim()):
            arguments = changed(operator, place, lambda x, dim=dim: torch.cat([x, x.narrow(dim, 0, 1)], dim))
            if (place[0], dim) in free:
                call(operator, arguments)
                continue
            with pytest.raises(
                RuntimeError,
                match=r"hypermlp: (\w+ has shape .* must be|there are more queries|a rotation needs|"
                r"\w+ is .* first of|gate_weight has rows|heads must divide)",
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
    for place in places(operator):
        arguments = changed(operator, place, strided)
        if place[0] in CACHES:
            with pytest.raises(
                RuntimeError, match=f"{place[0]} is a cache; its last dimension must have stride 1"
            ):
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
        ("native_gradients", {"diag1": None}, "diag, left and right of a mix must be given together"),
        ("native_conv", {"length": 0}, "length must be between 1 and the number of positions of x"),
        ("native_conv", {"length": 8}, "length must be between 1 and the number of positions of x"),
        ("native_step", {"past": 8}, "no room for the new positions after `past`"),
        ("native_step", {"past": -1}, "no room for the new positions after `past`"),
        ("native_step", {"past_inputs": 8}, "no room for the new positions after `past_inputs`"),
        ("native_step", {"k_conv": None}, "history, k_conv and v_conv must be given together"),
        ("native_step", {"mix2_gate": -1}, "a mix and its gate must be given together"),
        (
            "native_step",
            {"mix2_gate": 35},
            "mix2_gate is 35; it must be -1, or the first of 4 of the 38 rows",
        ),
        ("native_step", {"q_gate": -2}, "q_gate is -2; it must be -1"),
        (
            "native_step",
            {"gate_weight": None},
            "q_gate is 0; it must be -1, or the first of 16 of the 0 rows",
        ),
        ("native_step", {"cos": None}, "cos and sin must be given together"),
        ("native_step", {"reach": None}, "starts and reach must be given together"),
        ("native_step", {"activation": "softmax"}, "activation must be 'relu' or 'glu'"),
        ("native_conv", {"weights": []}, "weights must not be empty"),
        ("native_conv_gradients", {"grads": []}, "one gradient for each weight"),
        ("native_gradients", {"kept": []}, "has one output and keeps one"),
        ("native_layer", {"k_conv": None}, "k_conv and v_conv must be given together"),
        ("native_layer", {"gate_bias": None}, "gate_weight and gate_bias must be given together"),
        ("native_layer", {"q_gate": 19}, "q_gate is 19; it must be -1, or the first of 4 of the 22 rows"),
        ("native_layer", {"output_gate": -2}, "output_gate is -2; it must be -1"),
        ("native_layer", {"output_gate": -1}, "gate_weight has rows that belong to no gate"),
        ("native_layer", {"mix1_gate": -1}, "a mix and its gate must be given together"),
        ("native_layer", {"heads": 4}, r"diag1 has shape|left1 has shape"),
        ("native_layer_gradients", {"kept": []}, "has one output and keeps six tensors"),
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
    expected = call("native_step", step())[0]
    arguments = step()
    ranges = {"q_gate": (0, 16), "output_gate": (16, 26), "mix1_gate": (26, 34), "mix2_gate": (34, 38)}
    order = ("mix2_gate", "output_gate", "q_gate", "mix1_gate")
    rows = torch.cat([torch.arange(*ranges[name]) for name in order])
    offsets = {name: int((rows == ranges[name][0]).nonzero()) for name in order}
    moved = {name: arguments[name][rows] for name in ("gate_weight", "gate_bias")}
    assert offsets["mix2_gate"] == 0
    assert torch.equal(call("native_step", arguments | offsets | moved)[0], expected)
    without = call("native_step", step() | {"q_gate": -1, "output_gate": -1})[0]
    assert not torch.allclose(without, expected)


def test_tensors_on_several_devices_are_refused(operator):
    """PyTorch runs the fake kernel as soon as one tensor is on the meta device."""
    arguments = ARGUMENTS[operator]()
    last = next(name for name, value in reversed(arguments.items()) if isinstance(value, torch.Tensor))
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
    call("native_step", absent | {"x": x} | weights | caches | OPTIONS | {"activation": "relu"})
    expected = weight[:, 1].float() + weight[:, -1].float()
    assert torch.equal(values[0, 0, 0], numbers)
    assert torch.equal(values[1, 0, 0], expected.to(dtype))
