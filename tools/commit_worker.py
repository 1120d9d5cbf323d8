"""Time one layer of whatever version of the package is on the path, on request.

``hypermlp.bench.commits`` runs this file as a program beside a source tree of another commit, so it uses only
the package's documented names. Every line of standard input is a JSON request, every line of standard output
its answer: ``{"setup": {...}}`` prepares the works, ``{"run": name}`` times one of them.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import hypermlp
from hypermlp import Mixer

TOKENS = 20  # that one timing decodes, always after the same positions


def works(label: str, batch: int, length: int, hidden: int, threads: int) -> dict[str, Callable[[], object]]:
    """Return what is timed, by name."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    layer = Mixer.from_label(label, hidden_size=hidden, max_length=length)
    x = torch.randn(batch, length, hidden, requires_grad=True)
    leaves, grad = [x, *layer.parameters()], torch.randn(batch, length, hidden)

    def decoding(dtype: torch.dtype) -> Callable[[], None]:
        longer = Mixer.from_label(label, hidden_size=hidden, max_length=length + TOKENS).to(dtype)
        state, prompt = longer.new_state(batch), x.detach().to(dtype)
        with torch.no_grad():
            longer(prompt, state=state)

        def decode() -> None:
            state.crop(length)
            with torch.no_grad():
                for _ in range(TOKENS):
                    longer(prompt[:, -1:], state=state)

        return decode

    def forward() -> None:
        with torch.no_grad():
            layer(x)

    return {
        "layer forward": forward,
        "layer forward+backward": lambda: torch.autograd.grad(layer(x), leaves, grad),
        f"layer decode {TOKENS} tokens": decoding(torch.float32),
        f"layer decode {TOKENS} tokens, bfloat16": decoding(torch.bfloat16),
    }


def answer(request: dict[str, Any], prepared: dict[str, Callable[[], object]]) -> dict[str, Any]:
    """Return the answer to one request; ``prepared`` keeps the works between requests."""
    if "setup" in request:
        prepared.update(works(**request["setup"]))
        return {"package": hypermlp.__file__, "works": list(prepared)}
    began = time.perf_counter()
    prepared[request["run"]]()
    return {"seconds": time.perf_counter() - began}


def main() -> None:
    prepared: dict[str, Callable[[], object]] = {}
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line), prepared)), flush=True)


if __name__ == "__main__":
    main()
