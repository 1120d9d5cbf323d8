"""A whole layer and its decoding step as one operator give the numbers of the general path."""

import pytest
import torch
from torch import nn

from hypermlp import Mixer
from hypermlp.bench.measure import peak_bytes
from hypermlp.layers import fast, mixer
from hypermlp.layers.visibility import Visibility
from hypermlp.ops import layer as operators
from hypermlp.ops import native
from hypermlp.testing import assert_close, randomise_

pytestmark = pytest.mark.skipif(
    native.unavailable() is not None, reason=f"native is not available: {native.unavailable()}"
)
LABELS = ["G-cg-q-12o", "R-cg-q-12o", "G-12!", "R-1!", "G-cg-q", "R-g-q-2o", "G-c", "R"]
STARTS = [None, torch.tensor([0, 5]), (torch.arange(30) // 7 * 7).expand(2, -1)]
FEW, MANY = 2, 18  # sequences of 30 positions: up to 512 in all are projected panel by panel, more by blocks


def setup(label="G-cg-q-12o", dtype=torch.float64, batch=FEW, **settings):
    layer = randomise_(Mixer.from_label(label, hidden_size=16, max_length=30, rank=3, **settings)).to(dtype)
    x = torch.randn(batch, 30, 16, dtype=dtype, generator=torch.Generator().manual_seed(0))
    return layer, x.requires_grad_()


def is_taken(layer, x, state=None):
    visibility = Visibility(None, past=0, new=x.shape[1], device=x.device)
    return fast.fast_path(layer, x, state, visibility) is not None


@torch.no_grad()
def steps(layer, x, starts=None, chunks=(1,) * 30):
    state = layer.new_state(x.shape[0])
    outs = [layer(chunk, state=state, starts=starts) for chunk in x.split(list(chunks), dim=1)]
    return torch.cat(outs, dim=1)


def results(layer, x, starts):
    """The output with and without gradients, and all gradients."""
    out = layer(x, starts=starts)
    with torch.no_grad():
        inferred = layer(x, starts=starts)
    return [out, inferred, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]


def by_modules(monkeypatch):
    monkeypatch.setattr(mixer, "fast_path", lambda *_: None)


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("starts", STARTS, ids=["all", "padding", "documents"])
@pytest.mark.parametrize("batch", [FEW, MANY])
def test_a_layer_equals_the_general_path(label, starts, batch, monkeypatch):
    layer, x = setup(label, batch=batch)
    if starts is not None:
        starts = starts.repeat_interleave(batch // 2, 0)
    assert is_taken(layer, x)
    actual = results(layer, x, starts)
    by_modules(monkeypatch)
    expected = results(layer, x, starts)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e, tolerance=1e-10, floor=1e-6)


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("starts", STARTS[:2])
def test_steps_of_any_size_equal_the_layer(label, starts):
    layer, x = setup(label)
    actual = steps(layer, x, starts, (1, 2, 3, 4, 5, 1, 8, 1, 1, 4))
    assert_close(actual, layer(x, starts=starts), tolerance=1e-10)


@pytest.mark.parametrize("label", ["G-cg-q-12o", "R-g-q-2o"])
def test_a_larger_batch_changes_no_bit(label):
    layer = randomise_(Mixer.from_label(label, hidden_size=272, max_length=30, rank=3)).float()
    x = torch.randn(MANY, 30, 272, requires_grad=True)
    many = results(layer, x, None)
    few = results(layer, x[:FEW].detach().requires_grad_(), None)
    for name, a, e in zip(("output", "without gradients", "gradient of x"), few, many, strict=False):
        assert torch.equal(a, e[:FEW]), name


@pytest.mark.parametrize("batch", [3, 4])
def test_the_number_of_threads_changes_no_bit(batch):
    layer = randomise_(Mixer.from_label("G-cg-q-12o", hidden_size=80, max_length=150, rank=5)).float()
    x = torch.randn(batch, 150, 80, requires_grad=True)
    starts, runs, before = torch.tensor([0, 20, 75, 1])[:batch], [], torch.get_num_threads()
    try:
        for threads in (1, 2, 4, 8):
            torch.set_num_threads(threads)
            runs.append(results(layer, x, starts))
    finally:
        torch.set_num_threads(before)
    for other in runs[1:]:
        assert all(torch.equal(a, e) for a, e in zip(other, runs[0], strict=True))


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Subclass(torch.Tensor):
    """A tensor that a library reads in its own way, such as a quantised one."""


def doubled(_module, _inputs, out):
    return 2 * out if isinstance(out, torch.Tensor) else out._replace(**{out._fields[-1]: 2 * out[-1]})


def doubled_linear(module, inputs, out):
    return 2 * out if isinstance(module, nn.Linear) else None


def with_bias(layer):
    layer.q_proj = nn.Linear(16, layer.q_proj.out_features, bias=True, dtype=torch.float64)


def with_subclass(layer):
    layer.k_proj.weight = nn.Parameter(layer.k_proj.weight.data.as_subclass(Subclass))


def with_attribute(layer):
    """A bias that is no parameter."""
    del layer.q_proj._parameters["bias"]
    layer.q_proj.__dict__["bias"] = torch.ones(layer.q_proj.out_features, dtype=torch.float64)


def with_other_gates(layer):
    logits = layer.gates.logits
    layer.gates.logits = lambda x: 2 * logits(x)


def with_longer_convolution(layer):
    layer.v_conv = nn.Parameter(torch.randn(16, 6, dtype=torch.float64))


CHANGES = {
    "a bias": with_bias,
    "a hook": lambda layer: layer.v_proj.register_forward_hook(doubled),
    "a hook of the gates": lambda layer: layer.gates.register_forward_hook(doubled),
    "a hook of a mix": lambda layer: layer.mix1.register_forward_hook(doubled),
    "a hook before": lambda layer: layer.o_proj.register_forward_pre_hook(lambda _m, xs: (2 * xs[0],)),
    "a hook of the backward": lambda layer: layer.q_proj.register_full_backward_hook(lambda *_: None),
    "another class": lambda layer: setattr(layer, "o_proj", Doubled(16, 16, bias=False).double()),
    "an adapter": lambda layer: setattr(layer, "q_proj", nn.Sequential(layer.q_proj)),
    "a parametrization": lambda layer: nn.utils.parametrize.register_parametrization(
        layer.q_proj, "weight", nn.Tanh(), unsafe=True
    ),
    "a parametrization of the layer": lambda layer: nn.utils.parametrize.register_parametrization(
        layer, "k_conv", nn.Tanh(), unsafe=True
    ),
    "a buffer": lambda layer: layer.q_proj.register_buffer("scale", torch.ones(1)),
    "a subclass of Tensor": with_subclass,
    "a bias as an attribute": with_attribute,
    "other gates": with_other_gates,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_operators_do_not_read_takes_the_general_path(change):
    """Outputs, steps and gradients are those of the changed modules."""
    layer, x = setup()
    state = layer.new_state(FEW)
    assert is_taken(layer, x)
    CHANGES[change](layer)
    with torch.no_grad():
        assert not is_taken(layer, x)
        assert not is_taken(layer, x[:, :1], state)
    actual = [*results(layer, x, None), steps(layer, x)]
    layer.backend = "reference"
    expected = [*results(layer, x, None), layer(x)]
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e, tolerance=1e-10, floor=1e-6)


@pytest.mark.parametrize("change", [with_longer_convolution, lambda layer: setattr(layer, "mix1", None)])
@torch.no_grad()
def test_a_layer_that_its_configuration_does_not_describe_takes_the_general_path(change):
    layer, x = setup()
    change(layer)
    assert not is_taken(layer, x)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # PyTorch's fallback in vmap
@torch.no_grad()
def test_vmap_over_layers_inputs():
    layer, x = setup()
    actual = torch.vmap(layer)(torch.stack([x, 2 * x]))
    assert_close(actual, torch.stack([layer(x), layer(2 * x)]), tolerance=1e-10)


def test_the_bias_of_a_projection_is_added():
    """Not only where both paths agree: the output is that of the formula."""
    layer, x = setup("R")
    layer.o_proj = nn.Linear(16, 16, dtype=torch.float64)
    weight, bias = layer.o_proj.weight.data, layer.o_proj.bias.data.clone()
    out = layer(x)
    (grad,) = torch.autograd.grad(out.sum(), layer.o_proj.bias)
    assert_close(grad, torch.full_like(bias, 60.0), tolerance=1e-12)
    layer.o_proj = nn.Linear(16, 16, bias=False, dtype=torch.float64)
    layer.o_proj.weight.data = weight
    assert_close(out, layer(x) + bias, tolerance=1e-12)


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
def test_a_hook_for_all_modules_is_called(kind):
    layer, x = setup()
    called = []
    handle = getattr(nn.modules.module, f"register_module_{kind}")(
        lambda module, *_: called.append(type(module)) and None
    )
    try:
        layer(x).sum().backward()
        assert nn.Linear in called
        with torch.no_grad():
            assert not is_taken(layer, x[:, :1], layer.new_state(FEW))
    finally:
        handle.remove()
    assert is_taken(layer, x)


@pytest.mark.parametrize("name", fast.PARTS)
@pytest.mark.parametrize("whole", [False, True], ids=["module", "class"])
def test_a_replaced_forward_is_called(name, whole, monkeypatch):
    layer, x = setup()
    part, before = getattr(layer, name), layer(x)
    original = type(part).forward

    def forward(self, *inputs):
        return doubled(self, inputs, original(self, *inputs))

    if whole:
        monkeypatch.setattr(type(part), "forward", forward)
    else:
        monkeypatch.setattr(part, "forward", forward.__get__(part))
    assert not is_taken(layer, x)
    full = layer(x)
    assert_close(steps(layer, x), full, tolerance=1e-10)
    assert not torch.allclose(full, before)


def test_where_a_layer_is_one_operator():
    layer, x = setup()
    assert is_taken(layer, x)
    for label in ("R-p", "S"):
        assert not is_taken(*setup(label))
    for settings in ({"num_registers": 2}, {"canon": True}, {"dtype": torch.bfloat16}):
        assert not is_taken(*setup(**settings))
    assert not is_taken(layer.float(), x)
    layer.double()
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_taken(layer, x)
    layer.q_proj.weight.requires_grad_(False)  # it would compute a gradient that nobody wants
    assert not is_taken(layer, x)
    with torch.no_grad():
        assert is_taken(layer, x)
    layer.q_proj.weight.requires_grad_(True)
    for backend in ("blocked", "reference"):
        layer.backend = backend
        assert not is_taken(layer, x)


def test_where_a_step_is_one_operator():
    layer, x = setup(dtype=torch.float32)
    state = layer.new_state(FEW)
    assert not is_taken(layer, x[:, :1], state)  # gradients may be needed
    with torch.no_grad():
        assert is_taken(layer, x[:, :1], state)
        assert is_taken(layer, x[:, :4], state)
        assert not is_taken(layer, x[:, :5], state)
        assert not is_taken(layer, x[:1, :1].expand(40, -1, -1), state)
        assert not is_taken(layer, x[:, :1].double(), state)
        assert is_taken(setup(dtype=torch.bfloat16)[0], x[:, :1].bfloat16(), state)
        assert is_taken(setup("R-p", dtype=torch.float32)[0], x[:, :1], state)
        assert not is_taken(setup("S", dtype=torch.float32)[0], x[:, :1], state)
        with torch.autocast("cpu", torch.bfloat16):
            assert not is_taken(layer, x[:, :1], state)
        layer.backend = "blocked"
        assert not is_taken(layer, x[:, :1], state)


@pytest.mark.parametrize("change", [lambda y, x: y.add_(x), lambda y, x: y.mul_(2), lambda y, x: y.relu_()])
@pytest.mark.parametrize("backend", ["auto", "blocked"])
def test_the_output_may_be_changed_in_place(change, backend):
    layer, x = setup()
    layer.backend = backend
    actual = change(layer(x), x)
    expected = change(layer(x).clone(), x)
    grads = (torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]) for y in (actual, expected))
    for a, e in zip(*grads, strict=True):
        assert_close(a, e, tolerance=1e-12, floor=1e-6)


def seen_arguments(monkeypatch, name, run):
    """Return the arguments of one call of an operator, as leaves."""
    seen = []
    original = getattr(operators, name)

    def spy(*arguments):
        seen.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(operators, name, spy)
    run()
    return tuple(
        a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a
        for a in seen[-1]
    )


def test_opcheck_of_the_layer(monkeypatch):
    layer, x = setup()
    arguments = seen_arguments(monkeypatch, "_native_layer", lambda: layer(x, starts=STARTS[2]))
    checks = torch.library.opcheck(torch.ops.hypermlp.native_layer.default, arguments)
    assert set(checks.values()) == {"SUCCESS"}


def test_opcheck_of_a_step(monkeypatch):
    layer, x = setup()
    state = layer.new_state(FEW)
    with torch.no_grad():
        layer(x[:, :7], state=state, starts=torch.tensor([0, 3]))
        original = operators.call
        seen = []
        monkeypatch.setattr(operators, "call", lambda op, *a: seen.append(a) or original(op, *a))
        layer(x[:, 7:9], state=state)
        checks = torch.library.opcheck(torch.ops.hypermlp.native_step.default, seen[0])
    assert set(checks.values()) == {"SUCCESS"}


def test_gradients_are_derivatives():
    layer, _ = setup()
    x = torch.randn(1, 3, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: layer(x), (x,), fast_mode=True)


def test_second_derivatives_are_refused():
    layer, x = setup()
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()


def test_derivatives_by_transforms_are_refused_not_zero():
    layer, x = setup()
    with torch.no_grad(), pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.jvp(lambda z: layer(z, state=layer.new_state(2)), (x[:, :1],), (x[:, :1],))
    with pytest.raises(RuntimeError, match=r"cannot be differentiated by torch.func.*backend='reference'"):
        torch.func.grad(lambda z: layer(z).sum())(x)
    layer.backend = "reference"
    assert torch.func.grad(lambda z: layer(z).sum())(x).shape == x.shape
    assert torch.func.jvp(layer, (x,), (x,))[1].abs().max() > 0


def test_the_forward_pass_frees_what_it_does_not_need(monkeypatch):
    layer = Mixer.from_label("G-cg-q-12o", hidden_size=256, max_length=512)
    x = torch.randn(2, 512, 256)
    work = torch.no_grad()(lambda: layer(x))
    less = peak_bytes(work)
    by_modules(monkeypatch)
    assert less < 0.85 * peak_bytes(work)


class Cast(nn.Module):
    """A projection that returns another dtype, like an adapter."""

    def __init__(self, linear, dtype):
        super().__init__()
        self.linear, self.dtype = linear, dtype

    def forward(self, x):
        return self.linear(x).to(self.dtype)


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_projections_of_another_dtype_are_not_misread(name):
    layer, x = setup(dtype=torch.float32)
    if name == "v_proj":
        layer.o_proj = layer.o_proj.bfloat16()
    setattr(layer, name, Cast(getattr(layer, name), torch.bfloat16))
    layer.backend = "native"
    with torch.no_grad():
        try:
            full = layer(x)
        except (RuntimeError, ValueError):
            with pytest.raises((RuntimeError, ValueError)):
                layer(x[:, :1], state=layer.new_state(FEW))
            return
    assert_close(steps(layer, x), full, tolerance=0.05)


def test_a_step_in_another_dtype_leaves_the_state_as_it_was():
    layer, x = setup(dtype=torch.float32)
    state = layer.new_state(FEW)
    with torch.no_grad():
        full = layer(x)
        layer(x[:, :10], state=state)
        state = state.clone()  # its buffers are full
        layer.double()
        for count in (1, 8):
            with pytest.raises(ValueError, match=r"the state holds torch\.float32"):
                layer(x[:, 10 : 10 + count].double(), state=state)
        layer.float()
        outs = [layer(x[:, i : i + 1], state=state) for i in range(10, 30)]
    assert_close(torch.cat(outs, dim=1), full[:, 10:], tolerance=1e-4)


def test_a_step_over_tensors_saved_for_backward_raises():
    layer, x = setup()
    state = layer.new_state(FEW)
    out = layer(x[:, :10], state=state)
    state.detach().crop(8)
    with torch.no_grad():
        layer(x[:, 15:16], state=state)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
