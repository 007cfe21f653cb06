"""``GET /rose/stats`` on vLLM's API server: what the workers themselves say they run.

An endpoint plugin in vLLM's sense (``vllm.endpoint_plugins``): loaded only where ``VLLM_PLUGINS`` names ``rose``.
"""

from argparse import Namespace
from typing import Any

from fastapi import FastAPI, HTTPException, Request


class RoseEndpoint:
    """Adds the route; every answer is one ``collective_rpc`` to all workers."""

    name = "rose"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Register ``GET /rose/stats``."""
        app.add_api_route("/rose/stats", _stats, methods=["GET"])

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Keep vLLM's engine client for the route."""
        state.rose_engine_client = engine_client


async def _stats(request: Request) -> dict[str, Any]:
    engine_client = getattr(request.app.state, "rose_engine_client", None)
    if engine_client is None:
        raise HTTPException(status_code=503, detail="this server has no engine")
    return {"workers": await engine_client.collective_rpc("rose_stats")}
