"""The operator: every backend against the oracle, outputs and gradients, in every dtype and magnitude."""

import random
from collections import Counter

import numpy as np
import torch

from fuzz import oracle
from fuzz.compare import Expected
from fuzz.core import Case, Finding, Part
from fuzz.drawing import draw_starts, smaller_numbers, starts_array
from hypermlp.errors import UserError
from hypermlp.ops import Mix, hyper_attention
from hypermlp.ops.arguments import Request
from hypermlp.ops.dispatch import BACKENDS

DTYPES = {"float64": 8, "float32": 6, "bfloat16": 3, "float16": 3}
"""Names of dtypes, and how often each is drawn."""
LEAST = {
    "batch": 1, "queries": 1, "earlier": 0, "heads": 1, "qk_dim": 1, "vo_dim": 1, "rank": 1, "spare_slots": 0,
    "threads": 1,
}  # fmt: skip
PLAIN = {
    "score_exponent": 0.0, "value_exponent": 0.0, "grad_exponent": 0.0, "mix_scale": 0.3, "eps": 1e-12,
    "zeros": "none", "strided": False, "starts": {"kind": "none"}, "layout": "lag", "mix_float32": False,
}  # fmt: skip


def runs(backends: tuple[str, ...], case: Case) -> list[str]:
    """Return the backends that can run a case."""
    request = Request(
        "attention", "cpu", getattr(torch, case["dtype"]), case["activation"], bool(case["mixes"])
    )
    return [name for name in backends if BACKENDS[name].refusal(request) is None]


class Operators(Part):
    name = "operator"
    backends = ("reference", "blocked", "native", "sdpa")
    sizes = (1, 1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 33)

    def __init__(self, folder):
        super().__init__(folder)
        self.present = tuple(name for name in self.backends if BACKENDS[name].unavailable() is None)

    def draw(self, rng: random.Random) -> Case:
        long = rng.random() < 0.015
        dtype = rng.choices(list(DTYPES), weights=list(DTYPES.values()))[0]
        half = dtype in ("bfloat16", "float16")
        extreme = rng.random() < 0.5
        reach = {"float16": 4.0, "float64": 30.0}.get(dtype, 18.0)
        queries = rng.choice((40, 65, 130)) if long else rng.randint(1, 9)
        earlier = rng.choice((0, 0, rng.randint(0, 6), 70 if long else 0))
        return {
            "seed": rng.randrange(2**32),
            "dtype": dtype,
            "mix_float32": half and rng.random() < 0.5,
            "activation": rng.choice(("relu", "glu", "softmax")),
            "layout": rng.choice(("lag", "lag", "forward")),
            "mixes": rng.choice(("", "1", "2", "12", "12", "12")),
            "batch": 1 if long else rng.randint(1, 3),
            "queries": queries,
            "earlier": earlier,
            "heads": rng.choice((1, 2, 2, 3)),
            "qk_dim": rng.choice(self.sizes),
            "vo_dim": rng.choice(self.sizes),
            "rank": rng.choice((1, 2, 3, 4, 5, 8, 16, 17)),
            "spare_slots": rng.choice((0, 0, 1, 5)),
            "starts": draw_starts(rng, queries + earlier),
            "score_exponent": rng.uniform(-min(reach, 30), reach) if extreme else 0.0,
            "value_exponent": rng.uniform(-reach, reach) * 0.5 if extreme and rng.random() < 0.5 else 0.0,
            "grad_exponent": rng.uniform(-reach, reach) * 0.3 if extreme and rng.random() < 0.3 else 0.0,
            "mix_scale": rng.choice((0.02, 0.3, 0.3, 1.0, 10.0)),
            "eps": rng.choice((1e-12, 1e-12, 1e-6, 1.0, 2.0**-126)),
            "zeros": rng.choice(("none",) * 6 + ("all", "queries", "some", "values")),
            "strided": rng.random() < 0.3,
            "threads": rng.choice((1,) * 7 + (2,)),
        }

    def smaller(self, case):
        yield from smaller_numbers(case, LEAST)
        yield from (case | {name: value} for name, value in PLAIN.items())
        yield from (case | {"mixes": mixes} for mixes in ("", "1", "2") if mixes in case["mixes"])

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
    """The same for backend "triton" in Triton's interpreter, which needs TRITON_INTERPRET=1 and is slow."""

    name = "triton"
    backends = ("reference", "triton")
    sizes = (1, 2, 3, 5, 8, 16)

    def rounding(self, dtype):
        return dtype  # matrix products take factors in the dtype of the tensors, and gradients use the output

    def draw(self, rng):
        case = super().draw(rng)
        small = {"batch": 1, "queries": min(case["queries"], 5), "earlier": min(case["earlier"], 3)}
        case |= small | {"rank": min(case["rank"], 4), "heads": min(case["heads"], 2)}
        case["dtype"] = "float32" if case["dtype"] == "float64" else case["dtype"]
        return case | {"starts": draw_starts(rng, case["queries"] + case["earlier"])}
