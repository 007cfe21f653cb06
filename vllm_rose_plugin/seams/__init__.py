"""The only code that names vLLM internals: one file per seam, and the table of patches."""
