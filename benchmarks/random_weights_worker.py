"""For ``worker_extension_cls``: vLLM imports this in every worker before it makes the model, and that is enough."""

from random_weights import give_random_weights

give_random_weights()


class RandomWeights:
    """What vLLM asks for; adds nothing to a worker."""
