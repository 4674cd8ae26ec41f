#pragma once

// Low-bit weights as a source of panels of the driver (MoEDriver.h). A panel is decoded
// exactly into operands of the micro-GEMM. Operands of e4m3 include power-of-two scales, as
// bfloat16 holds the products. Other scales multiply the sum over their
// block of K, in ascending order. So results depend neither on the number of rows nor
// on the decoder.

#include <ATen/native/MoEMLPScaledUtils.h>
#include <ATen/native/cpu/MoEDriver.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/SmallVector.h>
#include <c10/util/bit_cast.h>

#include <array>
#include <cmath>

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_cpu {

using moe::kPanelLines;

// What a code of a weight means.
enum class LowBitCodes : uint8_t {
  E4M3,
  Int8,
  E2M1,  // two a byte, the one of even k in the low half
  Int4,  // the same, and the value is the code - 8
};

inline LowBitCodes codes_of(ScalarType dtype) {
  return dtype == kFloat8_e4m3fn ? LowBitCodes::E4M3
      : dtype == kChar           ? LowBitCodes::Int8
      : dtype == kByte           ? LowBitCodes::Int4
                                 : LowBitCodes::E2M1;
}
constexpr int64_t code_bits(LowBitCodes codes) {
  return codes == LowBitCodes::E4M3 || codes == LowBitCodes::Int8 ? 8 : 4;
}

// Value of each code: 256, or 16.
inline const std::array<float, 256>& values_of(LowBitCodes codes) {
  static const auto tables = [] {
    constexpr float kE2M1[8] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
    std::array<std::array<float, 256>, 4> t{};
    for (const auto i : c10::irange(256)) {
      t[0][i] = static_cast<float>(
          c10::Float8_e4m3fn(static_cast<uint8_t>(i), c10::Float8_e4m3fn::from_bits()));
      t[1][i] = static_cast<float>(static_cast<int8_t>(i));
      t[2][i] = std::copysign(kE2M1[i & 7], (i & 8) != 0 ? -1.f : 1.f);
      t[3][i] = static_cast<float>((i & 15) - 8);
    }
    return t;
  }();
  return tables[static_cast<size_t>(codes)];
}

// While it exists, this thread computes with denormal numbers, whatever torch.set_flush_denormal says.
// The E8M0 scale 2^-127 is a denormal number, but its product with a code need not be one.
class KeptDenormals {
 public:
#if defined(__SSE2__) || defined(_M_X64)
  KeptDenormals() : before_(_mm_getcsr()) {
    _mm_setcsr(before_ & ~0x8040u);  // DAZ and FTZ
  }
  ~KeptDenormals() {
    _mm_setcsr(before_);
  }

 private:
  const uint32_t before_;
#elif defined(__aarch64__) && defined(__GNUC__)
  KeptDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" : : "r"(before_ & ~(uint64_t{1} << 24)) : "memory");  // FZ
  }
  ~KeptDenormals() {
    asm volatile("msr fpcr, %0" : : "r"(before_) : "memory");
  }

 private:
  uint64_t before_;
#else
  KeptDenormals() {}
#endif
  C10_DISABLE_COPY_AND_ASSIGN(KeptDenormals);
};

// ---- a matrix ---------------------------------------------------------------------

// Scales by (expert, row, element of K).
struct ScaleView {
  static constexpr int64_t kBlocksAhead = 8;  // how many blocks ahead scales are fetched
  bool is_pow2;  // bytes of E8M0, else float
  const void* data;
  int64_t expert_stride;  // in elements
  int64_t row_stride;     // of blocks; of kPanelLines rows if `panels`
  int64_t col_stride;     // of blocks
  int64_t block_rows;
  int64_t block_cols;
  bool panels;

  ScaleView(
      const Tensor& scale, const moe::ScalingRule& rule, int64_t rows, int64_t depth,
      bool has_panels)
      : is_pow2(scale.scalar_type() == kFloat8_e8m0fnu),
        data(scale.const_data_ptr()),
        block_rows(
            rule.square                                          ? rule.block
                : rule.type == moe::ScalingType::TensorWise ? std::max<int64_t>(1, rows)
                                                                 : 1),
        block_cols(std::max<int64_t>(1, rule.block == 0 ? depth : rule.block)),
        panels(has_panels && scale.dim() == 3 && block_rows == 1) {
    const auto stride = [&](int64_t dim) {
      return scale.dim() > dim && scale.size(dim) > 1 ? scale.stride(dim) : 0;
    };
    expert_stride = stride(0);
    // (E, N, blocks) holds (E, N / 16, blocks, 16).
    row_stride = panels ? scale.size(2) * kPanelLines : stride(1);
    col_stride = panels ? kPanelLines : stride(2);
  }

  // Offset of the scale of element k of a row.
  int64_t offset(int64_t expert, int64_t row, int64_t k) const {
    return expert * expert_stride + k / block_cols * col_stride + row_offset(row);
  }
  // Whether scales of neighbouring rows are adjacent, so that a vector of them can be loaded.
  bool is_dense_along_rows() const {
    return panels || (block_rows == 1 && row_stride == 1);
  }
  float at(int64_t expert, int64_t row, int64_t k) const {
    return value(offset(expert, row, k));
  }
  // Scales of element k of the `count` rows of a panel. Fetches those of later blocks.
  template <typename acc_t>
  void load(int64_t expert, int64_t row, int64_t count, int64_t k, acc_t* out) const {
    const int64_t block = k / block_cols;
    const int64_t of_block = expert * expert_stride + block * col_stride;
    // Rows whose scales are the same, or adjacent.
    const int64_t together = panels ? kPanelLines : block_rows;
    const int64_t stride = panels ? 1 : block_rows > 1 ? 0 : row_stride;
    const bool is_next = (block + kBlocksAhead) * col_stride >= row_stride;
    const int64_t ahead = kBlocksAhead * col_stride +
        (is_next ? (count / kPanelLines - 1) * row_stride : 0);
    for (int64_t begin = 0, end = 0; begin < count; begin = end) {
      const int64_t left = together == 1 ? count : together - (row + begin) % together;
      end = std::min(begin + left, count);
      const int64_t first = of_block + row_offset(row + begin);
      if (panels) {
        prefetch(static_cast<const char*>(data) + (first + ahead) * (is_pow2 ? 1 : 4));
      }
      for (const auto i : c10::irange(begin, end)) {
        out[i] = static_cast<acc_t>(value(first + (i - begin) * stride));
      }
    }
  }

 private:
  int64_t row_offset(int64_t row) const {
    return panels ? row / kPanelLines * row_stride + row % kPanelLines
                  : row / block_rows * row_stride;
  }
  float value(int64_t i) const {
    return is_pow2 ? moe::power_of_two(static_cast<const uint8_t*>(data)[i])
                   : static_cast<const float*>(data)[i];
  }
};

// Where scales are applied.
enum class Scaling : uint8_t {
  Folded,  // into the operands
  Blocks,  // sums over block_cols elements
  Rows,    // sums over all of K
};

// One matrix (E, N, K) per expert with the scales of its blocks: element (e, n, k) is
// value(code) * scale[e, n / block_rows, k / block_cols].
struct LowBitView {
  LowBitView(TensorList scaled, const moe::ScalingRule& rule, bool panels)
      : codes(codes_of(scaled[0].scalar_type())),
        panels(panels),
        numbers(panels || scaled[0].stride(2) != 1 ? scaled[0].contiguous() : scaled[0]),
        scales(panels ? scaled[1].contiguous() : scaled[1]),
        rows(numbers.size(1)),
        depth(numbers.size(2) * (8 / code_bits(codes))),
        data(static_cast<const uint8_t*>(numbers.const_data_ptr())),
        expert_bytes(numbers.stride(0)),
        row_bytes(rows > 1 ? numbers.stride(1) : numbers.size(2)),
        scale(scales, rule, rows, depth, panels),
        scaling(
            codes == LowBitCodes::E4M3 && scale.is_pow2 ? Scaling::Folded
                : scale.block_cols >= depth                  ? Scaling::Rows
                                                             : Scaling::Blocks) {}

  // Byte `i` of a row.
  const uint8_t* at(int64_t expert, int64_t row, int64_t i) const {
    const uint8_t* begin = data + expert * expert_bytes;
    if (!panels) {
      return begin + row * row_bytes + i;
    }
    const uint8_t* group = begin + row / kPanelLines * kPanelLines * row_bytes + i / 4 * 64;
    const int64_t lane = row % kPanelLines;
    if (code_bits(codes) == 4) {
      return group + lane * 4 + i % 4;
    }
    // Each half of a 128-bit lane has one byte pair of a line; unpacking the bytes makes words.
    return group + lane / 4 * 16 + i % 4 / 2 * 8 + lane % 4 * 2 + i % 2;
  }

  LowBitCodes codes;
  // WeightLayout::Panels: kPanelLines rows side by side, four bytes of each at a time.
  bool panels;
  Tensor numbers, scales;  // the pointers point into them
  int64_t rows;   // N
  int64_t depth;  // K
  const uint8_t* data;
  int64_t expert_bytes;
  int64_t row_bytes;
  ScaleView scale;
  Scaling scaling;
};

// Lines of a matrix from `row` on, side by side in a register. Their products go to
// c[r * kPanelCols]. The same lines of the next panel are `ahead` bytes further; those to be
// read after these begin at `next`.
struct LineGroup {
  const LowBitView* w;
  int64_t row;
  int64_t ahead;
  float* c;
  const uint8_t* next = nullptr;
};
// Those of a panel.
using LineGroups = c10::SmallVector<LineGroup, 8>;

// ---- int8 rows ----------------------------------------------------------------------

// A left operand rounded to int8: its codes, then per block of K a scale, and the sum of the
// codes. MoELowBitDecoder.h adds a number to the weights, as one factor must not be negative.
struct Int8Row {
  // Of weights of `w`, whose blocks are those of the row.
  explicit Int8Row(const LowBitView& w)
      : depth(w.depth),
        block(std::clamp<int64_t>(w.scale.block_cols, 1, std::max<int64_t>(1, w.depth))),
        has_pairs(code_bits(w.codes) == 4) {}

  static int8_t* codes(void* row) {
    return static_cast<int8_t*>(row);
  }
  float* scales(void* row) const {
    return reinterpret_cast<float*>(codes(row) + depth);
  }
  int32_t* sums(void* row) const {
    return reinterpret_cast<int32_t*>(codes(row) + depth) + ceil_div(depth, block);
  }
  // Weights of 4 bits come as the even ones of each 8 elements, then the odd ones.
  int64_t place(int64_t k) const {
    return has_pairs ? k / 8 * 8 + k % 2 * 4 + k % 8 / 2 : k;
  }

  static constexpr uint64_t even_bytes(uint64_t x) {
    x &= 0x00ff00ff00ff00ff;
    x = (x | x >> 8) & 0x0000ffff0000ffff;
    return (x | x >> 16) & 0xffffffff;
  }

  // The bit rule of _moe_quantize with int8: the exponent of the scale is
  // ceil(log2(max / 127)), the smallest for 0; a value that is not finite makes the block NaN.
  template <typename scalar_t>
  void round(const scalar_t* x, void* row) const {
    for (int64_t k0 = 0; k0 < depth; k0 += block) {
      const int64_t end = std::min(k0 + block, depth);
      alignas(64) float values[kPiece];
      // Bits of magnitudes are ordered as integers; values that are not finite come last.
      int32_t largest = 0;
      for (int64_t k = k0; k < end; k += kPiece) {
        convert_row(x + k, values, kPiece);
        for (const auto i : c10::irange(kPiece)) {
          largest = std::max(largest, c10::bit_cast<int32_t>(values[i]) & 0x7fffffff);
        }
      }
      const int32_t byte = moe::scale_byte(largest, moe::scale_byte_offset(kChar));
      const float inverse = byte == 255 ? 0.f : moe::power_of_two(254 - byte);
      int32_t sum = 0;
      for (int64_t k = k0; k < end; k += kPiece) {
        convert_row(x + k, values, kPiece);
        alignas(64) int8_t rounded[kPiece];
        for (const auto i : c10::irange(kPiece)) {
          const float value = byte == 255 ? 0.f : std::nearbyint(values[i] * inverse);
          rounded[i] = static_cast<int8_t>(static_cast<int32_t>(value));
        }
        for (const auto i : c10::irange(kPiece)) {
          sum += rounded[i];
        }
        std::memcpy(codes(row) + k, rounded, kPiece);
        for (int64_t i = 0; has_pairs && i < kPiece; i += 8) {
          uint64_t word = 0;
          std::memcpy(&word, rounded + i, 8);
          const uint64_t parted = even_bytes(word) | even_bytes(word >> 8) << 32;
          std::memcpy(codes(row) + k + i, &parted, 8);
        }
      }
      scales(row)[k0 / block] = moe::power_of_two(byte);
      sums(row)[k0 / block] = sum;
    }
  }

  static constexpr int64_t kPiece = 32;  // K and blocks are multiples of it
  int64_t depth;  // K
  int64_t block;
  bool has_pairs;
};

}  // namespace moe_cpu
}  // namespace CPU_CAPABILITY
}  // namespace at::native

// Decoders for instruction sets.
#include <ATen/native/cpu/MoELowBitAvx2.h>
#include <ATen/native/cpu/MoELowBitAvx512.h>

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_cpu {

// Calls fn(decoder) for the decoders that the CPU supports, until one returns true.
template <typename Fn>
bool any_decoder([[maybe_unused]] const Fn& fn) {
#ifdef MOE_HAS_LOW_BIT_AVX512
  if (Avx512LowBit::is_available() && fn(Avx512LowBit())) {
    return true;
  }
#endif
#ifdef MOE_HAS_LOW_BIT_AVX2
  if (fn(Avx2LowBit())) {
    return true;
  }
#endif
  return false;
}

// ---- the source -----------------------------------------------------------------------

// W^T of a matrix of codes per expert, in one part, or in two for gate and up, which may
// be two tensors.
class LowBitSource {
 public:
  LowBitSource(
      const LowBitView& w, const std::optional<LowBitView>& w_up, int64_t parts)
      : part_depth(w.depth),
        parts_{w, w_up.value_or(w)},
        second_row_(w_up.has_value() || parts == 1 ? 0 : w.rows / 2) {}

  static constexpr bool kPacks = false;
  const int64_t k_parts = 1;
  const int64_t part_depth;

  // The product of a whole panel: c of `lines` rows, see ExpertGemm.
  template <typename Micro>
  void multiply(
      int64_t expert, const PanelColumns& columns, int64_t rows,
      const RowLines<typename Micro::operand_t>& a, typename Micro::operand_t* packed,
      acc_type<typename Micro::operand_t>* c) const {
    const KeptDenormals mode;
    using operand_t = typename Micro::operand_t;
    using acc_t = acc_type<operand_t>;
    if (part_depth == 0) {
      std::fill_n(c, rows * kPanelCols, acc_t(0));
      return;
    }
    // For few rows weights are decoded in registers and not packed.
    const bool is_done = any_decoder([&](auto decoder) {
      using Decoder = decltype(decoder);
      if constexpr (Decoder::template multiplies<Micro>()) {
        if (rows <= Decoder::kRows) {
          const auto groups = line_groups<Decoder>(columns, c);
          return !groups.empty() &&
              Decoder::template multiply<Micro>(groups, expert, rows, a.lines);
        }
      }
      return false;
    });
    if (is_done) {
      return;
    }
    const LowBitView& w = parts_[0];
    const bool in_blocks = w.scaling == Scaling::Blocks;
    const int64_t block =
        in_blocks ? std::min(Micro::kMinDepth, w.scale.block_cols) : Micro::kMinDepth;
    // Whether the product multiplies by the scales; AmxGemm cannot.
    const auto scales_sums = [&] {
      if constexpr (requires { Micro::kSumDepth; }) {
        return in_blocks && block <= Micro::kSumDepth;
      }
      return false;
    }();
    // The words of a tile as wide as the panel follow each other, so that a block can be a part of it.
    const int64_t step = scales_sums && Micro::kTileCols == kPanelCols
        ? Micro::kMinDepth / block * block
        : block;
    alignas(64) acc_t scales[kPanelCols] = {};
    if (in_blocks && !scales_sums) {
      std::fill_n(c, rows * kPanelCols, acc_t(0));
    }
    for (int64_t k0 = 0; k0 < part_depth; k0 += step) {
      const int64_t end = std::min(k0 + step, part_depth);
      auto ahead = prefetch_after<Micro>(expert, columns, rows, k0, end - k0);
      for (const auto& span : columns.spans) {
        if (span.count > 0) {
          pack<Micro>(expert, span, k0, end - k0, packed);
        }
      }
      for (int64_t k = k0; k < end; k += block) {
        const int64_t depth = std::min(block, end - k);
        const operand_t* panel = packed + (k - k0) * kPanelCols;
        if (in_blocks) {
          load_scales(expert, columns, k, scales);
        }
        if (!in_blocks || scales_sums) {
          Micro::multiply(
              rows, columns.end(), depth, {a.lines, a.ld, a.offset + k}, panel,
              {c, k > 0, in_blocks ? scales : nullptr}, ahead);
          continue;
        }
        // A few rows at a time, so that the sums of a block stay in cache.
        constexpr int64_t kRows =
            std::max<int64_t>(1, 48 / Micro::kTileRows) * Micro::kTileRows;
        alignas(64) acc_t sums[kRows * kPanelCols];
        for (int64_t row = 0; row < rows; row += kRows) {
          const int64_t count = std::min(kRows, rows - row);
          Micro::multiply(
              count, columns.end(), depth, {a.lines + row, a.ld, a.offset + k}, panel,
              {sums, false}, ahead);
          add_scaled(sums, scales, count, c + row * kPanelCols);
        }
      }
    }
    if (w.scaling == Scaling::Rows) {
      load_scales(expert, columns, 0, scales);
      scale_tile(scales, rows, c);
    }
  }

 protected:
  // The columns as groups of lines; none if that is not possible.
  template <typename Decoder>
  LineGroups line_groups(const PanelColumns& columns, float* c) const {
    LineGroups groups;
    for (const auto& span : columns.spans) {
      const LowBitView& w = part(span);
      if (span.count > 0 && !Decoder::is_regular(w, first_row(span), span.count)) {
        return {};
      }
      for (int64_t n = 0; n < span.count; n += Decoder::kLines) {
        groups.push_back(
            {&w, first_row(span) + n, span.count * w.row_bytes, c + span.at + n});
      }
    }
    return groups;
  }

  const LowBitView& part(const PanelSpan& span) const {
    return parts_[span.part];
  }
  int64_t first_row(const PanelSpan& span) const {
    return span.first + (span.part == 1 ? second_row_ : 0);
  }

 private:
  template <typename acc_t>
  void load_scales(
      int64_t expert, const PanelColumns& columns, int64_t k, acc_t (&scales)[kPanelCols]) const {
    for (const auto& span : columns.spans) {
      part(span).scale.load(expert, first_row(span), span.count, k, scales + span.at);
    }
  }

  // c += sums * scales
  template <typename acc_t>
  static void add_scaled(const acc_t* sums, const acc_t* scales, int64_t rows, acc_t* c) {
    using Vec = vec::Vectorized<acc_t>;
    for (int64_t i = 0; i < rows * kPanelCols; i += Vec::size()) {
      vec::fmadd(
          Vec::loadu(sums + i), Vec::loadu(scales + i % kPanelCols), Vec::loadu(c + i))
          .store(c + i);
    }
  }

  template <typename acc_t>
  static void scale_tile(const acc_t* scales, int64_t rows, acc_t* c) {
    using Vec = vec::Vectorized<acc_t>;
    for (int64_t i = 0; i < rows * kPanelCols; i += Vec::size()) {
      (Vec::loadu(c + i) * Vec::loadu(scales + i % kPanelCols)).store(c + i);
    }
  }

  // The bytes of the codes for Micro::Prefetch: lines of a span, or of kPanelLines side by side.
  struct CodeBytes {
    const LowBitSource& source;
    const int64_t lines;       // that follow each other
    const int64_t part_depth;  // bytes of them

    StridedView<uint8_t> view(
        int64_t expert, const PanelSpan& span, int64_t /*k_part*/, int64_t begin) const {
      const LowBitView& w = source.part(span);
      const uint8_t* first = w.at(expert, source.first_row(span), 0);
      return {first + begin, 1, w.row_bytes * lines};
    }
  };

  // Fetches the codes that are read after [k0, k0 + depth) of K, in the calls of a product.
  template <typename Micro>
  typename Micro::Prefetch prefetch_after(
      int64_t expert, PanelColumns columns, int64_t rows, int64_t k0, int64_t depth) const {
    const LowBitView& w = parts_[0];
    const int64_t lines = w.panels ? kPanelLines : 1;
    const int64_t products = ceil_div(rows, Micro::kTileRows) *
        ceil_div(columns.end(), Micro::kTileCols) *
        (Micro::kFetchesWithin ? ceil_div(depth, kWordElements<typename Micro::operand_t>) : 1);
    const bool ends = k0 + depth == part_depth;
    for (auto& span : columns.spans) {
      span.first += ends ? span.count : 0;  // the next panel
      span.count = ceil_div(span.count, lines);
    }
    const auto bytes = [&](int64_t k) { return k * code_bits(w.codes) / 8 * lines; };
    return typename Micro::Prefetch(
        CodeBytes{*this, lines, bytes(part_depth)}, Panel{expert, columns}, 0,
        ends ? 0 : bytes(k0 + depth), bytes(depth), products, Micro::kFetchesWithin);
  }

  // Decodes columns of `span`, [k0, k0 + depth) of K, into a panel.
  template <typename Micro>
  void pack(
      int64_t expert, const PanelSpan& span, int64_t k0, int64_t depth,
      typename Micro::operand_t* panel) const {
    using operand_t = typename Micro::operand_t;
    constexpr bool is_one_tile = Micro::kTileCols == kPanelCols;
    const LowBitView& w = part(span);
    const bool is_done = any_decoder([&](auto decoder) {
      return decltype(decoder)::pack(
          w, expert, first_row(span), span.count, k0, depth, span.at, Micro::kTileCols, panel);
    });
    if (is_done) {
      return;
    }
    // Lines of a tile of columns are decoded, then transposed. Products deeper than
    // kDepth have tiles as wide as the panel, whose words follow each other.
    constexpr int64_t kLines = 16;
    constexpr int64_t kDepth = 256;
    TORCH_INTERNAL_ASSERT_DEBUG_ONLY(depth <= kDepth || is_one_tile);
    alignas(64) operand_t lines[kLines][kDepth];
    for (int64_t k = 0; k < depth; k += kDepth) {
      const int64_t piece = std::min(kDepth, depth - k);
      for (int64_t n = 0; n < span.width; n += kLines) {
        const int64_t width = std::min(kLines, span.width - n);
        const int64_t count = std::clamp<int64_t>(span.count - n, 0, width);
        for (const auto i : c10::irange(count)) {
          decode(w, expert, first_row(span) + n + i, k0 + k, piece, lines[i]);
        }
        pack_panel<Micro, operand_t>(
            {lines[0], 1, kDepth}, count, piece, span.at + n, width, panel + k * kPanelCols);
      }
    }
  }

  template <typename operand_t>
  static void decode(
      const LowBitView& w, int64_t expert, int64_t row, int64_t k0, int64_t depth,
      operand_t* out) {
    const auto& values = values_of(w.codes);
    const bool folded = w.scaling == Scaling::Folded;
    const int64_t per_byte = 8 / code_bits(w.codes);
    float scale = 1;
    for (const auto k : c10::irange(k0, k0 + depth)) {
      if (folded && (k == k0 || k % w.scale.block_cols == 0)) {
        scale = w.scale.at(expert, row, k);
      }
      uint8_t code = *w.at(expert, row, k / per_byte);
      if (per_byte == 2) {
        code = k % 2 == 0 ? code & 15 : code >> 4;
      }
      out[k - k0] = static_cast<operand_t>(values[code] * scale);
    }
  }

  const LowBitView parts_[2];
  const int64_t second_row_;
};

// The same with rows rounded to int8: sums over a block are integers.
class Int8LowBitSource : public LowBitSource {
 public:
  using LowBitSource::LowBitSource;

  // With one scale per row a sum is over all of K. It must fit into 32 bits.
  static bool is_supported(const LowBitView& w) {
    constexpr int64_t kMaxDepth = int64_t{1} << 17;
    return w.codes != LowBitCodes::E4M3 && (w.scaling != Scaling::Rows || w.depth <= kMaxDepth);
  }

  // A row takes at most 1.25 bytes per element; the driver's rows have two.
  template <typename scalar_t, typename operand_t>
  void convert_row(const scalar_t* row, operand_t* out) const {
    static_assert(sizeof(operand_t) >= 2);
    layout_.round(row, out);
  }

  template <typename Micro>
  void multiply(
      int64_t expert, const PanelColumns& columns, int64_t rows,
      const RowLines<typename Micro::operand_t>& a, typename Micro::operand_t* packed,
      acc_type<typename Micro::operand_t>* c) const {
    const KeptDenormals mode;
    if (part_depth == 0) {
      std::fill_n(c, rows * kPanelCols, 0);
      return;
    }
    if constexpr (std::is_same_v<acc_type<typename Micro::operand_t>, float>) {
      const bool is_done = any_decoder([&](auto decoder) {
        const auto groups = line_groups<decltype(decoder)>(columns, c);
        return !groups.empty() &&
            decltype(decoder)::template multiply_int8<Micro>(groups, expert, rows, a.lines, packed);
      });
      if (is_done) {
        return;
      }
    }
    for (const auto& span : columns.spans) {
      const LowBitView& w = part(span);
      for (const auto i : c10::irange(rows)) {
        for (const auto n : c10::irange(span.count)) {
          c[i * kPanelCols + span.at + n] = dot(w, expert, first_row(span) + n, a.lines[i]);
        }
      }
    }
  }

 private:
  template <typename operand_t>
  float dot(const LowBitView& w, int64_t expert, int64_t row, const operand_t* x) const {
    auto* record = const_cast<operand_t*>(x);
    const auto& values = values_of(w.codes);
    const int64_t per_byte = 8 / code_bits(w.codes);
    float sum = 0;
    for (int64_t k0 = 0; k0 < w.depth; k0 += layout_.block) {
      int64_t products = 0;  // of twice the weights, as e2m1 has halves
      for (const auto k : c10::irange(k0, std::min(k0 + layout_.block, w.depth))) {
        uint8_t code = *w.at(expert, row, k / per_byte);
        if (per_byte == 2) {
          code = k % 2 == 0 ? code & 15 : code >> 4;
        }
        products +=
            Int8Row::codes(record)[layout_.place(k)] * static_cast<int64_t>(2 * values[code]);
      }
      const float scale = w.scale.at(expert, row, k0) / 2;
      const float scaled = static_cast<float>(products) * scale;
      sum = std::fma(scaled, layout_.scales(record)[k0 / layout_.block], sum);
    }
    return sum;
  }

  const Int8Row layout_{part({})};
};

}  // namespace moe_cpu
}  // namespace CPU_CAPABILITY
}  // namespace at::native
