"""``hypermlp gpu-check``: the Triton kernels on this GPU, checked and timed, as one record to send us."""

import os
import sys
from typing import Any

import torch

from hypermlp.bench import gpu
from hypermlp.commands.shared import Args, Argument, command, measuring, require_measuring, save_record
from hypermlp.errors import UserError
from hypermlp.ops import triton
from hypermlp.ops.triton import interpreting, selfcheck

INTERPRETED_SHAPES = [(1, 3, 64)]
PAPER_NOTE = (
    "The paper's table: a GPT-2 of 12 layers on one NVIDIA L40S, batch 8, length 1024. It times whole "
    "models, the rows above one operator."
)


def _progress(text: str) -> None:
    print(f"{text} ...", file=sys.stderr, flush=True)


def _interpret() -> None:
    """Turn Triton's interpreter on for this process."""
    if "triton" in sys.modules and not interpreting():
        raise UserError("Triton is loaded already; set TRITON_INTERPRET=1 in the environment instead")
    os.environ["TRITON_INTERPRET"] = "1"


@command(
    Argument(
        "--interpret",
        action="store_true",
        help="run everything on the CPU in Triton's interpreter, at tiny sizes: a test of the kernels and of "
        "this command (about a minute); the times mean nothing",
    ),
    Argument("--check-only", action="store_true", help="run the checks, no timings (estimated: 5 minutes)"),
    *measuring(rounds=20, seconds=5, json_help="path of the record (default: gpu-check.json)"),
)
def main(args: Args) -> None:
    args.json = args.json or "gpu-check.json"
    require_measuring(args)
    if args.interpret:
        _interpret()
    elif not torch.cuda.is_available():
        raise UserError("there is no CUDA or ROCm device; --interpret runs the kernels on the CPU, slowly")
    if reason := triton.unavailable():
        raise UserError(f"the Triton kernels cannot run here: {reason}")
    device = "cpu" if args.interpret else "cuda"
    settings: dict[str, Any] = {"device": "interpreter"}
    if not args.interpret:
        settings = selfcheck.facts() | {"self-check": str(selfcheck.self_check())}
        _progress("checks and timings take an estimated 20 minutes, most of it compiling")
    rows = gpu.run_checks(device, _progress)
    failed = [name for row in rows for name in row["failed"]]
    timed = not args.check_only and not failed
    if timed:
        rows += gpu.run_timings(
            device,
            INTERPRETED_SHAPES if args.interpret else gpu.SHAPES,
            gpu.CONTENDERS[:3] if args.interpret else gpu.CONTENDERS,
            rounds=1 if args.interpret else args.rounds,
            seconds=args.seconds,
            progress=_progress,
        )
    print(gpu.table(rows).terminal())
    if timed:
        print(f"\n{PAPER_NOTE}", gpu.paper_table().terminal(), "", sep="\n")
    save_record(args.json, "gpu-check", settings, rows)
    if args.interpret:
        print("These kernels ran in Triton's interpreter: their times mean nothing.")
    else:
        print(f"Please send us this file, whatever it says: attach {args.json} to an issue of the project.")
    if failed:
        print(f"hypermlp gpu-check: {len(failed)} failed: {'; '.join(failed)}", file=sys.stderr)
        raise SystemExit(1)
