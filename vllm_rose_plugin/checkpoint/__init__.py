"""MXFP8 conversion and checking of safetensors checkpoints. Imports no vLLM."""
