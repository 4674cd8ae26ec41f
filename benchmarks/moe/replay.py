"""Is the trained model the one that was sampled from? Trains on served samples.

    python benchmarks/moe/replay.py [--requests 12] [--dtypes float32 bfloat16] --out benchmarks/moe/results

The server of serve.py samples from a small Qwen3-MoE of transformers with random weights, with
continuous batching: prefill in chunks, decoding, tokens of several requests in one call. Then
transformers runs the model on the sequences as a padded batch, for a policy gradient step. Each
sampled token gives the difference of its log-probability and the KL divergence of the two distributions.

Replay gives the second pass the experts of the first (clients/routing.py). ``invariant`` replaces
F.linear and F.scaled_dot_product_attention in both passes by products whose sums do not depend on other
tokens; norms, rotations, softmax and F.moe_mlp are invariant already. A row "all but X" leaves X
unchanged and shows the effect of X alone.
"""

import contextlib
import pathlib
import sys
import time


sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent / "clients")]

from packages import require_transformers
from report import figure, parse, progress, show
from serve import draw_trace, Request, Server

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from demo.text import read_corpus
from measure import save


VOCABULARY, EXPERTS, TOP_K = 256, 32, 4
LENGTH = 128  # of the longest sequence
PARTS = ("attention", "projections", "router", "lm_head")


class Invariant(TorchFunctionMode):
    """Gives the sums in some parts of a model one order, for any number of tokens."""

    def __init__(self, model: torch.nn.Module, parts: tuple[str, ...]) -> None:
        super().__init__()
        self.attention, self.weights = "attention" in parts, set()
        for name, p in model.named_parameters():
            kind = "router" if "gate.weight" in name else "projections"
            if (kind if "lm_head" not in name else "lm_head") in parts:
                self.weights.add(p)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear and args[1] in self.weights:
            x, weight = args[0].float(), args[1].float()
            rows = x.flatten(0, -2).split(64)  # bounds the memory of the products
            sums = [(row.unsqueeze(-2) * weight).sum(-1) for row in rows]
            return torch.cat(sums).view(*x.shape[:-1], -1).to(args[0].dtype)
        if func is F.scaled_dot_product_attention and self.attention:
            return attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def attend(
    q,
    k,
    v,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
):
    """Each query by itself, over keys of one length."""
    missing = LENGTH - k.shape[-2]
    k, v = (
        F.pad(t.float(), (0, 0, 0, missing)).repeat_interleave(
            q.shape[1] // t.shape[1], 1
        )
        for t in (k, v)
    )
    n = q.shape[-2]
    mask = torch.ones(n, n, dtype=torch.bool).tril() if is_causal else attn_mask
    mask = F.pad(mask, (0, LENGTH - mask.shape[-1]))
    scores = (q.float().unsqueeze(-2) * k.unsqueeze(-3)).sum(-1) * scale
    p = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return (p.unsqueeze(-1) * v.unsqueeze(-3)).sum(-2).to(q.dtype)


def build(dtype: torch.dtype, experts: str):
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        hidden_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=VOCABULARY, moe_intermediate_size=64, num_experts=EXPERTS,
        num_experts_per_tok=TOP_K, initializer_range=0.08, use_cache=False,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.set_experts_implementation(experts)
    return model


class Engine:
    """A model of transformers for Server: tokens of all requests in one row."""

    def __init__(self, model) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self.model = model
        self.generator = torch.Generator().manual_seed(1)
        self.logprobs: dict[Request, list[Tensor]] = {}  # (V,) of every sampled token
        self.routing: dict[Request, list[dict[str, Tensor]]] = {}
        self.batch: list[tuple[Request, Tensor]] = []
        ALL_ATTENTION_FUNCTIONS.register("serve", self.attend)

    def step(self, batch: list[tuple[Request, Tensor]]) -> list[int]:
        from routing import record_routing

        self.batch, model = batch, self.model.model
        counts = [len(tokens) for _, tokens in batch]
        places = [torch.arange(r.done, r.done + len(tokens)) for r, tokens in batch]
        x = model.embed_tokens(torch.cat([tokens for _, tokens in batch]))[None]
        rotations = model.rotary_emb(x, torch.cat(places)[None])
        self.model.config._attn_implementation = "serve"
        with record_routing(self.model) as record:
            for layer in model.layers:
                x = layer(x, position_embeddings=rotations)
        self.model.config._attn_implementation = "sdpa"
        last = torch.tensor(counts).cumsum(0) - 1
        logits = self.model.lm_head(model.norm(x)[0, last])
        logprobs = logits.float().log_softmax(-1)
        made = torch.multinomial(logprobs.exp(), 1, generator=self.generator)[:, 0]
        ids = {name: part.split(counts) for name, part in record.items()}
        for i, (request, tokens) in enumerate(batch):
            part = {name: parts[i] for name, parts in ids.items()}
            self.routing.setdefault(request, []).append(part)
            if request.done + len(tokens) >= len(request.prompt):
                self.logprobs.setdefault(request, []).append(logprobs[i])
        return made.tolist()

    def attend(self, module, q, k, v, mask, *, scaling, **options):
        counts, outputs = [len(tokens) for _, tokens in self.batch], []
        for (request, tokens), *parts in zip(
            self.batch, *(t.split(counts, 2) for t in (q, k, v))
        ):
            if len(request.cache) <= module.layer_idx:
                size = (2, *k.shape[:2], LENGTH, k.shape[-1])
                request.cache.append(torch.zeros(size, dtype=k.dtype))
            n, end = len(tokens), request.done + len(tokens)
            cache = request.cache[module.layer_idx]
            cache[..., request.done : end, :] = torch.stack(parts[1:])
            causal = torch.ones(n, end, dtype=torch.bool).tril(end - n)
            keys, values = cache[..., :end, :]
            y = F.scaled_dot_product_attention(
                parts[0], keys, values, attn_mask=causal, scale=scaling, enable_gqa=True
            )
            outputs.append(y.transpose(1, 2))
        return torch.cat(outputs, 1), None


@torch.no_grad()
def roll_out(model, count: int) -> tuple[Engine, list[Request]]:
    text, requests = read_corpus().train, []
    for i, drawn in enumerate(draw_trace(count, 16.0)):
        prompt = text[1000 * i :][: max(4, drawn["prompt"] // 8)].long()
        wanted = min(LENGTH - len(prompt), drawn["wanted"])
        requests.append(Request(drawn["arrival"], prompt, wanted))
    engine = Engine(model)
    server = Server(engine, list(requests), time.process_time)
    while server.waiting or server.running:
        if not server.running:
            server.clock = max(server.clock, server.next_arrival())
        server.step(lambda seconds: seconds)
    return engine, requests


def train(model, engine: Engine, requests: list[Request], replay: bool) -> dict:
    """A policy gradient step on the rollout, and the differences of the two passes."""
    from routing import record_routing, replay_routing

    ids = torch.zeros(len(requests), LENGTH, dtype=torch.int64)
    record = {
        name: torch.arange(TOP_K, dtype=torch.int8).repeat(len(requests), LENGTH, 1)
        for name in engine.routing[requests[0]][0]
    }
    for i, request in enumerate(requests):
        sequence = torch.cat(
            [request.prompt, torch.tensor(request.made[:-1], dtype=torch.int64)]
        )
        ids[i, : len(sequence)] = sequence
        for name, rows in record.items():
            rows[i, : len(sequence)] = torch.cat(
                [p[name] for p in engine.routing[request]]
            )
    record = {name: rows.flatten(0, 1) for name, rows in record.items()}
    routing = replay_routing(model, record) if replay else record_routing(model)
    with routing as seen:
        logits = model(input_ids=ids).logits.float()
        trained = logits.log_softmax(-1)
        now, before, tokens = [], [], []
        for row, request in zip(trained, requests):
            first = len(request.prompt) - 1
            now.append(row[first : first + len(request.made)])
            before += engine.logprobs[request]
            tokens += request.made
        now, before = torch.cat(now), torch.stack(before)
        chosen = torch.tensor(tokens)[:, None]
        differences = (now.gather(1, chosen) - before.gather(1, chosen))[:, 0]
        (-differences.exp().mean()).backward()  # the ratio of policies, all rewards 1
    seen = record if replay else seen
    real = torch.cat([
        torch.arange(i * LENGTH, i * LENGTH + len(r.prompt) + len(r.made) - 1)
        for i, r in enumerate(requests)
    ])  # fmt: skip
    other = [
        (record[n][real].sort()[0] != seen[n][real].sort()[0]).any(-1) for n in record
    ]
    before, now = before.double(), now.detach().double()
    return {
        "tokens": len(chosen),
        "other_experts": torch.stack(other).double().mean().item(),
        "largest": differences.abs().max().item(),
        "mean": differences.abs().mean().item(),
        "kl": (before.exp() * (before - now)).sum(-1).mean().item(),
        "differences": differences.abs().tolist(),
    }


def forms() -> dict[str, tuple[str, bool, tuple[str, ...]]]:
    """Experts, replay, and invariant parts of each row."""
    found = {
        "transformers": ("grouped_mm", False, ()),
        "F.moe_mlp": ("moe_mlp", False, ()),
        "replay": ("moe_mlp", True, ()),
        "replay, invariant": ("moe_mlp", True, PARTS),
        "invariant": ("moe_mlp", False, PARTS),
    }
    for part in PARTS:
        left = tuple(p for p in PARTS if p != part)
        found[f"all but {part}"] = ("moe_mlp", True, left)
    for experts in ("grouped_mm", "eager"):
        found[f"all but experts: {experts}"] = (experts, True, PARTS)
    return found


def main() -> None:
    args = parse(__doc__, requests=12, dtypes=["float32", "bfloat16"])
    require_transformers()
    import transformers_experts  # noqa: F401  registers moe_mlp

    torch.set_num_threads(1)
    rows = []
    cases = [(dtype, form) for dtype in args.dtypes for form in forms()]
    with progress("Rollouts", len(cases)) as advance:
        for dtype, form in cases:
            experts, replay, parts = forms()[form]
            model = build(getattr(torch, dtype), experts)
            with Invariant(model, parts) if parts else contextlib.nullcontext():
                row = train(model, *roll_out(model, args.requests), replay)
            rows.append({"dtype": dtype, "form": form, **row})
            advance(form)
    columns = ("dtype", "form", "tokens", "other_experts", "largest", "mean", "kl")
    show("Sampled tokens, rollout against training", rows, columns)
    save(args.out, length=LENGTH, rows=rows)
    if args.out:
        plot(rows, args.out.with_suffix(".png"))


def plot(rows: list[dict], path: pathlib.Path) -> None:
    """Differences of the log-probabilities of sampled tokens, sorted; zeros are below the axis."""
    dtypes = dict.fromkeys(row["dtype"] for row in rows)
    grid = {"figsize": (6 * len(dtypes), 4), "squeeze": False}
    with figure(path, 1, len(dtypes), **grid) as axes:
        for axis, dtype in zip(axes[0], dtypes):
            for row in rows:
                if row["dtype"] == dtype and not row["form"].startswith("all but"):
                    zeros = ", all 0" if row["largest"] == 0 else ""
                    axis.plot(sorted(row["differences"]), label=row["form"] + zeros)
            axis.set(
                xlabel="sampled tokens",
                ylabel="|difference of log-probability|",
                yscale="log",
            )
            axis.set_title(dtype)
            axis.legend(fontsize=8)


if __name__ == "__main__":
    main()
