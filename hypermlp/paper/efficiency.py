"""The paper's efficiency table: FLOPs of a GPT-2 body, as counted by PyTorch's profiler."""

SETTING = {"hidden": 768, "layers": 12, "length": 1024}
MFLOPS_PER_TOKEN = {  # mixer -> (forward, training)
    "G-cg-q-12o": (183.27, 549.76),
    "softmax": (169.89, 509.65),
    "softmax-naive": (207.84, 623.41),
    "linear": (169.94, 509.75),
    "gla": (208.03, 623.90),
    "hgrn2": (169.89, 509.65),
    "gsa": (184.04, 552.11),
    "mamba": (156.33, 468.97),
    "rwkv7": (179.35, 538.09),
    "path": (171.29, 513.84),
}
