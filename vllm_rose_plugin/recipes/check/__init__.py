"""``rose check``: what is wrong with a recipe, found on a machine with no GPU. One module per kind of fault."""
