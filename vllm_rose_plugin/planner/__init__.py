"""How many prefill and decode replicas a load needs, and what a model's weights and caches weigh."""
