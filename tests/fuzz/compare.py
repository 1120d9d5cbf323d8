"""How far a result may be from the oracle.

In float64 the relative error may be 1e-10. In lower precision it may be twice that of plain PyTorch
(``reference`` in that dtype) and a few roundings. Both are judged for each position by itself where a tensor
has positions. Cases differ in how much they amplify rounding; the oracle measures that by small random
changes of its inputs and intermediate results, and a result may also be off by what ``NOISE_FACTOR``
roundings of that kind cause.
"""

from collections import Counter

import numpy as np
import torch

from fuzz import oracle
from fuzz.core import Finding

TIGHT = 1e-10
PLAIN_FACTOR = 2.0
ROUNDINGS = 4
NOISE_FACTOR = 16.0
NOISE_RUNS = 3
BY_POSITION = {"output": 2, "q": 2, "k": 2, "v": 2, "mix1.gate": 2, "mix2.gate": 2}
"""Leading dimensions over which a tensor is judged by position; the others are judged as a whole."""


def finfo(name: str) -> torch.finfo:
    return torch.finfo(getattr(torch, name))


def compute_dtype(name: str) -> str:
    return "float64" if name == "float64" else "float32"


def by_position(name: str, x: np.ndarray) -> np.ndarray:
    """Return the largest magnitude at each position, or of the whole tensor."""
    kept = BY_POSITION.get(name, 0)
    return np.abs(x).max(axis=tuple(range(kept, x.ndim)))


def shares(errors: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Return each error as a share of what is allowed."""
    return np.minimum(errors / np.maximum(allowed, 1e-300), 1e300)


def worst_place(share: np.ndarray) -> tuple[int, ...] | None:
    """Return the place of the largest share; None if no error exceeds what is allowed."""
    return tuple(map(int, np.unravel_index(np.argmax(share), share.shape))) if share.max() > 1 else None


class Expected:
    """The oracle's results for one case, and the errors that it allows in a dtype.

    Args:
        inputs, do: the arguments and the gradient of the output.
        dtype: the dtype of the tensors.
        rounding: the dtype to which a backend rounds intermediate results; by default the one that it
            computes in.

    Attributes:
        outputs_defined: whether scores, norms and outputs are representable.
        gradients_defined: the same for gradients; no score may be within rounding of the kink of relu.
    """

    def __init__(self, inputs: oracle.Inputs, do: np.ndarray, dtype: str, rounding: str | None = None):
        self.dtype, self.storage, self.compute = dtype, finfo(dtype), finfo(compute_dtype(dtype))
        self.rounding = finfo(rounding or compute_dtype(dtype)).eps
        forward, backward = oracle.Extremes(), oracle.Extremes()
        out, grads = oracle.attention_and_gradients(inputs, do, forward, backward)
        self.exact = {"output": out} | grads
        self.outputs_defined = self._representable(forward) and self._storable("output")
        self.gradients_defined = self._representable(backward) and forward.kink > 64 * self.compute.eps
        # PyTorch's fused kernel recomputes exponentials of scores, whose rounding must be small then.
        self.coarse_scores = forward.largest * self.compute.eps > 1
        if self.outputs_defined:
            self.noise = self._noise(inputs, do)

    def _representable(self, extremes: oracle.Extremes) -> bool:
        least = self.compute.tiny / self.compute.eps
        return extremes.largest < self.compute.max / 64 and extremes.smallest > least

    def _storable(self, name: str) -> bool:
        return float(np.abs(self.exact[name]).max()) < self.storage.max / 2

    def _noise(self, inputs: oracle.Inputs, do: np.ndarray) -> dict[str, np.ndarray]:
        """Return how far results move if inputs and intermediates change by a rounding, by position."""
        level = 1e-11 if self.dtype == "float64" else 4 * self.compute.eps
        rng = np.random.default_rng(0)

        def changed(x, terms=None, may_underflow=False):
            change = rng.choice((-1.0, 1.0), size=x.shape) * rng.uniform(0.5, 1.5, size=x.shape)
            lost = 4 * self.compute.tiny / self.compute.eps if may_underflow else 0.0
            return x + level * change * ((np.abs(x) if terms is None else terms) + lost)

        moved = {name: np.zeros_like(by_position(name, x)) for name, x in self.exact.items()}
        for _ in range(NOISE_RUNS):
            near = inputs.replaced({name: changed(x) for name, x in inputs.arrays().items()})
            out, grads = oracle.attention_and_gradients(near, changed(do), noise=changed)
            for name, x in ({"output": out} | grads).items():
                moved[name] = np.maximum(moved[name], by_position(name, x - self.exact[name]))
        return {name: x * (self.rounding / level) for name, x in moved.items()}

    def allowed(self, backend: str, name: str, plain: dict | None) -> np.ndarray:
        """Return the error that is allowed at each position."""
        size, noise = by_position(name, self.exact[name]), NOISE_FACTOR * self.noise[name]
        if backend == "sdpa":  # PyTorch's fused kernel rounds weights to the dtype of the tensors
            noise = noise * (self.storage.eps / self.rounding)
        least = 4 * self.storage.smallest_normal * self.storage.eps
        if self.dtype == "float64":
            return np.maximum(TIGHT * size, noise) + least
        rounding = ROUNDINGS * self.storage.eps * size + noise + least
        if plain is None:
            return rounding + noise
        return PLAIN_FACTOR * self.errors(name, plain[name]) + rounding

    def errors(self, name: str, actual: torch.Tensor) -> np.ndarray:
        """Return the error at each position."""
        return by_position(name, actual.double().numpy() - self.exact[name])

    def judge(self, backend: str, results: dict, plain: dict | None, counted: Counter) -> None:
        """Raise Finding if a result is wrong; add to ``counted``, also the worst errors."""
        for name, actual in results.items():
            if name != "output" and not (self.gradients_defined and self._storable(name)):
                continue
            if name != "output" and backend == "sdpa" and self.coarse_scores:
                continue
            what = f"{backend}, {self.dtype}, {'output' if name == 'output' else 'gradient'}"
            exact = self.exact[name]
            if tuple(actual.shape) != exact.shape:
                raise Finding(f"wrong shape: {what}", f"{name} is {list(actual.shape)}, not {exact.shape}")
            if not torch.isfinite(actual).all():
                raise Finding(f"not finite: {what}", f"{name} has NaN or infinity")
            errors, allowed = self.errors(name, actual), self.allowed(backend, name, plain)
            share = shares(errors, allowed)
            place = worst_place(share)
            if place is not None:
                raise Finding(
                    f"wrong: {backend}, {self.dtype}, {name}",
                    f"{name} at {place} is off by {errors[place]:.3g}; allowed "
                    f"{allowed[place]:.3g}; largest exact value there {by_position(name, exact)[place]:.3g}",
                )
            size = float(np.abs(exact).max())
            key = f"worst error, {what}"
            if size > 0 and float(self.noise[name].max()) < 100 * self.rounding * size:
                counted[key] = max(counted[key], float(errors.max()) / size)
            key = f"worst share of what is allowed, {what}"
            counted[key] = max(counted[key], float(share.max()))
