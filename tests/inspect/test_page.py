"""The page and the figures show what the model computes."""

import base64
import json
import runpy
import struct
import zlib
from pathlib import Path

import pytest
import torch

from hypermlp.cli import main
from hypermlp.inspect import figures
from hypermlp.inspect.page import encoded
from hypermlp.inspect.panels import panels, pre_activations
from hypermlp.models import HyperMLPForCausalLM
from hypermlp.reporting.figures import FORMATS, new_figure
from hypermlp.testing import randomise_
from hypermlp.theory.objects import Step
from hypermlp.train.tokenization import build_tokenizer
from tests.checkpoints import byte_model, save

PROMPT = "def area(r):\n    <b>return</b> 3 * r ** 2\n"
REGISTERS = 2
COUNT = len(PROMPT) + REGISTERS


def build(folder, mixer, **settings):
    model, tokenizer = byte_model(mixer=mixer, num_hidden_layers=len(mixer), **settings)
    save(randomise_(model), tokenizer, folder)
    return model, tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "hybrid"
    build(folder, ["G-cg-q-12o", "S-p", "gla", "R"], num_registers=REGISTERS)
    return folder


@pytest.fixture(scope="module")
def page(checkpoint):
    out = checkpoint.parent / "page.html"
    assert main(["inspect", str(checkpoint), "--prompt", PROMPT, "--out", str(out)]) == 0
    return out


def pixels(view, name):
    return view.evaluate(f"document.getElementById('{name}').toDataURL()")


@pytest.mark.thorough
@pytest.mark.parametrize("screen", ["phone", "desk"])
def test_in_a_browser(page, browser, screen):
    view = browser(page, screen)
    view.wait_for_selector("body[data-ready]")
    assert view.locator("#text span").count() == COUNT
    assert view.locator("#text").inner_text().endswith(PROMPT.replace("\n", "↵\n"))
    assert view.locator("#text .register").all_inner_texts() == ["register 1", "register 2"]
    assert view.locator("#layer option").all_inner_texts() == ["1", "2", "4"]
    assert "left out: 3" in view.locator("main").inner_text()
    assert view.locator("#kernels path").count() > 16
    assert view.locator("#gates .card").count() == 4

    assert view.locator("#where").inner_text().startswith(f"{len(PROMPT)} of {len(PROMPT)}")

    before = pixels(view, "effective"), view.locator("#memory").inner_text()
    view.locator("#text span").nth(9).hover()
    view.wait_for_function("document.getElementById('where').textContent.startsWith('8 of')")
    assert (pixels(view, "effective"), view.locator("#memory").inner_text()) != before
    assert view.locator("#text span.later").count() == COUNT - 10
    assert view.locator("#text span.chosen").count() == 1

    view.locator("#text").focus()
    view.keyboard.press("ArrowLeft")
    view.wait_for_function("document.getElementById('where').textContent.startsWith('7 of')")
    view.keyboard.press("Home")
    view.wait_for_function("document.getElementById('where').textContent.startsWith('1 of')")

    bent = pixels(view, "routing-map")
    view.locator("#dynamic").fill("0")
    assert pixels(view, "routing-map") != bent
    view.locator("#activation").hover()
    assert view.locator("#tip").inner_text().startswith(("at ", "no such slot"))

    view.locator("#layer").select_option(index=1)  # softmax: no gates, no mixes, no borders
    assert view.locator("#no-routing").is_visible()
    assert view.locator("#gates").inner_text() == "This layer has no gates."
    assert not view.locator("#effective").is_visible()
    assert not view.locator("#routing-map").is_visible()
    assert view.locator("#kernels").inner_text() == "This layer does not mix along the sequence."
    assert view.locator("#text span.active").count() == 0
    view.locator("#layer").select_option(index=2)
    assert view.locator("#routing-map").is_visible()


@pytest.mark.thorough
def test_opens_at_a_head_that_is_active(tmp_path, browser):
    model, _ = build(tmp_path / "model", ["R-cg-q-12o", "R-cg-q-12o"])
    with torch.no_grad():
        model.model.layers[0].mixer.q_proj.weight.zero_()  # no score of the first layer is above zero
    model.save_pretrained(tmp_path / "model")
    out = tmp_path / "page.html"
    assert main(["inspect", str(tmp_path / "model"), "--prompt", PROMPT, "--out", str(out)]) == 0
    view = browser(out, "desk")
    view.wait_for_selector("body[data-ready]")
    assert view.locator("#layer").input_value() == "1"
    assert "of the summed lengths of all contributions" in view.locator("#memory").inner_text()
    view.locator("#layer").select_option(index=0)
    assert "Choose another head, layer or token" in view.locator("#memory").inner_text()


@pytest.mark.thorough
def test_a_resting_pointer_does_not_disturb_the_keys(page, browser):
    """Text that scrolls under a resting pointer is not chosen."""
    view = browser(page, "phone")
    view.wait_for_selector("body[data-ready]")
    view.add_style_tag(content="#text { max-height: 60px !important; }")
    view.locator("#text span").nth(4).hover()
    view.locator("#text").focus()
    for key, place in (("End", len(PROMPT)), ("Home", 1), ("End", len(PROMPT))):
        view.keyboard.press(key)
        view.wait_for_timeout(150)
        assert view.locator("#where").inner_text().startswith(f"{place} of")


def test_the_script_computes_the_routing_of_the_layer(checkpoint, page, browser):
    """The script's active slots at points of the plane are those that Python computes."""
    model, tokenizer = HyperMLPForCausalLM.from_pretrained(checkpoint).eval(), build_tokenizer("bytes", [])
    routing = panels(model, tokenizer, PROMPT).layers[0].heads[1].routing
    where = 2 * torch.rand(40, 2) - 1
    view = browser(page, "desk")
    view.wait_for_selector("body[data-ready]")
    view.locator("#head").select_option(index=1)
    for dynamic in (0.0, 1.0, 3.0):
        expected = pre_activations(routing, where, dynamic)
        patterns = [view.evaluate(f"activePattern({a}, {b}, {dynamic})") for a, b in where.tolist()]
        shown = torch.tensor([[bit == "1" for bit in pattern] for pattern in patterns])
        clear = expected.abs() > 1e-4 * expected.abs().max()
        assert torch.equal(shown[clear], (expected > 0)[clear])


def test_the_routing_of_a_plane_is_that_of_its_points(tmp_path):
    """The pre-activations are those of the theory's objects, and linear where the gates are held still."""
    model, tokenizer = build(tmp_path, ["G-cg-q-12o"])
    model.double()
    found = panels(model, tokenizer, PROMPT)
    routing, layer = found.layers[0].heads[1].routing, model.model.layers[0].mixer
    inputs = []
    hook = layer.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    model(torch.tensor([tokenizer(PROMPT)["input_ids"]]))
    hook.remove()
    step = Step(layer, inputs[0][0, : routing.step + 1])
    where = torch.rand(30, 2, dtype=torch.float64) - 0.5
    for point, h in zip(where, pre_activations(routing, where), strict=True):
        x = routing.plane[0] + point @ routing.plane[1:]
        torch.testing.assert_close(h, step.h(x, 1))
    ends = torch.tensor([[-1.0, 0.3], [1.0, -0.7], [0.0, -0.2]], dtype=torch.float64)
    left, right, middle = pre_activations(routing, ends, dynamic=0.0)
    torch.testing.assert_close((left + right) / 2, middle)
    left, right, middle = pre_activations(routing, ends, dynamic=1.0)
    assert ((left + right) / 2 - middle).abs().max() > 1e-3 * middle.abs().max()


def test_the_data_of_the_page(checkpoint):
    model, tokenizer = HyperMLPForCausalLM.from_pretrained(checkpoint).eval(), build_tokenizer("bytes", [])
    found = panels(model, tokenizer, PROMPT)
    content = zlib.decompress(base64.b64decode(encoded(found)))
    size = struct.unpack("<I", content[:4])[0]
    described, maps = json.loads(content[4 : 4 + size]), content[4 + size :]
    assert "".join(described["tokens"][REGISTERS:]) == PROMPT
    triangle = COUNT * (COUNT + 1) // 2
    heads = [head for layer in found.layers for head in layer.heads]
    assert len(maps) == 2 * len(heads) * triangle
    rows, columns = torch.tril_indices(COUNT, COUNT)
    for index, head in enumerate(heads):
        for offset, values in ((0, head.activation), (1, head.contribution)):
            begin, peaks = (
                (2 * index + offset) * triangle,
                torch.tensor(described["peaks"][2 * index + offset]),
            )
            kept = (torch.tensor(list(maps[begin : begin + triangle])) / 255).square() * peaks[rows]
            assert ((kept - values[rows, columns]).abs() <= 0.005 * values.amax(1)[rows]).all()
        on = torch.tensor(list(maps[2 * index * triangle : (2 * index + 1) * triangle])) > 0
        assert torch.equal(on, head.active[rows, columns])
        number, place = divmod(index, 2)
        for t in (REGISTERS, COUNT - 1):
            shares = head.contribution[t] / head.contribution[t].sum().clamp(min=1e-30)
            for key, percent in described["layers"][number]["heads"][place]["strongest"][t]:
                assert percent == pytest.approx(100 * float(shares[key]), abs=0.051)
        assert not head.active[:REGISTERS].any()


@pytest.mark.thorough
def test_figures(tmp_path, capsys):
    build(tmp_path / "model", ["G-cg-q-12o"])
    out = ["--out", str(tmp_path / "page.html"), "--figures", str(tmp_path / "figures")]
    assert main(["inspect", str(tmp_path / "model"), "--prompt", PROMPT, "--tokens", "12", *out]) == 0
    assert "page.html: 1 layers, 12 tokens" in capsys.readouterr().out
    names = {"memory", "activation", "contribution", "growth", "kernels", "mix", "gates", "routing"}
    written = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert written == sorted(f"{name}.{kind}" for name in names for kind in FORMATS)


def test_figures_without_content_are_left_out(checkpoint, tmp_path):
    model, tokenizer = HyperMLPForCausalLM.from_pretrained(checkpoint).eval(), build_tokenizer("bytes", [])
    found = panels(model, tokenizer, PROMPT)
    only_softmax = type(found)(found.tokens, found.registers, [found.layers[1]], [])
    names = {path.stem for path in figures.write_figures(only_softmax, tmp_path)}
    assert names == {"memory", "activation", "contribution"}


def test_the_conceptual_figures_in_the_docs_are_up_to_date(tmp_path):
    docs = Path(__file__).parents[2] / "docs" / "figures"
    draw_all = runpy.run_path(str(docs / "concepts.py"))["draw_all"]
    for path in draw_all(tmp_path):
        if path.suffix == ".svg":
            assert path.read_text() == (docs / path.name).read_text(), (
                f"run python docs/figures/concepts.py ({path.name})"
            )


def test_a_tap_shows_a_value(page, chromium):
    context = chromium.new_context(viewport={"width": 390, "height": 844}, has_touch=True)
    view = context.new_page()
    view.goto(page.as_uri())
    view.wait_for_selector("body[data-ready]")
    view.locator("#contribution").scroll_into_view_if_needed()
    view.locator("#contribution").tap(position={"x": 20, "y": 200})
    assert view.locator("#tip").inner_text().startswith("at ")
    context.close()


def test_half_precision_is_captured_in_float32(tmp_path):
    model, tokenizer = build(tmp_path, ["G-cg-q-12o"])
    model.bfloat16()
    found = panels(model, tokenizer, PROMPT, tokens=9)
    assert len(found.tokens) == 9
    assert found.layers[0].heads[0].activation.dtype == torch.float32
    figures.draw_routing(new_figure(3, 3).subplots(), found.layers[0].heads[0].routing, 1.0)


def test_a_model_of_the_package_has_a_prompt(tmp_path, capsys):
    out = tmp_path / "page.html"
    assert main(["inspect", "tiny", "--out", str(out)]) == 0
    assert "4 layers, 68 tokens" in capsys.readouterr().out
    assert "radius" in out.read_text()


def test_mistakes_are_refused(checkpoint, tmp_path, capsys):
    out = ["--out", str(tmp_path / "page.html")]
    for arguments, message in (
        ([], "--prompt is missing"),
        (["--prompt", "x"], "1 tokens; allowed: 2 to 64"),
        (["--prompt", "x" * 65], "65 tokens"),
        (["--prompt", "xyz", "--tokens", "1"], "--tokens is 1"),
        (["--prompt", "@nowhere.txt"], "nowhere.txt"),
        (["--prompt", "ab\udcff"], "the prompt is not UTF-8"),
        (["--prompt", "abc", "--figures", str(checkpoint / "config.json")], "config.json"),
    ):
        assert main(["inspect", str(checkpoint), *arguments, *out]) == 2
        assert message in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "nowhere"), *out]) == 2
    assert "nowhere is not a folder" in capsys.readouterr().err
    model, _ = build(tmp_path / "damaged", ["G-cg-q-12o"])
    torch.nn.init.constant_(model.model.layers[0].mixer.q_proj.weight, 1e38)  # finite, but not for long
    model.save_pretrained(tmp_path / "damaged")
    assert main(["inspect", str(tmp_path / "damaged"), "--prompt", PROMPT, *out]) == 2
    assert "layer 1 computes numbers that are not finite" in capsys.readouterr().err
    build(tmp_path / "baseline", ["gla"])
    assert main(["inspect", str(tmp_path / "baseline"), "--prompt", PROMPT, *out]) == 2
    assert "no layer of this model has a memory pool" in capsys.readouterr().err
