"""MXFP8 mixture-of-experts serving for vLLM. Importing this package imports neither torch nor vLLM."""

__version__ = "0.1.0"


class PluginError(RuntimeError):
    """The plugin can't work here; the message names it and the ways out."""


def register() -> None:
    """Entry point ``vllm.general_plugins: rose``; vLLM calls it in every process.

    Raises:
        PluginError: the plugin can't be installed into this vLLM. vLLM doesn't catch what an entry point raises, so
            a broken or mismatched plugin ends start-up instead of leaving stock behaviour behind a rose flag.
    """
    import os

    if os.environ.get("VLLM_ROSE_DISABLE", "0").strip().lower() in ("1", "true", "yes", "on"):
        return
    try:
        from vllm_rose_plugin.seams.install import install

        install()
    except PluginError:
        raise
    except Exception as error:
        raise PluginError(
            f"vllm_rose_plugin {__version__} is broken ({type(error).__name__}: {error}). "
            "Reinstall vllm-rose-plugin, or set VLLM_ROSE_DISABLE=1 to run vLLM without it."
        ) from error
