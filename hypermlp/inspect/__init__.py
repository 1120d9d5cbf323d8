"""Look into a layer: ``capture(layer, x)``, ``capture_model(model, tokens)``."""

from hypermlp.inspect.capture import Capture, capture, capture_model

__all__ = ["Capture", "capture", "capture_model"]
