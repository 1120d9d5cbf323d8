"""``hypermlp plan``: memory, FLOPs and time that a recipe needs on given GPUs."""

import dataclasses
import json
import sys
import time

from hypermlp.commands.shared import PRINT_JSON, SET, VOCAB, Args, Argument, command
from hypermlp.costs.plan import GPUS, TEMPLATE, make_plan, plan_table, recipe_of, usual_nodes
from hypermlp.errors import UserError

MOST_GPUS = 2**20


@command(
    Argument(
        "recipe",
        help=f"a recipe; or a folder with a model, or its config.json, to be trained like {TEMPLATE}",
    ),
    SET,
    Argument("--gpu", default="h100", choices=sorted(GPUS), help="type of GPU"),
    Argument("--count", type=int, default=1, help="number of GPUs"),
    Argument(
        "--nodes", type=int, help="number of machines (default: the fewest with at most eight GPUs each)"
    ),
    Argument(
        "--utilisation",
        type=float,
        default=0.3,
        help="fraction of the GPU's peak FLOP/s that is reached (default: 0.3, a guess)",
    ),
    VOCAB,
    PRINT_JSON,
)
def main(args: Args) -> None:
    if not 1 <= args.count <= MOST_GPUS or not 0 < args.utilisation <= 1:
        raise UserError(
            f"--count is {args.count}, --utilisation {args.utilisation}; "
            f"--count must be from 1 to {MOST_GPUS:,}, --utilisation above 0 and at most 1"
        )
    nodes = usual_nodes(args.count) if args.nodes is None else args.nodes
    if nodes < 1 or args.count % nodes:
        raise UserError(f"--nodes is {nodes}; it must be a divisor of --count = {args.count}")
    recipe, gpu = recipe_of(args.recipe, args.set), GPUS[args.gpu]
    plan = make_plan(
        recipe,
        vocab_size=recipe.vocab_size(args.vocab),
        gpu=gpu,
        count=args.count,
        nodes=nodes,
        utilisation=args.utilisation,
        on_progress=Progress(),
    )
    if args.json:
        derived = {name: getattr(plan, name) for name in ("step_seconds", "seconds", "fits", "limit")}
        print(json.dumps(dataclasses.asdict(plan) | derived, indent=2))
        return
    print(f"{recipe.name} on {args.count} x {args.gpu} in {nodes} {'node' if nodes == 1 else 'nodes'}\n")
    print(plan_table(plan, recipe, args.count, gpu, args.utilisation).markdown())


class Progress:
    """Print to standard error how far the plan is: on a terminal in one line, elsewhere every ten seconds."""

    def __init__(self) -> None:
        self.next = time.monotonic() + 1  # a short plan needs no lines

    def __call__(self, done: float) -> None:
        if time.monotonic() < self.next and done < 1:
            return
        terminal = sys.stderr.isatty()
        self.next = time.monotonic() + (0.2 if terminal else 10)
        text = f"tracing a training step without its memory: {done:.0%}"
        print(f"\r{text}" if terminal else text, end="" if terminal and done < 1 else "\n", file=sys.stderr)
