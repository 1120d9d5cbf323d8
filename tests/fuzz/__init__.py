"""Fuzzers: random cases with an independent oracle, wrong command lines, damaged files, malformed requests.

``make fuzz MINUTES=30`` runs all of them; docs/reliability.md describes them.
"""
