"""Device functions that the kernels share: memory order, wide accesses, reductions, barriers, waiting.

The DSL's own functions wherever it has them; what is added here is the name, the legal values and why one would use it.
Each has a test that finds its instruction in the machine code of every target.
"""
