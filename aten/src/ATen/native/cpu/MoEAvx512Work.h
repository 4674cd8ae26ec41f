#pragma once

// How the AVX512 kernels of _moe_mlp split their work over threads, and the memory
// that the threads write.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/cpu/MoEAmx.h>
#include <ATen/native/cpu/MoEAvx512Packing.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#else
#include <ATen/ops/empty.h>
#endif

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <atomic>
#include <optional>
#include <type_traits>
#include <vector>

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_avx512 {

// Rows [begin, end) of one expert.
struct Block {
  int64_t expert;
  int64_t begin;
  int64_t end;
};

// Whether products of this type run on AMX tiles.
template <typename compute_t>
inline bool uses_tiles() {
  return std::is_same_v<compute_t, BFloat16> && moe_amx::is_available();
}

// What a thread has to hold while it multiplies.
template <typename compute_t>
class GemmSession {
 public:
#ifdef MOE_HAS_AMX
  GemmSession() {
    if (uses_tiles<compute_t>()) {
      tiles_.emplace();
    }
  }

 private:
  std::optional<moe_amx::Session> tiles_;
#endif
};

// Hands out blocks x panels to the threads as they come. A thread takes a block and
// goes through its panels, a few at a time, and helps with the others' blocks when
// none is left, so that one that the system or a neighbour slows down gets less.
// Each (block, panel) is computed in exactly one way, whichever thread gets it.
class WorkList {
 public:
  // At most panels_per_task panels of a block are handed out at once.
  WorkList(std::vector<Block> blocks, int64_t panels, int64_t panels_per_task)
      : blocks_(std::move(blocks)),
        panels_(panels),
        per_task_(std::clamp<int64_t>(panels_per_task, 1, panels)) {}

  // fn(thread, block, next, panel_begin, panel_end) for every task, next as in Task.
  // The tasks of a block come one after the other on the thread that took it.
  template <typename compute_t, typename Fn>
  void run(int64_t threads, const Fn& fn) const {
    const auto blocks = static_cast<int64_t>(blocks_.size());
    std::atomic<int64_t> next_block{0};
    std::vector<std::atomic<int64_t>> next_panel(blocks);
    at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
      const GemmSession<compute_t> session;
      for (const auto thread : c10::irange(begin, end)) {
        const auto work_on = [&](int64_t block) {
          auto& panel = next_panel[block];
          const Block* next =
              block + threads < blocks ? &blocks_[block + threads] : nullptr;
          for (int64_t first = panel.fetch_add(per_task_); first < panels_;
               first = panel.fetch_add(per_task_)) {
            fn(thread,
               blocks_[block],
               next,
               first,
               std::min(first + per_task_, panels_));
          }
        };
        for (int64_t block = next_block++; block < blocks;
             block = next_block++) {
          work_on(block);
        }
        for (const auto block : c10::irange(blocks)) {
          work_on(block);
        }
      }
    });
  }

 private:
  std::vector<Block> blocks_;
  int64_t panels_;
  int64_t per_task_;
};

// Rows of the expert that has most.
inline int64_t most_rows(const std::vector<Block>& experts) {
  int64_t most = 0;
  for (const auto& expert : experts) {
    most = std::max(most, expert.end - expert.begin);
  }
  return most;
}

// Cuts each expert's rows into blocks of at most max_rows.
inline std::vector<Block> make_blocks(
    const std::vector<Block>& experts,
    int64_t max_rows) {
  std::vector<Block> blocks;
  for (const auto& expert : experts) {
    for (int64_t row = expert.begin; row < expert.end; row += max_rows) {
      blocks.push_back(
          {expert.expert, row, std::min(row + max_rows, expert.end)});
    }
  }
  return blocks;
}

// Maps the pages of memory that is about to be written. Weight gradients are as
// large as the weights and new in every step, so that each of their pages is
// touched for the first time here; asking for them together costs about half of
// the page faults. Huge pages would cost less yet, but not where a hypervisor takes
// free memory back: after a pause a step was a quarter slower with them. Only a
// hint: failing (an older kernel) changes nothing.
inline void map_pages(void* data, int64_t bytes) {
#ifdef __linux__
#ifdef MADV_POPULATE_WRITE
  constexpr int populate_write = MADV_POPULATE_WRITE;
#else
  constexpr int populate_write = 23; // Linux 5.14, glibc 2.35
#endif
  constexpr uintptr_t page = 4096;
  const auto begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const auto end = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
  if (begin < end) {
    madvise(reinterpret_cast<void*>(begin), end - begin, populate_write);
  }
#endif
}

// Cache-line aligned per-thread buffers cut out of one allocation.
class Scratch {
 public:
  Scratch(int64_t threads, int64_t bytes)
      : stride_(round_up(bytes, 64) + 64),
        storage_(at::empty({threads * stride_ + 64}, at::kByte)) {
    auto address = reinterpret_cast<uintptr_t>(storage_.data_ptr());
    base_ = reinterpret_cast<char*>((address + 63) / 64 * 64);
  }
  char* at(int64_t thread) const {
    return base_ + thread * stride_;
  }

 private:
  int64_t stride_;
  Tensor storage_;
  char* base_;
};

} // namespace moe_avx512
} // namespace CPU_CAPABILITY
} // namespace at::native
