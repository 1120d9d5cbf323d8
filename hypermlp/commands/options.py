"""Command-line options that several commands share."""

import argparse

import torch

from hypermlp.errors import UserError
from hypermlp.jobs.workers import Cluster, Local, Workers


def add_worker_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose where cells run, and with how many threads and GPUs."""
    parser.add_argument("--jobs", type=int, default=1, help="cells that run at once (default: 1)")
    parser.add_argument("--threads", type=int, help="threads of each cell (default: all cores, shared)")
    parser.add_argument("--device", default="cpu", help="device of local cells (default: cpu)")
    parser.add_argument(
        "--cluster", metavar="ADDRESS", nargs="?", const="auto", help="run on a Ray cluster instead"
    )
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of each cell on the cluster (default: 0)")


def chosen_workers(args: argparse.Namespace) -> Workers:
    """Return the workers that the options of ``add_worker_options`` ask for."""
    if args.jobs < 1 or (args.threads is not None and args.threads < 1):
        raise UserError(f"--jobs is {args.jobs}, --threads is {args.threads}; both must be 1 or more")
    if args.gpus < 0 or (args.gpus and not args.cluster):
        raise UserError(f"--gpus is {args.gpus}; it must be 0 or more, and needs --cluster")
    try:
        torch.zeros(1, device=args.device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--device is {args.device!r}, which is not usable here: {reason}") from error
    if args.cluster:
        return Cluster(address=args.cluster, threads=args.threads or 1, gpus=args.gpus)
    return Local(jobs=args.jobs, threads=args.threads, device=args.device)
