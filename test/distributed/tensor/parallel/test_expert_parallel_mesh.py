# Owner(s): ["oncall: distributed"]

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel._expert_mesh import fold_expert_parallel
from torch.testing._internal.common_distributed import MultiThreadedTestCase
from torch.testing._internal.common_utils import run_tests


def mesh(names, *shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


class TestFoldExpertParallel(MultiThreadedTestCase):
    world_size = 4

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def test_ranks(self):
        dense = mesh(("dp_shard", "cp", "tp"), 1, 2, 2)
        for ep in (1, 2, 4):
            sparse = fold_expert_parallel(dense, ep)
            self.assertEqual(sparse.mesh_dim_names, ("efsdp", "ep"))
            self.assertEqual(sparse.shape, (4 // ep, ep))
            self.assertEqual(sparse["ep"].get_local_rank(), self.rank % ep)
            self.assertEqual(sparse["efsdp"].get_local_rank(), self.rank // ep)

    def test_other_dims_stay(self):
        dense = mesh(("pp", "dp_shard"), 2, 2)
        sparse = fold_expert_parallel(dense, 2)
        self.assertEqual(sparse.mesh_dim_names, ("pp", "efsdp", "ep"))
        self.assertEqual(sparse.shape, (2, 1, 2))
        self.assertEqual(
            sparse["pp"].get_group().group_name, dense["pp"].get_group().group_name
        )
        self.assertEqual(
            sparse["ep"].mesh.tolist(), [self.rank // 2 * 2, self.rank // 2 * 2 + 1]
        )

    def test_errors(self):
        dense = mesh(("dp_shard", "cp", "tp"), 1, 2, 2)
        with self.assertRaisesRegex(
            ValueError, r"ep_degree must divide dp_shard=1 \* cp=2 \* tp=2 = 4, got 3"
        ):
            fold_expert_parallel(dense, 3)
        with self.assertRaisesRegex(ValueError, "= 4, got 0"):
            fold_expert_parallel(dense, 0)
        with self.assertRaisesRegex(ValueError, r"at least one of .* got .*\('x', 'y'"):
            fold_expert_parallel(mesh(("x", "y"), 2, 2), 2)
        with self.assertRaisesRegex(ValueError, "must not have a dim 'tp' yet"):
            fold_expert_parallel(dense, 2, dims=("cp",), efsdp_dim="tp")


if __name__ == "__main__":
    run_tests()
