"""Whole layers in float64: outputs against the layer's oracle, gradients against its differences.

The gradient is checked along a random direction of the input and the parameters: the derivative of the oracle
along it comes from central differences at two distances. If these disagree, a score passes the kink of relu
on the way, and the case says nothing about gradients.
"""

import functools
from collections import Counter

import numpy as np
import torch
from hypothesis import strategies as st

from fuzz import layer_oracle
from fuzz.core import Finding, Part
from fuzz.decoding import BACKENDS, layer_settings, new_layer
from fuzz.drawing import SEEDS, STARTS, record, starts_array
from hypermlp.label import PAPER_ROWS

TIGHT = 1e-10
DISTANCE = 1e-5
DIFFERENCE = 1e-6
"""Largest error of a derivative, relative to the sum of the magnitudes of its terms."""


class Layers(Part):
    name = "layer"

    cases = functools.partial(
        record,
        seed=SEEDS,
        mixer=st.sampled_from(sorted(PAPER_ROWS)),
        settings=layer_settings(),
        backend=st.sampled_from(BACKENDS),
        batch=st.integers(1, 2),
        length=st.integers(1, 9),
        starts=STARTS,
        only=st.sampled_from(("everything", "x", "one parameter")),
    )
    share = 2
    enough = 3_000

    def check(self, case):
        torch.set_num_threads(1)
        rng = np.random.default_rng(case["seed"])
        layer = new_layer(case, case["backend"], torch.float64)
        x = rng.standard_normal((case["batch"], case["length"], layer.config.hidden_size))
        starts = starts_array(case["starts"], case["batch"], case["length"], 0)
        rows = np.zeros(x.shape[:2], int) if starts is None else starts
        if rows.ndim == 1:
            rows = np.minimum(rows[:, None], np.arange(case["length"]) + 1)
        arrays = {"x": x} | layer_oracle.parameters_of(layer)
        given = torch.from_numpy(x).requires_grad_()
        out = layer(given, starts=None if starts is None else torch.from_numpy(starts))
        do = rng.standard_normal(out.shape)
        grads = torch.autograd.grad(
            out, [given, *layer.parameters()], torch.from_numpy(do), allow_unused=True
        )

        def oracle(values):
            return layer_oracle.outputs(layer.config, values, values["x"], rows)

        what = f"{case['mixer']}, backend {case['backend']}"
        counted = Counter({"layers": 1})
        counted |= self._check_output(out.detach().numpy(), oracle(arrays), what)
        found = {name: None if g is None else g.numpy() for name, g in zip(arrays, grads, strict=True)}
        return counted + self._check_gradient(case["only"], rng, arrays, found, do, oracle, what)

    def _check_output(self, actual, exact, what):
        error, size = np.abs(actual - exact).max(axis=-1), np.abs(exact).max(axis=-1)
        if not (error <= TIGHT * size + 1e-3 * TIGHT * max(size.max(), 1e-30)).all():  # NaN is not
            raise Finding("wrong output of a layer", f"{what}: off by {error.max():.3g} of {size.max():.3g}")
        return Counter({"worst error of outputs": float(error.max() / max(size.max(), 1e-30))})

    def _check_gradient(self, only, rng, arrays, grads, do, oracle, what):
        names = list(arrays)
        names = names[:1] if only == "x" else [rng.choice(names[1:])] if only == "one parameter" else names
        direction = {name: rng.standard_normal(arrays[name].shape) for name in names}

        def loss(distance):
            moved = {name: x + distance * direction.get(name, 0.0) for name, x in arrays.items()}
            return float((do * oracle(moved)).sum())

        near, far = ((loss(h) - loss(-h)) / (2 * h) for h in (DISTANCE, 2 * DISTANCE))
        terms = [direction[name] * grads[name] for name in names if grads[name] is not None]
        actual = sum(float(x.sum()) for x in terms)
        scale = sum(float(np.abs(x).sum()) for x in terms) + np.abs(near)
        if abs(near - far) > 0.3 * DIFFERENCE * scale + 1e-10:
            return Counter({"skipped, kink on the way": 1})
        error = abs(actual - near)
        if not error <= DIFFERENCE * scale + 1e-9:  # NaN is not
            raise Finding(
                "wrong gradient of a layer",
                f"{what}: derivative along {', '.join(names)} is {actual:.8g}, "
                f"differences of the oracle give {near:.8g} and {far:.8g}",
            )
        return Counter({"worst error of derivatives": error / scale if scale > 1e-6 else 0.0})
