"""Every code block of README, RFC, CONTRIBUTING and docs runs as it stands there, or says why it does not.

A fenced block is run by its kind: Python (one namespace per document, in the staged torch),
`$ command` lines with their output below (... stands for what is left out), the schemas of our ops. Above any other one, a
comment `<!-- not run: reason -->`, or `<!-- one-liner: NAME -->`: test_one_liners.py runs that. Python below
`<!-- needs: peft, lightning -->` runs where these are installed, in the folder of the clients.
"""

import contextlib
import doctest
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from staging import config
from staging.forkserver import ForkServer


ROOT = Path(__file__).parents[2]
PYTHON = config.workspace(ROOT).venv / "bin" / "python"
DOCUMENTS = ["README.md", "RFC.md", "CONTRIBUTING.md"]
DOCUMENTS += sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/source/*.md"))
_BLOCK = re.compile(
    r"(?:^<!-- (?:(?:not run|one-liner): (?P<reason>[^\n]+)|needs: (?P<needs>[^\n]+)) -->\n+)?"
    r"^```(?P<language>[^\n]*)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_RANK = """
import torch.distributed
torch.distributed.init_process_group(
    "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
)
"""
# What a document takes for granted: names, and eight GPUs.
BEFORE = {
    "README.md": """
import torch, torch.nn.functional as F
x, router = torch.randn(5, 8), torch.nn.Linear(8, 16)
w_in, w_out = torch.randn(16, 12, 8), torch.randn(16, 8, 6)
""",
    "docs/source/distributed.expert_parallel.md": f"""
import torch
{_RANK}
tokens = torch.randn(5, 64)
""",
    "docs/source/nn.moe_training.md": f"import torch{_RANK}",
    "docs/source/distributed.expert_placement.md": f"""
import torch
{_RANK}
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ExpertParallel, parallelize_module
mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
model = torch.nn.ModuleDict({{"layers": torch.nn.ModuleList([torch.nn.ModuleDict(
    {{"moe": torch.nn.MoE(8, 16, num_experts=8, top_k=2)}})])}})
""",
}
# A model as transformers' are called, and ids for it.
_MODEL = f"""
import torch, types
{_RANK}
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.moe = torch.nn.MoE(16, 8, num_experts=4, top_k=2)
    def forward(self, x):
        return x + self.moe(x)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(32, 16)
        self.layers = torch.nn.Sequential(Layer(), Layer())
    def forward(self, input_ids, labels):
        x = self.layers(self.embedding(input_ids)) @ self.embedding.weight.T
        loss = torch.nn.functional.cross_entropy(x.flatten(0, 1), labels.flatten())
        return types.SimpleNamespace(loss=loss)
model, ids = Model(), torch.randint(32, (2, 8))
"""
BEFORE["docs/source/distributed.moe_parallelize.md"] = _MODEL
BEFORE["README.md"] += _MODEL
BEFORE["RFC.md"] = """
import torch, torch.nn.functional as F
T, D, H, E, K = 5, 8, 6, 16, 2
x, w1, w3, w2 = (torch.randn(s) for s in ((T, D), (E, H, D), (E, H, D), (E, D, H)))
topk_indices, topk_weights = F.moe_topk(torch.randn(T, E), K)
"""
BEFORE["CONTRIBUTING.md"] = f"import sys\nsys.path.insert(0, {str(ROOT / 'test')!r})"
BEFORE["docs/source/distributed.moe_planner.md"] = """
import torch
tokens_per_expert = torch.arange(128) + 100
"""
SMALLER = {
    '"cuda", (8,)': '"cpu", (1,)',
    "MoE(1024, 2048": "MoE(64, 128",
    "Linear(1024, 8": "Linear(64, 8",
    "slots_per_rank=10": "slots_per_rank=8",
    "batch=64, seq=4096": "batch=2, seq=8",
}

# What modules print, each with its arguments: one process, as most of the time is torch's import.
MODULES = """
import contextlib, io, json, runpy, sys
printed = []
for module, *arguments in json.loads(sys.argv[1]):
    sys.argv = [module, *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as exit:
            if isinstance(exit.code, str):
                print(exit.code, file=sys.stderr)
    printed.append(out.getvalue() + err.getvalue())
print(json.dumps(printed))
"""

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="no staged environment; stage.py setup makes it"
)


def blocks(name):
    """(language, body, reason not to run it) of a document's fenced blocks."""
    text = (ROOT / name).read_text()
    found = [
        (m["language"], m["body"], m["reason"] or m["needs"] and f"needs {m['needs']}")
        for m in _BLOCK.finditer(text)
    ]
    assert len(found) == len(re.findall(r"(?m)^```\S", text)) + len(
        re.findall(r"(?m)^```$", text)
    ) - len(found), f"{name}: an open code block"
    return found


def run(arguments, folder, **variables):
    env = {**os.environ, **variables, "PATH": f"{PYTHON.parent}:{os.environ['PATH']}"}
    return subprocess.run(
        arguments, cwd=folder, capture_output=True, text=True, env=env
    )


def script_of(name, bodies, folder):
    text = "\n".join([BEFORE.get(name, ""), *bodies])
    for large, small in SMALLER.items():
        text = text.replace(large, small)
    script = folder / "document.py"
    script.write_text(text)
    return script


@pytest.fixture(scope="module")
def server():
    """Runs documents; most of the time of a short one is torch's import."""
    path = f"{PYTHON.parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONWARNINGS": "ignore"}
    with contextlib.closing(ForkServer(PYTHON, env, ["torch"])) as server:
        yield server


@pytest.mark.parametrize("name", DOCUMENTS)
def test_python(name, server, tmp_path):
    bodies = [body for kind, body, why in blocks(name) if kind == "python" and not why]
    script, output = script_of(name, bodies, tmp_path), tmp_path / "output"
    status = server.run_script(script, output)
    assert status == 0, f"{name}\n{script.read_text()}\n{output.read_text()}"


@pytest.mark.parametrize(
    "name", [name for name in DOCUMENTS if "<!-- needs:" in (ROOT / name).read_text()]
)
def test_python_with_other_libraries(name, tmp_path):
    needed, bodies = set(), []
    for kind, body, why in blocks(name):
        if kind == "python" and (not why or why.startswith("needs ")):
            bodies.append(body)
            needed |= set((why or "needs ").removeprefix("needs ").split(", ")) - {""}
    clients = Path(os.environ.get("MOE_CLIENTS", ROOT / "build/clients")).resolve()
    missing = [library for library in needed if not (clients / library).exists()]
    if missing:
        pytest.skip(f"{missing} not in {clients}; .ci/long clients installs them")
    command = [str(PYTHON), "-W", "ignore", str(script_of(name, bodies, tmp_path))]
    done = run(command, tmp_path, PYTHONPATH=str(clients))
    assert done.returncode == 0, f"{name}\n{done.stderr}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_print_what_the_document_says(name, tmp_path):
    expected = []
    for _, body, why in blocks(name):
        if why or not body.startswith("$ "):
            continue
        *commands, output = re.split(r"(?m)^\$ ((?:.*\\\n)*.*)\n", body)[1:]
        assert len(commands) == 1, f"{name}: one command per block, got {commands}"
        python, option, *command = shlex.split(commands[0].replace("\\\n", " "))
        assert (python, option) == ("python", "-m"), f"{name}: {commands[0]}"
        expected.append((command, output))
    if not expected:
        return
    called = json.dumps([command for command, _ in expected])
    done = run([str(PYTHON), "-c", MODULES, called], tmp_path)
    assert done.returncode == 0, f"{name}\n{done.stderr}"
    for (command, output), printed in zip(expected, json.loads(done.stdout)):
        same = doctest.OutputChecker().check_output(output, printed, doctest.ELLIPSIS)
        assert same, f"{name}: {command}\nprints\n{printed}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_schemas_are_those_of_the_ops(name, tmp_path):
    for _, body, why in blocks(name):
        if why or not body.startswith("_moe_"):
            continue
        schemas = [" ".join(s.split()) for s in re.split(r"\n(?=\S)", body.strip())]
        program = (
            "import sys, torch\n"
            "for text in sys.argv[1:]:\n"
            "    said = torch._C.parse_schema('aten::' + text)\n"
            "    op = getattr(torch.ops.aten, text.partition('(')[0]).default._schema\n"
            "    assert str(said) == str(op), f'{said}\\nis really\\n{op}'\n"
        )
        done = run([str(PYTHON), "-c", program, *schemas], tmp_path)
        assert done.returncode == 0, f"{name}\n{done.stderr}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_other_block_says_why_it_is_not_run(name):
    for kind, body, why in blocks(name):
        known = kind in ("python", "{eval-rst}") or body.startswith(("$ ", "_moe_"))
        assert known or why, f"{name}: nothing runs\n{body}"
