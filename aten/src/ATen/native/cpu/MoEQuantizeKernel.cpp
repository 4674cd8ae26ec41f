// _moe_quantize on CPU, and the same rounding without the codes: the low-precision MLP
// multiplies the numbers that data and scale stand for. The loops are over few enough
// elements, and plain enough, for the compiler to make vectors of them.
#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/MoEQuantize.h>
#include <ATen/native/cpu/MoEPacking.h>

#include <c10/util/bit_cast.h>

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

namespace at::native {
namespace {

using moe::kNaNByte;
using moe::QuantizeOutputs;
using moe::ScalingRule;
using moe_cpu::convert_row;

// Elements that are handled at a time: a block of every blockwise rule, or some of them.
constexpr int64_t kChunk = 128;
// Elements that are worth another thread.
constexpr int64_t kGrain = 32 * 1024;
constexpr int32_t kMagnitude = 0x7FFFFFFF;

inline float power_of_two(int32_t byte) {
  return c10::bit_cast<float>(
      byte == 0 ? 0x00400000 : byte == kNaNByte ? 0x7FC00000 : byte << 23);
}

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

// Codes of scaled numbers. A float8_e4m3fn has steps of 2^-9 below 2^-6, where a sum with 2^14
// rounds, and 3 bits of mantissa above.
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
  // The number of the code.
  static inline float rounded(float x) {
    const auto bits = c10::bit_cast<uint32_t>(x);
    const uint32_t magnitude = bits & 0x7FFFFFFFU;
    const uint32_t normal = (magnitude + 0x7FFFFU + ((magnitude >> 20) & 1U)) & 0xFFF00000U;
    const float small = (c10::bit_cast<float>(magnitude) + 16384.F) - 16384.F;
    const float number = std::min(magnitude < 0x3C800000U ? small : c10::bit_cast<float>(normal), 448.F);
    return c10::bit_cast<float>(c10::bit_cast<uint32_t>(number) | (bits & 0x80000000U));
  }
  // What a code stands for. Codes below 8 are the subnormals, multiples of 2^-9.
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
    // A sum with 1.5 * 2^23 rounds to integers.
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
  bool has_values() const {
    return values_.defined();
  }

  // Codes of n numbers with one byte.
  void encode(const float* x, int64_t n, int32_t byte, uint8_t* to) const {
    is_int8_ ? encode_as<Int8Code>(x, n, byte, to) : encode_as<E4M3Code>(x, n, byte, to);
  }
  void put_codes(const float* x, int64_t n, int32_t byte, int64_t place) const {
    encode(x, n, byte, codes_ + place);
  }
  uint8_t* codes() const {
    return codes_;
  }

  // The same with a reciprocal (NaN for NaN) and a scale for each number.
  void encode_each(const float* x, int64_t n, const float* reciprocals, uint8_t* to) const {
    is_int8_ ? encode_each_as<Int8Code>(x, n, reciprocals, to)
             : encode_each_as<E4M3Code>(x, n, reciprocals, to);
  }

  void put_values(const float* x, int64_t n, int32_t byte, int64_t place) const {
    alignas(64) float out[kChunk];
    const float factor = reciprocal(byte), scale = power_of_two(byte);
    if (is_int8_) {
      round_as<Int8Code>(x, n, factor, scale, out);
    } else {
      round_as<E4M3Code>(x, n, factor, scale, out);
    }
    store_values(out, n, place);
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
  template <typename Code>
  static void encode_as(const float* x, int64_t n, int32_t byte, uint8_t* to) {
    if (byte == kNaNByte) {
      std::fill_n(to, n, Code::kNaN);
      return;
    }
    const float factor = reciprocal(byte);
    for (int64_t i = 0; i < n; ++i) {
      to[i] = Code::of(x[i] * factor);
    }
  }
  template <typename Code>
  static void encode_each_as(const float* x, int64_t n, const float* factors, uint8_t* to) {
    for (int64_t i = 0; i < n; ++i) {
      const bool is_nan = factors[i] != factors[i];
      const uint8_t code = Code::of(is_nan ? 0.F : x[i] * factors[i]);
      to[i] = is_nan ? Code::kNaN : code;
    }
  }
  template <typename Code>
  static void round_as(const float* x, int64_t n, float factor, float scale, float* out) {
    for (int64_t i = 0; i < n; ++i) {
      out[i] = Code::rounded(x[i] * factor) * scale;
    }
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

// x (rows, length), scaled along its dense dimension.
template <typename scalar_t>
void quantize_rows(
    const scalar_t* x, int64_t rows, int64_t length, const ScalingRule& rule,
    const Writer& writer) {
  const int64_t block = rule.block == 0 ? std::max<int64_t>(length, 1) : rule.block;
  const int64_t blocks = rule.block == 0 ? 1 : (length + block - 1) / block;
  const auto quantize_row = [&](int64_t row) {
    alignas(64) float buffer[kChunk];
    const scalar_t* from = x + row * length;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t first = b * block, last = std::min(length, first + block);
      int32_t amax = 0;
      for (int64_t i = first; i < last; i += kChunk) {
        const int64_t n = std::min(kChunk, last - i);
        convert_row(from + i, buffer, n);
        amax = std::max(amax, max_magnitude(buffer, n));
      }
      const int32_t byte = writer.put_scale(amax, row * blocks + b);
      for (int64_t i = first; i < last; i += kChunk) {
        const int64_t n = std::min(kChunk, last - i);
        if (last - first > kChunk) {
          convert_row(from + i, buffer, n);
        }
        if (writer.has_codes()) {
          writer.put_codes(buffer, n, byte, row * length + i);
        }
        if (writer.has_values()) {
          writer.put_values(buffer, n, byte, row * length + i);
        }
      }
    }
  };
  at::parallel_for(
      0, rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, length)),
      [&](int64_t begin, int64_t end) {
        for (const auto row : c10::irange(begin, end)) {
          quantize_row(row);
        }
      });
}

// Rows [begin, end) of a matrix that share the scales at `place` of their columns.
struct RowBlock {
  int64_t begin;
  int64_t end;
  int64_t place;
};

// Blocks of the rows, and those that are behind every expert.
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
  const auto ends = offs.contiguous();
  const auto* data = ends.const_data_ptr<int32_t>();
  int64_t begin = 0;
  for (const auto e : c10::irange(offs.numel())) {
    const auto end = static_cast<int64_t>(data[e]);
    TORCH_CHECK_VALUE(
        end >= begin && end <= rows,
        "_moe_quantize: offs must be non-decreasing in [0, R] = [0, ", rows, "], got ", end,
        " at [", e, "] after ", begin);
    cut(begin, end, (rule.block == 0 ? 0 : begin / rule.block) + e);
    begin = end;
  }
  live_rows = begin;
  return blocks;
}

// Codes of a chunk of columns, whose rows become dense.
constexpr int64_t kFlippedRows = 32;

// x (outer, rows, cols), scaled along the rows: codes and scales are (outer, cols, rows) in
// memory, values lie as x does.
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
    // Places that no block has are those of zeros, and so are rows behind the experts.
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

// x (outer, rows, cols) in squares of kChunk.
template <typename scalar_t>
void quantize_squares(
    const scalar_t* x, int64_t outer, int64_t rows, int64_t cols, const Writer& writer) {
  const int64_t tall = (rows + kChunk - 1) / kChunk, wide = (cols + kChunk - 1) / kChunk;
  const auto quantize_square = [&](int64_t place) {
    alignas(64) float buffer[kChunk];
    const int64_t col = place % wide * kChunk, n = std::min(kChunk, cols - col);
    const int64_t first = place / wide % tall * kChunk;
    const int64_t base = place / wide / tall * rows * cols + col;
    const int64_t last = std::min(rows, first + kChunk);
    int32_t amax = 0;
    for (const auto row : c10::irange(first, last)) {
      convert_row(x + base + row * cols, buffer, n);
      amax = std::max(amax, max_magnitude(buffer, n));
    }
    const int32_t byte = writer.put_scale(amax, place);
    for (const auto row : c10::irange(first, last)) {
      convert_row(x + base + row * cols, buffer, n);
      if (writer.has_codes()) {
        writer.put_codes(buffer, n, byte, base + row * cols);
      }
      if (writer.has_values()) {
        writer.put_values(buffer, n, byte, base + row * cols);
      }
    }
  };
  at::parallel_for(0, outer * tall * wide, 2, [&](int64_t begin, int64_t end) {
    for (const auto place : c10::irange(begin, end)) {
      quantize_square(place);
    }
  });
}

template <typename scalar_t>
void quantize(
    const Tensor& x, const ScalingRule& rule, int64_t dim, const Tensor& offs,
    const QuantizeOutputs& out) {
  const Writer writer(rule, out);
  if (rule.square) {
    const int64_t rows = x.size(-2), cols = x.size(-1);
    quantize_squares(
        x.const_data_ptr<scalar_t>(), c10::multiply_integers(x.sizes().slice(0, x.dim() - 2)),
        rows, cols, writer);
    return;
  }
  const auto outer = c10::multiply_integers(x.sizes().slice(0, dim));
  const auto inner = c10::multiply_integers(x.sizes().slice(dim + 1));
  if (dim == x.dim() - 1) {
    quantize_rows(x.const_data_ptr<scalar_t>(), outer, x.size(dim), rule, writer);
  } else {
    quantize_columns<scalar_t>(x, outer, x.size(dim), inner, rule, offs, out, writer);
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

// data (rows, length) times its scales, a row of which serves `rule.block` rows of squares.
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
        // A whole chunk of the stack's: the loop has vectors and no tail.
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
