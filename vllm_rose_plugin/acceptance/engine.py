"""A vLLM engine in this process, started for the measurement."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_rose_plugin.acceptance.measure import AcceptanceError, Answer, Counters


class Engine:
    """``vllm.LLM`` with a draft; each answer tells its own verification steps (vLLM's
    ``per_request_spec_decode_metrics``)."""

    name = "offline engine"

    def __init__(self, *, model: Path, draft: Path | None, speculative_tokens: int, arguments: dict[str, Any]) -> None:
        """Args:
            model: the target.
            draft: its draft directory; None where it is attached.
            speculative_tokens: drafted at each step.
            arguments: further ones of ``vllm.LLM``.

        Raises:
            AcceptanceError: vLLM can't start so.
        """
        import vllm

        drafting: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": speculative_tokens}
        if draft is not None:
            drafting["model"] = str(draft)
        try:
            self._llm = vllm.LLM(
                model=str(model),
                speculative_config=drafting,
                per_request_spec_decode_metrics="detailed",
                **arguments,
            )
        except (ValueError, TypeError, RuntimeError, OSError) as error:
            raise AcceptanceError(f"vLLM doesn't start with {model} and this draft: {error}") from error
        self.model, self.draft = str(model), None if draft is None else str(draft)
        self.speculative_tokens = speculative_tokens
        self.max_model_len = int(self._llm.model_config.max_model_len)
        self.versions = f"vllm {vllm.__version__}"
        self._tokenizer: Any = self._llm.get_tokenizer()

    def tokenize(self, text: str) -> list[int]:
        """By the model's tokenizer."""
        return list(self._tokenizer.encode(text))

    def tokenize_question(self, question: str) -> list[int]:
        """By its chat template."""
        messages = [{"role": "user", "content": question}]
        found = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return list(found["input_ids"])

    def answer(self, prompts: Sequence[list[int]], *, max_tokens: int, temperature: float) -> list[Answer]:
        """All in one call; vLLM batches as it sees fit."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        outputs = self._llm.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts],
            SamplingParams(temperature=temperature, max_tokens=max_tokens),
            use_tqdm=False,
        )
        answers = []
        for output in outputs:
            completion = output.outputs[0]
            drafting = completion.spec_decode_metrics
            steps = () if drafting is None else tuple(drafting.per_step_accepted)
            answers.append(Answer(len(completion.token_ids), steps))
        return answers

    def counters(self, *, generated: int) -> Counters | None:
        """Not needed: answers tell all."""
        return None
