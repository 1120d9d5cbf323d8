"""Bad input: a ValueError that shows the value and what is allowed, before any work."""

import pytest
import torch

from hypermlp.ops import available_backends, hyper_attention
from hypermlp.ops import dispatch as table
from hypermlp.ops.dispatch import Backend
from hypermlp.testing import op_inputs

INPUTS = op_inputs(queries=5, keys=6)
Q, K, V, MIX1, MIX2 = INPUTS


def test_good_input_passes():
    assert hyper_attention(*INPUTS).shape == (2, 5, 2, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q": Q[0]}, r"q has shape \[5, 4, 4\]; it must be \[batch, positions, heads, width\]"),
        ({"v": V[..., :0]}, "no dimension may be empty"),
        ({"k": K[:1]}, "k has shape .* must agree with q"),
        ({"k": K[..., :3]}, "k has shape .* must agree with q"),
        ({"v": V[:, :5]}, "v has shape .* must agree with k"),
        ({"k": K[:, :4], "v": V[:, :4]}, "5 queries for 4 keys"),
        ({"v": torch.cat([V, V], dim=2)}, "q has 4 heads and v has 4; activation 'glu' needs 2 x"),
        ({"activation": "relu"}, "q has 4 heads and v has 2; activation 'relu' needs 1 x"),
        ({"activation": "gelu"}, "unknown activation 'gelu'; allowed: 'relu', 'glu', 'softmax'"),
        ({"layout": "ring"}, "unknown layout 'ring'; allowed: 'lag', 'forward'"),
        ({"backend": "cuda"}, "unknown backend 'cuda'; allowed: 'auto',"),
        ({"q": [1.0]}, "q is a list; it must be a tensor"),
        ({"backend": ["blocked"]}, r"backend is \['blocked'\]; it must be a string"),
        ({"mix1": tuple(MIX1)}, "mix1 is a tuple; it must be None or a Mix"),
        ({"mix1": MIX1._replace(gate=None)}, "a Mix of four tensors"),
        ({"starts": [0, 1]}, "starts is a list; it must be an integer tensor"),
        ({"eps": None}, "eps is None"),
        ({"eps": 1e-320}, "eps is 1e-320; it must be a finite number of at least"),
        ({"eps": float("nan")}, "eps is nan"),
        ({"eps": 0.0}, "eps is 0.0"),
        ({"eps": float("inf")}, "eps is inf"),
        ({"k": K.float()}, "k is torch.float32, q is torch.float64"),
        ({"q": Q.long(), "k": K.long(), "v": V.long()}, "q is torch.int64; allowed: torch.float32"),
        ({"v": V.to("meta")}, "v is on meta, q on cpu"),
        ({"mix1": MIX1._replace(diag=MIX1.left)}, "mix1 has tensors with .* must be Mix"),
        ({"mix1": MIX2}, r"mix1.diag has shape \[2, 6\]; it must be \[4, 6\]"),
        ({"mix2": MIX2._replace(right=MIX2.right[..., :2])}, "mix2.right has shape"),
        ({"mix2": MIX2._replace(gate=MIX2.gate[:, 1:])}, "mix2.gate has shape"),
        ({"mix2": MIX2._replace(gate=MIX2.gate.float())}, "mix2.gate is torch.float32, q is torch.float64"),
        ({"mix2": MIX2._replace(gate=MIX2.gate.to("meta"))}, "mix2.gate is on meta"),
        (
            {"mix1": MIX1._replace(**{f: getattr(MIX1, f)[:, :4] for f in ("diag", "left", "right")})},
            "6 positions, .* only 4 slots",
        ),
        (
            {"starts": torch.zeros(3, dtype=torch.long)},
            r"starts has shape \[3\]; it must be \[2\] or \[2, 5\]",
        ),
        ({"starts": torch.zeros(2)}, "starts is torch.float32; it must be an integer"),
        ({"starts": torch.tensor([0, -1])}, r"negative: got -1 at index \(1, 0\)"),
        ({"starts": torch.tensor([0, 7])}, "beyond its query: got 7"),
        ({"starts": torch.tensor([[0, 0, 0, 0, 0], [3, 0, 0, 0, 0]])}, "beyond its query: got 3"),
        (
            {"starts": torch.tensor([[0, 0, 0, 0, 0], [1, 2, 1, 2, 2]])},
            r"must not decrease along the queries: got 1 at index \(1, 2\)",
        ),
        ({"starts": torch.zeros(2, dtype=torch.long, device="meta")}, "starts is on meta"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    good = {"q": Q, "k": K, "v": V, "mix1": MIX1, "mix2": MIX2}
    with pytest.raises(ValueError, match=message):
        hyper_attention(**(good | arguments))


def test_starts_may_not_show_more_than_the_slots():
    short = op_inputs(queries=5, keys=6, slots=3)
    position = torch.arange(1, 6)
    hyper_attention(*short, starts=(position - 2).clamp(min=0).expand(2, -1))
    with pytest.raises(ValueError, match="see more than 3 positions"):
        hyper_attention(*short, starts=torch.zeros(2, 5, dtype=torch.long))


def test_an_unavailable_backend_is_refused_with_its_reason_and_passed_over_by_auto(monkeypatch):
    lacking = Backend("lacking", attention=lambda arguments: None, unavailable=lambda: "it needs a compiler")
    monkeypatch.setattr(table, "BACKENDS", {"lacking": lacking, **table.BACKENDS})
    assert "lacking" not in available_backends()
    with pytest.raises(
        ValueError, match=r"backend 'lacking' is not available: it needs a compiler. Available here: 'auto', "
    ):
        hyper_attention(*INPUTS, backend="lacking")
    table._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="'lacking' is not available: it needs a compiler"):
        hyper_attention(*INPUTS)
    hyper_attention(*INPUTS)  # said once: a second warning would be an error here
