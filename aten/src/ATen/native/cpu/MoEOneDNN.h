#pragma once

#include <ATen/cpu/Utils.h>
#include <c10/util/env.h>

#include <initializer_list>
#include <string>
#include <string_view>

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_cpu {

// Whether ONEDNN_MAX_CPU_ISA, which bounds the instructions of brgemm, lets it use
// one of these, parts of the names that the variable may have. Our own products of
// the same operands keep to it, so that one setting says what a run uses.
inline bool onednn_may_use(std::initializer_list<std::string_view> instructions) {
  const auto limit = c10::utils::get_env("ONEDNN_MAX_CPU_ISA");
  if (!limit || *limit == "ALL" || *limit == "DEFAULT") {
    return true;
  }
  for (const auto name : instructions) {
    if (limit->find(name) != std::string::npos) {
      return true;
    }
  }
  return false;
}

inline bool has_instructions(const char* name) {
  const auto capabilities = at::cpu::get_cpu_capabilities();
  const auto found = capabilities.find(name);
  return found != capabilities.end() && found->second.toBool();
}

// Whether brgemm multiplies bfloat16. cpublas::brgemm asks for AVX512 only, and fails
// with "could not generate a kernel" where AVX512-BF16 is missing.
inline bool brgemm_has_bfloat16() {
  static const bool has = has_instructions("avx512_bf16") &&
      onednn_may_use({"BF16", "FP16", "AMX", "AVX10"});
  return has;
}

} // namespace moe_cpu
} // namespace CPU_CAPABILITY
} // namespace at::native
