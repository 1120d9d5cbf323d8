"""``hypermlp bench lm --mixer``: all costs of several mixers."""

import json

from hypermlp.bench.lm import COST_COLUMNS
from hypermlp.cli import main

SMALL = [
    "model.hidden_size=32",
    "model.num_hidden_layers=1",
    "data.context=64",
    "data.limit=200000",
    "training.micro_batch=2",
    "training.batch_tokens=128",
]


def test_a_table_of_mixers(tmp_path, capsys):
    record = tmp_path / "bench.json"
    words = ["bench", "lm", "--mixer", "G-cg-q-12o", "gla", "softmax", "--rounds", "3", "--seconds", "1"]
    changes = (word for change in SMALL for word in ("--set", change))
    assert main([*words, "--json", str(record), *changes]) == 0
    printed = capsys.readouterr().out
    rows = json.loads(record.read_text())["results"]
    assert [row["mixer"] for row in rows] == ["G-cg-q-12o", "gla", "softmax"]
    assert all(value > 0 for row in rows for key, value in row.items() if key != "mixer")
    assert printed.count("|") >= 4 * len(COST_COLUMNS)
    softmax = rows[-1]
    assert softmax["profiler_mflops_per_token"] < softmax["forward_mflops_per_token"], (
        "the profiler does not see fused attention"
    )


def test_an_unknown_mixer_is_refused_before_anything_runs(capsys):
    assert main(["bench", "lm", "--mixer", "nothing"]) == 2
    assert "unknown mixer 'nothing'" in capsys.readouterr().err
