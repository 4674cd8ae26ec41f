#pragma once

#include <ATen/cpu/Utils.h>
#include <c10/util/env.h>

#include <algorithm>
#include <cctype>
#include <initializer_list>
#include <string>
#include <string_view>

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_cpu {

// ONEDNN_MAX_CPU_ISA, or the older DNNL_MAX_CPU_ISA, in upper case: oneDNN takes both
// names and any case. Empty without a limit.
inline std::string instruction_limit() {
  auto limit = c10::utils::get_env("ONEDNN_MAX_CPU_ISA");
  if (!limit || limit->empty()) {
    limit = c10::utils::get_env("DNNL_MAX_CPU_ISA");
  }
  std::string result = limit.value_or("");
  for (char& c : result) {
    c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  }
  return result;
}

// Whether instruction_limit(), which bounds the instructions of oneDNN, is one of these.
// The kernels of _moe_mlp keep to it, so that one setting says what all products of a
// run use. Names that are not oneDNN's are no limit, there and here.
inline bool is_limited_to(std::initializer_list<std::string_view> names) {
  const std::string limit = instruction_limit();
  return std::find(names.begin(), names.end(), limit) != names.end();
}

inline bool may_use_avx512() {
  static const bool may =
      !is_limited_to({"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2"});
  return may;
}

inline bool may_use_avx512_bf16() {
  static const bool may = may_use_avx512() &&
      !is_limited_to({"AVX512_CORE", "AVX512_CORE_VNNI"});
  return may;
}

inline bool may_use_amx() {
  static const bool may = may_use_avx512_bf16() &&
      !is_limited_to(
          {"AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX10_1", "AVX10_1_512",
           "AVX10_2", "AVX10_2_512"});
  return may;
}

inline bool has_instructions(const char* name) {
  const auto capabilities = at::cpu::get_cpu_capabilities();
  const auto found = capabilities.find(name);
  return found != capabilities.end() && found->second.toBool();
}

inline bool has_avx512_bf16() {
  static const bool has =
      has_instructions("avx512_bf16") && may_use_avx512_bf16();
  return has;
}

} // namespace moe_cpu
} // namespace CPU_CAPABILITY
} // namespace at::native
