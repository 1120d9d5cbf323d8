"""``hypermlp serve``: serve a model with the completions of OpenAI's API."""

from pathlib import Path

from hypermlp.commands.shared import CHECKPOINT, DEVICE, Args, Argument, command, require_at_least
from hypermlp.errors import UserError
from hypermlp.models.loading import load

LAST_PORT = 65535


@command(
    CHECKPOINT,
    Argument("--host", default="localhost", help="address to listen on (default: localhost)"),
    Argument("--port", type=int, default=8000, help="port to listen on (default: 8000)"),
    Argument("--device", default=DEVICE, help=f"cpu, cuda:0, ... (default here: {DEVICE})"),
    Argument("--waiting", type=int, default=32, help="requests that wait or run at a time (default: 32)"),
    Argument(
        "--timeout", type=int, default=300, metavar="SECONDS", help="longest time of a request (default: 300)"
    ),
)
def main(args: Args) -> None:
    require_at_least(args, port=1, waiting=1, timeout=1)
    if args.port > LAST_PORT:
        raise UserError(f"--port is {args.port}; it must be at most {LAST_PORT}")
    try:
        import uvicorn

        from hypermlp.serve.app import Limits, Server, build_app
    except ImportError as error:
        raise UserError(f"serving needs more packages: pip install 'hypermlp[serve]' ({error})") from error
    model, tokenizer = load(args.checkpoint)
    try:
        model = model.to(args.device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device is {args.device!r}, which is not usable here: {error}") from error
    name = model_name(args.checkpoint)
    app = build_app(Server(model, tokenizer, name, Limits(waiting=args.waiting, seconds=args.timeout)))
    print(
        f"http://{args.host}:{args.port}/v1/completions serves {name}; requests may leave the model out; "
        "Ctrl-C stops the server",
        flush=True,
    )
    uvicorn.run(app, host=args.host, port=args.port, log_level="warning")


def model_name(checkpoint: str) -> str:
    """Return the name of a saved model: that of its run, or of its folder."""
    folder = Path(checkpoint).resolve()
    inside = folder.name == "final" or folder.name.startswith("checkpoint-")
    return folder.parent.name if inside else folder.name
