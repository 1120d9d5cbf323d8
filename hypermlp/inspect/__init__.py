"""Look into a layer with ``capture(layer, x)``, or into a model with ``capture_model(model, input_ids)``.

Both return ``Capture`` objects, which hold every intermediate result. Nothing changes what the layer
computes.
"""

from hypermlp.inspect.capture import Capture, capture, capture_model

__all__ = ["Capture", "capture", "capture_model"]
