"""The paper's qualitative predictions: how much each MAD task gains from mixing along the sequence."""

GAIN_LEVELS = ("low", "medium to high", "high")  # in increasing order
PREDICTED_GAIN = {
    "compression": "high",
    "noisy-in-context-recall": "high",
    "fuzzy-in-context-recall": "high",
    "selective-copying": "medium to high",
    "in-context-recall": "low",
    "memorization": "low",
}
