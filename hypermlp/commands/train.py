"""``hypermlp train``: train a language model from a recipe, or resume a run."""

import sys
from pathlib import Path

from hypermlp.commands.shared import SET, Args, Argument, command
from hypermlp.errors import UserError
from hypermlp.train.keys import key_help
from hypermlp.train.recipe import load_recipe, recipe_names
from hypermlp.train.run import is_main_process, train


@command(
    Argument("recipe", nargs="?", help=f"a YAML file, or {', '.join(recipe_names())}"),
    SET,
    Argument("--out", metavar="FOLDER", help="folder of the run (default: runs/NAME)"),
    Argument(
        "--resume", action="store_true", help="continue from the newest complete checkpoint, if there is one"
    ),
    Argument(
        "--init-from",
        metavar="FOLDER",
        help="begin with the weights of a saved model; ignored if --resume finds a checkpoint",
    ),
    Argument(
        "--keys", action="store_true", help="list the keys of a recipe with their meanings, train nothing"
    ),
)
def main(args: Args) -> None:
    if args.keys:
        print(key_help())
        return
    if args.recipe is None:
        raise UserError(f"no recipe given; allowed: a YAML file, or one of {', '.join(recipe_names())}")
    recipe = load_recipe(args.recipe, args.set)
    folder = Path(args.out) if args.out else Path("runs") / recipe.name
    final = train(recipe, folder, resume=args.resume, init_from=args.init_from)
    if not is_main_process():
        return
    stopped = final == folder
    if final.exists():  # a run that is stopped before its first step leaves nothing
        hint = "" if stopped else f"; `hypermlp sample {folder}` generates text"
        print(f"saved in {final}{hint}", flush=True)
    if stopped:
        print("the training was stopped; the same command with --resume continues it", file=sys.stderr)
