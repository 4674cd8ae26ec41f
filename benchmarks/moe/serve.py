"""Serve a small MoE language model with continuous batching: F.moe_mlp beside transformers' experts.

    python benchmarks/moe/serve.py [--ranks 1 2] [--requests 40] [--rate 16] [--clock wall] --out benchmarks/moe/results

One trace of arrivals, drawn once and written into the JSON, is replayed for every form. Requests come
in bursts, each with a prompt of real text and a number of bytes to generate. A step takes the next
byte of every running request and chunks of waiting prompts, up to a budget of tokens, so it mixes
prefill and decoding. Every form has its own server, and the servers take turns, step by step. The
clock of a server moves by the time of its steps, and jumps to the next arrival when it is idle.
With two ranks, each serves every other request and holds half of the experts; a rank without tokens
still takes part in the exchange. All forms use the same token switch there.

The model has random weights; attention, router and the rest are the same code for all forms. Every
rank is one thread. A step is timed by process time, that of the slower rank, which excludes
other jobs on the machine and waiting for the other rank; ``--clock wall`` includes them.
"""

import dataclasses
import statistics
import time
from collections import deque
from collections.abc import Callable

from peers import make_peers, OURS
from report import parse, progress, show
from shapes import SERVE_SHAPE as SHAPE

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from demo.text import read_corpus
from measure import on_gloo_ranks, over_ranks, save


FORMS = (OURS, "transformers_grouped_mm", "transformers_eager")
LAYERS, HEADS, VOCABULARY = 2, 8, 256
TOKENS_PER_STEP, RUNNING = 128, 16  # budget of a step, requests at a time
CLOCKS = {"process": time.process_time, "wall": time.perf_counter}


@dataclasses.dataclass(eq=False)  # compared by identity, as tensors compare elementwise
class Request:
    """One request and its state."""

    arrival: float  # seconds
    prompt: Tensor  # (P,) int64
    wanted: int  # bytes to generate
    done: int = 0  # tokens whose keys and values are cached
    made: list[int] = dataclasses.field(default_factory=list)  # bytes
    times: list[float] = dataclasses.field(default_factory=list)  # of each of them
    cache: list[Tensor] = dataclasses.field(default_factory=list)

    def next_tokens(self, budget: int) -> Tensor:
        if self.done < len(self.prompt):
            return self.prompt[self.done : self.done + budget]
        return torch.tensor(self.made[-1:])


def draw_trace(count: int, rate: float) -> list[dict]:
    """Arrivals in bursts of one to six at ``rate`` requests/s, long-tailed lengths."""
    g = torch.Generator().manual_seed(0)
    trace, now = [], 0.0
    while len(trace) < count:
        burst = int(torch.randint(1, 7, (), generator=g))
        now += -burst / rate * float(torch.rand((), generator=g).clamp(min=1e-3).log())
        for _ in range(burst):
            prompt, wanted = (torch.randn(2, generator=g) * 0.7).exp().tolist()
            prompt = min(512, max(8, int(96 * prompt)))
            wanted = min(96, max(4, int(24 * wanted)))
            trace.append({"arrival": now, "prompt": prompt, "wanted": wanted})
    return trace[:count]


class Model:
    """A decoder whose experts are one of FORMS; all have the same weights."""

    def __init__(self, name: str, switch=None) -> None:
        ranks, rank = (dist.get_world_size(), dist.get_rank()) if switch else (1, 0)
        g = torch.Generator().manual_seed(0)
        D, E, Fh = SHAPE.D, SHAPE.E, SHAPE.F

        def weight(*size: int) -> Tensor:
            return (torch.randn(size, generator=g) * size[-1] ** -0.5).bfloat16()

        mine = slice(rank * E // ranks, (rank + 1) * E // ranks)
        self.name, self.switch = name, switch
        self.embedding = torch.randn(VOCABULARY, D, generator=g).bfloat16()
        self.layers = []
        for _ in range(LAYERS):
            qkv, out, router = weight(3 * D, D), weight(D, D), weight(E, D)
            experts = (weight(E, 2 * Fh, D)[mine], weight(E, D, Fh)[mine])
            self.layers.append((qkv, out, router, tuple(w.clone() for w in experts)))
        local = dataclasses.replace(SHAPE, E=E // ranks)
        self.call = next(p.call for p in make_peers(local)[0] if p.name == name)

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, w: tuple) -> Tensor:
        if self.switch is None:
            return self.call(x, ids, weights.to(x.dtype), *w)
        routing = self.switch.create_routing(ids, layout="flat")
        rows, weights, ids = self.switch.dispatch(routing, x, weights)
        if self.name != OURS:
            rows = self.slots_here(rows, ids, weights, w)
        elif len(rows):
            rows = self.call(rows, ids, weights, *w)
        return self.switch.combine(routing, rows)

    def slots_here(self, rows, ids, weights, w: tuple) -> Tensor:
        """Experts without an id for "not here" get each local slot as its own row."""
        row, slot = (ids >= 0).nonzero(as_tuple=True)
        y = torch.zeros_like(rows)
        if len(row):
            local, scores = (t[row, slot, None] for t in (ids.long(), weights))
            y.index_add_(0, row, self.call(rows[row], local, scores.to(rows.dtype), *w))
        return y

    def step(self, batch: list[tuple[Request, Tensor]]) -> list[int]:
        """The next byte of every request of the batch; caches keys and values."""
        D = SHAPE.D
        counts = [len(tokens) for _, tokens in batch]
        x = torch.empty(0, D, dtype=torch.bfloat16)
        if batch:
            x = self.embedding[torch.cat([tokens for _, tokens in batch])]
        for i, (qkv, out, router, experts) in enumerate(self.layers):
            h = F.linear(F.rms_norm(x, (D,)), qkv)
            parts = zip(batch, h.split(counts))
            attended = [self.attend(request, h, i) for (request, _), h in parts]
            x = x + F.linear(torch.cat(attended), out) if batch else x
            h = F.rms_norm(x, (D,))
            ids, weights = F.moe_topk(F.linear(h, router), SHAPE.K)
            x = x + self.experts(h, ids, weights, experts)
        if not batch:
            return []
        last = torch.tensor(counts).cumsum(0) - 1
        return F.linear(x[last], self.embedding).argmax(-1).tolist()

    def attend(self, request: Request, qkv: Tensor, layer: int) -> Tensor:
        n, D = len(qkv), SHAPE.D
        q, k, v = qkv.view(n, 3, HEADS, D // HEADS).permute(1, 2, 0, 3)
        if len(request.cache) <= layer:
            sizes = (2, HEADS, len(request.prompt) + request.wanted, D // HEADS)
            request.cache.append(torch.empty(sizes, dtype=qkv.dtype))
        end = request.done + n
        request.cache[layer][:, :, request.done : end] = torch.stack([k, v])
        k, v = request.cache[layer][:, None, :, :end]
        mask = torch.ones(n, end, dtype=torch.bool).tril(end - n) if n > 1 else None
        y = F.scaled_dot_product_attention(q[None], k, v, attn_mask=mask)
        return y[0].transpose(0, 1).flatten(1)


class Server:
    """Continuous batching of one form."""

    def __init__(self, model: Model, requests: list[Request], timer: Callable) -> None:
        self.model, self.timer, self.clock, self.tokens = model, timer, 0.0, 0
        self.waiting, self.running = deque(requests), []
        self.finished: list[Request] = []
        self.steps: list[tuple[int, float]] = []

    def next_arrival(self) -> float:
        return self.waiting[0].arrival if self.waiting else float("inf")

    def batch(self) -> list[tuple[Request, Tensor]]:
        while len(self.running) < RUNNING and self.next_arrival() <= self.clock:
            self.running.append(self.waiting.popleft())
        # Decoding comes first: these requests need one token each.
        left, batch = TOKENS_PER_STEP, []
        for request in sorted(self.running, key=lambda r: r.done < len(r.prompt)):
            tokens = request.next_tokens(left)
            if len(tokens):
                batch.append((request, tokens))
                left -= len(tokens)
        return batch

    def step(self, together: Callable[[float], float]) -> int:
        """Runs a step and moves the clock by its time on the slowest rank; the finished requests."""
        batch, before = self.batch(), len(self.finished)
        start = self.timer()
        made = self.model.step(batch)
        seconds = together(self.timer() - start)
        self.clock += seconds
        self.steps.append((sum(len(tokens) for _, tokens in batch), seconds))
        for (request, tokens), byte in zip(batch, made):
            request.done += len(tokens)
            self.tokens += len(tokens)
            if request.done >= len(request.prompt):
                request.made.append(byte)
                request.times.append(self.clock)
                if len(request.made) == request.wanted:
                    request.cache.clear()
                    self.running.remove(request)
                    self.finished.append(request)
        return len(self.finished) - before


@torch.inference_mode()
def serve(trace: list[dict], clock: str) -> dict[str, dict]:
    """Runs all forms in turns; the results of each, on all ranks together."""
    switch, rank, ranks = None, 0, 1
    if dist.is_initialized():
        from torch.distributed._moe.all_to_all import TokenSwitchAllToAll

        switch = TokenSwitchAllToAll(dist.group.WORLD, SHAPE.E)
        rank, ranks = dist.get_rank(), dist.get_world_size()
    text = read_corpus().held_out.long()
    servers = {}
    for name in FORMS:
        requests = [
            Request(r["arrival"], text[991 * i :][: r["prompt"]], r["wanted"])
            for i, r in enumerate(trace)
        ]
        model = Model(name, switch)
        servers[name] = Server(model, requests[rank::ranks], CLOCKS[clock])
        warm = Request(0, text[:32], 1)
        servers[name].model.step([(warm, warm.prompt)])
    slowest = over_ranks if dist.is_initialized() else list
    active = list(FORMS)
    with progress("Requests", 0 if rank else len(servers[OURS].waiting)) as advance:
        while active:
            for name in list(active):
                server = servers[name]
                if not slowest([len(server.waiting) + len(server.running)])[0]:
                    active.remove(name)
                    continue
                at = server.clock if server.running else server.next_arrival()
                at = -slowest([-max(at, server.clock)])[0]  # the earliest of the ranks
                server.clock = max(server.clock, at)
                done = server.step(lambda seconds: slowest([seconds])[0])
                for _ in range(0 if rank or name != OURS else done):
                    advance()
    return {name: summary(server) for name, server in servers.items()}


def summary(server: Server) -> dict[str, object]:
    done = server.finished
    times = [[request.arrival, *request.times] for request in done]
    return {
        "seconds": server.clock,
        "generated": sum(len(r.made) for r in done),
        "tokens": server.tokens,
        "latencies": [b - a for t in times for a, b in zip(t[1:], t[2:])],
        "first": [t[1] - t[0] for t in times],
        "steps": server.steps,
        "bytes": sorted(r.made for r in done),
    }


def run(ranks: int, trace: list[dict], clock: str) -> list[dict]:
    """One row per form."""
    if ranks == 1:
        parts = [serve(trace, clock)]
    else:
        parts = on_gloo_ranks(ranks, serve, trace, clock)
    rows = []
    for name in FORMS:
        seen = [part[name] for part in parts]
        seconds = max(s["seconds"] for s in seen)
        row = {
            "ranks": ranks,
            "form": name,
            "bytes_per_s": sum(s["generated"] for s in seen) / seconds,
            "tokens_per_s": sum(s["tokens"] for s in seen) / seconds,
            "busy_s": sum(s[1] for s in seen[0]["steps"]),
        }
        for key, values in (("token", "latencies"), ("first", "first")):
            ms = sorted(1e3 * v for s in seen for v in s[values])
            row[f"{key}_ms_p50"] = statistics.median(ms)
            row[f"{key}_ms_p99"] = ms[int(0.99 * (len(ms) - 1))]
        pairs = [zip(part[name]["bytes"], part[OURS]["bytes"]) for part in parts]
        row["same_bytes"] = statistics.fmean(a == b for p in pairs for a, b in p)
        row["steps"] = [[n, 1e3 * t] for s in seen for n, t in s["steps"] if n]
        rows.append(row)
    for row in rows:
        row["busy_to_ours"] = row["busy_s"] / rows[0]["busy_s"]
    return rows


def main() -> None:
    options = {"ranks": [1, 2], "requests": 40, "rate": 16.0, "clock": tuple(CLOCKS)}
    args = parse(__doc__, **options)
    torch.set_num_threads(1)
    trace, rows = draw_trace(args.requests, args.rate), []
    for ranks in args.ranks:
        rows += run(ranks, trace, args.clock)
    title = f"{args.requests} requests, {args.rate:g}/s; ms per generated byte and to the first"
    show(title, rows, [name for name in rows[0] if name != "steps"])
    shape = SHAPE.sizes() | {"layers": LAYERS}
    save(args.out, shape=shape, clock=args.clock, rows=rows, trace=trace)


if __name__ == "__main__":
    main()
