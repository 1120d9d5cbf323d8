"""``hypermlp serve``: serve a model with the OpenAI-compatible server of transformers."""

from pathlib import Path

from huggingface_hub.constants import HF_HUB_CACHE

from hypermlp.commands.shared import CHECKPOINT, Args, Argument, command
from hypermlp.errors import UserError
from hypermlp.models import HyperMLPForCausalLM
from hypermlp.models.loading import model_folder


@command(
    CHECKPOINT,
    Argument("--host", default="localhost", help="address to listen on (default: localhost)"),
    Argument("--port", type=int, default=8000, help="port to listen on (default: 8000)"),
    Argument("--device", default="auto", help="cpu, cuda:0, ... (default: auto)"),
)
def main(args: Args) -> None:
    folder = model_folder(args.checkpoint).resolve()
    Path(HF_HUB_CACHE).mkdir(parents=True, exist_ok=True)  # /v1/models fails without it
    try:
        from transformers.cli.serve import Serve

        add_model_class_to_server()
        print(
            f"http://{args.host}:{args.port}/v1/completions serves {folder}; "
            "requests may leave the model out; Ctrl-C stops the server",
            flush=True,
        )
        Serve(str(folder), host=args.host, port=args.port, device=args.device)
    except ImportError as error:
        raise UserError(f"serving needs more packages: pip install 'hypermlp[serve]' ({error})") from error


def add_model_class_to_server() -> None:
    """Make the server of transformers find our model class.

    The server does not use the registry of the Auto classes: ``ModelManager._load_model`` evaluates
    ``getattr(transformers, config.architectures[0])``, so the class must be an attribute of the module
    ``transformers`` that the server imported, which is not always ours. transformers 5.22 has no other way.
    tests/commands/test_serve.py fails when the server begins to load registered classes; then this function
    can be removed.
    """
    from transformers.cli.serving import model_manager

    setattr(vars(model_manager)["transformers"], HyperMLPForCausalLM.__name__, HyperMLPForCausalLM)
