"""Recipes: one file per deployment, from a rack's hardware down to vLLM's own flags. Imports neither torch nor vLLM."""
