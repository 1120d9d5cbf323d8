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
LATENCY = {  # mixer -> seconds of a forward pass and of a training step, batch 8, on one NVIDIA L40S
    "G-cg-q-12o": (0.0395, 0.1190),
    "softmax": (0.0300, 0.0880),
    "softmax-naive": (0.0552, 0.2689),
    "linear": (0.0264, 0.0775),
    "gla": (0.0929, 0.2945),
    "hgrn2": (0.0295, 0.0880),
    "gsa": (0.0378, 0.1244),
    "mamba": (0.0306, 0.0899),
    "rwkv7": (0.0532, 0.1711),
    "path": (0.0349, 0.1280),
}
