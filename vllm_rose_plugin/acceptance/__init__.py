"""How many of a draft's tokens the target accepts: measured on vLLM, by draft position and by context length.

`rose bench mtp` measures and writes; the planner reads the JSON file. Imports no vLLM until an engine is asked for.
"""
