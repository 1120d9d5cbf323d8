"""Loss by position against the models' own losses, and variants of one checkpoint."""

import json

import pytest
import torch
import torch.nn.functional as F

from hypermlp.cli import main
from hypermlp.errors import UserError
from hypermlp.evals import positions
from hypermlp.evals.figures import curves_of, write_position_figure
from hypermlp.evals.variants import Variant
from hypermlp.models import HyperMLPForCausalLM
from hypermlp.testing import assert_close, randomise_
from tests.checkpoints import byte_model, save

CONTEXT = 16
DATA = {"tokenizer": "bytes", "context": CONTEXT, "validation": 0.5}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of untrained models on small texts: HyperGLU twice, softmax with RoPE, a recurrence."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "texts").mkdir()
    for index in range(8):
        text = f"def f{index}(x):\n    return x + {index} * {index}\n" * 20
        (folder / "texts" / f"{index}.py").write_text(text)
    data = DATA | {"source": str(folder / "texts"), "cache": str(folder / "cache")}
    for name, mixer, seed in (
        ("glu-1", "HyperGLU", 1),
        ("glu-2", "HyperGLU", 2),
        ("rope", "S-p", 1),
        ("gla", "gla", 1),
    ):
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "rank": 3, "max_position_embeddings": CONTEXT}
        model, tokenizer = byte_model(mixer=mixer, seed=seed, **sizes)
        save(randomise_(model, scale=0.2), tokenizer, folder / name / "final")
        recipe = {"data": data, "training": {"seed": seed}}
        (folder / name / "recipe.json").write_text(json.dumps(recipe))
    return folder


@pytest.fixture(scope="module")
def texts(runs):
    trained = positions.read_trained(str(runs / "glu-1"))
    return positions.held_out_texts(positions.prepare(trained.data), 4 * CONTEXT, 5)


def variant_of(runs, name):
    variant = Variant.parse(str(runs / name))
    return positions.read_trained(variant.source), variant


def test_the_grid_has_the_octaves_of_the_context():
    edges = positions.grid(128, 1024)
    assert {0, 16, 32, 64, 128, 256, 512, 1024} <= set(edges)
    assert edges == sorted(edges)
    assert len(edges) == 1 + 3 * 4 + 1 + 3 * 4
    assert positions.grid(100, 250)[-2:] == [238, 250]


def test_texts_are_held_out_and_within_one_document(runs, texts):
    assert texts.shape == (5, 4 * CONTEXT + 1)
    held_out = positions.prepare(positions.read_trained(str(runs / "rope")).data)
    whole = held_out.tokens["validation"].tobytes()
    eos = held_out.tokenizer.eos_token_id
    assert all(row.numpy().astype(held_out.tokens["train"].dtype).tobytes() in whole for row in texts)
    assert not (texts[:, :-1] == eos).any()
    with pytest.raises(UserError, match="no held-out document has 100001 tokens"):
        positions.held_out_texts(held_out, 100_000, 5)


def test_losses_are_the_models_own(runs, texts):
    """The mean over buckets, weighted by their widths, is the loss that the model reports itself."""
    trained, variant = variant_of(runs, "glu-1@zero")
    row = positions.by_position(trained, variant, texts, CONTEXT)
    model = trained.model.extend_context(4 * CONTEXT, method="zero")
    with torch.no_grad():
        logits = model(texts[:, :-1]).logits.double()
    expected = F.cross_entropy(logits.flatten(0, 1), texts[:, 1:].flatten())
    widths = torch.tensor(row["edges"]).diff().double()
    mean = (widths * torch.tensor(row["loss"], dtype=torch.float64)).sum() / widths.sum()
    assert float(mean) == pytest.approx(float(expected), rel=1e-5)
    assert list(positions.octaves(row, CONTEXT)) == ["0 to 8", "8 to 16", "16 to 32", "32 to 64"]


def test_a_window_reaches_back_through_the_layers_and_recomputing_does_not(runs, texts):
    trained, variant = variant_of(runs, "glu-1@window=5")
    windowed = variant.applied(trained.model, CONTEXT, 64)
    given = HyperMLPForCausalLM.from_pretrained(runs / "glu-1/final", sliding_window=5).eval()
    with torch.no_grad():
        assert_close(windowed(texts).logits, given(texts).logits, tolerance=1e-6)
    edges = positions.grid(CONTEXT, 64)
    anew = positions.recomputed_losses(trained.model, texts, 5, edges)
    with torch.no_grad():
        for seen in (1, 5, 6, 17, 64):
            logits = trained.model(texts[:, max(0, seen - 5) : seen]).logits[:, -1]
            expected = F.cross_entropy(logits, texts[:, seen], reduction="none")
            assert_close(anew[:, seen - 1], expected, tolerance=1e-5)
    cached = positions.losses(windowed, texts)
    assert_close(cached[:, :5], anew[:, :5], tolerance=1e-5)
    assert (cached[:, 63] - anew[:, 63]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["rope@ntk", "rope@yarn", "rope@yarn=2,0.5,2", "rope", "gla", "glu-1"])
def test_variants_leave_the_trained_model_as_it_is(runs, name):
    trained, variant = variant_of(runs, name)
    before = trained.model.config.to_dict()
    changed = variant.applied(trained.model, CONTEXT, 64)
    assert trained.model.config.to_dict() == before
    assert changed.config.max_position_embeddings == 64
    factor = {"rope@yarn=2,0.5,2": 2.0, "rope@yarn": 4.0, "rope@ntk": 4.0}.get(name, 1.0)
    assert changed.config.rope_factor == factor
    assert changed.config.rope_beta_fast == (2.0 if "," in name else 32.0)


WRONG = ["x@linear", "x@zero=3", "x@window=2.5", "x@window=-1", "x@yarn=2,3", "x@ntk=two"]


@pytest.mark.parametrize("name", WRONG)
def test_unknown_variants_are_refused(name):
    with pytest.raises(UserError, match=f"'{name}' names no variant; allowed: RUN, or RUN@VARIANT with zero"):
        Variant.parse(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gla@zero", "baselines have no slots to extend"),
        ("gla@window", "it must be None for 'gla', which has no window"),
        ("glu-1@window=99", "sliding_window is 99; it must be a positive integer, at most the context of 16"),
        ("glu-1@ntk", "rope_type is 'ntk'; it must be left out for 'G-cg-q-12o'"),
    ],
)
def test_variants_that_a_model_cannot_have_are_refused(runs, name, message):
    trained, variant = variant_of(runs, name)
    with pytest.raises(UserError, match=message):
        variant.applied(trained.model, CONTEXT, 64)


@pytest.mark.parametrize(
    ("length", "titles"),
    [
        (64, ["0 to 8", "8 to 16", "16 to 32", "32 to 64"]),
        (50, ["0 to 8", "8 to 16", "16 to 32", "32 to 50"]),
        (12, ["0 to 8", "8 to 12"]),
        (6, ["0 to 6"]),
    ],
)
def test_columns_cover_every_position(length, titles):
    edges = positions.grid(16, length)
    row = {"edges": edges, "loss": [1.0] * (len(edges) - 1)}
    assert positions.octaves(row, 16) == dict.fromkeys(titles, 1.0)


@pytest.mark.parametrize("context", [1, 2, 3, 103])
def test_columns_cover_every_position_of_odd_contexts(context):
    edges = positions.grid(context, 5 * context)
    row = {"edges": edges, "loss": [float(edge) for edge in edges[1:]]}
    titles = positions.octaves(row, context)
    ends = [0, *(int(title.split(" to ")[1].replace(",", "")) for title in titles)]
    assert ends[-1] == 5 * context
    assert set(ends) <= set(edges)


def test_the_line_of_a_model_begins_with_the_loss_within_the_trained_context():
    row = {"name": "x", "edges": [0, 8, 16, 32, 64], "loss": [3.0, 1.0, 2.0, 7.0]}
    line = "x: 2.000 nats per token at the positions 0 to 16 (the trained context), 7.000 at 32 to 64"
    assert positions.headline(row, 16) == line
    short = {"name": "x", "edges": [0, 8], "loss": [3.0]}
    assert positions.headline(short, 16) == "x: 3.000 nats per token at the positions 0 to 8"


def test_the_command_and_the_page(runs, tmp_path, capsys):
    record, page = tmp_path / "positions.json", tmp_path / "report.html"
    names = [str(runs / name) for name in ("glu-1@repeat", "glu-2@repeat", "rope", "gla")]
    options = ["--by-position", "--texts", "3", "--length", "64", "--json", str(record)]
    assert main(["eval", *names, *options]) == 0
    out = capsys.readouterr().out
    assert "| loss at positions | 0 to 8 | 8 to 16 | 16 to 32 | 32 to 64 |" in out
    assert f"{names[2]}: context extended from 16 to 64 without training (learned slots by 'repeat')" in out
    assert "Loading weights" not in capsys.readouterr().err
    rows = json.loads(record.read_text())["results"]
    assert [row["name"] for row in rows] == ["glu-1@repeat", "glu-2@repeat", "rope", "gla"]
    assert [curve.name for curve in curves_of(rows)] == ["HyperGLU, repeat (2 seeds)", "S-p", "gla"]
    assert main(["report", str(record), "--out", str(page), "--figure", str(tmp_path / "curves")]) == 0
    assert page.read_text().count('class="series') == 3
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    with pytest.raises(UserError, match="there is no loss by position to draw"):
        list(write_position_figure([], tmp_path / "nothing"))


def test_runs_on_different_texts_are_refused(runs, tmp_path, capsys):
    other = json.loads((runs / "rope/recipe.json").read_text())
    other["data"]["validation"] = 0.25
    (runs / "gla" / "final" / "recipe.json").write_text(json.dumps(other))
    try:
        assert main(["eval", str(runs / "rope"), str(runs / "gla" / "final"), "--by-position"]) == 2
        assert "losses on different texts cannot be compared" in capsys.readouterr().err
    finally:
        (runs / "gla" / "final" / "recipe.json").unlink()
    assert main(["eval", "--by-position"]) == 2
    assert "no checkpoint was given" in capsys.readouterr().err
