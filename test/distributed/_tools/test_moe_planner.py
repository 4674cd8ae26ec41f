# Owner(s): ["oncall: distributed"]

import ast
import contextlib
import graphlib
import io
import json
import math
import pathlib
import random
import re
import tempfile
import time
import unittest
from dataclasses import replace
from unittest import mock

import torch
from torch.distributed._tools import moe_plan, moe_planner, moe_step_model
from torch.distributed._tools.moe_config import MODELS
from torch.distributed._tools.moe_inference_model import inference_table
from torch.distributed._tools.moe_layer_plan import fastest_dtypes
from torch.distributed._tools.moe_layout import Layout
from torch.distributed._tools.moe_memory_model import memory
from torch.distributed._tools.moe_plan import plan
from torch.distributed._tools.moe_planner import main
from torch.distributed._tools.moe_profile import (
    Constants,
    CpuConstants,
    DEVICES,
    Profile,
    profile,
)
from torch.distributed._tools.moe_reasons import DIMENSIONS, LIMIT_PAYS
from torch.distributed._tools.moe_search import FILL
from torch.distributed._tools.moe_simulator import (
    Assumptions,
    expected_imbalance,
    largest_normal,
    simulate,
)
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.moe_generators import MoeCase


# Published layouts: model, GPU, GPUs, sequences, layout, what their recipes fix. Of
# Megatron-Bridge unless H800 (DeepSeek's report) or Mixtral, Qwen2 (MoE Parallel Folding).
BRIDGE = {"gradient_bytes": 2, "optimizer_bytes": 8}
GRAPHS = {**BRIDGE, "graphs": 1}
LAYOUTS = (
    ("deepseek-v3", "H800", 2048, 15360, (1, 16, 64), "fp8", {}),
    ("deepseek-v3", "H100", 1024, 8192, (2, 8, 64), "fp8", BRIDGE),
    ("deepseek-v3", "GB200", 256, 4096, (1, 4, 64), "mxfp8", GRAPHS),
    ("deepseek-v3", "GB300", 256, 4096, (1, 2, 32), "mxfp8", GRAPHS),
    ("deepseek-v3", "B200", 256, 4096, (1, 8, 32), "mxfp8", BRIDGE),
    ("deepseek-v3", "B300", 256, 4096, (1, 8, 8), "mxfp8", BRIDGE),
    ("kimi-k2", "GB300", 256, 4096, (1, 4, 64), "mxfp8", GRAPHS),
    ("qwen3-235b-a22b", "H100", 256, 8192, (2, 8, 32), "fp8", BRIDGE),
    ("qwen3-235b-a22b", "GB200", 256, 8192, (1, 8, 32), "mxfp8", GRAPHS),
    ("qwen3-235b-a22b", "GB300", 256, 8192, (1, 4, 32), "mxfp8", GRAPHS),
    ("qwen3-235b-a22b", "B300", 256, 8192, (1, 8, 8), "mxfp8", BRIDGE),
    ("qwen3-30b-a3b", "H100", 16, 1024, (1, 1, 16), "fp8", BRIDGE),
    ("qwen3-30b-a3b", "GB200", 8, 512, (1, 1, 8), "mxfp8", GRAPHS),
    ("qwen3-30b-a3b", "B200", 8, 512, (1, 1, 8), "mxfp8", GRAPHS),
    ("gpt-oss-120b", "H100", 64, 1280, (1, 4, 8), "bf16", BRIDGE),
    ("gpt-oss-120b", "GB200", 64, 1280, (1, 1, 64), "bf16", GRAPHS),
    ("gpt-oss-120b", "B200", 64, 1280, (1, 1, 8), "bf16", BRIDGE),
    ("mixtral-8x7b", "H100", 64, 256, (1, 4, 8), "bf16", {}),
    ("mixtral-8x22b", "H100", 128, 256, (2, 8, 8), "bf16", {}),
    ("qwen2-57b-a14b", "H100", 64, 256, (2, 4, 4), "bf16", {}),
)


def within_ten_percent(find):
    """How many published layouts reach 90 % of the best one's tokens a second."""
    near = 0
    for model, gpu, gpus, batch, (tp, pp, ep), dtype, fixed in LAYOUTS:
        kw = {"global_batch": batch, "dtypes": (dtype,), "top": 1 << 20, **fixed}
        ranked = find(model, gpu, gpus, **kw).best
        theirs = next(r for r, x in ranked if (x.tp, x.pp, x.ep) == (tp, pp, ep))
        near += theirs >= 0.9 * ranked[0][0]
    return near


class TestPlan(TestCase):
    def test_published_layouts(self):
        self.assertGreaterEqual(within_ten_percent(plan), 16)

    def test_explains(self):
        found = plan("deepseek-v3", "H800", 2048, global_batch=15360, dtypes=("fp8",))
        self.assertEqual((found.layout.pp, found.layout.ep), (16, 128))
        by_name = {c.name: c for c in found.choices}
        wanted = (*DIMENSIONS, "node_limit", "recipe", "chunks",
                  "capacity_factor", "replicas", "row_alignment")  # fmt: skip
        self.assertEqual(tuple(by_name), wanted)
        for choice in found.choices:
            self.assertRegex(choice.reason, r"\d|no exchange")
        for name in ("ep", "tp", "pp", "micro_batch"):
            self.assertIsNotNone(by_name[name].other, name)
            self.assertGreaterEqual(by_name[name].other_loss, -0.005)
        self.assertLess(found.memory.total, FILL * profile("H800").device.memory)
        self.assertEqual(json.loads(json.dumps(found.to_json()))["layout"]["ep"], 128)

    def test_node_limit_is_chosen_where_it_pays(self):
        kw = {"global_batch": 8192, "dtypes": ("fp8",)}

        def limit(model, gpus, **fixed):
            found = plan(model, "H100", gpus, **kw, **fixed)
            (choice,) = (c for c in found.choices if c.name == "node_limit")
            self.assertEqual(choice.value, found.layout.node_limit)
            return found, choice

        # Eight nodes: a router that is trained with a limit saves a part of the step.
        wide, choice = limit("qwen3-235b-a22b", 256, ep=64)
        free, _ = limit("qwen3-235b-a22b", 256, ep=64, node_limit=0)
        self.assertEqual((choice.value, choice.other), (4, 0))
        self.assertLess(wide.step.seconds, (1 - LIMIT_PAYS) * free.step.seconds)
        self.assertEqual(choice.other_loss, 1 - wide.step.seconds / free.step.seconds)
        # Two nodes: nothing to limit. A limit that is given, or the model's, stays.
        self.assertEqual(limit("qwen3-235b-a22b", 256, ep=16)[1].value, 0)
        self.assertEqual(limit("qwen3-235b-a22b", 256, ep=64, node_limit=2)[1].value, 2)
        self.assertIn("trained with", limit("deepseek-v3", 1024, ep=64)[1].reason)
        # A broken model, whose exchange takes no time, finds nothing that pays.
        with mock.patch.object(moe_step_model, "all_to_all", lambda *a, **k: 0.0):
            self.assertEqual(limit("qwen3-235b-a22b", 256, ep=64)[1].value, 0)

    def test_parallel_dims(self):
        found = plan("qwen3-235b-a22b", "H100", 256, global_batch=2048)
        dims = found.parallel_dims()
        rest = dims["dp_replicate"] * dims["dp_shard"] * dims["cp"] * dims["tp"]
        self.assertEqual(rest * dims["pp"], dims["world_size"])
        # torchtitan: ep borrows dp_shard * cp * tp.
        self.assertEqual(dims["dp_shard"] * dims["cp"] * dims["tp"] % dims["ep"], 0)

    def test_expert_parallel_takes_it(self):
        from torch.distributed.tensor.parallel.expert_parallel import ExpertParallel

        for ep, domain, switch in ((8, 8, "all_to_all"), (64, 8, "hierarchical")):
            fixed = {"ep": ep, "domain": domain}
            found = plan("deepseek-v3", "B200", 256, global_batch=4096, **fixed)
            style = ExpertParallel(**found.expert_parallel())
            # What the plan's time is of: once to every node, and from there on.
            self.assertEqual(style.token_switch, switch)
            per_node = 8 if switch == "hierarchical" else None
            self.assertEqual(style.ranks_per_node, per_node)

    def test_expert_parallel_takes_capacity_and_replicas(self):
        from torch.distributed.tensor.parallel.expert_parallel import ExpertParallel

        load = [1.0] * 128
        load[0] = 40.0
        kw = {"global_batch": 512, "ep": 8}
        found = plan("qwen3-30b-a3b", "H200", 16, load=load, **kw)
        style = ExpertParallel(**found.expert_parallel())
        self.assertIsNone(style.switch_options["capacity"])
        self.assertEqual(style.placement.slots_per_rank * 8, 128 + found.replicas)
        # Less than by bytes alone: a token copy is computed as well.
        self.assertEqual(style.placement.copy_cost, found.copy_cost)
        self.assertGreater(found.copy_cost, 1)
        self.assertLess(found.copy_cost, 1.5 * found.model.f)
        even = plan("qwen3-30b-a3b", "H200", 16, **kw)
        self.assertNotIn("placement", even.expert_parallel())

        # Rows of the fullest pair of ranks, of nodes, and of ranks of a node, as drawn.
        torch.manual_seed(0)
        coarse = replace(even, model=replace(even.model, experts=8, k=4))
        for found, sizes in (
            (even, (8,)),
            (replace(even, domain=2), (4, 8)),
            (coarse, (8,)),
        ):
            options = found.expert_parallel(static=True)
            capacity = ExpertParallel(**options).switch_options["capacity"]
            tokens, k = -(-found.tokens // found.chunks), found.model.k
            E = found.model.experts
            for rows, ranks in zip(capacity if len(sizes) > 1 else (capacity,), sizes):
                sources = 4 if sizes == (4, 8) and ranks == 8 else 1
                experts = torch.rand(sources * tokens, E).topk(k).indices
                to = experts // (E // ranks)
                hit = torch.zeros(len(to), ranks, dtype=torch.bool).scatter_(
                    1, to, True
                )
                fullest = int(hit.sum(0).max())
                self.assertLess(fullest, rows)
                self.assertLess(rows, 1.25 * fullest)

    def test_nearest_number_of_gpus(self):
        with self.assertRaisesRegex(ValueError, "Nearest that works: gpus=512,"):
            plan("kimi-k2", "H100", 7, global_batch=112)
        for gpus, found in ((7, "gpus=8,"), (9, "gpus=8,.* or gpus=16,")):
            with self.assertRaisesRegex(ValueError, f"nothing fits .* works: {found}"):
                plan("qwen3-30b-a3b", "H100", gpus, global_batch=16 * gpus)
        # What is offered works; below as well as above.
        with self.assertRaisesRegex(ValueError, "divides 100000 GPUs") as e:
            plan("deepseek-v3", "H100", 100000, global_batch=100000, dtypes=("fp8",))
        words = re.findall(r"gpus=(\d+), .*? batch of (\d+)", str(e.exception))
        (below, _), (above, _) = words
        self.assertTrue(98304 <= int(below) < 100000 < int(above) < 101000)
        for gpus, batch in words:
            kw = {"global_batch": int(batch), "dtypes": ("fp8",)}
            plan("deepseek-v3", "H100", int(gpus), **kw)

    def test_exchange_in_a_node_has_one_level(self):
        for ep, name in ((1, "none"), (8, "a copy per rank"), (16, "hierarchical")):
            found = plan("qwen3-30b-a3b", "H200", 16, global_batch=512, ep=ep)
            algorithm = next(c for c in found.choices if c.name == "algorithm")
            self.assertEqual(algorithm.value, name)
            self.assertEqual("hierarchical" in algorithm.reason, ep == 16)

    def test_errors_name_what_works(self):
        kw = {"global_batch": 1024}
        for fixed, message in (
            ({"ep": 48}, r"ep must divide the experts, 256, got 48; .* works: ep=32"),
            ({"tp": 3}, r"tp must divide the attention heads, 128, got 3; .* tp=2"),
            ({"pp": 7}, r"pp must divide the 64 GPUs, got 7; .* works: pp=8"),
            ({"depth": 2}, r"\['depth'\] are not dimensions; those are .*ep"),
            ({"ep": 16, "algorithm": "one_sided"}, r"ep must be at most the 8 ranks"),
        ):
            with self.assertRaisesRegex(ValueError, message):
                plan("deepseek-v3", "H800", 64, **kw, **fixed)
        with self.assertRaisesRegex(
            ValueError, "nothing fits .* needs .*works: gpus="
        ) as e:
            plan("deepseek-v3", "H800", 64, **kw)
        works = int(str(e.exception).split("works: gpus=")[1].split(",")[0])
        plan("deepseek-v3", "H800", works, global_batch=1024 * works // 64)
        batches = "batch must be .*works: global_batch=64 or global_batch=128"
        with self.assertRaisesRegex(ValueError, batches):
            plan("qwen3-30b-a3b", "H100", 64, global_batch=100, pp=1, tp=1)
        for dtypes in ([], "bf16"):
            with self.assertRaisesRegex(ValueError, "dtypes must be a sequence"):
                plan("qwen3-30b-a3b", "H100", 8, global_batch=64, dtypes=dtypes)
        with self.assertRaisesRegex(ValueError, "load must have 128 entries.* got 3"):
            plan("qwen3-30b-a3b", "H100", 16, global_batch=512, ep=8, load=[1, 2, 3])
        with self.assertRaisesRegex(ValueError, "^plan: load must be .*got 128 zeros"):
            plan("qwen3-30b-a3b", "H100", 16, global_batch=512, ep=8, load=[0] * 128)

    def test_one_sided_stays_in_a_domain(self):
        kw = {"global_batch": 512, "algorithm": "one_sided", "top": 1000}
        found = plan("qwen3-30b-a3b", "H200", 16, **kw)
        self.assertLessEqual(max(x.ep for _, x in found.best), 8)

    def test_skewed_load(self):
        load = [1.0] * 128
        load[0] = 40.0
        kw = {"global_batch": 512, "ep": 8}
        even = plan("qwen3-30b-a3b", "H200", 16, **kw)
        skewed = plan("qwen3-30b-a3b", "H200", 16, load=load, **kw)
        self.assertLess(even.capacity_factor, 1.2)
        self.assertEqual(even.replicas, 0)
        # Replicas bring the heaviest rank back.
        self.assertGreater(skewed.replicas, 0)
        self.assertLess(skewed.capacity_factor, 1.3)
        reason = next(c.reason for c in skewed.choices if c.name == "replicas")
        self.assertRegex(reason, r"the given load: none: 2\.6")

    def test_recipe_is_per_gemm(self):
        p = profile("B200")
        # 16,384 rows an expert of DeepSeek-V3, and 32 rows an expert of a tiny one.
        big, times = fastest_dtypes(p, 131072, 7168, 2048, 8)
        self.assertEqual(set(big.values()), {"mxfp8"})
        small, _ = fastest_dtypes(p, 4096, 512, 128, 128)
        self.assertEqual(set(small.values()), {"bf16"})
        for gemm, seconds in times.items():
            self.assertEqual(big[gemm], min(seconds, key=seconds.get))

    def test_all_candidates_fit_the_machine(self):
        found = plan("gpt-oss-120b", "B200", 64, global_batch=1280, top=50)
        for _, x in found.best:
            self.assertEqual(64 % (x.tp * x.pp), 0)
            self.assertEqual(MODELS["gpt-oss-120b"].experts % x.ep, 0)
            size = memory(MODELS["gpt-oss-120b"], x, global_batch=1280).total
            self.assertLessEqual(size, FILL * 180e9)

    def test_inference(self):
        rows = inference_table(
            MODELS["deepseek-v3"], profile("H800"), 128, phase="decode", tokens=128,
            context=4096,
        )  # fmt: skip
        self.assertGreaterEqual(rows[0]["ep"], 64)
        args = (MODELS["deepseek-v3"], profile("H800"))
        kw = {"phase": "decode", "tokens": 8, "context": 4096}
        with self.assertRaisesRegex(
            ValueError, r"fit on no ep of 2 GPUs.*works: gpus=(\d+), ep=(\d+)"
        ) as e:
            inference_table(*args, 2, **kw)
        gpus, ep = map(int, re.findall(r"=(\d+)", str(e.exception))[-2:])
        self.assertEqual(inference_table(*args, gpus, ep=ep, **kw)[0]["ep"], ep)
        with self.assertRaisesRegex(ValueError, r"256 experts: \[1, 2, 4, 8\], got 3"):
            inference_table(*args, 8, ep=3, **kw)


class TestCommand(TestCase):
    def call(self, *words):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(words)
        return code, out.getvalue(), err.getvalue()

    def test_first_plan(self):
        help_text = moe_planner._parser().format_help()
        command = help_text.split("moe_planner")[-1].split()
        self.assertEqual(command[0], "qwen3-30b-a3b")
        code, out, _ = self.call(*command)
        self.assertEqual(code, 0)
        for word in (
            "tokens/s/GPU",
            "because:",
            "next:",
            "uncertainty",
            "ParallelDims",
        ):
            self.assertIn(word, out)

    def test_json(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "p.json")
            words = ["qwen3-30b-a3b", "--device", "B200", "--json", str(path)]
            self.assertEqual(self.call(*words)[0], 0)
            self.assertIn("choices", json.loads(path.read_text()))

    def error(self, *words):
        code, out, err = self.call(*words)
        self.assertEqual((code, out), (2, ""), words)
        self.assertRegex(err, r"^error: [^\n]+\n$")
        return err

    def test_errors(self):
        for words, message in (
            ("--device H1000", "device must be one of A100"),
            ("--micro-batch 0", "--micro-batch: must be an integer from 1 to 65,536, got '0'"),
            ("--gpus 1.5", "--gpus: must be an integer from 1 to 1,048,576, got '1.5'"),
            ("--seq 0", "--seq: must be an integer from 1 to 16,777,216, got '0'"),
            ("--tokens -5 --phase decode", "--tokens: must be an integer from 1"),
            ("--tokens 5", "--tokens has no meaning for training"),
            ("--phase decode --micro-batch 2", "--micro-batch has no meaning for inference"),
            ("--phase decode --device A100 --dtype fp8", "A100 multiplies, fp32, bf16, fp16"),
            ("--device A100 --dtype nvfp4", "that A100 multiplies, fp32, bf16, fp16, got"),
            ("--device H100 --dtype mxfp8", "H100 multiplies, fp32, bf16, fp16, fp8, got"),
            ("--cp 3", "cp must divide the tokens of a sequence, 4096, got 3"),
            ("--depth 3", "unrecognized arguments: --depth 3"),
            ("--json /nowhere/at/all", "/nowhere/at/all"),
            ("--load /nowhere.json", "/nowhere.json: No such file"),
        ):  # fmt: skip
            if "--json" in words:
                self.assertIn(message, self.call("qwen3-30b-a3b", *words.split())[2])
            else:
                self.assertIn(message, self.error("qwen3-30b-a3b", *words.split()))

    def test_files_are_named(self):
        good = {
            "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
            "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
            "vocab_size": 100,
        }  # fmt: skip
        device = profile("H100").to_json()
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "x.json")
            for text, message in (
                ("{", "is not JSON"),
                ("[]", "must hold a dict, got a list"),
                (json.dumps({**good, "hidden_size": "a"}), "hidden_size must be an integer"),
                (json.dumps({**good, "num_experts": 1}), "k must be at most experts = 1"),
                (json.dumps({**good, "hidden_size": 2}), "head_dim must be an integer"),
                (json.dumps({"num_hidden_layers": 2}), "has none of ('hidden_size',)"),
            ):  # fmt: skip
                path.write_text(text)
                self.assertIn(f"error: {path}: ", err := self.error(str(path)))
                self.assertIn(message, err)
            for part, name, value, message in (
                ("device", "fast", 0, "device.fast must be a number above 0, got 0"),
                ("device", "units", 1.5, "device.units must be an integer above 0"),
                (
                    "constants",
                    "fast_us",
                    -1,
                    "constants.fast_us must be a number from 0",
                ),
                ("constants", "fats", 1, "got ['fats']"),
                (
                    "device",
                    "memory",
                    math.nan,
                    "device.memory must be a number above 0",
                ),
            ):
                bad = {**device, part: {**device[part], name: value}}
                path.write_text(json.dumps(bad))
                err = self.error("qwen3-30b-a3b", "--device", str(path))
                self.assertIn(f"error: {path}: ", err)
                self.assertIn(message, err)

    def test_first_line_says_what_for(self):
        _, out, _ = self.call("qwen3-30b-a3b", "--device", "H200")
        self.assertRegex(out, r"^8 x H200, training, .*\n128 sequences of 4,096 tokens")
        self.assertIn("the default of --batch", out)
        # bf16 and FP8 are equally fast if the host is the limit, and the text says so.
        _, slow, _ = self.call("qwen3-30b-a3b", "--device", "H100")
        self.assertRegex(slow, "(fp8|bf16) is as fast, as the limit is the host")
        _, out, _ = self.call("qwen3-30b-a3b", "--phase", "decode")
        self.assertRegex(out, "^8 x H100, inference, decode with 128 sequences a GPU")
        self.assertIn(
            "error 12% on 6 published inference rows that calibrated nothing, too", out
        )
        self.assertIn("error 11% on 72 published training rows that calibrated", slow)
        self.assertIn("21% in a check by others", slow)
        glm = MODELS["qwen3-235b-a22b"]
        with self.assertRaisesRegex(ValueError, "training: nothing fits .*optimizer"):
            plan(glm, "H100", 8, global_batch=128)

    def test_absurd_batch_is_named(self):
        words = "--device GB200 --gpus 65536 --dtype mxfp8".split()
        _, out, _ = self.call("deepseek-v3", *words)
        self.assertIn("warning: published recipes have at most 63 M tokens", out)
        self.assertNotIn("nothing to limit", out)
        self.assertIn("the limit, the model's, never binds", out)

    def test_context_parallel(self):
        _, out, _ = self.call("qwen3-30b-a3b", "--device", "H200", "--cp", "2")
        self.assertIn("2 ranks share a sequence", out)
        self.assertIn("'cp': 2", out)

    def test_inference_of_one_degree(self):
        words = ("--phase", "decode", "--ep", "4", "--json", "-", "--dtype", "bf16")
        _, out, _ = self.call("qwen3-30b-a3b", *words)
        (row,) = json.loads(out)["rows"]
        self.assertEqual((row["ep"], row["dtype"]), (4, "bf16"))

    def test_cpu(self):
        p = profile("H100")
        cpu = Profile("a CPU", p.device, Constants(), "made up", CpuConstants())
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "cpu.json")
            path.write_text(json.dumps(cpu.to_json()))
            code, out, _ = self.call("olmoe-1b-7b", "--device", str(path))
            self.assertEqual(code, 0)
            self.assertRegex(
                out, "^a CPU, 132 threads, inference .* training .*made up"
            )
            self.assertIn("tokens_per_second", out)
            err = self.error("olmoe-1b-7b", "--device", str(path), "--gpus", "2")
            self.assertIn("--gpus has no meaning for a CPU", err)

        calibrate = "torch.distributed._tools.moe_calibration.calibrate"
        with mock.patch(calibrate, return_value=cpu):
            code, out, _ = self.call(
                "olmoe-1b-7b", "--device", "cpu", "--phase", "train"
            )
        self.assertEqual((code, "fwd+bwd" in out), (0, True))


class TestImports(TestCase):
    """The map in docs/source: a module imports from modules above it, and no private name."""

    FOLDER = pathlib.Path(moe_plan.__file__).parent
    PAGE = pathlib.Path(__file__).parents[3] / "docs/source/distributed.moe_planner.md"

    def imports(self, path):
        for n in ast.walk(ast.parse(path.read_text())):
            if isinstance(n, ast.ImportFrom) and "torch.distributed._" in (
                n.module or ""
            ):
                for alias in n.names:
                    yield n.module.rpartition(".")[2], alias.name

    @unittest.skipUnless(PAGE.exists(), "needs docs/source")
    def test_map(self):
        rows = [line.split("|")[1] for line in self.PAGE.read_text().splitlines()
                if line.startswith("| `moe_") and line.count("|") == 3]  # fmt: skip
        order = {
            name: i
            for i, row in enumerate(rows)
            for name in re.findall(r"moe_\w+", row)
        }
        paths = [*self.FOLDER.glob("moe_*.py")]
        for path in paths:
            with self.subTest(path.name):
                for module, name in self.imports(path):
                    self.assertNotRegex(name, "^_", f"{path.name}: private")
                    used = name if module == "_tools" else module
                    self.assertLessEqual(order.get(used, -1), order[path.stem], used)
        self.assertNotIn("moe_nothing", order)
        self.assertLess(order["moe_profile"], order["moe_plan"])

    def test_no_circle(self):
        known = {
            path.stem: {x for pair in self.imports(path) for x in pair} - {path.stem}
            for path in self.FOLDER.glob("moe_*.py")
        }
        known = {name: names & known.keys() for name, names in known.items()}
        graphlib.TopologicalSorter(known).prepare()
        known["moe_profile"] |= {"moe_plan"}
        with self.assertRaises(graphlib.CycleError):
            graphlib.TopologicalSorter(known).prepare()


class TestAnyArguments(TestCase):
    """An answer is plausible, or an error of one line; a traceback is neither."""

    WRONG = ("0", "-1", "1.5", "nan", "1e9", "99999999999", "three", "")

    def words(self, gen):
        def number(*good):
            return gen.choice(self.WRONG if gen.random() < 0.1 else good)

        phase = gen.choice(("train", "train", "prefill", "decode"))
        words = [gen.choice((*MODELS, "gpt"))] if gen.random() < 0.02 else [
            gen.choice((*MODELS,))
        ]  # fmt: skip
        words += ["--device", gen.choice(DEVICES), "--phase", phase]
        numbers = {
            "--gpus": ("1", "7", "8", "16", "64", "96", "256", "1000", "2048"),
            "--seq": ("1", "128", "4096", "5000", "131072"),
            "--ep": ("1", "2", "8", "12", "64"),
            "--domain": ("1", "3", "8", "72"),
        }
        if phase == "train":
            numbers |= {
                "--batch": ("1", "64", "100", "1024", "4096"),
                "--tp": ("1", "2", "8", "3"), "--pp": ("1", "2", "4", "5", "16"),
                "--cp": ("1", "2", "4"), "--micro-batch": ("1", "2", "8"),
                "--graphs": ("0", "1", "2"), "--node-limit": ("0", "2", "8"),
            }  # fmt: skip
        else:
            numbers["--tokens"] = ("1", "64", "5000")
        for flag, good in numbers.items():
            if gen.random() < (0.8 if flag == "--gpus" else 0.2):
                words += [flag, number(*good)]
        if gen.random() < 0.3:
            words += ["--dtype", gen.choice(("bf16", "fp8", "mxfp8", "nvfp4", "int3"))]
        return words

    def rate(self, words, **device):
        """Best tokens a second with a device that differs, or None with its error."""

        def changed(name):
            p = profile(name)
            new = {k: factor * getattr(p.device, k) for k, factor in device.items()}
            return replace(p, device=replace(p.device, **new))

        out, err = io.StringIO(), io.StringIO()
        with mock.patch.object(moe_planner, "profile", changed):
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = main([*words, "--json", "-"])
        if code:
            self.assertRegex(err.getvalue(), r"^error: [^\n]+\n$", words)
            return None
        found = json.loads(out.getvalue())
        if "rows" in found:
            rates = [row["tokens_per_second_per_gpu"] for row in found["rows"]]
            sizes = [row["memory"] for row in found["rows"]]
        else:
            rates = [found["tokens_per_second_per_gpu"], *(r for r, _ in found["best"])]
            sizes = [found["memory"]["total"], *found["memory"].values()]
            self.assertGreater(found["step"]["seconds"], 0)
            self.assertGreaterEqual(found["capacity_factor"], 1)
        for value in (*rates, *sizes):
            self.assertTrue(math.isfinite(value) and value >= 0, words)
        self.assertTrue(min(rates) > 0 and max(rates) < 1e7, (words, rates))
        return max(rates)

    def test_draws(self):
        answers = 0
        for seed in range(150):
            words = self.words(random.Random(seed))
            rate = self.rate(words)
            if rate is None or answers >= 25:
                continue
            answers += 1
            # "Of equals, the one with less machinery": 0.5 % apart.
            for device in ({"fast": 2}, {"slow": 2}, {"memory": 2}):
                better = self.rate(words, **device)
                self.assertIsNotNone(better, words)
                self.assertGreater(better, 0.99 * rate, (words, device))
        self.assertGreater(answers, 20)


def check_monotone(run):
    """More skew, jitter, stragglers, failures are never better; nor are more GPUs."""
    base = run(Assumptions())
    assert base.slowdown >= 1 and 0 < base.goodput <= 1
    for worse in (
        {"imbalance": 1.5}, {"jitter": 0.05}, {"slow_share": 0.05}, {"slow_by": 0.5},
        {"mtbf_hours": 5000}, {"restart_seconds": 3600}, {"save_seconds": 300},
    ):  # fmt: skip
        job = run(Assumptions(**worse))
        assert job.tokens_per_second < base.tokens_per_second, worse


class TestSimulator(TestCase):
    layout = Layout(tp=2, pp=8, ep=64, dtype="fp8", virtual=4)

    def jobs(self, gpus, **kw):
        return simulate(profile("H100"), MODELS["deepseek-v3"], self.layout, gpus, **kw)

    def test_hundred_thousand(self):
        self.jobs([1024])
        start = time.process_time()
        (job,) = self.jobs([102400])
        self.assertLess(time.process_time() - start, 2)
        self.assertEqual(job.gpus, 102400)

    def test_deterministic(self):
        self.assertEqual(self.jobs([4096], seed=3), self.jobs([4096], seed=3))
        self.assertNotEqual(self.jobs([4096], seed=3), self.jobs([4096], seed=4))

    def test_monotone(self):
        check_monotone(lambda a: self.jobs([8192], assumptions=a)[0])

        def broken(a):  # forgets failures
            (job,) = self.jobs([8192], assumptions=a)
            return job._replace(tokens_per_second=job.tokens_per_second / job.goodput)

        with self.assertRaises(AssertionError):
            check_monotone(broken)
        goodput = [j.goodput for j in self.jobs([1024, 8192, 102400])]
        self.assertEqual(goodput, sorted(goodput, reverse=True))

    def test_quiet_machine_is_ideal(self):
        quiet = Assumptions(imbalance=1, jitter=0, silicon=0, slow_share=0,
                            mtbf_hours=1e12, save_seconds=0)  # fmt: skip
        (job,) = self.jobs([2048], assumptions=quiet)
        self.assertEqual(job.slowdown, 1.0, rtol=1e-5, atol=0)
        self.assertEqual(job.goodput, 1.0, rtol=1e-5, atol=0)

    def test_goodput_of_drawn_failures(self):
        """The closed form against failures that are drawn one by one."""
        from torch.distributed._tools.moe_simulator import _goodput

        a = Assumptions()
        expected, mtbf, interval = _goodput(a, 32768)
        gen = torch.Generator().manual_seed(0)
        good = total = 0.0
        period = interval + a.save_seconds
        for uptime in torch.empty(20000).exponential_(1 / mtbf, generator=gen).tolist():
            good += uptime // period * interval
            total += uptime + a.detect_seconds + a.restart_seconds
        self.assertEqual(expected, good / total, rtol=0.01, atol=0)

    def test_errors(self):
        with self.assertRaisesRegex(ValueError, "64 GPUs are fewer .* multiple of 512"):
            self.jobs([64])
        with self.assertRaisesRegex(
            ValueError, "imbalance must be a number from 1.0 to 100,000.0, got 0.5"
        ):
            Assumptions(imbalance=0.5)
        with self.assertRaisesRegex(
            ValueError, "jitter must be a number from 0.0 to 10.0, got -1"
        ):
            Assumptions(jitter=-1)


class TestImbalance(TestCase):
    def drawn(self, load, tokens, k, ep, samples=400):
        gen = torch.Generator().manual_seed(0)
        p = torch.tensor(load, dtype=torch.float64)
        ids = torch.multinomial(p.expand(samples, -1), tokens * k, True, generator=gen)
        rank = ids // (len(load) // ep)
        counts = torch.zeros(samples, ep).scatter_add_(1, rank, torch.ones(rank.shape))
        return counts.amax(1) * ep / (tokens * k)

    def test_closed_form(self):
        skewed = [2.0 ** -(i % 7) for i in range(64)]
        for load in ([1.0] * 64, skewed):
            for tokens, ep in ((64, 8), (1024, 8), (1024, 32)):
                heaviest = self.drawn(load, tokens, 4, ep)
                got = expected_imbalance(load, tokens, 4, ep)
                self.assertEqual(got, heaviest.mean().item(), rtol=0.02, atol=0)
                high = expected_imbalance(load, tokens, 4, ep, quantile=0.95)
                self.assertEqual(
                    high, heaviest.quantile(0.95).item(), rtol=0.05, atol=0
                )

    def test_design_effect_and_placement(self):
        load = [1.0] * 16
        plain = expected_imbalance(load, 256, 2, 4)
        self.assertGreater(expected_imbalance(load, 256, 2, 4, design=4.0), plain)
        load[:4] = [10.0] * 4
        spread = expected_imbalance(load, 256, 2, 4, placement=[0, 1, 2, 3] * 4)
        self.assertLess(spread, expected_imbalance(load, 256, 2, 4))

    def test_skewed_routing(self):
        case = MoeCase("s", 4096, num_experts=64, top_k=8, routing="skewed")
        ids = case.topk_indices()
        experts, k = 64, ids.shape[1]
        load = torch.bincount(ids.flatten(), minlength=experts).double()
        gen = torch.Generator().manual_seed(0)
        off = []
        for tokens in (256, 1024):
            for ep in (4, 8, 16):
                real = []
                for _ in range(60):
                    rows = ids[torch.randperm(len(ids), generator=gen)[:tokens]]
                    rank = torch.bincount(rows.flatten() * ep // experts, minlength=ep)
                    real.append(rank.max().item() * ep / (tokens * k))
                want = sum(real) / len(real)
                off.append(abs(expected_imbalance(load, tokens, k, ep) / want - 1))
        self.assertLess(sorted(off)[len(off) // 2], 0.03)

    def test_largest_normal(self):
        for n in (2, 8, 64, 1024):
            gen = torch.Generator().manual_seed(0)
            drawn = torch.randn(4000, n, generator=gen).amax(1).mean().item()
            self.assertEqual(largest_normal(n), drawn, rtol=0.06, atol=0.02)
        self.assertEqual(largest_normal(1), 0)

    def test_errors(self):
        with self.assertRaisesRegex(ValueError, "10 experts do not divide over ep = 4"):
            expected_imbalance([1.0] * 10, 64, 2, 4)
        with self.assertRaisesRegex(ValueError, "one non-negative number per expert"):
            expected_imbalance([0.0] * 8, 64, 2, 4)


if __name__ == "__main__":
    run_tests()
