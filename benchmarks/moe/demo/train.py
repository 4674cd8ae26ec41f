"""Train several models in lockstep: same initial weights, same batches, one after the other."""

import dataclasses
import math
import time

from peers import MoEBlock

import torch
from torch import Tensor

from demo.model import LanguageModel, ModelConfig


PEAK_LEARNING_RATE = 2e-3


@dataclasses.dataclass
class Run:
    """One model in training and its record of every step."""

    name: str
    model: LanguageModel
    optimizer: torch.optim.Optimizer
    losses: list[float] = dataclasses.field(default_factory=list)  # before the update
    seconds: list[float] = dataclasses.field(default_factory=list)

    def step(self, window: Tensor, learning_rate: float) -> None:
        start = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.zero_grad()
        loss = self.model.loss(window)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - start)

    @torch.no_grad()
    def evaluate(self, windows: Tensor) -> float:
        """Mean loss over (N, B, S + 1) windows."""
        losses = [self.model.loss(window) for window in windows]
        return torch.stack(losses).mean().item()


def make_run(name: str, model: LanguageModel, groups: list[list]) -> Run:
    """Groups are parameters that one fused update can take: no DTensors on different meshes."""
    params = [{"params": group} for group in groups]
    options = {"betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
    return Run(name, model, torch.optim.AdamW(params, **options))


def make_runs(blocks: dict[str, MoEBlock], config: ModelConfig, seed: int) -> list[Run]:
    """One run per named block, all with the initial weights that ``seed`` gives."""
    runs = []
    for name, block in blocks.items():
        torch.manual_seed(seed)
        model = LanguageModel(config, block)
        runs.append(make_run(name, model, [list(model.parameters())]))
    return runs


def learning_rate(step: int, num_steps: int) -> float:
    """Linear warm-up over the first quarter times half a cosine down to a tenth of the peak."""
    warmup = min(1.0, (step + 1) / (0.25 * num_steps))
    cosine = 0.5 * (1 + math.cos(math.pi * step / num_steps))
    return PEAK_LEARNING_RATE * warmup * (0.1 + 0.9 * cosine)


def train(runs: list[Run], batches: Tensor, on_step=lambda step: None) -> None:
    """Train every run on the (steps, B, S + 1) batches.

    The runs take turns within each step, in changing order, so that other jobs on the machine
    slow all of them alike.
    """
    for step, window in enumerate(batches):
        first = step % len(runs)
        for run in runs[first:] + runs[:first]:
            run.step(window, learning_rate(step, len(batches)))
        on_step(step)
