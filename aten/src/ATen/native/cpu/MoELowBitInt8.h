// Products of low-bit weights and rows rounded to int8, whose sums over a block are integers. Included by
// MoELowBitDecoder.h, within the same namespaces and pragmas.

// How many bytes ahead panels are fetched, as measured on Zen 4 and Zen 5.
template <typename Weights>
constexpr int64_t kInt8Near = 8 / Weights::kBits * kAhead;

// ---- few rows -------------------------------------------------------------------------------

// What the shift of weights adds to their product with a row, given the sum of the row's codes.
template <typename Weights>
C10_ALWAYS_INLINE Ints shift_of(const int32_t* sum) {
  return multiply_ints(all_ints(*sum), all_ints(-Weights::kShift));
}

// Few rows times the lines of one group. A group lies in one piece of memory, which is
// read faster than several pieces in turns. `whole`: a block is a row.
template <typename Weights, bool whole, int M>
bool multiply_int8_lines(const LineGroup* group, int64_t expert, const void* const* x) {
  constexpr int64_t kElements = 32 / Weights::kBits, kPiece = Int8Row::kPiece / kElements;
  const Int8Row layout(*group->w);
  const int64_t total = layout.depth / kElements;
  const Weights weights;
  LineScales scales;
  LineReader<Weights, kInt8Near<Weights>> lines;
  Floats sums[M];
  const int32_t* codes[M];
  const float* row_scales[M];
  const int32_t* row_sums[M];
  scales.begin(*group->w, expert, group->row);
  lines.begin(*group, expert, total);
  MOE_UNROLL
  for (int r = 0; r < M; ++r) {
    void* record = const_cast<void*>(x[r]);
    sums[r] = all_floats(0);
    codes[r] = reinterpret_cast<const int32_t*>(Int8Row::codes(record));
    row_scales[r] = layout.scales(record);
    row_sums[r] = layout.sums(record);
  }
  int64_t d0 = 0;
  for (int64_t block = 0; d0 < total; ++block) {
    const int64_t end = whole ? total : std::min(d0 + layout.block / kElements, total);
    Ints products[1][M];
    MOE_UNROLL
    for (int r = 0; r < M; ++r) {
      products[0][r] = shift_of<Weights>(row_sums[r] + block);
    }
    for (; d0 < end; d0 += kPiece) {
      const Ints* const from[] = {lines.read(d0)};
      add_int8(from, weights, codes, d0 * kElements / 4, products);
    }
    const Floats scale = multiply_floats(scales.values(block), all_floats(Weights::kUnit));
    MOE_UNROLL
    for (int r = 0; r < M; ++r) {
      sums[r] = fma(
          multiply_floats(to_floats(products[0][r]), scale), all_floats(row_scales[r][block]),
          whole ? all_floats(0) : sums[r]);
    }
  }
  for (int r = 0; r < M; ++r) {
    store_floats(group->c + r * kPanelCols, sums[r]);
  }
  return !is_any(scales.rare);
}

template <typename Weights, bool whole>
Kernel<void> multiply_int8_lines_of(int64_t rows) {
  return with_log_rows<kMaxInt8Rows>(rows, [](auto log) {
    return Kernel<void>{&multiply_int8_lines<Weights, whole, 1 << log>};
  });
}

// ---- many rows ----------------------------------------------------------------------------

// The products of two groups of lines, a slice of K at a time, so that their codes stay in L1 for all
// rows. `whole`: a block is a row, and its sums are integers until the last slice.
template <typename Weights, bool whole>
class Int8Slices {
 public:
  static constexpr int Q = 2;
  static constexpr int64_t kBytes = 256;  // of a line
  // Elements of K; blocks divide them, or are a row.
  static constexpr int64_t kSlice = kBytes * 8 / Weights::kBits;

  // `scratch` has room for the codes of a slice.
  Int8Slices(const LineGroup (&groups)[Q], int64_t expert, Ints* scratch)
      : groups_(groups), expert_(expert), layout_(*groups[0].w), scratch_(scratch) {
    for (int q = 0; q < Q; ++q) {
      scales_[q].begin(*groups[q].w, expert, groups[q].row);
    }
  }

  // Goes to the slice from element k0 of K. Returns whether all scales are regular.
  bool begin(int64_t k0) {
    k0_ = k0;
    depth_ = std::min(kSlice, layout_.depth - k0);
    Ints* to = scratch_;
    bool is_rare = false;
    for (int q = 0; q < Q; ++q) {
      const LowBitView& w = *groups_[q].w;
      const int64_t lines = w.panels ? kLines : 1;  // that follow each other
      const uint8_t* first = w.at(expert_, groups_[q].row, 0) + k0 * Weights::kBits / 8 * lines;
      next_[q] = is_last() ? groups_[q].next : first + kBytes * lines;
      codes_[q] = w.panels ? reinterpret_cast<const Ints*>(first) : to;
      if (!w.panels) {
        to = gather(q, to);
      }
      const int64_t blocks = !whole ? ceil_div(depth_, layout_.block) : is_last() ? 1 : 0;
      for (const auto i : c10::irange(blocks)) {
        const Floats scale = scales_[q].values(whole ? 0 : k0 / layout_.block + i);
        store_floats(factors_[i][q], multiply_floats(scale, all_floats(Weights::kUnit)));
      }
      is_rare = is_rare || is_any(scales_[q].rare);
    }
    return !is_rare;
  }

  // Adds the products of M of `count` rows, from `row` on; repeats the last one rather than take
  // fewer. Fetches a part of the next slice, one of `turns`.
  template <int M>
  void multiply(
      const void* const* rows, int64_t row, int64_t count, int64_t turn, int64_t turns) const {
    const int32_t *codes[M], *row_sums[M];
    const float* row_scales[M];
    alignas(64) float unused[kLines] = {};
    float* c[Q][M];
    Ints products[Q][M];
    Floats sums[Q][M];
    const auto for_all = [&](const auto& fn) MOE_INLINE {
      MOE_UNROLL
      for (int r = 0; r < M; ++r) {
        MOE_UNROLL
        for (int q = 0; q < Q; ++q) {
          fn(q, r, products[q][r], sums[q][r]);
        }
      }
    };
    MOE_UNROLL
    for (int r = 0; r < M; ++r) {
      void* record = const_cast<void*>(rows[std::min(row + r, count - 1)]);
      codes[r] = reinterpret_cast<const int32_t*>(Int8Row::codes(record) + k0_);
      row_scales[r] = layout_.scales(record) + k0_ / layout_.block;
      row_sums[r] = layout_.sums(record) + k0_ / layout_.block;
    }
    for_all([&](int q, int r, Ints& product, Floats& sum) MOE_INLINE {
      c[q][r] = row + r < count ? groups_[q].c + (row + r) * kPanelCols : unused;
      sum = k0_ == 0 ? all_floats(0) : load_floats(c[q][r]);
      if (whole) {
        product = k0_ == 0 ? shift_of<Weights>(row_sums[r]) : as_ints(sum);
      }
    });
    const Weights weights;
    const int64_t pitch = groups_[0].w->panels ? kBytes : groups_[0].w->row_bytes;
    const int64_t share = Weights::kBits / turns;
    for (int64_t k = 0, block = 0; k < depth_; ++block) {
      if (!whole) {
        for_all([&](int, int r, Ints& product, Floats&) MOE_INLINE {
          product = shift_of<Weights>(row_sums[r] + block);
        });
      }
      const int64_t end = whole ? depth_ : std::min(k + layout_.block, depth_);
      for (; k < end; k += kBlock) {
        const int64_t at = k * Weights::kBits / 32;
        for (const auto i : c10::irange(at + turn * share, at + (turn + 1) * share)) {
          MOE_UNROLL
          for (int q = 0; q < Q; ++q) {
            fetch<1>(next_[q] + i * 64 / kBytes * pitch + i * 64 % kBytes, into_l1_);
          }
        }
        const Ints* from[Q];
        MOE_UNROLL
        for (int q = 0; q < Q; ++q) {
          from[q] = codes_[q] + at;
        }
        add_int8(from, weights, codes, k / 4, products);
      }
      if (!whole || is_last()) {
        for_all([&](int q, int r, Ints& product, Floats& sum) MOE_INLINE {
          const Floats scaled =
              multiply_floats(to_floats(product), load_floats(factors_[block][q]));
          sum = fma(scaled, all_floats(row_scales[r][block]), whole ? all_floats(0) : sum);
        });
      }
    }
    for_all([&](int q, int r, Ints& product, Floats& sum) MOE_INLINE {
      store_floats(c[q][r], whole && !is_last() ? as_floats(product) : sum);
    });
  }

 private:
  bool is_last() const {
    return k0_ + kSlice >= layout_.depth;
  }

  // Writes the codes of a group that is not a panel in the order of one. Returns the end.
  Ints* gather(int q, Ints* to) const {
    LineReader<Weights, /*near=*/0> lines;
    lines.begin(groups_[q], expert_, layout_.depth * Weights::kBits / 32);
    for (int64_t k = k0_; k < k0_ + depth_; k += kBlock) {
      const Ints* from = lines.read(k * Weights::kBits / 32);
      for (const auto i : c10::irange(Weights::kBits)) {
        store_ints(to++, load_ints(from + i));
      }
    }
    return to;
  }

  const LineGroup (&groups_)[Q];
  const int64_t expert_;
  const Int8Row layout_;
  Ints* const scratch_;
  const bool into_l1_ = fetches_into_l1();
  LineScales scales_[Q];
  int64_t k0_ = 0, depth_ = 0;
  const Ints* codes_[Q];
  const uint8_t* next_[Q];  // what is read after the slice
  alignas(64) float factors_[kSlice / kBlock][Q][kLines];  // scales times kUnit
};

template <typename Weights, bool whole>
bool multiply_int8_slices(
    std::span<const LineGroup> groups, int64_t expert, int64_t rows, const void* const* lines,
    Ints* scratch) {
  using Slices = Int8Slices<Weights, whole>;
  constexpr int64_t kRows = 8, kMaxTurns = 4;
  int64_t turns = 1;
  while (turns < kMaxTurns && 2 * turns * kRows < rows + kRows) {
    turns *= 2;
  }
  const int64_t depth = groups[0].w->depth;
  for (size_t g = 0; g < groups.size(); g += Slices::Q) {
    LineGroup some[Slices::Q];
    for (int q = 0; q < Slices::Q; ++q) {
      some[q] = group_of(groups, expert, g, q, Slices::Q);
    }
    Slices slices(some, expert, scratch);
    for (int64_t k0 = 0; k0 < depth; k0 += Slices::kSlice) {
      if (!slices.begin(k0)) {
        return false;
      }
      for (int64_t row = 0; row < rows; row += kRows) {
        with_log_rows<kRows>(rows - row, [&](auto log) {
          slices.template multiply<1 << log>(lines, row, rows, row / kRows % turns, turns);
        });
      }
    }
  }
  return true;
}

// The same in tiles, for int8 weights with a scale per row: `Tiles` multiplies the codes of 32 rows, which
// are at equal distances, by those of two groups of lines. The rows, and their sums, exist up to a multiple
// of 32.
template <typename Tiles, typename Weights>
bool multiply_int8_tiles(
    std::span<const LineGroup> groups, int64_t expert, int64_t rows, const void* const* lines,
    uint8_t* scratch) {
  constexpr int Q = 2;
  constexpr int64_t kRows = 32;
  constexpr int64_t kSlice = 512;  // elements of K: their codes stay in L1
  const Int8Row layout(*groups[0].w);
  const int64_t pitch = static_cast<const char*>(lines[1]) - static_cast<const char*>(lines[0]);
  const Weights weights;
  for (size_t g = 0; g < groups.size(); g += Q) {
    LineGroup some[Q];
    LineReader<Weights, kInt8Near<Weights>> readers[Q];
    LineScales scales[Q];
    for (int q = 0; q < Q; ++q) {
      some[q] = group_of(groups, expert, g, q, Q);
      readers[q].begin(some[q], expert, layout.depth / 4);
      scales[q].begin(*some[q].w, expert, some[q].row);
    }
    // The last group may be there twice.
    const int distinct = g + 1 < groups.size() ? Q : 1;
    const auto for_rows = [&](const auto& fn) {
      for (const auto r : c10::irange(rows)) {
        void* record = const_cast<void*>(lines[r]);
        for (int q = 0; q < distinct; ++q) {
          fn(some[q].c + r * kPanelCols, scales[q], *layout.sums(record), *layout.scales(record));
        }
      }
    };
    for_rows([](float* c, LineScales&, const int32_t& sum, float) {
      store_ints(c, shift_of<Weights>(&sum));
    });
    for (int64_t k0 = 0; k0 < layout.depth; k0 += kSlice) {
      const int64_t depth = std::min(kSlice, layout.depth - k0);
      for (int64_t k = 0; k < depth; k += kBlock) {
        for (int q = 0; q < Q; ++q) {
          const Ints* from = readers[q].read((k0 + k) / 4);
          for (int64_t i = 0; i < kBlock / 4; ++i) {
            Ints words[1];
            weights.shift(load_ints(from + i), words);
            store_ints(scratch + ((k / 4 + i) * Q + q) * sizeof(Ints), words[0]);
          }
        }
      }
      for (int64_t row = 0; row < rows; row += kRows) {
        const int8_t* codes = Int8Row::codes(const_cast<void*>(lines[row])) + k0;
        Tiles::multiply_bytes(
            depth, codes, pitch, scratch, some[0].c + row * kPanelCols, some[1].c + row * kPanelCols);
      }
    }
    for_rows([](float* c, LineScales& scales, int32_t, float row_scale) {
      const Floats scale = multiply_floats(scales.values(0), all_floats(Weights::kUnit));
      const Floats scaled = multiply_floats(to_floats(load_ints(c)), scale);
      store_floats(c, fma(scaled, all_floats(row_scale), all_floats(0)));
    });
    if (is_any(scales[0].rare) || is_any(scales[1].rare)) {
      return false;
    }
  }
  return true;
}

// `scratch` has kPanelCols bytes for each of the first 256 elements of K.
template <typename Weights, bool whole>
bool multiply_int8_groups(
    std::span<const LineGroup> groups, int64_t expert, int64_t rows, const void* const* lines,
    [[maybe_unused]] void* scratch) {
  if constexpr (kSlicesInt8) {
    if (rows > kMaxInt8Rows) {
      return multiply_int8_slices<Weights, whole>(
          groups, expert, rows, lines, static_cast<Ints*>(scratch));
    }
  }
  return multiply_groups<kMaxInt8Rows>(
      groups, expert, rows, lines, &multiply_int8_lines_of<Weights, whole>);
}
