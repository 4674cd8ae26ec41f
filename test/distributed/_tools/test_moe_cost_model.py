# Owner(s): ["oncall: distributed"]

import dataclasses
import importlib.util
import math
import pathlib
import sys
import unittest

import torch
from torch.distributed._tools import moe_cost_model as cost
from torch.distributed._tools.moe_cpu_model import cpu_experts
from torch.distributed._tools.moe_exchange_model import (
    all_to_all,
    ALL_TO_ALLS,
    wire_bytes,
)
from torch.distributed._tools.moe_fit import fit
from torch.distributed._tools.moe_profile import (
    BOUNDS,
    Constants,
    CpuConstants,
    DEVICES,
    FITTED,
    Profile,
    profile,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.utils.flop_counter import FlopCounterMode


HAS_EP = importlib.util.find_spec("torch.distributed._moe") is not None


def faster(p, **device):
    return dataclasses.replace(p, device=dataclasses.replace(p.device, **device))


def check_links(all_to_all):
    """A faster link is never slower, and more bytes are never faster."""
    base = profile("H100")
    for algorithm in ALL_TO_ALLS:
        for ep in (8,) if algorithm == "one_sided" else (8, 16, 64):
            for units in (0, 8):

                def seconds(p, tokens=4096, d=7168, **kw):
                    return all_to_all(
                        p, tokens, d, 256, 8, ep, algorithm=algorithm, units=units, **kw
                    )

                now = seconds(base)
                for link in ("fast", "slow"):
                    doubled = faster(base, **{link: 2 * getattr(base.device, link)})
                    assert seconds(doubled) <= now, (algorithm, ep, link)
                assert seconds(base, tokens=8192) >= now
                assert seconds(base, d=8192) >= now
                assert seconds(base, dtype="fp8") <= now
                assert seconds(base, imbalance=1.5) >= now


def check_kernels(experts):
    """Faster memory, products or launches are never slower; more rows never faster."""
    for name in ("H100", "B200", "MI300X"):
        p = profile(name)
        for rows, local in ((64, 8), (8192, 8), (65536, 64)):
            for dtype in ("bf16", "fp8"):
                kw = {"kernel": "mcore", "dtype": dtype, "pass_": "fwd+bwd"}
                now = experts(p, rows, 2048, 768, local, **kw)
                for what in ("memory_rate", "bf16", "fp8", "cache"):
                    doubled = faster(p, **{what: 2 * getattr(p.device, what)})
                    assert experts(doubled, rows, 2048, 768, local, **kw) <= now * (
                        1 + 1e-9
                    ), (name, what)
                assert experts(p, 2 * rows, 2048, 768, local, **kw) > now
                assert experts(p, rows, 2048, 1536, local, **kw) > now


def check_flops(flops):
    """The formula counts what the flop counter counts for the products of the experts."""
    T, D, F, E, K = 24, 16, 12, 4, 2
    ids = torch.arange(T * K).view(T, K) % E
    for gated in (True, False):
        x = torch.randn(T, D, requires_grad=True)
        up = [torch.randn(D, F, requires_grad=True) for _ in range(E)]
        gate = [torch.randn(D, F, requires_grad=True) for _ in range(E)]
        down = [torch.randn(F, D, requires_grad=True) for _ in range(E)]
        with FlopCounterMode(display=False) as forward:
            out = torch.zeros(T, D)
            for e in range(E):
                rows = (ids == e).any(1).nonzero()[:, 0]
                h = x[rows] @ up[e]
                h = h * (x[rows] @ gate[e]).sigmoid() if gated else h.relu()
                out = out.index_add(0, rows, h @ down[e])
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
        assert flops(T * K, D, F, gated=gated) == forward.get_total_flops()
        counted = backward.get_total_flops()
        assert flops(T * K, D, F, gated=gated, pass_="bwd") == counted


def check_bytes(wire_bytes):
    """Expected bytes are those that the accounting of the token switches counts."""
    sys.path.append(str(pathlib.Path(__file__).parents[1]))
    from moe_placement import deduplicated_rows

    gen = torch.Generator().manual_seed(0)
    T, E, K, W, L = 4000, 64, 4, 16, 4
    ids = [torch.rand(T, E, generator=gen).topk(K).indices for _ in range(W)]
    for shape, domain in (((W,), W), ((W // L, L), L)):
        want = deduplicated_rows(ids, E, shape)
        got = wire_bytes(T, 256, E, K, W, domain)
        assert set(got) == set(want), (set(got), set(want))
        for level, rows in want.items():
            counted = sum(rows) / W * 256 * 2
            assert abs(got[level] / counted - 1) < 0.01, (level, got[level], counted)
    flat = wire_bytes(T, 256, E, K, W, L, dedup=False)
    sent = sum((i // (E // W) != r).sum().item() for r, i in enumerate(ids)) / W
    assert abs(flat["flat"] / (sent * 512) - 1) < 0.01


class TestProperties(TestCase):
    def test_links(self):
        check_links(all_to_all)

        def broken(p, tokens, *args, **kw):  # a start that grows with the link's rate
            return all_to_all(p, tokens, *args, **kw) + 1e-14 * p.device.slow

        with self.assertRaises(AssertionError):
            check_links(broken)

    def test_kernels(self):
        check_kernels(cost.experts)

        def broken(p, rows, *args, **kw):  # cost per row falls faster than rows grow
            return cost.experts(p, rows, *args, **kw) + 1e3 / rows**2

        with self.assertRaises(AssertionError):
            check_kernels(broken)

    def test_flops(self):
        check_flops(cost.expert_flops)

        def broken(rows, d, f, *, gated=True, pass_="fwd"):  # forgets the gate
            return cost.expert_flops(rows, d, f, gated=False, pass_=pass_)

        with self.assertRaises(AssertionError):
            check_flops(broken)

    @unittest.skipUnless(HAS_EP, "needs torch.distributed._moe")
    def test_bytes(self):
        check_bytes(wire_bytes)

        def broken(
            tokens, d, e, k, ep, domain, *args, **kw
        ):  # its own rank counted as well
            got = wire_bytes(tokens, d, e, k, ep, domain, *args, **kw)
            return {level: n * ep / (ep - 1) for level, n in got.items()}

        with self.assertRaises(AssertionError):
            check_bytes(broken)

    def test_hit_experts(self):
        gen = torch.Generator().manual_seed(0)
        for experts, rows in ((64, 16), (8, 100), (128, 128)):
            drawn = torch.randint(experts, (2000, rows), generator=gen)
            hit = torch.zeros(2000, experts).scatter_(1, drawn, 1).sum(1).mean().item()
            self.assertEqual(cost.hit_experts(experts, rows), hit, rtol=0.01, atol=0.01)

    def test_nothing_to_do(self):
        p = profile("H100")
        self.assertEqual(cost.gemm(p, 8, 0, 64, 64), 0)
        self.assertEqual(all_to_all(p, 4096, 7168, 256, 8, 1), 0)
        c = CpuConstants()
        self.assertEqual(cpu_experts(c, 0, 64, 64, 8, 2), c.call_us * 1e-6)

    def test_small_experts_are_bound_by_memory(self):
        # Decode: 64 tokens over 128 experts read the weights; FLOPs do not matter.
        p = profile("H100")
        shares = cost.expert_shares(p, 64 * 8, 2048, 768, 128)
        self.assertGreater(shares["memory"], shares["compute"])
        whole = cost.experts(p, 64 * 8, 2048, 768, 128)
        self.assertEqual(sum(shares.values()), whole)
        big = cost.expert_shares(p, 65536, 2048, 768, 8, kernel="mcore", dtype="fp8")
        self.assertGreater(big["quantisation"], 0)

    def test_bad_arguments(self):
        p = profile("H100")
        with self.assertRaisesRegex(
            ValueError, "algorithm must be one of .*got 'ring'"
        ):
            all_to_all(p, 1, 1, 2, 1, 2, algorithm="ring")
        with self.assertRaisesRegex(ValueError, "dtype must be one of .*got 'int3'"):
            cost.gemm(p, 1, 1, 1, 1, "int3")
        for place, name in enumerate(("groups", "m", "n", "k")):
            sizes = [1, 1, 1, 1]
            sizes[place] = -1
            with self.assertRaisesRegex(ValueError, f"^gemm: {name} must be .*got -1"):
                cost.gemm(p, *sizes)
        for call in (
            lambda: cost.router(p, 1, 1, 1, 1, "both"),
            lambda: cost.dense_mlp(p, 1, 1, 1, pass_="both"),
            lambda: cost.expert_flops(1, 1, 1, pass_="both"),
        ):
            with self.assertRaisesRegex(ValueError, "pass_ must be .*got 'both'"):
                call()
        with self.assertRaisesRegex(ValueError, "^router: tokens must be .*got -1"):
            cost.router(p, -1, 64, 8, 2)
        with self.assertRaisesRegex(ValueError, "^dense_mlp: tokens must be .*got -1"):
            cost.dense_mlp(p, -1, 64, 64)
        with self.assertRaisesRegex(ValueError, "kernel must be one of .*got 'x'"):
            cost.experts(p, 1, 1, 1, 1, kernel="x")
        with self.assertRaisesRegex(ValueError, "pass_ must be .*got 'both'"):
            cost.experts(p, 1, 1, 1, 1, pass_="both")
        for place, name, bad in (
            (0, "rows", -4), (0, "rows", math.nan), (0, "rows", 1e300), (1, "d", -1),
            (2, "f", -1), (3, "local", 0),
        ):  # fmt: skip
            sizes = [8, 64, 64, 8]
            sizes[place] = bad
            for function in (cost.experts, cost.recipe_seconds):
                with self.assertRaisesRegex(
                    ValueError, f"^{function.__name__}: {name} must be .*, got "
                ):
                    function(p, *sizes)
        with self.assertRaisesRegex(ValueError, "^experts: tokens must be .*got -1"):
            cost.experts(p, 8, 64, 64, 8, tokens=-1)
        # No output rows are not the default, which is the routed ones.
        self.assertLess(
            cost.experts(p, 1e6, 64, 64, 8, tokens=0), cost.experts(p, 1e6, 64, 64, 8)
        )
        with self.assertRaisesRegex(ValueError, "rows must be above 0, got 0"):
            cost.copy_cost(p, 0, 64, 64, 8, 8)
        with self.assertRaisesRegex(ValueError, "device must be one of .*got 'H1'"):
            profile("H1")

    @parametrize(
        "name,bad",
        [
            ("tokens", -1), ("d", 0), ("num_experts", 0), ("k", 0), ("k", 9), ("ep", 0), ("ep", -1), ("ep", 2.5),
            ("domain", -1), ("imbalance", 0), ("node_limit", -1), ("units", -1),
            ("dtype", "foo"), ("algorithm", "ring"),
        ],
    )  # fmt: skip
    def test_bad_exchange(self, name, bad):
        args = {"tokens": 64, "d": 64, "num_experts": 8, "k": 2, "ep": 8, name: bad}
        with self.assertRaisesRegex(
            ValueError, f"^all_to_all: {name} must be .*, got {bad!r}$"
        ):
            all_to_all(profile("H100"), **args)

    def test_one_sided_stays_in_a_domain(self):
        args = (profile("H100"), 4096, 7168, 256, 8)
        times = [all_to_all(*args, ep, algorithm="one_sided") for ep in (2, 4, 8)]
        self.assertEqual(times, sorted(times))
        with self.assertRaisesRegex(ValueError, "ep must be at most the 8 .*got 16"):
            all_to_all(*args, 16, algorithm="one_sided")
        all_to_all(*args, 64, algorithm="one_sided", domain=72)

    @parametrize(
        "name,bad",
        [("tokens", -1), ("d", -1), ("f", 0), ("num_experts", 0), ("k", 0)],
    )
    def test_bad_experts_of_a_cpu(self, name, bad):
        sizes = {"tokens": 8, "d": 64, "f": 64, "num_experts": 8, "k": 2, name: bad}
        with self.assertRaisesRegex(
            ValueError, f"^cpu_experts: {name} must be .*, got {bad!r}$"
        ):
            cpu_experts(CpuConstants(), **sizes)
        with self.assertRaisesRegex(ValueError, "dtype must be .*got 'fp8'"):
            cpu_experts(CpuConstants(), 8, 64, 64, 8, 2, dtype="fp8")


class TestProfiles(TestCase):
    @parametrize("name", DEVICES)
    def test_json(self, name):
        p = profile(name)
        again = Profile.from_json(p.to_json())
        self.assertEqual(again.to_json(), p.to_json())
        self.assertIn(
            "fitted" if p.device.generation != "ampere" else "not", p.provenance
        )

    def test_peaks_are_dense(self):
        self.assertEqual(profile("H100").device.bf16, 989.5e12)
        self.assertEqual(profile("B200").device.fp8, 4500e12)
        with self.assertRaisesRegex(ValueError, "expected name, device, constants"):
            Profile.from_json({"name": "x"})

    def test_fit(self):
        rows = [(x, 3.0 * x + 7.0) for x in (1, 2, 5, 10, 50)]

        def loss(v):
            off = [
                abs(torch.tensor((v["a"] * x + v["b"]) / y).log().item())
                for x, y in rows
            ]
            return sum(off)

        got = fit({"a": 1.0, "b": 1.0}, loss, bounds={"a": (0.1, 10), "b": (0.1, 100)},
                  stiffness=lambda name: 0.0)  # fmt: skip
        self.assertEqual(got["a"], 3.0, rtol=0.05, atol=0)
        self.assertEqual(got["b"], 7.0, rtol=0.05, atol=0)

    def test_constants_are_within_bounds(self):
        for values in FITTED.values():
            Constants(**values)
            for name, value in values.items():
                low, high = BOUNDS[name]
                self.assertTrue(low <= value <= high, (name, value))


instantiate_parametrized_tests(TestProperties)
instantiate_parametrized_tests(TestProfiles)

if __name__ == "__main__":
    run_tests()
