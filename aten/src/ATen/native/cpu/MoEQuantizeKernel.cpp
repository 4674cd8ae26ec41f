// _moe_quantize on CPU, and the same rounding without codes: the low-precision MLP
// multiplies the values of codes and scales. The loops are short and plain enough for the
// compiler to vectorize them.
#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/MoEMLPUtils.h>
#include <ATen/native/MoEQuantize.h>
#include <ATen/native/cpu/MoEPacking.h>

#include <algorithm>
#include <vector>

namespace at::native {
namespace {

using moe::kNaNByte;
using moe::power_of_two;
using moe::QuantizeOutputs;
using moe::ScalingRule;
using moe_cpu::convert_row;

// Elements handled at a time: one block of a blockwise rule, or several.
constexpr int64_t kChunk = 128;
// Elements that are worth another thread.
constexpr int64_t kGrain = 32 * 1024;
constexpr int32_t kMagnitude = 0x7FFFFFFF;

inline float reciprocal(int32_t byte) {
  return power_of_two(std::max(254 - byte, 0));
}

inline int32_t max_magnitude(const float* x, int64_t n) {
  int32_t most = 0;
  for (int64_t i = 0; i < n; ++i) {
    most = std::max(most, c10::bit_cast<int32_t>(x[i]) & kMagnitude);
  }
  return most;
}

// Codes of scaled numbers. Below 2^-6 a float8_e4m3fn has steps of 2^-9, to which adding 2^14
// rounds; above it has 3 bits of mantissa.
struct E4M3Code {
  static inline uint8_t of(float x) {
    const auto bits = c10::bit_cast<uint32_t>(x);
    const uint32_t magnitude = bits & 0x7FFFFFFFU;
    const uint32_t normal = ((magnitude + 0x7FFFFU + ((magnitude >> 20) & 1U)) >> 20) - 960U;
    const uint32_t small =
        c10::bit_cast<uint32_t>(c10::bit_cast<float>(magnitude) + 16384.F) - 0x46800000U;
    const uint32_t code = std::min(magnitude < 0x3C800000U ? small : normal, 0x7EU);
    return static_cast<uint8_t>(code | ((bits >> 24) & 0x80U));
  }
  // The code as an integer.
  static inline float rounded(float x) {
    const auto bits = c10::bit_cast<uint32_t>(x);
    const uint32_t magnitude = bits & 0x7FFFFFFFU;
    const uint32_t normal = (magnitude + 0x7FFFFU + ((magnitude >> 20) & 1U)) & 0xFFF00000U;
    const float small = (c10::bit_cast<float>(magnitude) + 16384.F) - 16384.F;
    const float number = std::min(magnitude < 0x3C800000U ? small : c10::bit_cast<float>(normal), 448.F);
    return c10::bit_cast<float>(c10::bit_cast<uint32_t>(number) | (bits & 0x80000000U));
  }
  // The value of a code. Codes below 8 are the subnormals, multiples of 2^-9.
  static inline float number(uint8_t code) {
    const uint32_t magnitude = code & 0x7FU;
    const float small = static_cast<float>(static_cast<int32_t>(magnitude)) * 0.001953125F;
    const float normal = c10::bit_cast<float>((magnitude << 20) + 0x3C000000U);
    const float value = magnitude < 8U ? small : normal;
    const auto bits = c10::bit_cast<uint32_t>(value) | ((code & 0x80U) << 24);
    return c10::bit_cast<float>(magnitude == 0x7FU ? 0x7FC00000U : bits);
  }
  static constexpr uint8_t kNaN = 0x7F;
};

struct Int8Code {
  static inline float rounded(float x) {
    // Adding 1.5 * 2^23 rounds to integers.
    return (std::clamp(x, -127.F, 127.F) + 12582912.F) - 12582912.F;
  }
  static inline uint8_t of(float x) {
    return static_cast<uint8_t>(static_cast<int32_t>(rounded(x)));
  }
  static inline float number(uint8_t code) {
    return static_cast<float>(static_cast<int8_t>(code));
  }
  static constexpr uint8_t kNaN = 0;
};

// Writes scales, numbers and codes of one call.
class Writer {
 public:
  Writer(const ScalingRule& rule, const QuantizeOutputs& out)
      : byte_offset_(moe::scale_byte_offset(out.dtype)),
        is_int8_(out.dtype == kChar),
        bytes_(rule.scale_dtype != kFloat && out.scale.defined()
                   ? static_cast<uint8_t*>(out.scale.mutable_data_ptr())
                   : nullptr),
        floats_(rule.scale_dtype == kFloat && out.scale.defined()
                    ? out.scale.mutable_data_ptr<float>()
                    : nullptr),
        codes_(out.data.defined() ? static_cast<uint8_t*>(out.data.mutable_data_ptr()) : nullptr),
        values_(out.values) {}

  // The byte of a block, whose scale is at `place`.
  int32_t put_scale(int32_t amax_bits, int64_t place) const {
    const int32_t byte = moe::scale_byte(amax_bits, byte_offset_);
    if (bytes_ != nullptr) {
      bytes_[place] = static_cast<uint8_t>(byte);
    } else if (floats_ != nullptr) {
      floats_[place] = power_of_two(byte);
    }
    return byte;
  }

  bool has_codes() const {
    return codes_ != nullptr;
  }
  uint8_t* codes() const {
    return codes_;
  }
  bool has_values() const {
    return values_.defined();
  }

  // Writes the wanted codes and values of n <= kChunk numbers with one byte.
  void put(const float* x, int64_t n, int32_t byte, int64_t place) const {
    with_code([&](auto code) {
      using Code = decltype(code);
      const float factor = reciprocal(byte), scale = power_of_two(byte);
      uint8_t* to = codes_ + place;
      if (has_codes() && byte == kNaNByte) {
        std::fill_n(to, n, Code::kNaN);
      } else if (has_codes()) {
        for (int64_t i = 0; i < n; ++i) {
          to[i] = Code::of(x[i] * factor);
        }
      }
      if (has_values()) {
        alignas(64) float out[kChunk];
        for (int64_t i = 0; i < n; ++i) {
          out[i] = Code::rounded(x[i] * factor) * scale;
        }
        store_values(out, n, place);
      }
    });
  }

  // Codes of n numbers, each with its own reciprocal (NaN for NaN).
  void encode_each(const float* x, int64_t n, const float* reciprocals, uint8_t* to) const {
    with_code([&](auto code) {
      using Code = decltype(code);
      for (int64_t i = 0; i < n; ++i) {
        const bool is_nan = reciprocals[i] != reciprocals[i];
        const uint8_t number = Code::of(is_nan ? 0.F : x[i] * reciprocals[i]);
        to[i] = is_nan ? Code::kNaN : number;
      }
    });
  }
  void put_values_each(
      const float* x, int64_t n, const float* reciprocals, const float* scales,
      int64_t place) const {
    alignas(64) float out[kChunk];
    for (int64_t i = 0; i < n; ++i) {
      out[i] = E4M3Code::rounded(x[i] * reciprocals[i]) * scales[i];
    }
    store_values(out, n, place);
  }

 private:
  template <typename Fn>
  void with_code(const Fn& fn) const {
    is_int8_ ? fn(Int8Code()) : fn(E4M3Code());
  }

  void store_values(const float* x, int64_t n, int64_t place) const {
    if (values_.scalar_type() == kFloat) {
      std::copy_n(x, n, values_.mutable_data_ptr<float>() + place);
    } else {
      convert_row(x, values_.mutable_data_ptr<BFloat16>() + place, n);
    }
  }

  const int32_t byte_offset_;
  const bool is_int8_;
  uint8_t* const bytes_;
  float* const floats_;
  uint8_t* const codes_;
  const Tensor values_;
};

// x (outer, rows, cols) in blocks of tall x wide elements with a scale each. A thread takes `group`
// neighbouring blocks at a time, at least `grain` times.
template <typename scalar_t>
void quantize_blocks(
    const scalar_t* x, int64_t outer, int64_t rows, int64_t cols, int64_t tall, int64_t wide,
    int64_t blocks, int64_t group, int64_t grain, const Writer& writer) {
  const int64_t lines = (rows + tall - 1) / tall, groups = (blocks + group - 1) / group;
  const auto quantize_block = [&](int64_t line, int64_t block) {
    alignas(64) float buffer[kChunk];
    const int64_t first_row = line % lines * tall, first = block * wide;
    const int64_t height = std::min(tall, rows - first_row), width = std::min(wide, cols - first);
    const int64_t corner = (line / lines * rows + first_row) * cols + first;
    // Calls fn(place, n) for chunks of the block in the buffer. A block of one chunk stays there.
    const auto for_each_chunk = [&](bool is_loaded, const auto& fn) {
      for (const auto row : c10::irange(height)) {
        for (int64_t i = 0; i < width; i += kChunk) {
          const int64_t n = std::min(kChunk, width - i), place = corner + row * cols + i;
          if (!is_loaded) {
            convert_row(x + place, buffer, n);
          }
          fn(place, n);
        }
      }
    };
    int32_t amax = 0;
    for_each_chunk(false, [&](int64_t, int64_t n) {
      amax = std::max(amax, max_magnitude(buffer, n));
    });
    const int32_t byte = writer.put_scale(amax, line * blocks + block);
    for_each_chunk(height == 1 && width <= kChunk, [&](int64_t place, int64_t n) {
      writer.put(buffer, n, byte, place);
    });
  };
  at::parallel_for(0, outer * lines * groups, grain, [&](int64_t begin, int64_t end) {
    for (const auto i : c10::irange(begin, end)) {
      const int64_t first = i % groups * group;
      for (const auto block : c10::irange(first, std::min(blocks, first + group))) {
        quantize_block(i / groups, block);
      }
    }
  });
}

// Rows [begin, end) of a matrix whose columns have their scales at `place`.
struct RowBlock {
  int64_t begin;
  int64_t end;
  int64_t place;
};

// Blocks of the rows, including those behind every expert.
std::vector<RowBlock> make_row_blocks(
    int64_t rows, const ScalingRule& rule, const Tensor& offs, int64_t& live_rows) {
  std::vector<RowBlock> blocks;
  const auto cut = [&](int64_t begin, int64_t end, int64_t place) {
    const int64_t step = rule.block == 0 ? std::max<int64_t>(1, end - begin) : rule.block;
    for (; begin < end; begin += step) {
      blocks.push_back({begin, std::min(end, begin + step), place++});
    }
  };
  live_rows = rows;
  if (!offs.defined()) {
    cut(0, rows, 0);
    return blocks;
  }
  moe::check_offs("_moe_quantize", offs, rows);
  const auto ends = offs.contiguous();
  const auto* data = ends.const_data_ptr<int32_t>();
  int64_t begin = 0;
  for (const auto e : c10::irange(offs.numel())) {
    const auto end = static_cast<int64_t>(data[e]);
    cut(begin, end, (rule.block == 0 ? 0 : begin / rule.block) + e);
    begin = end;
  }
  live_rows = begin;
  return blocks;
}

// Codes of a chunk of columns, whose rows become dense.
constexpr int64_t kFlippedRows = 32;

// x (outer, rows, cols), scaled along the rows: codes and scales are (outer, cols, rows) in
// memory, values have the layout of x.
template <typename scalar_t>
class ColumnPass {
 public:
  ColumnPass(
      const scalar_t* x, int64_t rows, int64_t cols, int64_t places, const Writer& writer)
      : x_(x), rows_(rows), cols_(cols), places_(places), writer_(writer) {}

  void run(int64_t outer, const RowBlock& block, int64_t col) const {
    const int64_t n = std::min(kChunk, cols_ - col);
    alignas(64) float buffer[kChunk];
    alignas(64) int32_t amax[kChunk] = {};
    for (const auto row : c10::irange(block.begin, block.end)) {
      load(outer, row, col, n, buffer);
      for (int64_t i = 0; i < n; ++i) {
        amax[i] = std::max(amax[i], c10::bit_cast<int32_t>(buffer[i]) & kMagnitude);
      }
    }
    alignas(64) float reciprocals[kChunk];
    alignas(64) float scales[kChunk];
    for (int64_t i = 0; i < n; ++i) {
      const int32_t byte =
          writer_.put_scale(amax[i], (outer * cols_ + col + i) * places_ + block.place);
      scales[i] = power_of_two(byte);
      reciprocals[i] = byte == kNaNByte ? scales[i] : reciprocal(byte);
    }
    uint8_t flipped[kFlippedRows][kChunk];
    for (int64_t row0 = block.begin; row0 < block.end; row0 += kFlippedRows) {
      const int64_t count = std::min(kFlippedRows, block.end - row0);
      for (const auto i : c10::irange(count)) {
        load(outer, row0 + i, col, n, buffer);
        if (writer_.has_codes()) {
          writer_.encode_each(buffer, n, reciprocals, flipped[i]);
        }
        if (writer_.has_values()) {
          writer_.put_values_each(
              buffer, n, reciprocals, scales, (outer * rows_ + row0 + i) * cols_ + col);
        }
      }
      for (int64_t j = 0; writer_.has_codes() && j < n; ++j) {
        uint8_t* to = writer_.codes() + (outer * cols_ + col + j) * rows_ + row0;
        for (int64_t i = 0; i < count; ++i) {
          to[i] = flipped[i][j];
        }
      }
    }
  }

 private:
  void load(int64_t outer, int64_t row, int64_t col, int64_t n, float* to) const {
    convert_row(x_ + (outer * rows_ + row) * cols_ + col, to, n);
  }

  const scalar_t* x_;
  const int64_t rows_, cols_;
  const int64_t places_;  // scales of a column
  const Writer& writer_;
};

template <typename scalar_t>
void quantize_columns(
    const Tensor& x, int64_t outer, int64_t rows, int64_t cols, const ScalingRule& rule,
    const Tensor& offs, const QuantizeOutputs& out, const Writer& writer) {
  int64_t live_rows = 0;
  const auto blocks = make_row_blocks(rows, rule, offs, live_rows);
  const int64_t places =
      (offs.defined() ? moe::scale_count_of_experts(rule, rows, offs.size(0))
                      : moe::scale_count(rule, rows))
          .expect_int();
  if ((offs.defined() || rows == 0) && out.scale.defined()) {
    // Places without a block, and rows behind the experts, are those of zeros.
    for (const auto i : c10::irange(out.scale.numel())) {
      writer.put_scale(0, i);
    }
    out.data.view(kByte).zero_();
  }
  if (out.values.defined() && live_rows < rows) {
    out.values.narrow(-2, live_rows, rows - live_rows).zero_();
  }
  const ColumnPass<scalar_t> pass(x.const_data_ptr<scalar_t>(), rows, cols, places, writer);
  const int64_t chunks = (cols + kChunk - 1) / kChunk;
  const auto per_outer = static_cast<int64_t>(blocks.size()) * chunks;
  at::parallel_for(0, outer * per_outer, 4, [&](int64_t begin, int64_t end) {
    for (const auto i : c10::irange(begin, end)) {
      pass.run(i / per_outer, blocks[i % per_outer / chunks], i % chunks * kChunk);
    }
  });
}

template <typename scalar_t>
void quantize(
    const Tensor& x, const ScalingRule& rule, int64_t dim, const Tensor& offs,
    const QuantizeOutputs& out) {
  const Writer writer(rule, out);
  const auto* data = x.const_data_ptr<scalar_t>();
  if (rule.square) {
    const int64_t rows = x.size(-2), cols = x.size(-1);
    const auto outer = c10::multiply_integers(x.sizes().slice(0, x.dim() - 2));
    const int64_t blocks = (cols + rule.block - 1) / rule.block;
    quantize_blocks(
        data, outer, rows, cols, rule.block, rule.block, blocks, /*group=*/1, /*grain=*/2, writer);
    return;
  }
  const auto outer = c10::multiply_integers(x.sizes().slice(0, dim));
  const auto inner = c10::multiply_integers(x.sizes().slice(dim + 1));
  const int64_t length = x.size(dim), some = std::max<int64_t>(length, 1);
  if (dim == x.dim() - 1) {
    const int64_t wide = rule.block == 0 ? some : rule.block;
    const int64_t blocks = rule.block == 0 ? 1 : (length + wide - 1) / wide;
    quantize_blocks(
        data, /*outer=*/1, outer, length, /*tall=*/1, wide, blocks,
        /*group=*/std::max<int64_t>(blocks, 1), std::max<int64_t>(1, kGrain / some), writer);
  } else {
    quantize_columns<scalar_t>(x, outer, length, inner, rule, offs, out, writer);
  }
}

void moe_quantize_kernel(
    const Tensor& x, const ScalingRule& rule, int64_t dim, const Tensor& offs,
    const QuantizeOutputs& out) {
  switch (x.scalar_type()) {
    case kFloat:
      return quantize<float>(x, rule, dim, offs, out);
    case kHalf:
      return quantize<Half>(x, rule, dim, offs, out);
    default:
      return quantize<BFloat16>(x, rule, dim, offs, out);
  }
}

// data (rows, length) times its scales. With squares, `rule.block` rows share a row of scales.
template <typename Code>
void dequantize(
    const moe::Quantized& quantized, const ScalingRule& rule, const Tensor& values) {
  const int64_t length = values.size(-1), height = values.dim() > 1 ? values.size(-2) : 1;
  const int64_t rows = length == 0 ? 0 : values.numel() / length;
  const int64_t block = rule.block == 0 ? std::max<int64_t>(length, 1) : rule.block;
  const int64_t blocks = rule.block == 0 ? 1 : (length + block - 1) / block;
  const int64_t tall = rule.square ? (height + block - 1) / block : 1;
  const auto scale = quantized.scale.to(kFloat);
  const auto* codes = static_cast<const uint8_t*>(quantized.data.const_data_ptr());
  const auto* scales = scale.const_data_ptr<float>();
  const auto run = [&](auto* out) {
    const auto dequantize_row = [&](int64_t row) {
      alignas(64) uint8_t chunk[kChunk] = {};
      alignas(64) float buffer[kChunk];
      const int64_t line = rule.square ? row / height * tall + row % height / block : row;
      for (int64_t i = 0; i < length; i += kChunk) {
        const int64_t n = std::min(kChunk, length - i);
        // A whole chunk on the stack: the loop is vectorized without a tail.
        std::copy_n(codes + row * length + i, n, chunk);
        for (int64_t j = 0; j < kChunk; ++j) {
          buffer[j] = Code::number(chunk[j]);
        }
        for (int64_t j = 0; j < n; j += block) {
          const float factor = scales[line * blocks + (i + j) / block];
          const int64_t last = std::min(n, j + block);
          for (int64_t l = j; l < last; ++l) {
            buffer[l] *= factor;
          }
        }
        convert_row(buffer, out + row * length + i, n);
      }
    };
    at::parallel_for(
        0, rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, length)),
        [&](int64_t begin, int64_t end) {
          for (const auto row : c10::irange(begin, end)) {
            dequantize_row(row);
          }
        });
  };
  if (values.scalar_type() == kFloat) {
    run(values.mutable_data_ptr<float>());
  } else {
    run(values.mutable_data_ptr<BFloat16>());
  }
}

void moe_dequantize_kernel(
    const moe::Quantized& quantized, const ScalingRule& rule, const Tensor& values) {
  if (quantized.data.scalar_type() == kChar) {
    dequantize<Int8Code>(quantized, rule, values);
  } else {
    dequantize<E4M3Code>(quantized, rule, values);
  }
}

}  // namespace

ALSO_REGISTER_AVX512_DISPATCH(moe_dequantize_stub, &moe_dequantize_kernel)
ALSO_REGISTER_AVX512_DISPATCH(moe_quantize_stub, &moe_quantize_kernel)

}  // namespace at::native
