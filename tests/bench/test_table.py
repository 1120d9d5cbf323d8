"""The paper's efficiency table: its FLOPs to the printed digits, and plain forms counted by the profiler."""

import json

import pytest
import torch
import torch.nn.functional as F

from hypermlp.cli import main
from hypermlp.costs.profiler import ROW_BLOCK, Count, body_count, flops_seen, mixer_count, profiled
from hypermlp.layers.registry import mixer_config
from hypermlp.paper.efficiency import MFLOPS_PER_TOKEN

HIDDEN, LENGTH = 64, 2 * ROW_BLOCK + 20  # the last block is not a full one


@pytest.mark.parametrize("mixer", ["softmax", "softmax-naive", "G-cg-q-12o"])
def test_the_papers_columns_to_the_printed_digits(mixer, capsys):
    assert main(["bench", "table", "--count-only", "--json", "-", "--mixer", mixer]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["train_tflops"] == pytest.approx(row["train_mflops_per_token"] * 8 * 1024 / 1e6), (
        "in all, of the paper's batch"
    )
    counted = tuple(round(row[f"{kind}_mflops_per_token"], 2) for kind in ("fwd", "train"))
    assert counted == MFLOPS_PER_TOKEN[mixer]
    assert counted == tuple(row[f"paper_{kind}_mflops_per_token"] for kind in ("fwd", "train"))


def test_counted_truly_softmax_costs_more_than_hyperglu(capsys):
    mixers = ["softmax", "softmax-naive", "G-cg-q-12o"]
    assert main(["bench", "table", "--count-only", "--json", "-", "--mixer", *mixers]) == 0
    softmax, naive, ours = (row["true_fwd_mflops_per_token"] for row in json.loads(capsys.readouterr().out))
    assert softmax == naive > ours


def test_a_plain_naive_form_is_counted_as_written_out():
    config = mixer_config("softmax-naive", hidden_size=HIDDEN, max_length=LENGTH, num_heads=4)
    x, cos, sin = torch.randn(LENGTH, HIDDEN), torch.ones(LENGTH, 16), torch.ones(LENGTH, 16)
    wq, wk, wv, wo = (torch.randn(HIDDEN, HIDDEN) for _ in range(4))

    def work():
        q, k, v = ((x @ w).view(LENGTH, 4, 16).transpose(0, 1) for w in (wq, wk, wv))
        q, k = (y * cos + torch.cat([-y[..., 8:], y[..., :8]], -1) * sin for y in (q, k))
        scores = torch.bmm(q, k.mT) * 0.25
        return torch.bmm(scores.softmax(-1), v).transpose(0, 1).reshape(LENGTH, HIDDEN) @ wo

    assert flops_seen(work) == LENGTH * mixer_count(config, LENGTH).forward


def test_a_plain_form_in_row_blocks_is_counted_as_written_out():
    config = mixer_config("G-cg-q-12o", hidden_size=HIDDEN, max_length=LENGTH)
    n, rank, qk = config.num_heads, config.rank, config.qk_width
    x = torch.randn(LENGTH, HIDDEN)
    k, v = torch.randn(2 * n, LENGTH, config.qk_dim), torch.randn(n, LENGTH, config.vo_dim)
    gates = {"gate_q": qk, "gate_o": HIDDEN, "gate_1": 2 * n * rank, "gate_2": n * rank}
    wide = {"q": qk, "k": qk, "v": HIDDEN, **gates}
    weights = {name: torch.randn(HIDDEN, width) for name, width in wide.items()}
    mixes = {heads: [torch.randn(heads, LENGTH, rank) for _ in range(2)] for heads in (n, 2 * n)}

    def mix(z, gate, mask):
        left, right = (each[:, : z.shape[-1]] for each in mixes[len(z)])
        return (z + torch.bmm(torch.bmm(z, left) * gate, right.mT)) * mask

    def heads(y, count):
        return y.view(LENGTH, count, -1).transpose(0, 1)

    def work():
        made = {name: x @ weight for name, weight in weights.items()}
        q = heads(made["q"] * made["gate_q"], 2 * n)
        out = []
        for first in range(0, LENGTH, ROW_BLOCK):
            seen = min(first + ROW_BLOCK, LENGTH)
            rows, mask = slice(first, seen), torch.ones(1, seen - first, seen)
            h = mix(torch.bmm(q[:, rows], k[:, :seen].mT), heads(made["gate_1"], 2 * n)[:, rows], mask)
            a = F.softplus(h[n:]) * F.relu(h[:n])
            a = mix(a, heads(made["gate_2"], n)[:, rows], mask)
            out.append(torch.bmm(a, v[:, :seen]) * h[:n].norm(dim=-1, keepdim=True))
        return (torch.cat(out, 1).transpose(0, 1).reshape(LENGTH, HIDDEN) * made["gate_o"]) @ weights[
            "gate_o"
        ]

    assert flops_seen(work) == pytest.approx(LENGTH * mixer_count(config, LENGTH).forward, rel=1e-12)


def test_the_body_is_counted_as_a_plain_one():
    x, up, down = (torch.randn(*s) for s in ((LENGTH, HIDDEN), (HIDDEN, 4 * HIDDEN), (4 * HIDDEN, HIDDEN)))

    def work():
        y = x + torch.zeros(1, HIDDEN)  # positions
        for _ in range(3):
            y = y + torch.zeros(LENGTH, HIDDEN)  # a mixer that costs nothing
            y = y + F.gelu(y @ up) @ down

    assert flops_seen(work) == LENGTH * body_count(Count(0, 0), HIDDEN, 3).forward


def test_other_mixers_are_profiled():
    found = profiled(mixer_config("gla", hidden_size=HIDDEN, max_length=LENGTH), LENGTH)
    assert 2.5 * found.forward < found.train < 4 * found.forward


def test_the_timed_table_and_its_record(tmp_path, capsys):
    record = tmp_path / "table.json"
    small = "--hidden 32 --layers 1 --length 32 --rounds 3 --device cpu --mixer softmax G-cg-q-12o"
    assert main(["bench", "table", *small.split(), "--json", str(record)]) == 0
    assert "| G-cg-q-12o |" in capsys.readouterr().out
    written = json.loads(record.read_text())
    assert written["kind"] == "bench-table"
    assert written["settings"]["batch"] == 1
    for row in written["results"]:
        assert row["train_seconds"] > 0
        assert row["train_peak_bytes"] > row["fwd_peak_bytes"]
        assert row["paper_fwd_mflops_per_token"] is None, "the paper's are of another setting"


@pytest.mark.parametrize(
    "wrong", ["--mixer nothing", "--json -", "--batch 0", "--hidden -5", "--layers 0", "--rounds 1"]
)
def test_nonsense_is_refused(wrong, capsys):
    assert main(["bench", "table", *wrong.split()]) == 2
    assert "hypermlp bench table:" in capsys.readouterr().err
