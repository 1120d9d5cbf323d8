"""Peers of HyperMLP with the same call, state and contract.

One file each, loaded when its name is asked for.
"""
