"""Published MAD scores, in percent over the full grid."""

# The six tasks in the order of the tuples below, each with its field of PaperRow (hypermlp/paper/variants.py)
PAPER_COLUMNS = {
    "in-context-recall": "in_context_recall",
    "noisy-in-context-recall": "noisy_recall",
    "fuzzy-in-context-recall": "fuzzy_recall",
    "memorization": "memorization",
    "compression": "compression",
    "selective-copying": "selective_copying",
}
# As tabulated in the DeltaNet paper, which measured its own row and took the others from the MAD paper
PUBLISHED_BASELINES = {
    "softmax": (94.1, 86.8, 29.8, 85.2, 51.6, 99.6),
    "mamba": (90.4, 90.1, 6.7, 89.5, 52.7, 86.3),
    "gla": (80.8, 81.6, 6.9, 63.3, 38.8, 88.6),
    "deltanet": (100.0, 100.0, 35.7, 52.8, 42.2, 100.0),
}
