"""The baselines: sequence mixers of other papers, with the call, decoding state and contract of a ``Mixer``.

There is one file for each. It is imported when the baseline's name is used (``BASELINES`` in
layers/registry.py).
"""
