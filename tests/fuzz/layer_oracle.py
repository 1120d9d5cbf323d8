"""A mixer layer in NumPy, float64, from its parameters, its configuration and docs/derivation.md.

It computes the outputs of chosen positions from the plain history of each sequence: no decoding state, no
chunks, no padding tricks. With registers, a context is the registers and the visible positions, and a
convolution at a position reads the position's own context.

Shapes: B sequences, T positions, D width, G score branches, H heads, K taps, k registers.
"""

import numpy as np

from fuzz import oracle
from fuzz.oracle import sigmoid


def parameters_of(layer):
    """Return the layer's parameters as float64 arrays, by name."""
    return {name: x.detach().double().cpu().numpy() for name, x in layer.named_parameters()}


def convolve(x, weight, starts, before=None):
    """Depthwise causal convolution of x, ``[T, D]``.

    Position t sees ``starts[t]`` to t, and before those the rows of ``before``, its registers.
    """
    out = np.zeros_like(x)
    for t in range(len(x)):
        for lag in range(weight.shape[1]):
            if t - lag >= starts[t]:
                out[t] += weight[:, lag] * x[t - lag]
            elif starts[t] <= t and before is not None and t - lag >= starts[t] - len(before):
                out[t] += weight[:, lag] * before[t - lag - starts[t]]
    return out


def rotate(x, positions, theta):
    """Rotate channel i with channel i + half by the angle position * theta^(-i / half). x: ``[T, G, Dk]``."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def origins_of(starts):
    """Return where the document of each position begins: at the last position that saw only itself."""
    origin, found = 0, []
    for t, start in enumerate(starts):
        origin = t if start == t else origin
        found.append(origin)
    return np.array(found)


class Rows:
    """Queries, keys, values and gates of the positions of one sequence, or of the registers before it."""

    def __init__(self, config, parameters, x, starts, positions, before=None):
        def project(rows, name, heads, width):
            return (rows @ parameters[f"{name}.weight"].T).reshape(len(rows), heads, width)

        heads, branches, width = config.num_heads, config.num_branches, config.qk_dim
        inputs = [
            convolve(x, parameters[name], starts, before) if config.conv else x
            for name in ("k_conv", "v_conv")
        ]
        self.q = project(x, "q_proj", branches, width)
        self.k = project(inputs[0], "k_proj", branches, width)
        self.v = project(inputs[1], "v_proj", heads, config.vo_dim)
        if config.canon:
            weights = np.split(parameters["canon.weight"], np.cumsum([branches * width] * 2))
            self.q, self.k, self.v = (
                y + convolve(y.reshape(len(x), len(weight)), weight, starts).reshape(y.shape)
                for y, weight in zip((self.q, self.k, self.v), weights, strict=True)
            )
        if config.rope:
            self.q, self.k = (rotate(y, positions, config.rope_theta) for y in (self.q, self.k))
        self.gates = _gates(config, parameters, x)
        if "query" in self.gates:
            self.q = self.q * self.gates["query"]


def sequence_outputs(config, parameters, x, starts, wanted):
    """Return the outputs ``[len(wanted), D]`` of one sequence. x: ``[T, D]``; starts: ``[T]``."""
    stream = np.arange(len(x))
    x = np.where((starts > stream)[:, None], 0.0, x)  # padding holds nothing
    registers = parameters.get("registers", np.zeros((0, x.shape[1])))
    count = len(registers)
    origins = origins_of(starts)
    rows = Rows(config, parameters, x, starts, count + stream - origins, registers)
    prefix = Rows(config, parameters, registers, np.zeros(count, int), np.arange(count))
    outs = np.zeros((len(wanted), x.shape[1]))
    for out, t in zip(outs, wanted, strict=True):
        if starts[t] <= t:
            if count and config.rope:  # the registers come just before the oldest visible position
                places = starts[t] - origins[t] + np.arange(count)
                prefix = Rows(config, parameters, registers, np.zeros(count, int), places)
            out[:] = _output(config, parameters, rows, prefix, t, int(starts[t]))
    return outs


def _output(config, parameters, rows, prefix, t, start):
    """Return the output at position t, whose context is the registers and the positions from ``start``."""
    mixes = [
        (
            *(parameters[f"{name}.{field}"] for field in ("diag", "left", "right")),
            rows.gates[name][None, t : t + 1],
        )
        if name in rows.gates
        else None
        for name in ("mix1", "mix2")
    ]
    k, v = (np.concatenate([a, b[start : t + 1]])[None] for a, b in ((prefix.k, rows.k), (prefix.v, rows.v)))
    one = oracle.Inputs(
        rows.q[None, t : t + 1],
        k,
        v,
        *mixes,
        np.zeros((1, 1), int),
        config.activation,
        config.layout,
        config.eps,
    )
    out = oracle.Query(one, 0, 0).output().reshape(-1)
    if "output" in rows.gates:
        out = out * rows.gates["output"][t]
    return out @ parameters["o_proj.weight"].T


def _gates(config, parameters, x):
    """Return the gates that the layer has; one matrix holds them in the order query, output, mix1, mix2."""
    shapes = {}
    if config.feature_gates:
        shapes |= {"query": (config.num_branches, config.qk_dim), "output": (config.vo_width,)}
    if config.mix1:
        shapes["mix1"] = (config.num_branches, config.rank)
    if config.mix2:
        shapes["mix2"] = (config.num_heads, config.rank)
    if not shapes:
        return {}
    values = sigmoid(x @ parameters["gates.weight"].T + parameters["gates.bias"])
    parts = np.split(values, np.cumsum([np.prod(shape) for shape in shapes.values()])[:-1], axis=1)
    return {
        name: part.reshape(len(x), *shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }


def outputs(config, parameters, x, starts, wanted=None):
    """Return the outputs of all sequences at the wanted positions. x: ``[B, T, D]``; starts: ``[B, T]``."""
    wanted = list(range(x.shape[1])) if wanted is None else wanted
    rows = zip(x, starts, strict=True)
    return np.stack([sequence_outputs(config, parameters, row, start, wanted) for row, start in rows])
