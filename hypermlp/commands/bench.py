"""``hypermlp bench op``, ``bench table``, ``bench lm`` and ``bench window``.

``bench op`` needs PyTorch only, so what the others measure is imported when they are called.
"""

import importlib
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import hypermlp
from hypermlp.bench import op
from hypermlp.bench.gate import check_backend
from hypermlp.bench.idle import check_idle
from hypermlp.bench.measure import WARMUPS, Row
from hypermlp.commands.shared import (
    DEVICE,
    SET,
    Args,
    Argument,
    command,
    measuring,
    require_measuring,
    save_record,
)
from hypermlp.config import MixerConfig
from hypermlp.errors import UserError
from hypermlp.layers.registry import chosen_mixers
from hypermlp.ops import available_backends
from hypermlp.ops.arguments import Request
from hypermlp.ops.dispatch import BACKENDS
from hypermlp.paper.efficiency import SETTING
from hypermlp.reporting.table import Table


@command(
    Argument("--label", default="G-cg-q-12o", help="label of our mixer (default: HyperGLU)"),
    Argument("--batch", least=1, default=2, help="sequences"),
    Argument("--length", least=2, default=1024, help="positions"),
    Argument("--hidden", least=1, default=768, help="width"),
    Argument(
        "--softmax-heads",
        type=int,
        nargs="+",
        metavar="HEADS",
        help="head counts of softmax attention; the fastest one counts (default: 2 and 12)",
    ),
    Argument(
        "--backend", nargs="+", metavar="NAME", help="default: all that are available, except reference"
    ),
    Argument("--threads", least=1, help="default: PyTorch's own number"),
    Argument(
        "--sweep", action="store_true", help="many sizes instead of one: lengths, widths, threads, decoding"
    ),
    Argument(
        "--goals",
        action="store_true",
        help="measure the goals of the native kernels instead, in a git checkout (2 threads)",
    ),
    Argument(
        "--against",
        metavar="COMMIT",
        help="compare the layer of this git checkout with that of another commit instead",
    ),
    *measuring(
        rounds=15,
        seconds=20,
        json_help="write the results to a record; refused while other processes use the machine",
    ),
)
def op_command(args: Args) -> None:
    """``hypermlp bench op``: the operator and the layer against fused softmax attention."""
    require_measuring(args)
    check_idle(record=bool(args.json))
    if args.against:
        _require_alone(args, "against", "sweep", "softmax_heads", "backend", "goals")
        rows = maintainer_tool("commits").run(args)
        _finish_idle(args, "bench-commits", vars(args), rows, op.commit_table)
    elif args.goals:
        _require_alone(args, "goals", "sweep", "softmax_heads", "backend", "threads")
        rows = maintainer_tool("goals").run(args)
        limits = {"rounds": args.rounds, "seconds": args.seconds}
        _finish_idle(args, "bench-goals", limits, rows, op.goal_table)
    else:
        _finish_idle(args, "bench-op", vars(args), _measure_sizes(args), op.table)


def _require_alone(args: Args, name: str, *others: str) -> None:
    """Raise UserError if one of the other arguments was given."""
    if any(getattr(args, other) for other in others):
        *flags, last = (f"--{other.replace('_', '-')}" for other in others)
        raise UserError(f"--{name} does not go with {', '.join(flags)} or {last}; drop them")


def maintainer_tool(name: str) -> ModuleType:
    """Import a file of ``tools/``, which a git checkout has and a wheel does not."""
    root = Path(hypermlp.__file__).parents[1]
    if not (root / "tools" / f"{name}.py").is_file():
        raise UserError("--goals and --against need a git checkout of hypermlp: they are not in its packages")
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module(f"tools.{name}")


def _finish_idle(
    args: Args, kind: str, settings: dict[str, Any], rows: list[Row], table: Callable[[list[Row]], Table]
) -> None:
    """Print the results, check that the machine was idle until the end, and write the record."""
    print(table(rows).markdown())
    check_idle(record=bool(args.json))
    save_record(args.json, kind, settings, rows)


def _measure_sizes(args: Args) -> list[Row]:
    """Measure one size or those of ``--sweep``, with every backend that fits and is right."""
    if args.softmax_heads and args.sweep:
        raise UserError("--softmax-heads does not go with --sweep, which has many widths; drop one")
    for heads in args.softmax_heads or []:
        if heads < 1 or args.hidden % heads:
            raise UserError(f"--softmax-heads has {heads}, which does not divide --hidden {args.hidden}")
    threads = args.threads or torch.get_num_threads()
    one_size = op.Case(args.batch, args.length, args.hidden, threads)
    cases = op.sweep_cases(threads) if args.sweep else [one_size]
    backends = _op_backends(args, cases)
    minutes = len(backends) * sum(4 * len(case.parts) for case in cases) * args.seconds / 60
    print(
        f"{args.label} against softmax attention in float32; sizes: {len(cases)}; "
        f"time limit: {max(1, round(minutes))} min",
        flush=True,
    )
    for backend in backends:
        print(f"{backend}: {check_backend(backend)} cases equal the reference", flush=True)
    rows = []
    for done, (case, backend) in enumerate(itertools.product(cases, backends), 1):
        torch.set_num_threads(case.threads)
        limits = {"rounds": args.rounds, "seconds": args.seconds}
        rows += op.OpBench(args.label, case, backend, softmax_heads=args.softmax_heads, **limits).rows()
        if args.sweep:
            print(f"{done} of {len(cases) * len(backends)}: {backend} {case}", file=sys.stderr, flush=True)
    return rows


def _op_backends(args: Args, cases: list[op.Case]) -> list[str]:
    """Return the backends to measure. Raises UserError if the label does not fit one of the cases."""
    configs = [
        MixerConfig.from_label(args.label, hidden_size=case.hidden, max_length=case.length) for case in cases
    ]
    mixed = configs[0].mix1 or configs[0].mix2
    request = Request("attention", "cpu", torch.float32, configs[0].activation, mixed)
    able = [name for name in available_backends() if BACKENDS[name].refusal(request) is None]
    return args.backend or [name for name in able if name != "reference"]


@command(
    Argument(
        "--mixer", nargs="+", default=["all"], metavar="NAME", help="labels and baselines (default: all)"
    ),
    Argument("--count-only", action="store_true", help="count FLOPs and time nothing"),
    *(
        Argument(f"--{name}", least=1, default=value, help=f"default, as in the paper: {value}")
        for name, value in SETTING.items()
    ),
    Argument("--batch", least=1, help="default: 8 as in the paper, but 1 to time a CPU"),
    Argument(
        "--device",
        choices=("cpu", "cuda"),
        default=DEVICE,
        help=f"default here: {DEVICE}; cuda compiles the model, in bfloat16",
    ),
    *measuring(
        rounds=20,
        least_rounds=3,
        seconds=300,
        json_help="write the results to a record; - with --count-only: print the rows as JSON",
    ),
)
def table_command(args: Args) -> None:
    """``hypermlp bench table``: the paper's efficiency table."""
    from hypermlp.bench import efficiency

    print_json = args.json == "-" and args.count_only
    if print_json:
        args.json = None
    if args.batch is None:
        args.batch = 8 if args.device == "cuda" or args.count_only else 1
    require_measuring(args)
    if args.device == "cuda" and not torch.cuda.is_available() and not args.count_only:
        raise UserError("--device is cuda, but there is no GPU; use --device cpu or --count-only")
    setting = {name: getattr(args, name) for name in SETTING}
    configs = {mixer: efficiency.body_config(mixer, **setting) for mixer in chosen_mixers(args.mixer)}
    rows = [efficiency.count(mixer, config, args.batch) for mixer, config in configs.items()]
    if print_json:
        print(json.dumps(rows, indent=2))
        return
    timing = {name: getattr(args, name) for name in ("batch", "device", "rounds", "seconds")}
    if not args.count_only:
        passes = (args.rounds + WARMUPS) * len(configs)
        print(
            f"counted; now at most {passes} passes of each kind on {args.device}, "
            f"{args.seconds:.0f} s beyond the first three rounds",
            flush=True,
        )
        measured = efficiency.measure(configs, length=args.length, **timing)
        rows = [row | measured[row["mixer"]] for row in rows]
    print(efficiency.table(rows).markdown())
    save_record(args.json, "bench-table", {**setting, **timing, "count_only": args.count_only}, rows)


@command(
    Argument("--recipe", default="cpu-mini", help="recipe of model, data and batch"),
    SET,
    Argument(
        "--mixer",
        nargs="+",
        metavar="NAME",
        help="measure time, FLOPs, parameters, state and memory of these mixers (or all) instead",
    ),
    Argument(
        "--rivals", nargs="+", default=["S-p", "S"], metavar="LABEL", help="softmax labels to compare with"
    ),
    Argument(
        "--rival-heads",
        type=int,
        nargs="+",
        default=[2, 4],
        metavar="HEADS",
        help="head counts of the softmax labels",
    ),
    *measuring(rounds=30, seconds=90, least_rounds=3),
)
def lm_command(args: Args) -> None:
    """``hypermlp bench lm``: training throughput; with ``--mixer``, all costs of the named mixers instead."""
    from hypermlp.bench import lm
    from hypermlp.train.data import prepare
    from hypermlp.train.recipe import load_recipe

    require_measuring(args)
    recipe = load_recipe(args.recipe, args.set)
    if args.mixer:
        kind, measure, table = "bench-mixers", lm.costs, lm.cost_table
        recipes = lm.mixer_recipes(args.recipe, args.set, args.mixer)
        most = recipe.data.context - WARMUPS - 1
        if args.rounds > most:
            raise UserError(
                f"--rounds is {args.rounds}; each decodes a token of data.context; use at most {most}"
            )
    else:
        kind, measure, table = "bench-lm", lm.throughput, lm.throughput_table
        recipes = lm.rival_recipes(args.recipe, args.set, args.rivals, args.rival_heads)
    print(
        f"{recipe.name}: {len(recipes)} models, steps of {lm.step_tokens(recipe):,} tokens, "
        f"{torch.get_num_threads()} threads, {args.seconds:.0f} s of timing at most",
        flush=True,
    )
    limits = {"rounds": args.rounds, "seconds": args.seconds}
    rows = measure(recipes, prepare(recipe.data), **limits)
    print(table(rows).markdown())
    save_record(args.json, kind, {"recipe": recipe.to_dict(), **limits}, rows)


@command(
    Argument(
        "--mixer",
        nargs="+",
        default=["HyperGLU", "HyperMLP", "S-p", "softmax"],
        metavar="NAME",
        help="labels and baselines with windows",
    ),
    Argument("--window", least=2, default=256, help="positions that each position sees"),
    Argument("--hidden", least=1, default=128, help="width of the model"),
    Argument("--layers", least=1, default=2, help="layers of the model"),
    *measuring(
        rounds=15,
        seconds=8,
        json_help="write the results to a record; refused while other processes use the machine",
    ),
)
def window_command(args: Args) -> None:
    """``hypermlp bench window``: decoding and training with a sliding window, at several lengths."""
    from hypermlp.bench import window

    require_measuring(args)
    check_idle(record=bool(args.json))
    sizes = {name: getattr(args, name) for name in ("window", "hidden", "layers", "rounds", "seconds")}
    mixers = chosen_mixers(args.mixer)
    print(f"{len(mixers)} models, about {2 * len(mixers) * args.seconds / 60 + 1:.0f} min", flush=True)
    rows = [window.measure(mixer, **sizes) for mixer in mixers]
    settings = {**sizes, "threads": torch.get_num_threads()}
    _finish_idle(args, "bench-window", settings, rows, window.table)
