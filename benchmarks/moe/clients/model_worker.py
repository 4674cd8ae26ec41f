"""Runs a whole model, of transformers or of an engine, in a process that whole_model.py commands.

    python model_worker.py transformers|vllm THREADS huge|small

``draw`` a model into a folder, ``load`` it and ``generate`` so many tokens for prompts by a form; the answer
is the tokens, the seconds that took, and those of them that experts had, where they can be told apart.
"""

import os
import pathlib
import sys
import time

import torch


sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "engine"))

from worker import serve


class Transformers:
    """transformers' own implementations of its experts, and F.moe_mlp, in the same model."""

    def draw(self, path: str, sizes: dict) -> None:
        from packages import require_transformers

        require_transformers()
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
        model.bfloat16().save_pretrained(path)

    def load(self, path: str) -> list[str]:
        import transformers_experts
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
        self.model, self.experts = model, 0.0
        for experts in transformers_experts.experts_of(model):
            experts.register_forward_pre_hook(self._enter)
            experts.register_forward_hook(self._leave)
        # Not batched_mm, which copies the weights of every token.
        return ["moe_mlp", "grouped_mm", "eager"]

    def _enter(self, *args) -> None:
        self.experts -= time.perf_counter()

    def _leave(self, *args) -> None:
        self.experts += time.perf_counter()

    def generate(self, form: str, prompts: list[list[int]], count: int) -> dict:
        self.model.set_experts_implementation(form)
        ids, self.experts = torch.tensor(prompts), 0.0
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        start = time.perf_counter()
        with torch.no_grad():
            made = self.model.generate(ids, pad_token_id=0, **options)
        seconds = time.perf_counter() - start
        tokens = made[:, ids.shape[1] :].tolist()
        return {"seconds": seconds, "experts": self.experts, "tokens": tokens}


class Vllm:
    """vLLM's engine without its server, in this process."""

    def load(self, path: str) -> list[str]:
        os.environ |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM

        off = {"skip_tokenizer_init": True, "enable_prefix_caching": False}
        self.llm = LLM(model=path, dtype="bfloat16", max_model_len=1024, **off)
        return ["vllm"]

    def generate(self, form: str, prompts: list[list[int]], count: int) -> dict:
        from vllm import SamplingParams

        wanted = SamplingParams(
            max_tokens=count, ignore_eos=True, temperature=0, detokenize=False
        )
        asked = [{"prompt_token_ids": p} for p in prompts]
        start = time.perf_counter()
        made = self.llm.generate(asked, wanted, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = [list(m.outputs[0].token_ids) for m in made]
        return {"seconds": seconds, "tokens": tokens}


if __name__ == "__main__":
    serve({"transformers": Transformers, "vllm": Vllm}[sys.argv[1]]())
