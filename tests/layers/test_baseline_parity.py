"""Each baseline's operator equals a published function, in outputs and gradients.

The functions come from the baseline's authors or from a reference library. They are imported, never copied;
docs/baselines.md lists them.
"""

import warnings
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hypermlp.layers import build_mixer
from hypermlp.layers.baselines.fox import forgetting_attention
from hypermlp.layers.baselines.gsa import slot_attention
from hypermlp.layers.baselines.path import path_scores
from hypermlp.layers.baselines.recurrence import delta_rule, diagonal_plus_rank_one, gated_attention
from hypermlp.layers.baselines.retnet import log_decays
from hypermlp.layers.baselines.scan import scan, selective_scan
from hypermlp.testing import assert_close, randomise_

B, T, H, K, V, SLOTS = 2, 128, 2, 16, 24, 12
SCALE = K**-0.5
TOLERANCE = 1e-5  # float32


@pytest.fixture(scope="module", autouse=True)
def fla() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning that there is no GPU
        return pytest.importorskip("fla.ops", reason="needs flash-linear-attention: pip install '.[dev]'")


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def assert_same(ours: Callable[..., Tensor], theirs: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    mine, expected = ours(*inputs), theirs(*inputs)
    assert_close(mine, expected, tolerance=TOLERANCE)
    weights = torch.randn(mine.shape, generator=torch.Generator().manual_seed(9))
    gradients = [torch.autograd.grad((out * weights).sum(), inputs) for out in (mine, expected)]
    for got, wanted in zip(*gradients, strict=True):
        assert_close(got, wanted, tolerance=TOLERANCE, what="gradient")


def first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def turned(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


@pytest.fixture
def qkv() -> list[Tensor]:
    return [normal(B, T, H, K, seed=0), normal(B, T, H, K, seed=1), normal(B, T, H, V, seed=2)]


def decay(*shape: int, strength: float) -> Tensor:
    return (strength * F.logsigmoid(normal(*shape, seed=3).detach())).requires_grad_()


def test_linear(qkv):
    from fla.ops.linear_attn.naive import naive_chunk_linear_attn

    none = torch.zeros(B, T, H, 1)
    assert_same(
        lambda q, k, v: gated_attention(q * SCALE, k, v, none)[0],
        lambda q, k, v: first(naive_chunk_linear_attn(q, k, v, normalize=False)),
        qkv,
    )


def test_retnet(qkv):
    from fla.ops.retention.naive import naive_retention

    assert_same(
        lambda q, k, v: gated_attention(q * SCALE, k, v, log_decays(H, q)[:, None].expand(B, T, H, 1))[0],
        lambda q, k, v: turned(first(naive_retention(*map(turned, (q, k, v))))),
        qkv,
    )


@pytest.mark.parametrize("strength", [0.05, 3.0, 20.0], ids=["slow", "fast", "beyond the factored form"])
def test_gla_and_hgrn2(qkv, strength):
    from fla.ops.gla.naive import naive_recurrent_gla

    assert_same(
        lambda q, k, v, g: gated_attention(q * SCALE, k, v, g)[0],
        lambda q, k, v, g: first(naive_recurrent_gla(q, k, v, g)),
        [*qkv, decay(B, T, H, K, strength=strength)],
    )


@pytest.mark.parametrize("strength", [0.1, 3.0, 10.0], ids=["slow", "fast", "beyond the factored form"])
def test_gsa(qkv, strength):
    from fla.ops.gsa.naive import naive_recurrent_gsa

    assert_same(
        lambda q, k, v, g: slot_attention(q * SCALE, k, v, 1 - g.exp(), g)[0],
        lambda q, k, v, g: first(naive_recurrent_gsa(q, k, v, 1 - g.exp(), g)),
        [*qkv, decay(B, T, H, SLOTS, strength=strength)],
    )


def test_hgrn():
    from fla.ops.hgrn.naive import naive_recurrent_hgrn

    assert_same(
        lambda x, g: scan(g.exp(), x, torch.zeros(B, K))[0],
        lambda x, g: first(naive_recurrent_hgrn(x, g)),
        [normal(B, T, K, seed=0), decay(B, T, K, strength=1.0)],
    )


def test_deltanet(qkv):
    from fla.ops.delta_rule.naive import delta_rule_recurrence

    beta = torch.rand(B, T, H, 1, generator=torch.Generator().manual_seed(4)).requires_grad_()

    def theirs(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        q, k, v, beta = map(turned, (q, F.normalize(k, dim=-1), v, beta[..., 0]))
        return turned(first(delta_rule_recurrence(q, k, v, beta)))

    assert_same(
        lambda q, k, v, beta: delta_rule(q * SCALE, F.normalize(k, dim=-1), v, beta, torch.zeros_like(beta))[
            0
        ],
        theirs,
        [*qkv, beta],
    )


@pytest.mark.parametrize("strength", [0.1, 5.0], ids=["slow", "fast"])
def test_gated_deltanet(qkv, strength):
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule

    beta = torch.rand(B, T, H, 1, generator=torch.Generator().manual_seed(4)).requires_grad_()
    assert_same(
        lambda q, k, v, beta, g: delta_rule(q * SCALE, F.normalize(k, dim=-1), v, beta, g)[0],
        lambda q, k, v, beta, g: first(
            naive_recurrent_gated_delta_rule(q, F.normalize(k, dim=-1), v, beta[..., 0], g[..., 0])
        ),
        [*qkv, beta, decay(B, T, H, 1, strength=strength)],
    )


@pytest.mark.parametrize("strength", [0.6, 5.0], ids=["as in RWKV-7", "fast"])
def test_rwkv7(qkv, strength):
    from fla.ops.generalized_delta_rule.dplr.naive import dplr_recurrence

    removed = F.normalize(normal(B, T, H, K, seed=5).detach(), dim=-1)
    a, b = (-removed).requires_grad_(), (removed * 0.7).requires_grad_()
    log_decay = (
        -strength * torch.rand(B, T, H, K, generator=torch.Generator().manual_seed(6))
    ).requires_grad_()
    assert_same(
        lambda q, *others: diagonal_plus_rank_one(q * SCALE, *others)[0],
        lambda *inputs: turned(first(dplr_recurrence(*map(turned, inputs)))),
        [*qkv, a, b, log_decay],
    )


def test_path():
    from fla.ops.path_attn.naive import naive_path_attn

    q, k, v = (normal(B, T, H, K, seed=seed) for seed in range(3))
    w = F.normalize(normal(B, T, H, K, seed=3).detach(), dim=-1).requires_grad_()
    beta = (2 * torch.rand(B, T, H, 1, generator=torch.Generator().manual_seed(4))).requires_grad_()

    def ours(q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor) -> Tensor:
        scores, _ = path_scores(*map(turned, (q, k, w, beta)))
        scores = (scores * SCALE).masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)
        return turned(scores.softmax(-1) @ turned(v))

    assert_same(
        ours,
        lambda q, k, v, w, beta: first(
            naive_path_attn(q, k, v, w, beta[..., 0], torch.zeros(B, T, H), SCALE)
        ),
        [q, k, v, w, beta],
    )


def test_fox():
    from fla.ops.forgetting_attn.naive import naive_forgetting_attn

    inputs = [*(normal(B, T, H, K, seed=seed) for seed in range(3)), decay(B, T, H, strength=1.0)]
    mask = torch.ones(T, T, dtype=torch.bool).tril()[None, None]

    def ours(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return turned(forgetting_attention(turned(q), turned(k), turned(v), turned(g), mask))

    assert_same(ours, naive_forgetting_attn, inputs)


def test_softmax(qkv):
    layers = [
        build_mixer(name, hidden_size=32, max_length=T, num_heads=2) for name in ("softmax", "softmax-naive")
    ]
    layers[1].load_state_dict(randomise_(layers[0]).state_dict())
    x = normal(B, T, 32, seed=0)
    assert_same(layers[0], layers[1], [x])


def test_mamba():
    from transformers import MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    ours = randomise_(build_mixer("mamba", hidden_size=32, max_length=T))
    theirs = MambaMixer(
        MambaConfig(hidden_size=32, state_size=16, time_step_rank=2, use_mambapy=False), layer_idx=0
    )
    theirs.load_state_dict(
        {
            "A_log": ours.log_rate,
            "D": ours.skip,
            "conv1d.weight": ours.conv.flip(1)[:, None],
            "conv1d.bias": ours.conv_bias,
            "in_proj.weight": ours.in_proj.weight,
            "x_proj.weight": ours.select_proj.weight,
            "dt_proj.weight": ours.step_weight,
            "dt_proj.bias": ours.step_bias,
            "out_proj.weight": ours.o_proj.weight,
        }
    )
    assert_same(ours, theirs, [normal(B, 40, 32, seed=0)])


def test_selective_scan_gradients():
    """Compare with finite differences in float64, with a memory and a document that begins in the middle."""
    torch.manual_seed(0)
    shapes = [(B, 5, 3), (B, 5, 3), (3, 4), (B, 5, 4), (B, 5, 4), (B, 3, 4)]
    inputs = [torch.rand(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    reach = torch.tensor([[2, 3, 4, 5, 6], [2, 3, 1, 2, 3]])
    assert torch.autograd.gradcheck(lambda *args: selective_scan(*args, reach), inputs)
    assert torch.autograd.gradcheck(
        scan, [inputs[0], inputs[1], torch.rand(B, 3, dtype=torch.float64).requires_grad_()]
    )


def test_diff():
    from transformers import DiffLlamaConfig
    from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention, DiffLlamaRotaryEmbedding

    config = DiffLlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=T,
        attention_bias=False,
    )
    config._attn_implementation = "eager"
    theirs = DiffLlamaAttention(config, layer_idx=1)
    ours = randomise_(
        build_mixer("diff", hidden_size=64, max_length=T, num_heads=2, lambda_init=theirs.lambda_init)
    )
    names = ("q_proj", "k_proj", "v_proj")
    weights = {
        f"{name}.weight": part for name, part in zip(names, ours.qkv_proj.weight.chunk(3), strict=True)
    }
    lambdas = {f"lambda_{side}{i + 1}": getattr(ours, f"lambda_{side}")[i] for side in "qk" for i in range(2)}
    theirs.load_state_dict(weights | lambdas | {"o_proj.weight": ours.o_proj.weight})
    positions = torch.arange(T)[None]
    mask = torch.full((T, T), -torch.inf).triu(1)[None, None]

    def run(x: Tensor) -> Tensor:
        turns = DiffLlamaRotaryEmbedding(config)(x, positions)
        return first(theirs(x, position_embeddings=turns, attention_mask=mask))

    assert_same(ours, run, [normal(B, T, 64, seed=0)])
