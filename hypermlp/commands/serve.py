"""``hypermlp serve``: serve a model with the completions of OpenAI's API."""

import contextlib
import socket
from pathlib import Path

import transformers

from hypermlp.commands.shared import CHECKPOINT, ON_DEVICE, Args, Argument, check_device, command
from hypermlp.errors import UserError
from hypermlp.models.loading import load

LAST_PORT = 65535


@command(
    CHECKPOINT,
    Argument("--host", default="localhost", help="address to listen on"),
    Argument("--port", least=1, default=8000, help="port to listen on"),
    ON_DEVICE,
    Argument("--waiting", least=1, default=32, help="requests that wait or run at a time"),
    Argument("--timeout", least=1, default=300, metavar="SECONDS", help="longest time of a request"),
)
def main(args: Args) -> None:
    if args.port > LAST_PORT:
        raise UserError(f"--port is {args.port}; it must be at most {LAST_PORT}")
    try:
        import uvicorn

        from hypermlp.serve.app import Limits, Server, build_app
    except ImportError as error:
        raise UserError(f"serving needs more packages: pip install 'hypermlp[serve]' ({error})") from error
    check_device(args.device)
    sockets = listen(args.host, args.port)
    transformers.logging.disable_progress_bar()
    model, tokenizer = load(args.checkpoint)
    model = model.to(args.device)
    name = model_name(args.checkpoint)
    app = build_app(Server(model, tokenizer, name, Limits(waiting=args.waiting, seconds=args.timeout)))
    print(
        f"http://{args.host}:{args.port}/v1/completions serves {name}; requests may leave the model out; "
        "Ctrl-C stops the server",
        flush=True,
    )
    server = uvicorn.Server(uvicorn.Config(app, host=args.host, port=args.port, log_level="warning"))
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=sockets)


def listen(host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen at every address of a host; raise if one is in use or cannot be had."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        families = dict.fromkeys((family, address) for family, *_, address in addresses)
        return [socket.create_server(address, family=family) for family, address in families]
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"--host is {host!r} and --port is {port}, which cannot be used: {error}; choose another --port "
            "if it is in use, or another --host if this machine does not have it"
        ) from error


def model_name(checkpoint: str) -> str:
    """Return the name of a saved model: that of its run, or of its folder."""
    folder = Path(checkpoint).resolve()
    inside = folder.name == "final" or folder.name.startswith("checkpoint-")
    return folder.parent.name if inside else folder.name
