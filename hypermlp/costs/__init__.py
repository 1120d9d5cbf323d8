"""Parameters, FLOPs and memory of mixers and models.

hypermlp.costs.mixer      one layer: parameter_count, forward_flops, state_bytes and their parts
hypermlp.costs.model      a language model, part by part
hypermlp.costs.plan       what a recipe needs on given GPUs (`hypermlp plan`)
hypermlp.costs.profiler   FLOPs as PyTorch's profiler counts them
"""
