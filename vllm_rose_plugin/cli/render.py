"""``rose render``: one recipe as vLLM config files, a Slurm job, Kubernetes objects or a compose file."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_rose_plugin.cli import UserError

if TYPE_CHECKING:
    from vllm_rose_plugin.recipes.render.common import Options
    from vllm_rose_plugin.recipes.schema import Recipe

HELP = "render a recipe as vLLM config files, a Slurm job, Kubernetes objects or a compose file"
FORMS = ("vllm", "srt-slurm", "kubernetes", "docker-compose")
RDMA_RESOURCE = "rdma/ib"
_ONLY = {
    "image": FORMS[1:],
    "router_image": FORMS[1:],
    "nodes": ("vllm",),
    "rdma_resource": ("kubernetes",),
}
"""Options that not every form has a use for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``rose render``."""
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="a recipe file, such as recipes/NAME.yaml")
    parser.add_argument("--as", dest="form", required=True, choices=FORMS, help="what to render")
    parser.add_argument(
        "--role", action="append", default=[], metavar="ROLE", help="only this role (or router); may be repeated"
    )
    parser.add_argument(
        "--overlay", action="append", default=[], metavar="NAME", help="merge this overlay of the recipe; in this order"
    )
    parser.add_argument("--image", metavar="NAME@sha256:…", help="image of the servers, for every form but vllm")
    parser.add_argument("--router-image", metavar="NAME@sha256:…", help="image of vllm-router, likewise")
    parser.add_argument(
        "--nodes", metavar="HOST,HOST,…", help="vllm: addresses of the nodes in order (default: node-0,node-1,…)"
    )
    parser.add_argument(
        "--rdma-resource",
        metavar="NAME",
        help=f"kubernetes: what the cluster calls an InfiniBand port (default: {RDMA_RESOURCE})",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write the files there instead of printing them one after the other"
    )


def run(args: argparse.Namespace) -> int:
    """Print or write the files."""
    from vllm_rose_plugin.recipes.finding import RecipeError
    from vllm_rose_plugin.recipes.render.common import Options, RenderError
    from vllm_rose_plugin.recipes.schema import load_recipe

    for name, forms in _ONLY.items():
        if getattr(args, name) is not None and args.form not in forms:
            option = "--" + name.replace("_", "-")
            raise UserError(f"{option} says nothing to --as {args.form}: remove it, or render {' or '.join(forms)}")
    options = Options(
        image=args.image,
        router_image=args.router_image,
        roles=tuple(args.role),
        nodes=tuple(args.nodes.split(",")) if args.nodes is not None else (),
        rdma_resource=args.rdma_resource or RDMA_RESOURCE,
    )
    try:
        recipe = load_recipe(args.recipe, overlays=args.overlay)
        roles = [*recipe.roles, *(["router"] if recipe.router.kind != "none" else [])]
        for role in args.role:
            if role not in roles:
                raise RenderError(f"--role {role} is no role of {recipe.name}; legal: {', '.join(roles)}")
        files = _render(args.form, recipe, options)
    except RecipeError as error:
        raise UserError(f"{args.recipe} is no recipe:\n{error}") from error
    except RenderError as error:
        raise UserError(str(error)) from error
    if args.out is None:
        _print(files)
    else:
        _write(files, args.out)
    return 0


def _render(form: str, recipe: "Recipe", options: "Options") -> dict[str, str]:
    from vllm_rose_plugin.recipes.render.compose import render_compose
    from vllm_rose_plugin.recipes.render.kubernetes import render_kubernetes
    from vllm_rose_plugin.recipes.render.slurm import render_srt_slurm
    from vllm_rose_plugin.recipes.render.vllm import render_vllm

    forms = (render_vllm, render_srt_slurm, render_kubernetes, render_compose)
    return dict(zip(FORMS, forms, strict=True))[form](recipe, options)


def _print(files: dict[str, str]) -> None:
    for name, text in files.items():
        if len(files) > 1:
            print(f"##### {name}")
        print(text, end="")


def _write(files: dict[str, str], folder: Path) -> None:
    for name, text in files.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"--out {folder}: can't write {path}: {error.strerror}") from error
        if path.suffix == ".sh":
            path.chmod(0o755)
        print(path)
