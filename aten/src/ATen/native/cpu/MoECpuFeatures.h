#pragma once

#include <ATen/cpu/Utils.h>
#include <c10/util/env.h>

#include <cctype>
#include <initializer_list>
#include <string>
#include <string_view>

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_cpu {

// ONEDNN_MAX_CPU_ISA, or the older DNNL_MAX_CPU_ISA, in upper case: oneDNN takes both
// names and any case.
inline std::string instruction_limit() {
  auto limit = c10::utils::get_env("ONEDNN_MAX_CPU_ISA");
  if (!limit) {
    limit = c10::utils::get_env("DNNL_MAX_CPU_ISA");
  }
  std::string result = limit.value_or("");
  for (char& c : result) {
    c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  }
  return result;
}

// Whether instruction_limit(), which bounds the instructions of oneDNN, lets it use
// one of these, parts of the names that the limit may have. The kernels of _moe_mlp
// keep to it, so that one setting says what all products of a run use.
inline bool may_use(std::initializer_list<std::string_view> instructions) {
  const std::string limit = instruction_limit();
  if (limit.empty() || limit == "ALL" || limit == "DEFAULT") {
    return true;
  }
  for (const auto name : instructions) {
    if (limit.find(name) != std::string::npos) {
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

inline bool may_use_avx512() {
  static const bool may = may_use({"AVX512", "AVX10"});
  return may;
}

inline bool has_avx512_bf16() {
  static const bool has = has_instructions("avx512_bf16") &&
      may_use({"BF16", "FP16", "AMX", "AVX10"});
  return has;
}

} // namespace moe_cpu
} // namespace CPU_CAPABILITY
} // namespace at::native
