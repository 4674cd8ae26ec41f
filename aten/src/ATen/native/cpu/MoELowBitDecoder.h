// The decoder of low-bit weights, written once for all instruction sets. A register holds a double
// word of each of kLines lines of a matrix. Included by MoELowBitAvx2.h and
// MoELowBitAvx512.h within their namespaces and pragmas, as a template may only use the
// instructions of the place where it is written. These files define
//
//   kStretch              double words of a line that are read at a time
//   kMaxRows, kMaxInt8Rows    rows of a product at most, a power of two
//   kGroups               groups of lines that are multiplied at a time, by log2 of the rows
//   kSlicesInt8           whether Int8Slices is used for more rows
//   kUnrolls, kMasksTails whether blocks are unrolled; whether fewer scales can be transposed
//   kReadsInPlace         whether panels are read where they lie
//   Floats, Ints, Rare    registers, and a mask of the lines with a rare scale
//   Int4, E2M1, Int8, E4M3, FoldedCodes<Row>    how codes become numbers: decode() a register,
//                         of which pair<j>() has elements 2 j and 2 j + 1; fold() of E8M0 scales
//   ShiftedE2M1, ShiftedInt4, ShiftedInt8    the same as bytes: a number is kUnit times the byte
//                         minus kShift
//   add_pair(), add_int8(), store_pair()    multiply and store them
//   Traits, underflows()    cases left to the caller
//
// MoELowBitInt8.h has the products of rows rounded to int8.

constexpr int64_t kBlock = 32;    // elements of the smallest block of a scale
constexpr int64_t kAhead = 4096;  // bytes that panels are fetched ahead

// How many bytes ahead a kernel of M rows fetches panels, as measured on Zen 4 and Zen 5. One row of
// 8-bit codes has so little to compute that a fetch far ahead delays the reads that are needed now.
template <typename Codes, int M>
constexpr int64_t kNear = Codes::kBits == 4 ? kAhead : M == 1 ? kAhead / 2 : 2 * kAhead;

// Whether codes are fetched into L1, not only into L2. On an Emerald Rapids, int8 took 4 to 9 % longer
// with L1.
inline bool fetches_into_l1() {
#if defined(__GNUC__)
  static const bool does = has_large_l1() && !__builtin_cpu_is("intel");
  return does;
#else
  return has_large_l1();
#endif
}

// Fetches `count` cache lines into L1 or L2.
template <int count>
C10_ALWAYS_INLINE void fetch(const uint8_t* from, bool into_l1) {
  const auto* lines = reinterpret_cast<const char*>(from);
  if (into_l1) {
    MOE_UNROLL
    for (int i = 0; i < count; ++i) {
      _mm_prefetch(lines + i * 64, _MM_HINT_T0);
    }
  } else {
    MOE_UNROLL
    for (int i = 0; i < count; ++i) {
      _mm_prefetch(lines + i * 64, _MM_HINT_T1);
    }
  }
}

// For lambdas.
#if defined(__GNUC__)
#define MOE_INLINE __attribute__((always_inline))
#else
#define MOE_INLINE
#endif

// ---- reading --------------------------------------------------------------------------------

// A stretch of kLines lines from double word d0, at most to `total`: where it is, or in `raw`.
template <typename Codes>
C10_ALWAYS_INLINE const Ints* read_lines(
    const LowBitView& w, const uint8_t* lines, int64_t d0, int64_t total, Ints (&raw)[kStretch]) {
  const int64_t here = std::min(kStretch, total - d0);
  if (w.panels) {
    const uint8_t* from = lines + d0 * 4 * kPanelLines;
    if (kReadsInPlace) {
      return reinterpret_cast<const Ints*>(from);
    }
    for (const auto i : c10::irange(here)) {
      raw[i] = ordered<Codes::kBits, /*panels=*/true>(load_ints(from + i * 4 * kPanelLines));
    }
    return raw;
  }
  if (here == kStretch) {
    transpose_lines(lines + d0 * 4, w.row_bytes, raw);
  } else {
    transpose_tail(lines + d0 * 4, w.row_bytes, here * 4, raw);
  }
  MOE_UNROLL
  for (int i = 0; i < kStretch; ++i) {
    raw[i] = ordered<Codes::kBits, /*panels=*/false>(raw[i]);
  }
  return raw;
}

// The double words of a group's lines in the order of K, registers of kLines of them. Fetches what
// is read `near` bytes later in panels, or, unless that is 0, the lines of the next panel.
template <typename Codes, int64_t near>
class LineReader {
 public:
  void begin(const LineGroup& group, int64_t expert, int64_t total) {
    group_ = &group;
    lines_ = group.w->at(expert, group.row, 0);
    total_ = total;
  }

  // Registers from d0 on, as many as a block of kBlock elements has: in the panel, or read a
  // stretch at a time.
  C10_ALWAYS_INLINE const Ints* read(int64_t d0) {
    const LowBitView& w = *group_->w;
    if (kReadsInPlace && w.panels) {
      const uint8_t* from = lines_ + d0 * 4 * kPanelLines;
      const int64_t left = (total_ - d0) * 4 * kPanelLines - near;
      const uint8_t* ahead = left > 0 ? from + near : group_->next - left;
      if (near > 0) {
        fetch<Codes::kBits>(ahead, into_l1_);
      }
      return reinterpret_cast<const Ints*>(from);
    }
    if (d0 % kStretch == 0) {
      const int64_t together = 4 * (w.panels ? kPanelLines : kLines);
      const uint8_t* ahead = lines_ + (w.panels ? kAhead : group_->ahead) + d0 * together;
      MOE_UNROLL
      for (int64_t i = 0; near > 0 && i < kStretch * together; i += 64) {
        prefetch(ahead + i);
      }
      read_lines<Codes>(w, lines_, d0, total_, raw_);
    }
    return raw_ + d0 % kStretch;
  }

 private:
  const bool into_l1_ = fetches_into_l1();
  const LineGroup* group_;
  const uint8_t* lines_;
  int64_t total_;
  Ints raw_[kStretch];
};

// Scales of kLines lines, block by block along K.
class LineScales {
 public:
  void begin(const LowBitView& w, int64_t expert, int64_t row) {
    scale_ = &w.scale;
    expert_ = expert;
    row_ = row;
    first_ = w.scale.offset(expert, row, 0);
    blocks_ = (w.depth + w.scale.block_cols - 1) / w.scale.block_cols;
    is_one_ = w.scale.row_stride == 0 ||
        (w.scale.block_rows % kLines == 0 && row % w.scale.block_rows % kLines == 0);
  }

  // E8M0 bytes as double words.
  C10_ALWAYS_INLINE Ints bytes(int64_t block) {
    if (scale_->panels) {
      prefetch(from<uint8_t>(block + ScaleView::kBlocksAhead));
      return load_bytes(from<uint8_t>(block));
    }
    load_blocks(block);
    return load_ints(staged_[block % kLines]);
  }

  C10_ALWAYS_INLINE Floats values(int64_t block) {
    if (scale_->is_pow2) {
      return pow2_of(bytes(block), rare);
    }
    if (is_one_) {
      return all_floats(*from<float>(block));
    }
    if (scale_->is_dense_along_rows()) {
      prefetch(from<float>(block + ScaleView::kBlocksAhead));
      return load_floats(from<float>(block));
    }
    load_blocks(block);
    return as_floats(load_ints(staged_[block % kLines]));
  }

  Rare rare{};

 private:
  template <typename scale_t>
  const scale_t* from(int64_t block) const {
    return static_cast<const scale_t*>(scale_->data) + first_ + block * scale_->col_stride;
  }

  // Loads kLines neighbouring blocks as double words.
  C10_ALWAYS_INLINE void load_blocks(int64_t block) {
    if (block / kLines != loaded_) {
      loaded_ = block / kLines;
      stage(loaded_ * kLines, std::min(kLines, blocks_ - loaded_ * kLines));
    }
  }

  C10_NOINLINE void stage(int64_t first, int64_t count) {
    const int64_t pitch = scale_->row_stride;
    if (scale_->col_stride == 1 && scale_->block_rows == 1 && (kMasksTails || count == kLines)) {
      if (scale_->is_pow2) {
        return stage_bytes(from<uint8_t>(first), pitch, count, staged_);
      }
      Ints turned[kLines];
      const auto* floats = reinterpret_cast<const uint8_t*>(from<float>(first));
      if (count == kLines) {
        transpose_lines(floats, pitch * 4, turned);
      } else {
        transpose_tail(floats, pitch * 4, count * 4, turned);
      }
      for (const auto i : c10::irange(kLines)) {
        store_ints(staged_[i], turned[i]);
      }
      return;
    }
    for (const auto line : c10::irange(kLines)) {
      for (const auto i : c10::irange(count)) {
        const int64_t k = (first + i) * scale_->block_cols;
        const int64_t at = scale_->offset(expert_, row_ + line, k);
        staged_[i][line] = scale_->is_pow2
            ? static_cast<const uint8_t*>(scale_->data)[at]
            : c10::bit_cast<int32_t>(static_cast<const float*>(scale_->data)[at]);
      }
    }
  }

  const ScaleView* scale_;
  int64_t expert_, row_, blocks_;
  int64_t first_;  // offset of the first block
  bool is_one_;    // of all lines
  int64_t loaded_ = -1;  // the kLines blocks in staged_
  alignas(64) int32_t staged_[kLines][kLines];
};

// ---- few rows -------------------------------------------------------------------------------

// fn(integral_constant<int, j>()) for j < n.
template <typename Fn, int... j>
C10_ALWAYS_INLINE void unrolled(const Fn& fn, std::integer_sequence<int, j...>) {
  (fn(std::integral_constant<int, j>()), ...);
}
template <int n, typename Fn>
C10_ALWAYS_INLINE void unrolled(const Fn& fn) {
  unrolled(fn, std::make_integer_sequence<int, n>());
}

// c[m] = x[m] times the lines of Q groups of one format. Sums are over blocks with their own
// scale, or those of VecGemm. Q is more than one, as a sum waits for its own last product.
template <typename Row, typename Codes, Scaling scaling, int M, int Q>
bool multiply_lines(const LineGroup* groups, int64_t expert, const Row* const* x) {
  constexpr int64_t kElements = 32 / Codes::kBits;  // of a double word
  constexpr int64_t kPiece = kBlock / kElements;
  const LowBitView& w = *groups[0].w;
  const int64_t depth = w.depth, total = depth / kElements;
  const int64_t segment = scaling == Scaling::Blocks ? w.scale.block_cols
      : std::is_same_v<Row, float>                    ? VecGemm<float>::kSumDepth
                                                      : depth;
  int64_t end = std::min(segment, depth), sums_done = 0;
  Codes codes;
  LineScales scales[Q];
  LineReader<Codes, kNear<Codes, M>> lines[Q];
  Fold folds[Q];
  Floats sums[Q][M], parts[Q][M];
  MOE_UNROLL
  for (int q = 0; q < Q; ++q) {
    scales[q].begin(*groups[q].w, expert, groups[q].row);
    lines[q].begin(groups[q], expert, total);
    folds[q] = unfolded();
    MOE_UNROLL
    for (int r = 0; r < M; ++r) {
      sums[q][r] = parts[q][r] = all_floats(0);
    }
  }
  for (int64_t d0 = 0; d0 < total; d0 += kPiece) {
    const Ints* from[Q];
    MOE_UNROLL
    for (int q = 0; q < Q; ++q) {
      from[q] = lines[q].read(d0);
      if constexpr (scaling == Scaling::Folded) {
        folds[q] = Codes::fold(scales[q].bytes(d0 / kPiece), scales[q].rare);
      }
    }
    const auto add = [&](int64_t i) MOE_INLINE {
      typename Codes::Numbers numbers[Q];
      MOE_UNROLL
      for (int q = 0; q < Q; ++q) {
        codes.decode(load_ints(from[q] + (i - d0)), folds[q], numbers[q]);
      }
      unrolled<kElements / 2>([&](auto pair) MOE_INLINE {
        constexpr int j = decltype(pair)::value;
        MOE_UNROLL
        for (int q = 0; q < Q; ++q) {
          const auto two = codes.template pair<j>(numbers[q], folds[q]);
          MOE_UNROLL
          for (int r = 0; r < M; ++r) {
            parts[q][r] = add_pair(parts[q][r], two, x[r] + i * kElements + 2 * j);
          }
        }
      });
    };
    const int64_t last = std::min(d0 + kPiece, total);
    if (kUnrolls && last == d0 + kPiece) {
      MOE_UNROLL
      for (int64_t i = 0; i < kPiece; ++i) {
        add(d0 + i);
      }
    } else {
      for (int64_t i = d0; i < last; ++i) {
        add(i);
      }
    }
    if (last * kElements < end) {
      continue;
    }
    const int64_t at = sums_done++;
    end = std::min(end + segment, depth);
    MOE_UNROLL
    for (int q = 0; q < Q; ++q) {
      Floats scale = all_floats(1);
      if constexpr (scaling == Scaling::Blocks) {
        scale = scales[q].values(at);
      }
      MOE_UNROLL
      for (int r = 0; r < M; ++r) {
        sums[q][r] = scaling == Scaling::Blocks ? fma(parts[q][r], scale, sums[q][r])
            : at == 0                           ? parts[q][r]
                                                : add_floats(sums[q][r], parts[q][r]);
        parts[q][r] = all_floats(0);
      }
    }
  }
  bool is_rare = codes.is_rare();
  for (int q = 0; q < Q; ++q) {
    Floats scale = all_floats(1);
    if constexpr (scaling == Scaling::Rows) {
      scale = scales[q].values(0);
    }
    for (int r = 0; r < M; ++r) {
      store_floats(
          groups[q].c + r * kPanelCols,
          scaling == Scaling::Rows ? multiply_floats(sums[q][r], scale) : sums[q][r]);
    }
    is_rare = is_rare || is_any(scales[q].rare);
  }
  return !is_rare;
}

// A kernel for some number of rows, and how many groups of lines it takes.
template <typename Row>
struct Kernel {
  bool (*run)(const LineGroup*, int64_t, const Row* const*);
  int groups = 1;
};

// fn(log2 of rows), as a constant.
template <int64_t max_rows, int log_rows = 0, typename Fn>
auto with_log_rows(int64_t rows, const Fn& fn) {
  if constexpr ((1 << log_rows) < max_rows) {
    if (rows > (int64_t{1} << log_rows)) {
      return with_log_rows<max_rows, log_rows + 1>(rows, fn);
    }
  }
  return fn(std::integral_constant<int, log_rows>());
}

// Lines that are not in panels are read 32 at a time. On an Emerald Rapids, one row took 4 to 15 % longer
// with 64.
template <typename Row, typename Codes, Scaling scaling>
Kernel<Row> multiply_lines_of(const LowBitView& w, int64_t rows) {
  return with_log_rows<kMaxRows>(rows, [&](auto log) {
    constexpr int m = 1 << log, q = kGroups[log], fewer = std::min(q, int{32 / kLines});
    return w.panels ? Kernel<Row>{&multiply_lines<Row, Codes, scaling, m, q>, q}
                    : Kernel<Row>{&multiply_lines<Row, Codes, scaling, m, fewer>, fewer};
  });
}

template <typename Row>
Kernel<Row> find_multiply(const LowBitView& w, int64_t rows) {
  switch (w.codes) {
    case LowBitCodes::Int4:
      return multiply_lines_of<Row, Int4, Scaling::Blocks>(w, rows);
    case LowBitCodes::E2M1:
      return multiply_lines_of<Row, E2M1, Scaling::Blocks>(w, rows);
    case LowBitCodes::Int8:
      return w.scaling == Scaling::Rows ? multiply_lines_of<Row, Int8, Scaling::Rows>(w, rows)
                                        : multiply_lines_of<Row, Int8, Scaling::Blocks>(w, rows);
    default:
      return w.scaling == Scaling::Folded
          ? multiply_lines_of<Row, FoldedCodes<Row>, Scaling::Folded>(w, rows)
          : w.scaling == Scaling::Rows ? multiply_lines_of<Row, E4M3, Scaling::Rows>(w, rows)
                                       : multiply_lines_of<Row, E4M3, Scaling::Blocks>(w, rows);
  }
}

// Group g + q of `count` that are multiplied at a time, with the one to be read after it, which may be
// in the next panel. Repeats the last group rather than take fewer.
inline LineGroup
group_of(std::span<const LineGroup> groups, int64_t expert, size_t g, int q, int count) {
  const auto last = groups.size() - 1, next = g + count + q;
  const LineGroup& after = groups[next > last ? std::min<size_t>(q, last) : next];
  LineGroup group = groups[std::min(g + q, last)];
  group.next = after.w->at(expert, after.row, 0) + (next > last ? after.ahead : 0);
  return group;
}

// Runs find(rows), a Kernel, for all rows, a power of two at a time, and all groups.
template <int64_t max_rows, typename Row, typename FindFn>
bool multiply_groups(
    std::span<const LineGroup> groups, int64_t expert, int64_t rows, const Row* const* lines,
    const FindFn& find) {
  for (int64_t r0 = 0; r0 < rows; r0 += max_rows) {
    const int64_t count = std::min(max_rows, rows - r0);
    int64_t padded = 1;
    while (padded < count) {
      padded *= 2;
    }
    const Row* here[max_rows];
    for (const auto r : c10::irange(padded)) {
      here[r] = lines[r0 + std::min(r, count - 1)];
    }
    const Kernel<Row> kernel = find(padded);
    for (size_t g = 0; g < groups.size(); g += kernel.groups) {
      alignas(64) float sums[kGroups[0]][max_rows * kPanelCols];
      LineGroup some[kGroups[0]];
      float* c[kGroups[0]];
      for (int q = 0; q < kernel.groups; ++q) {
        some[q] = group_of(groups, expert, g, q, kernel.groups);
        c[q] = some[q].c + r0 * kPanelCols;
        some[q].c = padded == count ? c[q] : sums[q];
      }
      if (!kernel.run(some, expert, here)) {
        return false;
      }
      for (int q = 0; padded != count && q < kernel.groups; ++q) {
        for (const auto r : c10::irange(count)) {
          std::copy_n(sums[q] + r * kPanelCols, kLines, c[q] + r * kPanelCols);
        }
      }
    }
  }
  return true;
}

#include <ATen/native/cpu/MoELowBitInt8.h>

// ---- into a panel ---------------------------------------------------------------------------

// Decodes kLines lines, [k0, k0 + depth) of K, into columns from `panel` of a tile of `ld` columns.
template <typename operand_t, typename Codes>
bool pack_lines(
    const LowBitView& w, int64_t expert, int64_t row, int64_t k0, int64_t depth, int64_t ld,
    operand_t* panel) {
  constexpr int64_t kElements = 32 / Codes::kBits, kPiece = kBlock / kElements;
  Codes codes;
  LineScales scales;
  scales.begin(w, expert, row);
  Fold fold = unfolded();
  const uint8_t* lines = w.at(expert, row, 0);
  const int64_t end = (k0 + depth) / kElements;
  bool is_rare = false;
  for (int64_t d0 = k0 / kElements; d0 < end; d0 += kStretch) {
    const int64_t here = std::min(kStretch, end - d0);
    Ints staged[kStretch];
    const Ints* raw = read_lines<Codes>(w, lines, d0, end, staged);
    for (const auto i : c10::irange(here)) {
      if constexpr (std::is_same_v<Codes, FoldedCodes<operand_t>>) {
        if (w.scaling == Scaling::Folded && i % kPiece == 0) {
          const Ints bytes = scales.bytes((d0 + i) / kPiece);
          fold = Codes::fold(bytes, scales.rare);
          is_rare |= underflows<operand_t>(bytes, raw + i, std::min(kPiece, here - i));
        }
      }
      typename Codes::Numbers numbers;
      codes.decode(load_ints(raw + i), fold, numbers);
      operand_t* to = panel + ((d0 + i) * kElements - k0) * ld;
      unrolled<kElements / 2>([&](auto pair) MOE_INLINE {
        constexpr int j = decltype(pair)::value;
        store_pair(codes.template pair<j>(numbers, fold), to + 2 * j * ld, ld);
      });
    }
  }
  return !is_rare && !codes.is_rare() && !is_any(scales.rare);
}

template <typename operand_t>
auto find_pack(const LowBitView& w) {
  return w.codes == LowBitCodes::Int8 ? &pack_lines<operand_t, Int8>
      : w.codes == LowBitCodes::E2M1  ? &pack_lines<operand_t, E2M1>
      : w.codes == LowBitCodes::Int4  ? &pack_lines<operand_t, Int4>
      : w.scaling == Scaling::Folded  ? &pack_lines<operand_t, FoldedCodes<operand_t>>
                                      : &pack_lines<operand_t, E4M3>;
}

// The interface for LowBitSource. pack and the products return false if their output is not
// valid. The instruction set defines
//
//   kRows            most rows without a packed panel
//   kLines           lines of a group
//   multiplies       whether the order of addition for few rows is that of a micro-GEMM
//   is_regular       whether lines can be read kLines at a time, and by double words
struct Decoder : Traits {
  template <typename Micro>
  static bool multiply(
      std::span<const LineGroup> groups, int64_t expert, int64_t rows,
      const typename Micro::operand_t* const* lines) {
    using Row = typename Micro::operand_t;
    const LowBitView& w = *groups[0].w;
    return multiply_groups<kMaxRows>(
        groups, expert, rows, lines, [&](int64_t m) { return find_multiply<Row>(w, m); });
  }

  template <typename Micro, typename operand_t>
  static bool multiply_int8(
      std::span<const LineGroup> groups, int64_t expert, int64_t rows,
      const operand_t* const* lines, operand_t* scratch) {
    const auto codes = groups[0].w->codes;
    if constexpr (kSlicesInt8 && requires { &Micro::multiply_bytes; }) {
      static const bool has_tiles = has_instructions("amx_int8");
      if (has_tiles && codes == LowBitCodes::Int8 && groups[0].w->scaling == Scaling::Rows &&
          rows > kMaxInt8Rows) {
        return multiply_int8_tiles<Micro, ShiftedInt8>(
            groups, expert, rows, reinterpret_cast<const void* const*>(lines),
            reinterpret_cast<uint8_t*>(scratch));
      }
    }
    const auto run = codes == LowBitCodes::Int4 ? &multiply_int8_groups<ShiftedInt4, false>
        : codes == LowBitCodes::E2M1            ? &multiply_int8_groups<ShiftedE2M1, false>
        : groups[0].w->scaling == Scaling::Rows ? &multiply_int8_groups<ShiftedInt8, true>
                                                : &multiply_int8_groups<ShiftedInt8, false>;
    return run(groups, expert, rows, reinterpret_cast<const void* const*>(lines), scratch);
  }

  // Decodes columns of a span to a panel from column `at`.
  template <typename operand_t>
  static bool pack(
      const LowBitView& w, int64_t expert, int64_t row, int64_t count, int64_t k0, int64_t depth,
      int64_t at, int64_t tile_cols, operand_t* panel) {
    constexpr int64_t v = kWordElements<operand_t>;
    if (!is_regular(w, row, count) || k0 % kBlock != 0 || depth % 8 != 0 || at % kLines != 0 ||
        (w.scaling == Scaling::Folded && w.scale.block_cols != kBlock)) {
      return false;
    }
    const auto fn = find_pack<operand_t>(w);
    for (int64_t n = 0; n < count; n += kLines) {
      const int64_t in_tile = (at + n) % tile_cols;
      operand_t* to = panel + (at + n - in_tile) * round_up(depth, v) + in_tile * v;
      if (!fn(w, expert, row + n, k0, depth, tile_cols, to)) {
        return false;
      }
    }
    return true;
  }
};

#undef MOE_INLINE
