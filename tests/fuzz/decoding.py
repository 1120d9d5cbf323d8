"""Decoding programs: random sequences of calls on a state, against the oracle on the plain history.

The program is a list of steps. A model of the state (``History``) keeps the inputs and ``starts`` of each
sequence as plain arrays; every output is compared with the oracle's outputs for those. Baselines have no
oracle: they are compared with their own forward pass over the whole history.
"""

from collections import Counter

import numpy as np
import torch
from hypothesis import strategies as st

from fuzz import layer_oracle
from fuzz.compare import shares, worst_place
from fuzz.core import Case, Finding, Part
from fuzz.drawing import SEEDS, drawn_from, once_in, record, weighted
from hypermlp.errors import UserError
from hypermlp.label import PAPER_ROWS
from hypermlp.layers import build_mixer
from hypermlp.layers.registry import BASELINES
from hypermlp.testing import randomise_

BACKENDS = ("auto", "auto", "auto", "native", "blocked", "reference")
TIGHT = 1e-10
PLAIN_FACTOR = 2.0
ROUNDINGS = 8
NOISE_FACTOR = 8.0
BASELINE_TOLERANCE = 1e-8
LIMIT = 24
"""Most positions of a program; also max_length of the layers."""
MISTAKES = ("width", "dtype", "batch", "starts", "too long", "reorder", "crop")


class History:
    """What a state should hold: inputs ``[B, T, D]`` and ``starts`` ``[B, T]`` of each sequence."""

    def __init__(self, batch: int, width: int):
        self.x, self.starts = np.zeros((batch, 0, width)), np.zeros((batch, 0), int)

    def copy(self) -> "History":
        other = History(0, 0)
        other.x, other.starts = self.x.copy(), self.starts.copy()
        return other

    @property
    def length(self) -> int:
        return self.x.shape[1]

    def add(self, x: np.ndarray, starts: np.ndarray) -> None:
        self.x = np.concatenate([self.x, x], axis=1)
        self.starts = np.concatenate([self.starts, starts], axis=1)

    def select(self, index) -> None:
        self.x, self.starts = self.x[index], self.starts[index]

    def crop(self, length: int) -> None:
        self.x, self.starts = self.x[:, :length], self.starts[:, :length]


@st.composite
def layer_settings(draw) -> dict:
    settings = {"num_heads": draw(st.integers(1, 2)), "rank": draw(st.sampled_from((1, 3)))}
    added = draw(weighted(nothing=5, registers=1, canon=1))
    if added == "registers":
        settings["num_registers"] = draw(st.sampled_from((1, 2, 5)))
    elif added == "canon":
        settings["canon"] = True
    if draw(once_in(3)):
        settings["conv_kernel"] = draw(st.sampled_from((1, 2, 3, 6)))
    return settings


FEED = record(do="feed", count=st.sampled_from((1, 1, 1, 2, 3, 5, 9)), **{"repeat starts": st.booleans()})
CHANGES = [
    record(do=do, draw=st.integers(0, 2**16 - 1)) for do in ("reorder", "repeat", "crop", "clone", "detach")
]
STEPS = drawn_from(*[FEED] * 8, *CHANGES, record(do="mistake", what=st.sampled_from(MISTAKES)))


@st.composite
def programs(draw) -> Case:
    def one(*values):
        return draw(st.sampled_from(values))

    baseline = draw(once_in(5))
    mixer = one(*sorted(BASELINES if baseline else PAPER_ROWS))
    recurrent = baseline and mixer not in ("softmax", "softmax-naive", "diff", "fox")
    settings = {} if baseline else draw(layer_settings())
    growing = baseline or "num_registers" in settings or "canon" in settings
    static = not growing and draw(once_in(4))
    return {
        "seed": draw(SEEDS),
        "mixer": mixer,
        "settings": settings,
        "backend": "auto" if baseline else one(*BACKENDS),
        "dtype": "float64" if baseline else draw(weighted(float64=4, float32=1, bfloat16=1)),
        "batch": draw(st.integers(1, 3)),
        "starts": one("none", "none", "padding", "packed", *[] if recurrent else ["window"]),
        "width": draw(st.integers(1, 8)),
        "rollback": one(0, 1, 3, 128),
        "capacity": one(8, 12, LIMIT) if static else 0,
        "gradients": not static and draw(once_in(7)),
        "steps": draw(st.lists(STEPS, min_size=2, max_size=9)),
    }


class Decoding(Part):
    name = "decoding"

    cases = programs
    share = 12
    enough = 5_200

    def check(self, case):
        torch.set_num_threads(1)
        program = Program(case)
        with torch.set_grad_enabled(case["gradients"]):
            for step in case["steps"]:
                getattr(program, step["do"].replace(" ", "_"))(step)
        return program.counted


def new_layer(case: Case, backend: str, dtype: torch.dtype):
    """Build the layer of a case, with random parameters."""
    pairs = "p" in case["mixer"] and case["mixer"] in PAPER_ROWS  # RoPE turns pairs of channels
    wide = {"qk_width": 16} if pairs else {}
    layer = build_mixer(case["mixer"], hidden_size=16, max_length=LIMIT, **case["settings"], **wide)
    able = getattr(layer.config, "activation", "") != "softmax" or backend != "native"
    layer.backend = backend if able else "auto"
    return randomise_(layer, seed=case["seed"] % 1000).to(dtype)


class Program:
    """A layer, its state and the history that the state stands for."""

    def __init__(self, case: Case):
        self.case, self.counted = case, Counter({"programs": 1})
        self.rng = np.random.default_rng(case["seed"])
        self.noise_rng = np.random.default_rng(0)
        self.dtype = getattr(torch, case["dtype"])
        self.layer, self.plain = (
            new_layer(case, backend, self.dtype) for backend in (case["backend"], "reference")
        )
        self.width = self.layer.config.hidden_size
        capacity = {"capacity": case["capacity"]} if case["capacity"] else {}
        self.states = [
            layer.new_state(case["batch"], rollback=case["rollback"], **capacity)
            for layer in (self.layer, self.plain)
        ]
        self.history = History(case["batch"], self.width)
        self.is_label = case["mixer"] not in BASELINES
        self.parameters = layer_oracle.parameters_of(self.layer) if self.is_label else {}
        self.pending = self.rng.integers(0, 6, size=case["batch"])  # left padding

    @property
    def batch(self) -> int:
        return self.history.x.shape[0]

    # Steps.

    def feed(self, step):
        count = min(step["count"], LIMIT - self.history.length)
        if self.case["capacity"]:
            count = min(count, self._room())
        if count < 1:
            return
        x = torch.from_numpy(self.rng.standard_normal((self.batch, count, self.width))).to(self.dtype)
        rows, given = self._starts(count, step["repeat starts"])
        results = []
        for layer, state in zip((self.layer, self.plain), self.states, strict=True):
            try:
                results.append(
                    layer(x, state=state, starts=None if given is None else torch.from_numpy(given))
                )
            except UserError as error:
                raise Finding("a valid call was refused", str(error)) from error
        self.history.add(x.double().numpy(), rows)
        self._compare(*results, count)

    def _room(self) -> int:
        """Return how many positions a state of fixed size takes in one call."""
        if self.case["starts"] == "window":
            return self.case["capacity"] - min(self.case["width"], self.history.length + 1) + 1
        return self.case["capacity"] - self.history.length

    def _starts(self, count, may_omit):
        """Return ``starts`` of the new positions, and what the call is given: None where the last goes on."""
        kind, before = self.case["starts"], self.history.length
        positions = before + np.arange(count)
        shape = (self.batch, count)
        if kind == "none":
            return np.zeros(shape, int), None
        if kind == "padding":
            rows = np.minimum(self.pending[:, None], positions + 1)
            return rows, None if before and may_omit else self.pending.copy()
        if kind == "window":
            rows = np.broadcast_to(np.maximum(0, positions - self.case["width"] + 1), shape).copy()
            return rows, rows
        return self._packed(positions, shape, may_omit)

    def _packed(self, positions, shape, may_omit):
        before = self.history.length
        last = self.history.starts[:, -1] if before else np.zeros(shape[0], int)
        if before and may_omit:
            return np.broadcast_to(last[:, None], shape).copy(), None
        new = np.where(self.rng.random(shape) < 0.25, positions, 0)
        rows = np.maximum.accumulate(np.maximum(new, last[:, None]), axis=1)
        return rows, rows

    def reorder(self, step):
        count = 1 + step["draw"] % 3
        index = np.random.default_rng(step["draw"]).integers(0, self.batch, size=count)
        self._select(index, lambda state: state.reorder(torch.from_numpy(index)))

    def repeat(self, step):
        times = 1 + step["draw"] % 2
        if self.batch * times <= 6:
            index = np.repeat(np.arange(self.batch), times)
            self._select(index, lambda state: state.repeat(times))

    def _select(self, index, change):
        for state in self.states:
            change(state)
        self.history.select(index)
        self.pending = self.pending[index]

    def crop(self, step):
        length = step["draw"] % (self.history.length + 1)
        removed = self.history.length - length
        conv = getattr(self.layer.config, "conv", True) or getattr(self.layer.config, "canon", False)
        surely = (
            length == 0
            or removed == 0
            or (
                self.is_label and not self.case["capacity"] and (not conv or removed <= self.case["rollback"])
            )
        )
        refused = 0
        for state in self.states:
            try:
                state.crop(length)
            except UserError as error:
                refused += 1
                if surely:
                    raise Finding("a valid crop was refused", str(error)) from error
        if refused == 1:
            raise Finding("backends differ in crop", f"crop to {length} of {self.history.length}")
        if not refused:
            self.history.crop(length)
        self.counted["refused crops"] += refused > 0

    def clone(self, step):
        others = [state.clone() for state in self.states]
        history = self.history.copy()
        if step["draw"] % 2:  # go on with the copy while the original takes other inputs
            pending = self.pending.copy()
            self.feed({"count": 2, "repeat starts": False})
            self.pending = pending
        self.states, self.history = others, history

    def detach(self, step):
        for state in self.states:
            state.detach()

    def mistake(self, step):
        """Make a call that must be refused and must leave the state as it was."""
        for layer, state in zip((self.layer, self.plain), self.states, strict=True):
            length, batch = state.length, state.batch_size
            try:
                refused = self._mistake(step["what"], layer, state)
            except UserError:
                refused = True
            if refused is False:
                raise Finding(f"a mistake was accepted: {step['what']}", str(state))
            if (state.length, state.batch_size) != (length, batch):
                raise Finding(f"a refused call changed the state: {step['what']}", str(state))
            self.counted["refused calls"] += refused is True

    def _mistake(self, what, layer, state):
        """Return False if the mistake was accepted, None if it cannot be made here."""
        x = torch.zeros(self.batch, 1, self.width, dtype=self.dtype)
        if what == "width":
            layer(x[..., :-1], state=state)
        elif what == "dtype":
            layer(x.to(torch.float16), state=state)
        elif what == "batch":
            layer(x.repeat(2, 1, 1), state=state)
        elif what == "starts":
            layer(x, state=state, starts=torch.full((self.batch, 1), self.history.length + 2))
        elif what == "too long" and self.is_label and self.case["starts"] == "none":
            layer(x.repeat(1, LIMIT + 1, 1), state=state)
        elif what == "reorder":
            state.reorder(torch.tensor([self.batch]))
        elif what == "crop":
            state.crop(self.history.length + 1)
        else:
            return None
        return False

    # Comparison.

    def _compare(self, actual, plain, count):
        wanted = list(range(self.history.length - count, self.history.length))
        dtype, self_compared = self.case["dtype"], not self.is_label
        if self_compared:
            whole = torch.from_numpy(self.history.x).to(self.dtype)
            starts = None if self.case["starts"] == "none" else torch.from_numpy(self.history.starts)
            exact = self.plain(whole, starts=starts)[:, wanted].detach().double().numpy()
        else:
            exact = layer_oracle.outputs(
                self.layer.config, self.parameters, self.history.x, self.history.starts, wanted
            )
        errors, plain_errors = (
            np.abs(y.detach().double().numpy() - exact).max(axis=-1) for y in (actual, plain)
        )
        size = np.abs(exact).max(axis=-1)
        noise = self._noise(exact, wanted) if dtype != "float64" else np.zeros_like(size)
        rounding = ROUNDINGS * torch.finfo(self.dtype).eps * size + NOISE_FACTOR * noise
        tight = (BASELINE_TOLERANCE if self_compared else TIGHT) * (size + 1e-3 * max(size.max(), 1.0))
        allowed = {
            "plain": tight if dtype == "float64" else rounding + NOISE_FACTOR * noise,
            self.case["backend"]: tight if dtype == "float64" else rounding + PLAIN_FACTOR * plain_errors,
        }
        for name, error in (("plain", plain_errors), (self.case["backend"], errors)):
            if not np.isfinite(error).all():
                raise Finding(f"not finite: {dtype}", f"backend {name}")
            place = worst_place(shares(error, allowed[name]))
            if place is not None:
                raise Finding(
                    f"wrong output: {dtype}",
                    f"{self.case['mixer']}, {name}, sequence {place[0]}, position {wanted[place[1]]}: off by "
                    f"{error[place]:.3g}, allowed {allowed[name][place]:.3g}, exact value {size[place]:.3g}",
                )
            key = f"worst error, {'baselines' if self_compared else 'labels'}, {dtype}"
            relative = float((error / (size + 1e-3 * max(size.max(), 1e-30))).max()) if size.max() else 0.0
            self.counted[key] = max(self.counted[key], relative)
        self.counted["positions"] += count

    def _noise(self, exact, wanted):
        """Return how far the outputs move if inputs and parameters change by a rounding."""
        level = torch.finfo(self.dtype).eps

        def changed(x):
            return x * (1 + level * self.noise_rng.standard_normal(x.shape))

        moved = np.zeros(exact.shape[:2])
        for _ in range(2):
            parameters = {name: changed(x) for name, x in self.parameters.items()}
            near = layer_oracle.outputs(
                self.layer.config, parameters, changed(self.history.x), self.history.starts, wanted
            )
            moved = np.maximum(moved, np.abs(near - exact).max(axis=-1))
        return moved
