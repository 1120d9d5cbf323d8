"""Small trained language models that come with the package, each in a folder with its model card.

``held-out.txt`` is a document that they were not trained on: ``os.py`` of Python 3.11.7, whose licence is in
``held-out-license.txt``.
"""

from pathlib import Path

from hypermlp.validation import find_option

FOLDER = Path(__file__).parent
HELD_OUT = FOLDER / "held-out.txt"
MODELS = {"hyperglu": "tiny", "softmax": "tiny-softmax"}


def tiny(mixer: str = "hyperglu") -> Path:
    """Return the folder of a small trained language model, for ``from_pretrained``.

    It has a million parameters and was trained on the source of Python's standard library. README.md in the
    folder is its model card. The commands of ``hypermlp`` accept the names "tiny" and "tiny-softmax". The
    Auto classes of transformers load it after ``import hypermlp.models``.

    Args:
        mixer: "hyperglu", or "softmax" for a model with softmax attention and as many parameters. The names
            of the models, "tiny" and "tiny-softmax", are accepted too.

    Example::

        import hypermlp
        from hypermlp.models import HyperMLPForCausalLM

        model = HyperMLPForCausalLM.from_pretrained(hypermlp.tiny())
        assert model.config.mixer == "G-cg-q-12o"
    """
    return find_shipped(mixer) or FOLDER / find_option("mixer of a shipped model", mixer, MODELS)


def find_shipped(name: str) -> Path | None:
    """Return the folder of the shipped model called ``name``, such as "tiny"; None for any other name."""
    return FOLDER / name if name in MODELS.values() else None
