"""The contract of the operator as cases: fixed inputs, what a backend computes, and the comparison.

Every check of kernels takes its cases from here: the self-test of a wheel's libraries (shipped.py), the
self-check on a GPU (triton/selfcheck.py), the gate of the benchmarks, ``hypermlp gpu-check`` and the tests.
To add a kernel, add a function that returns its ``Case`` and list it in ``cases``; all of them then run it.

Shapes: B batch, Tq queries, Tk keys.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hypermlp.ops import reference
from hypermlp.ops.arguments import Attention, Mix, Request
from hypermlp.ops.comparison import assert_close, assert_no_worse, relative_error
from hypermlp.ops.dispatch import BACKENDS
from hypermlp.ops.inputs import op_inputs, starts_of
from hypermlp.ops.layer import (
    LayerArguments,
    LayerWeights,
    RingStepArguments,
    StepArguments,
    project,
    reference_layer,
)

FLOOR = 1e-3
"""The smallest size that errors are relative to: one visible slot has a normalised score of exactly 1, whose
gradient is all cancellation."""
PLAIN = "plain"
"""In place of a backend's name: plain PyTorch, with every operation in the dtype of the inputs."""
VARIANTS = (  # activation, mixes, layout, pattern; the first three run every kernel of a backend
    ("glu", "12", "lag", "all"),
    ("glu", "12", "lag", "packed"),
    ("relu", "12", "forward", "window"),
    ("glu", "2", "lag", "window"),
    ("relu", "12", "lag", "all"),
    ("glu", "12", "forward", "packed"),
    ("relu", "1", "forward", "all"),
    ("relu", "", "lag", "window"),
)
TENSORS = ("q", "k", "v", *(f"mix{i}.{field}" for i in (1, 2) for field in Mix._fields))


class Case(NamedTuple):
    """One computation, on which all backends must agree."""

    name: str
    request: Request
    """What a backend is requested to do; device and dtype are those of the call."""
    outputs: tuple[str, ...]
    """The names of the results."""
    tensors: dict[str, Tensor]
    """The inputs, in float64 on the CPU."""
    compute: Callable[..., Sequence[Tensor]]
    """Return the results, from the name of a backend (or PLAIN) and the inputs in their order. A backend is
    called through ``BACKENDS`` and not chosen: the check of a library runs before the library is available.
    """
    differentiable: bool = True

    def __str__(self) -> str:
        return self.name

    def runs_on(self, backend: str) -> bool:
        """Return whether the backend has a kernel for this case, on whatever machine and in any dtype."""
        return not BACKENDS[backend].lacks(self.request.operation)

    def refusal(self, backend: str, dtype: torch.dtype, device: str = "cpu") -> str | None:
        """Return why the backend does not compute this case; None if it does."""
        return BACKENDS[backend].refusal(self.request._replace(device_type=device, dtype=dtype))

    def results(
        self, backend: str, dtype: torch.dtype, device: str = "cpu", *, exact: bool = False
    ) -> dict[str, Tensor]:
        """Return the results by name, and the gradients of all inputs for fixed random cotangents.

        ``exact``: compute in float64, from the inputs in ``dtype``.
        """
        inputs = [x.to(dtype) for x in self.tensors.values()]
        inputs = [
            x.to(device, torch.float64 if exact else dtype).requires_grad_(self.differentiable)
            for x in inputs
        ]
        outs = list(self.compute(backend, *inputs))
        found = dict(zip(self.outputs, outs, strict=True))
        if self.differentiable:
            cotangents = [_normal(*out.shape, seed=i + 1).to(dtype).to(out) for i, out in enumerate(outs)]
            grads = torch.autograd.grad(outs, inputs, cotangents)
            found |= zip((f"gradient of {name}" for name in self.tensors), grads, strict=True)
        return {name: x.detach() for name, x in found.items()}


def check(
    case: Case,
    backend: str,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    tolerance: float | None = None,
    elements: bool = True,
    repeat: bool = False,
) -> float:
    """Compare results and gradients with ``reference`` in float64, and return the worst relative error.

    Args:
        tolerance: of the relative error; None: at most twice the error of plain PyTorch in that dtype.
        elements: judge every element too (``assert_close``); leave it off where products round their factors,
            as TF32 does.
        repeat: require the same bits in a second run.

    Raises:
        AssertionError: if a result is wrong.
    """
    actual = case.results(backend, dtype, device)
    exact = case.results("reference", dtype, device, exact=True)
    again = case.results(backend, dtype, device) if repeat else actual
    plain = case.results(PLAIN, dtype, device) if tolerance is None else exact
    worst = 0.0
    for name, value in actual.items():
        if not torch.equal(value, again[name]) and not value.isnan().any():
            raise AssertionError(f"{name}: different bits in a second run")
        error = relative_error(value, exact[name], floor=FLOOR)
        if tolerance is None:
            assert_no_worse(value, plain[name], exact[name], what=name)
        elif elements:
            assert_close(value, exact[name], tolerance=tolerance, floor=FLOOR, what=name)
        elif not error <= tolerance:
            raise AssertionError(f"{name}: relative error {error:.3g} exceeds {tolerance:.3g}")
        worst = max(worst, error)
    return worst


def cases(variants: Sequence[tuple[str, str, str, str]] = VARIANTS, *, keys: int, **sizes: Any) -> list[Case]:
    """Return the cases of the contract, the most important first. Every kernel of every backend runs in them.

    Args:
        variants: which of ``VARIANTS``; each is a case of training and one of decoding.
        keys, sizes: sizes of the operator, as in ``op_inputs``.
    """
    found = [
        attention(*variant, queries=queries, keys=keys, **sizes)
        for variant, queries in itertools.product(variants, (keys, 1))
    ]
    convolutions = [convolution(), convolution(count=1)]
    around = [*convolutions, gates(), ring(keys=keys, **sizes), layer(), step(), ring_step()]
    return [*found[:2], *around, *found[2:]]


def attention(
    activation: str = "glu",
    mixes: str = "12",
    layout: str = "lag",
    pattern: str = "all",
    *,
    queries: int,
    keys: int,
    **sizes: Any,
) -> Case:
    """Return the case of ``hyper_attention``; ``sizes`` as in ``op_inputs``."""
    inputs = op_inputs(queries=queries, keys=keys, activation=activation, mixes=mixes, **sizes)
    starts = starts_of(pattern, batch=inputs.q.shape[0], queries=queries, keys=keys)

    def compute(backend: str, *tensors: Tensor) -> list[Tensor]:
        given = _attention(tensors, mixes, starts, activation, layout)
        return [reference.trace(given).output if backend == PLAIN else BACKENDS[backend].attention(given)]

    what = "decode" if queries == 1 else "training"
    how = f"mixes {mixes}" if mixes else "no mixes"
    request = Request("attention", "", torch.float64, activation, bool(mixes))
    named = dict(zip(_names(mixes), inputs.tensors(), strict=True))
    name = f"{activation}, {how}, layout {layout}, {pattern}, {what}"
    return Case(name, request, ("output",), named, compute)


def ring(layout: str = "lag", *, keys: int, **sizes: Any) -> Case:
    """Return the case of one query over a ring of ``keys`` rows that has wrapped."""
    inputs = op_inputs(queries=1, keys=keys, **sizes)
    starts = torch.tensor([[4]]).expand(inputs.q.shape[0], 1)  # later than what the ring has overwritten

    def compute(backend: str, *tensors: Tensor) -> list[Tensor]:
        given = _attention(tensors, "12", starts, "glu", layout)
        run = BACKENDS["reference" if backend == PLAIN else backend].ring
        assert run is not None
        return [run(given, torch.tensor([keys + 2], device=tensors[0].device))]

    request = Request("ring", "", torch.float64, "glu", mixed=True)
    named = dict(zip(_names("12"), inputs.tensors(), strict=True))
    return Case("ring", request, ("output",), named, compute, differentiable=False)


def convolution(
    batch: int = 2,
    length: int = 30,
    earlier: int = 3,
    width: int = 48,
    taps: int = 4,
    *,
    count: int = 2,
    reach: bool = True,
) -> Case:
    """Return the case of ``count`` causal convolutions of one input.

    Args:
        earlier: positions before the first output.
        reach: whether positions differ in how far back they see (0, 1, ... positions).
    """
    seen = torch.arange(batch * length).view(batch, length) % (taps + 2) if reach else None

    def compute(backend: str, x: Tensor, *weights: Tensor) -> Sequence[Tensor]:
        run = BACKENDS["reference" if backend == PLAIN else backend].convolution
        assert run is not None
        return run(x, list(weights), length, None if seen is None else seen.to(x.device))

    tensors = {"x": _normal(batch, earlier + length, width, seed=1)}
    tensors |= {f"weight{i}": _normal(width, taps, seed=1 + i) for i in range(1, count + 1)}
    request = Request("convolution", "", torch.float64)
    outputs = tuple(f"output{i}" for i in range(1, count + 1))
    name = {1: "one convolution", 2: "convolution"}.get(count, f"{count} convolutions")
    return Case(name, request, outputs, tensors, compute)


def gates(sizes: Sequence[int] = (24, 40, 8, 4), positions: Sequence[int] = (2, 9)) -> Case:
    """Return the case of a layer's gates; ``sizes`` are the columns of each, 0 for an absent one."""

    def compute(backend: str, logits: Tensor, q: Tensor) -> list[Tensor]:
        fused = _kernel(backend, "gating")
        if fused is not None:
            return fused.gate_queries(logits, q, list(sizes))
        first, *rest = torch.sigmoid(logits).split(list(sizes), dim=-1)
        return [q * first, *rest]

    tensors = {
        "logits": 3 * _normal(*positions, sum(sizes), seed=1),
        "q": _normal(*positions, sizes[0], seed=2),
    }
    request = Request("gating", "", torch.float64)
    return Case("gates", request, ("gated q", "output", "mix1", "mix2"), tensors, compute)


def layer(batch: int = 2, length: int = 12, width: int = 12) -> Case:
    """Return the case of a whole layer: HyperGLU over packed documents, with 2 heads and rank 3."""
    starts = starts_of("packed", batch=batch, queries=length, keys=length)
    assert starts is not None
    reach = torch.arange(1, length + 1) - starts
    tensors = _weights(width, slots=length)

    def compute(backend: str, x: Tensor, *weights: Tensor) -> list[Tensor]:
        run = _kernel(backend, "layer") or reference_layer
        given = (x, _layer_weights(tensors, weights), starts.to(x.device), reach.to(x.device), 2)
        return [run(LayerArguments(*given, keep=torch.is_grad_enabled()))]

    request = Request("layer", "", torch.float64, "glu", mixed=True)
    inputs = {"x": _normal(batch, length, width, seed=9), **tensors}
    return Case("layer", request, ("output",), inputs, compute)


def step(batch: int = 2, length: int = 12, new: int = 2, width: int = 12) -> Case:
    """Return the case of a layer's decoding step: the last ``new`` of ``length`` positions."""
    tensors, past = _weights(width, slots=length), length - new

    def compute(backend: str, x: Tensor, *weights: Tensor) -> list[Tensor]:
        given = _layer_weights(tensors, weights)
        run, whole = _kernel(backend, "step"), LayerArguments(x, given, None, None, 2, keep=False)
        if run is None:
            return [reference_layer(whole)[:, past:]]
        history, keys, values = _caches(whole, past)
        caches = (history, past, keys, values, past)
        return [run(StepArguments(x[:, past:], given, None, None, None, *caches, None, None))]

    request = Request("step", "", torch.float64, "glu", mixed=True)
    inputs = {"x": _normal(batch, length, width, seed=9), **tensors}
    return Case("decoding step", request, ("output",), inputs, compute, differentiable=False)


def ring_step(batch: int = 2, length: int = 12, width: int = 12) -> Case:
    """Return the case of a decoding step on a state of fixed size: the last of ``length`` positions."""
    tensors, past = _weights(width, slots=length), length - 1

    def compute(backend: str, x: Tensor, *weights: Tensor) -> list[Tensor]:
        given = _layer_weights(tensors, weights)
        run, whole = _kernel(backend, "ring_step"), LayerArguments(x, given, None, None, 2, keep=False)
        if run is None:
            return [reference_layer(whole)[:, past:]]
        rings = _caches(whole, past)
        counter = torch.tensor(past, device=x.device)
        return [run(RingStepArguments(x[:, past:], given, *rings, counter, None, None))]

    request = Request("ring_step", "", torch.float64, "glu", mixed=True)
    inputs = {"x": _normal(batch, length, width, seed=9), **tensors}
    return Case("step in rings", request, ("output",), inputs, compute, differentiable=False)


def _kernel(backend: str, operation: str) -> Any:
    """Return what the backend runs; None for the definition: plain PyTorch, and the backend "reference"."""
    if backend in (PLAIN, "reference"):
        return None
    run = getattr(BACKENDS[backend], operation)
    assert run is not None, f"{backend} has no {operation}"
    return run


def _caches(whole: LayerArguments, past: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs, keys and values of a state; a step writes what comes after ``past`` positions."""
    _, keys, values, _ = project(whole)
    caches = whole.x.clone(), keys.contiguous(), values.contiguous()
    for cache in caches:
        cache[:, past:] = 1e6  # finite, as in a ring that is not filled yet
    return caches


def _weights(width: int, *, slots: int, rank: int = 3, heads: int = 2) -> dict[str, Tensor]:
    """Return the parameters of a HyperGLU layer by their names; queries have a third of the width."""
    qk, branches = width // 3, 2 * heads
    shapes = {
        "k_conv": (width, 4),
        "v_conv": (width, 4),
        "q_weight": (qk, width),
        "k_weight": (qk, width),
        "v_weight": (width, width),
        "o_weight": (width, width),
        "gate_weight": (qk + width + (branches + heads) * rank, width),
        "gate_bias": (qk + width + (branches + heads) * rank,),
    }
    for index, count in ((1, branches), (2, heads)):
        shapes |= {f"diag{index}": (count, slots)}
        shapes |= {f"{name}{index}": (count, slots, rank) for name in ("left", "right")}
    return {name: 0.5 * _normal(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}


def _layer_weights(named: dict[str, Tensor], tensors: Sequence[Tensor]) -> LayerWeights:
    """Return the weights of a call, whose gates have the order of ``Gates``."""
    weights: dict[str, Any] = dict(zip(named, tensors, strict=True))
    qk, vo = (weights[name].shape[0] for name in ("q_weight", "v_weight"))
    mix1_gate = qk + vo
    mix2_gate = mix1_gate + weights["left1"].shape[0] * weights["left1"].shape[2]
    firsts = {"q_gate": 0, "output_gate": qk, "mix1_gate": mix1_gate, "mix2_gate": mix2_gate}
    options = {"activation": "glu", "layout": "lag", "eps": 1e-12}
    return LayerWeights(**(weights | firsts | options))


def _names(mixes: str) -> list[str]:
    """Return the names of the tensors that a call has."""
    return [name for name in TENSORS if name in "qkv" or name[3] in mixes]


def _attention(
    tensors: Sequence[Tensor], mixes: str, starts: Tensor | None, activation: str, layout: str
) -> Attention:
    q, k, v, *rest = tensors
    mix1 = Mix(*rest[:4]) if "1" in mixes else None
    mix2 = Mix(*rest[-4:]) if "2" in mixes else None
    starts = None if starts is None else starts.to(q.device)
    return Attention(q, k, v, mix1, mix2, starts, activation, layout, 1e-12)


def _normal(*shape: int, seed: int) -> Tensor:
    """Return numbers from a generator of their own: the random state of the program must not change."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
