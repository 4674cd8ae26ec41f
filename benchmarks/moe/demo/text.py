"""Real text without a network: the documentation and sources that ship inside torch, as bytes."""

import hashlib
import pathlib
from typing import NamedTuple

import torch
from torch import Tensor


VOCAB_SIZE = 256  # one token per byte
# No pull request of the MoE stack changes them, so that training repeats bit by bit.
SOURCES = "_tensor_docs.py", "_torch_docs.py", "ao/**/*.py", "distributions/**/*.py"
HELD_OUT_EVERY = 10  # every tenth file is never trained on


class Corpus(NamedTuple):
    """Bytes of the text as uint8 tensors, and where they came from."""

    train: Tensor
    held_out: Tensor  # of other files
    num_files: int
    sha256: str  # of both parts


def read_corpus() -> Corpus:
    """Read SOURCES of the installed torch, whole files in the order of their paths."""
    root = pathlib.Path(torch.__file__).parent
    paths: list[pathlib.Path] = []
    for pattern in SOURCES:
        found = sorted(root.glob(pattern))
        if not found:
            raise FileNotFoundError(f"the installed torch has no {pattern}")
        paths += found
    texts = [path.read_bytes() for path in paths]
    held_out = b"".join(texts[::HELD_OUT_EVERY])
    train = b"".join(t for i, t in enumerate(texts) if i % HELD_OUT_EVERY)
    parts = map(bytearray, (train, held_out))
    tensors = (torch.frombuffer(part, dtype=torch.uint8) for part in parts)
    return Corpus(*tensors, len(paths), hashlib.sha256(train + held_out).hexdigest())


def sample_batches(
    text: Tensor, num_batches: int, batch: int, sequence: int, seed: int
) -> Tensor:
    """Windows at random places: (num_batches, batch, sequence + 1) int64.

    A window's first ``sequence`` bytes are the input, its last ``sequence`` bytes the targets.
    """
    g = torch.Generator().manual_seed(seed)
    places = len(text) - sequence
    starts = torch.randint(places, (num_batches, batch, 1), generator=g)
    return text[starts + torch.arange(sequence + 1)].long()


def byte_entropy(text: Tensor) -> float:
    """Loss (nats per byte) of a model that knows how often each byte occurs and nothing else."""
    p = torch.bincount(text.long(), minlength=VOCAB_SIZE).double() / len(text)
    return torch.special.entr(p).sum().item()
