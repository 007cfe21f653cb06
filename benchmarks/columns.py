"""The columns of every benchmarks/results/<area>.csv."""

COLUMNS = [
    "area",
    "case",
    "provider",
    "shape",
    "us",
    "gb_per_s",
    "tflop_per_s",
    "share_of_limit",
    "device",
    "versions",
    "commit",
    "date",
]
