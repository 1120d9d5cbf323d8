"""The operator: every backend against the oracle, outputs and gradients, in every dtype and magnitude."""

import functools
from collections import Counter
from typing import ClassVar

import numpy as np
import torch
from hypothesis import strategies as st

from fuzz import oracle
from fuzz.compare import Expected
from fuzz.core import Case, Finding, Part
from fuzz.drawing import SEEDS, STARTS, once_in, starts_array, weighted
from hypermlp.errors import UserError
from hypermlp.ops import Mix, hyper_attention
from hypermlp.ops.arguments import Request
from hypermlp.ops.dispatch import BACKENDS

SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 33)
SMALL_SIZES = (1, 2, 3, 5, 8, 16)
REACH = {"float16": 4.0, "float64": 30.0}
"""How many powers of ten scores may be from 1, where it is not 18."""


@st.composite
def operator_cases(draw, small=False):
    """Draw a case; a small one suits Triton's interpreter."""

    def one(*values):
        return draw(st.sampled_from(values))

    dtype = draw(weighted(**{} if small else {"float64": 8}, float32=6, bfloat16=3, float16=3))
    long = not small and draw(once_in(70))
    extreme, reach = draw(st.booleans()), REACH.get(dtype, 18.0)

    def exponent(low, high, used=True):
        return draw(st.floats(low, high)) if extreme and used else 0.0

    size = st.sampled_from(SMALL_SIZES if small else SIZES)
    return {
        "seed": draw(SEEDS),
        "dtype": dtype,
        "mix_float32": dtype in ("bfloat16", "float16") and draw(st.booleans()),
        "activation": one("relu", "glu", "softmax"),
        "layout": one("lag", "lag", "forward"),
        "mixes": one("", "1", "2", "12", "12", "12"),
        "batch": 1 if long or small else draw(st.integers(1, 3)),
        "queries": one(40, 65, 130) if long else draw(st.integers(1, 5 if small else 9)),
        "earlier": one(0, 0, 70) if long else one(0, 0, draw(st.integers(0, 3 if small else 6))),
        "heads": one(1, 2, 2) if small else one(1, 2, 2, 3),
        "qk_dim": draw(size),
        "vo_dim": draw(size),
        "rank": one(1, 2, 3, 4) if small else one(1, 2, 3, 4, 5, 8, 16, 17),
        "spare_slots": one(0, 0, 1, 5),
        "starts": draw(STARTS),
        "score_exponent": exponent(-reach, reach),
        "value_exponent": exponent(-reach / 2, reach / 2, draw(st.booleans())),
        "grad_exponent": exponent(-0.3 * reach, 0.3 * reach, draw(once_in(3))),
        "mix_scale": one(0.3, 0.02, 1.0, 10.0),
        "eps": one(1e-12, 1e-12, 1e-6, 1.0, 2.0**-126),
        "zeros": one(*["none"] * 6, "all", "queries", "some", "values"),
        "strided": draw(once_in(3)),
        "threads": one(1, 1, 1, 1, 1, 1, 1, 2),
    }


def runs(backends: tuple[str, ...], case: Case) -> list[str]:
    """Return the backends that can run a case."""
    request = Request(
        "attention", "cpu", getattr(torch, case["dtype"]), case["activation"], bool(case["mixes"])
    )
    return [name for name in backends if BACKENDS[name].refusal(request) is None]


class Operators(Part):
    name = "operator"
    cases = operator_cases
    share = 46
    backends: tuple[str, ...] = ("reference", "blocked", "native", "sdpa")

    def __init__(self, folder):
        super().__init__(folder)
        self.present = tuple(name for name in self.backends if BACKENDS[name].unavailable() is None)

    def rounding(self, dtype: str) -> str | None:
        """Return the dtype to which intermediate results are rounded; None for that of the computation."""
        return None

    def check(self, case):
        torch.set_num_threads(case["threads"])
        tensors, do = make_tensors(case)
        starts = starts_array(case["starts"], case["batch"], case["queries"], case["earlier"])
        rounding = self.rounding(case["dtype"])
        expected = Expected(to_oracle(case, tensors, starts), exact(do), case["dtype"], rounding)
        if not expected.outputs_defined:
            return Counter({"skipped, out of range": 1})
        counted: Counter[str] = Counter()
        plain = None
        for backend in runs(self.present, case):
            results = run_backend(backend, case, tensors, do, starts)
            expected.judge(backend, results, plain, counted)
            plain = results if backend == "reference" else plain
            counted[f"comparisons of {backend}"] += 1
        counted["skipped, gradients not defined"] += not expected.gradients_defined
        return counted


def make_tensors(case):
    """Return the differentiable tensors by name, and the gradient of the output."""
    rng = np.random.default_rng(case["seed"])
    batch, queries, heads = case["batch"], case["queries"], case["heads"]
    keys = queries + case["earlier"]
    branches = heads * (2 if case["activation"] == "glu" else 1)
    slots, rank, scale = keys + case["spare_slots"], case["rank"], case["mix_scale"]
    score = 10.0 ** (case["score_exponent"] / 2)

    def normal(*shape, scale=1.0):
        return scale * rng.standard_normal(shape)

    arrays = {
        "q": normal(batch, queries, branches, case["qk_dim"], scale=score * case["qk_dim"] ** -0.5),
        "k": normal(batch, keys, branches, case["qk_dim"], scale=score),
        "v": normal(batch, keys, heads, case["vo_dim"], scale=10.0 ** case["value_exponent"]),
    }
    for name, count in (("mix1", branches), ("mix2", heads)):
        if name[-1] in case["mixes"]:
            arrays[f"{name}.diag"] = normal(count, slots, scale=scale)
            arrays[f"{name}.left"] = normal(count, slots, rank, scale=scale)
            arrays[f"{name}.right"] = normal(count, slots, rank, scale=scale)
            arrays[f"{name}.gate"] = 1 / (1 + np.exp(-normal(batch, queries, count, rank)))
    do = normal(batch, queries, heads, case["vo_dim"], scale=10.0 ** case["grad_exponent"])
    place_zeros(case["zeros"], arrays, rng)
    dtype = getattr(torch, case["dtype"])
    mix_dtype = torch.float32 if case["mix_float32"] else dtype
    tensors = {
        name: stored(x, mix_dtype if "." in name else dtype, case["strided"]) for name, x in arrays.items()
    }
    return tensors, stored(do, dtype, case["strided"])


def place_zeros(kind, arrays, rng):
    """Set whole tensors, or some rows of the keys and queries, to zero."""
    names = {"all": ("q", "k", "v"), "queries": ("q",), "values": ("v",)}.get(kind, ())
    for name in names:
        arrays[name][:] = 0
    if kind == "some":
        for name in ("q", "k"):
            arrays[name][rng.random(arrays[name].shape[:3]) < 0.4] = 0


def stored(x, dtype, strided):
    """Return a tensor; a strided one is a view with gaps in a larger one."""
    tensor = torch.from_numpy(np.ascontiguousarray(x)).to(dtype)
    if strided and tensor.dim() >= 3:
        wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 2), torch.nan, dtype=dtype)
        wide = wide.transpose(0, 1).contiguous().transpose(0, 1)
        wide[..., 1:-1] = tensor
        tensor = wide[..., 1:-1]
    return tensor


def exact(x):
    return x.detach().double().numpy()


def to_oracle(case, tensors, starts):
    mixes = [
        tuple(exact(tensors[f"mix{i}.{field}"]) for field in Mix._fields) if i in case["mixes"] else None
        for i in "12"
    ]
    rows = np.zeros((case["batch"], case["queries"]), int) if starts is None else starts
    if rows.ndim == 1:
        positions = case["earlier"] + np.arange(case["queries"])
        rows = np.minimum(rows[:, None], positions + 1)
    qkv = (exact(tensors[name]) for name in "qkv")
    return oracle.Inputs(*qkv, *mixes, rows, case["activation"], case["layout"], case["eps"])


def run_backend(backend, case, tensors, do, starts):
    """Return the output and the gradients of a backend, by name."""
    given = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    mixes = [
        Mix(*(given[f"mix{i}.{field}"] for field in Mix._fields)) if i in case["mixes"] else None
        for i in "12"
    ]
    try:
        out = hyper_attention(
            given["q"], given["k"], given["v"], *mixes,
            activation=case["activation"], layout=case["layout"], eps=case["eps"], backend=backend,
            starts=None if starts is None else torch.from_numpy(starts),
        )  # fmt: skip
    except UserError as error:
        raise Finding(f"{backend} refuses a valid case", str(error)) from error
    grads = torch.autograd.grad(out, list(given.values()), do)
    return {"output": out.detach()} | dict(zip(given, grads, strict=True))


class TritonOperators(Operators):
    """The operator on backend "triton" in Triton's interpreter, which is slow."""

    name = "triton"
    cases = functools.partial(operator_cases, small=True)
    share = 4
    environment: ClassVar = {"TRITON_INTERPRET": "1"}
    backends = ("reference", "triton")

    def rounding(self, dtype):
        return dtype  # matrix products take factors in the dtype of the tensors, and gradients use the output
