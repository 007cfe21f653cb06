"""The command line of vllm-router, the vLLM project's router that knows prefill and decode.

Flags as in vllm-router 0.1.17, PyPI; https://github.com/vllm-project/router. In its NIXL mode it sends a request to a
prefill server with ``do_remote_decode``, takes the KV parameters from the answer and sends the request with them to a
decode server.
"""

from vllm_rose_plugin.recipes.render.common import LOAD_SECONDS, ROUTER_METRICS_PORT, Deployment

VERSION = "0.1.17"
"""The vllm-router that the flags are from."""


def static_router(deployment: Deployment, urls: dict[str, list[str]]) -> list[str]:
    """The router over servers with known addresses, by role."""
    words = _common(deployment)
    if deployment.recipe.kv_transfer is None:
        return [*words, "--worker-urls", *urls["serve"]]
    for role in ("prefill", "decode"):
        for url in urls[role]:
            words += [f"--{role}", url]
    return words


def discovering_router(deployment: Deployment, selectors: dict[str, dict[str, str]], port: int) -> list[str]:
    """The router that watches a Kubernetes namespace for ready pods with these labels, by role."""
    words = _common(deployment)
    words += ["--service-discovery", "--service-discovery-port", str(port)]
    words += ["--service-discovery-namespace", "$(POD_NAMESPACE)"]
    for role, labels in selectors.items():
        flag = "--selector" if role == "serve" else f"--{role}-selector"
        words += [flag, *(f"{key}={value}" for key, value in labels.items())]
    return words


def _common(deployment: Deployment) -> list[str]:
    router = deployment.recipe.router
    words = ["vllm-router", "--host", "0.0.0.0", "--port", str(router.port)]
    if router.policy is not None:
        words += ["--policy", router.policy]
    if deployment.recipe.kv_transfer is not None:
        words += ["--vllm-pd-disaggregation", "--kv-connector", "nixl"]
    words += ["--prometheus-host", "0.0.0.0", "--prometheus-port", str(ROUTER_METRICS_PORT)]
    return [*words, "--worker-startup-timeout-secs", str(LOAD_SECONDS)]
