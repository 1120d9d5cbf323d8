"""Look into a layer with ``capture(layer, x)``, or into a model with ``capture_model(model, tokens)``."""

from hypermlp.inspect.capture import Capture, capture, capture_model

__all__ = ["Capture", "capture", "capture_model"]
