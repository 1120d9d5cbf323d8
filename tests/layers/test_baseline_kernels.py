"""flash-linear-attention's kernels equal our PyTorch forms.

Without a GPU they run in Triton's interpreter, in a process of its own. RWKV-7's kernel is left out: it uses
an instruction that the interpreter does not have.
"""

import os
import subprocess
import sys

import pytest

INTERPRETED = """
import builtins, importlib, pkgutil, sys, warnings
warnings.simplefilter("ignore")
import triton.runtime.autotuner as autotuner
begin = autotuner.Autotuner.__init__
def first_only(self, fn, arg_names, configs, *args, **kwargs):  # choosing among several would need a GPU
    begin(self, fn, arg_names, configs[:1], *args, **kwargs)
autotuner.Autotuner.__init__ = first_only
import torch, torch.nn.functional as F
import fla.ops

class Index(int):  # kernels convert loop indices
    def to(self, dtype):
        return self

def indices(*args):
    return map(Index, builtins.range(*(int(a) for a in args)))

from hypermlp.layers.baselines import gsa, kernels, path, recurrence, scan
from hypermlp.testing import assert_close
for module, name in (
    ("gla", "chunk_gla"), ("simple_gla", "chunk_simple_gla"), ("gsa", "chunk_gsa"),
    ("gated_delta_rule", "chunk_gated_delta_rule"),
    ("hgrn", "fused_recurrent_hgrn"), ("path_attn", "parallel_path_attn"),
):
    kernels._kernel(module, name)  # import it before range is replaced
for name, module in list(sys.modules.items()):
    if name.startswith("fla.ops."):
        module.range = indices

torch.manual_seed(0)
B, T, H, K = 1, 96, 2, 32
def normal(*shape):
    return torch.randn(*shape).requires_grad_()
def decay(*shape):
    return (0.2 * F.logsigmoid(torch.randn(*shape))).requires_grad_()
def unit(*shape):
    return F.normalize(torch.randn(*shape), dim=-1)

q, k, v = (normal(B, T, H, K) for _ in range(3))
memory = normal(B, H, K, K)
beta = torch.rand(B, T, H, 1).requires_grad_()
attention = kernels.gated_attention, recurrence.gated_attention
cases = {
    "gated_attention, one decay": (*attention, [q, k, v, decay(B, T, H, 1), memory]),
    "gated_attention": (*attention, [q, k, v, decay(B, T, H, K), memory]),
    "delta_rule": (
        kernels.delta_rule, recurrence.delta_rule,
        [q, unit(B, T, H, K).requires_grad_(), v, beta, decay(B, T, H, 1), memory],
    ),
    "slot_attention": (
        lambda *inputs: kernels.slot_attention(*inputs, (None, None)),
        lambda *inputs: gsa.slot_attention(*inputs),
        [q, k, v, torch.rand(B, T, H, K).requires_grad_(), decay(B, T, H, K)],
    ),
    "scan": (
        lambda *inputs: (kernels.scan(*inputs),), scan.scan,
        [torch.rand(B, T, K).add(0.1).requires_grad_(), normal(B, T, K), normal(B, K)],
    ),
}
def path_ours(q, k, v, w, beta):
    scores, _ = path.path_scores(*(x.transpose(1, 2) for x in (q, k, w, beta[..., None])))
    scores = (scores * K**-0.5).masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    return ((scores.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2),)
cases["path_attention"] = (
    lambda q, k, v, w, beta: (kernels.path_attention(*(x.transpose(1, 2) for x in (q, k, v, w)), beta),),
    path_ours,
    [q, k, v, unit(B, T, H, K).requires_grad_(), torch.rand(B, T, H).requires_grad_()],
)
for name in sys.argv[1:] or cases:
    theirs, ours, inputs = cases[name]
    got, expected = theirs(*inputs)[0], ours(*inputs)[0]
    assert_close(got, expected, tolerance=1e-3, what=name)  # the kernels round to TF32 or half precision
    weights = torch.randn_like(expected)
    grads = (torch.autograd.grad((y * weights).sum(), inputs, allow_unused=True) for y in (got, expected))
    for mine, wanted in zip(*grads):
        if wanted is not None and mine is not None:
            assert_close(mine, wanted, tolerance=1e-2, what=name + "'s gradient")
    print(name, "equal", flush=True)
"""


@pytest.mark.slow
def test_kernels_equal_our_forms():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal") == 6
