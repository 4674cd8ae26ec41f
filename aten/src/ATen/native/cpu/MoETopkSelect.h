#pragma once

// The k best of a row of numbers, in the order of a stable descending
// at::sort, without sorting the others. All loops over the row are over
// integers and have no branches on the values, so the time depends
// little on their order, and the compiler vectorizes most of them.
//
//   k <= n / 4   the k-th largest maximum of 2k groups of ranks is a bound that few
//                ranks exceed, and only those are sorted
//   k <= n / 2   the k-th largest is found by quickselect
//   else         all are sorted

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <type_traits>

namespace at::native {
inline namespace CPU_CAPABILITY {
namespace moe_cpu {

// A larger rank is better in the order of at::sort(stable, descending): NaN before all,
// 0 and -0 equal. Equal ranks keep their order.
template <typename scalar_t>
using rank_t = std::conditional_t<std::is_same_v<scalar_t, double>, int64_t, int32_t>;

template <typename scalar_t>
inline rank_t<scalar_t> rank_of(scalar_t value) {
  using rank = rank_t<scalar_t>;
  constexpr auto kMax = std::numeric_limits<rank>::max();
  value += scalar_t(0); // -0 to 0
  rank bits;
  std::memcpy(&bits, &value, sizeof(bits));
  bits ^= (bits >> (8 * sizeof(rank) - 1)) & kMax;
  return value == value ? bits : kMax;
}

template <typename scalar_t>
inline scalar_t value_of(rank_t<scalar_t> rank) {
  rank ^= (rank >> (8 * sizeof(rank) - 1)) & std::numeric_limits<rank_t<scalar_t>>::max();
  scalar_t value;
  std::memcpy(&value, &rank, sizeof(value));
  return value;
}

constexpr int64_t kFew = 32; // numbers that are ordered by counting
constexpr int64_t kBlock = 16; // ranks compared together

// better[i] = how many of n <= size numbers are larger than number i; copies them to `few`.
template <int64_t size, typename number_t>
inline void count_better(const number_t* numbers, int64_t n, number_t* few, number_t* better) {
  std::fill(few, few + size, std::numeric_limits<number_t>::min());
  std::copy_n(numbers, n, few);
  number_t counts[size] = {};
  for (int64_t j = 0; j < n; ++j) {
    const number_t number = few[j];
    for (int64_t i = 0; i < size; ++i) {
      counts[i] += number > few[i];
    }
  }
  std::copy_n(counts, size, better);
}

template <typename number_t>
inline void
count_better_of_few(const number_t* numbers, int64_t n, number_t* few, number_t* better) {
  if (n <= kFew / 4) {
    count_better<kFew / 4>(numbers, n, few, better);
  } else if (n <= kFew / 2) {
    count_better<kFew / 2>(numbers, n, few, better);
  } else {
    count_better<kFew>(numbers, n, few, better);
  }
}

// The k-th largest of up to kFew numbers.
template <typename number_t>
inline number_t kth_of_few(const number_t* numbers, int64_t n, int64_t k) {
  number_t few[kFew], better[kFew];
  count_better_of_few(numbers, n, few, better);
  auto kth = std::numeric_limits<number_t>::max();
  for (int64_t i = 0; i < n; ++i) {
    kth = better[i] < k ? std::min(kth, few[i]) : kth;
  }
  return kth;
}

// Number of n ranks for which fn(rank) is true. Counts as wide as a rank vectorize.
template <typename rank, typename Fn>
inline int64_t count(const rank* ranks, int64_t n, const Fn& fn) {
  rank result = 0;
  for (int64_t i = 0; i < n; ++i) {
    result += fn(ranks[i]);
  }
  return result;
}

// Copies them to the front of `kept`, which may be `ranks`, and returns their number.
template <typename rank, typename Fn>
inline int64_t keep_if(const rank* ranks, int64_t n, const Fn& fn, rank* kept) {
  int64_t size = 0;
  for (int64_t i = 0; i < n; ++i) {
    const rank value = ranks[i];
    kept[size] = value;
    size += fn(value);
  }
  return size;
}

// The k-th largest of n ranks, which are overwritten. A quickselect without branches in
// its loops, whose pivot is about the k-th largest of a sample.
template <typename rank>
inline rank kth_largest(rank* ranks, int64_t n, int64_t k) {
  constexpr int kRounds = 12; // then the worst case is near
  for (int round = 0; n > kFew; ++round) {
    if (round == kRounds) {
      std::nth_element(ranks, ranks + k - 1, ranks + n, std::greater<rank>());
      return ranks[k - 1];
    }
    rank sample[kFew];
    for (int64_t i = 0; i < kFew; ++i) {
      sample[i] = ranks[i * n / kFew];
    }
    const rank pivot = kth_of_few(sample, kFew, std::min(k * kFew / n + 1, kFew));
    const auto is_above = [pivot](rank x) { return x > pivot; };
    const int64_t above = count(ranks, n, is_above);
    if (above >= k) {
      n = keep_if(ranks, n, is_above, ranks);
      continue;
    }
    k -= above + count(ranks, n, [pivot](rank x) { return x == pivot; });
    if (k <= 0) {
      return pivot;
    }
    n = keep_if(ranks, n, [pivot](rank x) { return x < pivot; }, ranks);
  }
  return kth_of_few(ranks, n, k);
}

// A lower bound of the k-th largest that few others exceed: the k-th largest of the
// maxima of 2k or more groups. `maxima` has room for n and one more block.
template <typename rank>
inline rank bound_of_best(const rank* ranks, int64_t n, int64_t k, rank* maxima) {
  const int64_t groups = (2 * k + kBlock - 1) / kBlock * kBlock;
  std::copy_n(ranks, groups, maxima);
  for (int64_t begin = groups; begin < n; begin += groups) {
    const int64_t size = std::min(groups, n - begin);
    for (int64_t i = 0; i < size; ++i) {
      maxima[i] = std::max(maxima[i], ranks[begin + i]);
    }
  }
  return kth_largest(maxima, groups, k);
}

// A rank and its place as one number; lower places are better.
inline int64_t key_of(int32_t rank, int64_t place) {
  return (static_cast<int64_t>(rank) << 32) | (0xffffffff - place);
}

inline int64_t place_of(int64_t key) {
  return 0xffffffff - (key & 0xffffffff);
}

// Merges two sorted runs of the same length from both ends at once, so that neither
// end can leave its run.
inline void merge_runs(const int64_t* a, const int64_t* b, int64_t n, int64_t* out) {
  const int64_t *a_end = a + n - 1, *b_end = b + n - 1;
  int64_t* out_end = out + 2 * n - 1;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t x = *a, y = *b;
    const bool first = x > y;
    *out++ = first ? x : y;
    a += first;
    b += !first;
    const int64_t u = *a_end, v = *b_end;
    const bool last = u < v;
    *out_end-- = last ? u : v;
    a_end -= last;
    b_end -= !last;
  }
}

// Sorts keys, best first.
inline void sort_keys(int64_t* keys, int64_t n, int64_t* other) {
  for (int64_t begin = 0; begin < n; begin += kFew) {
    int64_t few[kFew], better[kFew];
    const int64_t size = std::min(kFew, n - begin);
    count_better_of_few(keys + begin, size, few, better);
    for (int64_t i = 0; i < size; ++i) {
      keys[begin + better[i]] = few[i];
    }
  }
  int64_t *from = keys, *to = other;
  for (int64_t run = kFew; run < n; run *= 2) {
    int64_t begin = 0;
    for (; begin + 2 * run <= n; begin += 2 * run) {
      merge_runs(from + begin, from + begin + run, run, to + begin);
    }
    const int64_t middle = std::min(begin + run, n);
    std::merge(
        from + begin, from + middle, from + middle, from + n, to + begin, std::greater<int64_t>());
    std::swap(from, to);
  }
  if (from != keys) {
    std::copy_n(from, n, keys);
  }
}

// Whether fn(a, b) is true for all neighbours, which are compared in blocks.
template <typename rank, typename Fn>
inline bool in_order(const rank* ranks, int64_t n, const Fn& fn) {
  for (int64_t i = 0; i + 1 < n; i += kBlock) {
    int32_t breaks = 0;
    const int64_t end = std::min(i + kBlock, n - 1);
    for (int64_t j = i; j < end; ++j) {
      breaks |= !fn(ranks[j], ranks[j + 1]);
    }
    if (breaks) {
      return false;
    }
  }
  return true;
}

// Calls found(place, chosen) in order of place for the `above` ranks that exceed
// `bound` and the first `equals` ranks that equal it.
template <typename rank, typename Found>
inline void for_each_best(
    const rank* ranks, int64_t n, rank bound, int64_t above, int64_t equals, const Found& found) {
  auto look = [&](int64_t i) {
    const bool equal = (ranks[i] == bound) & (equals > 0);
    const bool larger = ranks[i] > bound;
    equals -= equal;
    above -= larger;
    found(i, equal | larger);
  };
  int64_t i = 0;
  for (; i + kBlock <= n && above + equals > 0; i += kBlock) {
    // This does not overflow, as no number has the lowest rank.
    const rank below = equals > 0 ? bound - 1 : bound;
    int32_t any = 0;
    for (int64_t j = i; j < i + kBlock; ++j) {
      any |= ranks[j] > below;
    }
    if (any) {
      for (int64_t j = i; j < i + kBlock; ++j) {
        look(j);
      }
    }
  }
  for (; i < n && above + equals > 0; ++i) {
    look(i);
  }
}

// Places of the k best of n ranks, best first. `copy` holds n + kBlock ranks,
// `keys` and `other` n + kBlock numbers each.
template <typename rank>
inline void select_best(
    const rank* ranks, int64_t n, int64_t k, int64_t* places, rank* copy, int64_t* keys,
    int64_t* other) {
  if (in_order(ranks, n, std::greater_equal<rank>())) {
    std::iota(places, places + k, 0);
    return;
  }
  if (in_order(ranks, n, std::less<rank>())) {
    for (int64_t i = 0; i < k; ++i) {
      places[i] = n - 1 - i;
    }
    return;
  }
  if (k == 1) {
    rank largest = ranks[0];
    for (int64_t i = 1; i < n; ++i) {
      largest = std::max(largest, ranks[i]);
    }
    places[0] = std::find(ranks, ranks + n, largest) - ranks;
    return;
  }
  constexpr bool kHasKeys = std::is_same_v<rank, int32_t>;
  int64_t kept = 0;
  auto keep = [&](int64_t place, bool take) {
    keys[kept] = kHasKeys ? key_of(ranks[place], place) : place;
    kept += take;
  };
  if (n <= kFew || 2 * k > n) {
    for (int64_t i = 0; i < n; ++i) {
      keep(i, true);
    }
  } else {
    rank bound;
    if (n >= 4 * k && n >= 4 * kBlock) {
      bound = bound_of_best(ranks, n, k, copy);
    } else {
      std::copy_n(ranks, n, copy);
      bound = kth_largest(copy, n, k);
    }
    const auto is_above = [&bound](rank x) { return x > bound; };
    int64_t above = count(ranks, n, is_above);
    if (above > k + kFew) {
      // Too many ranks exceed the bound.
      bound = kth_largest(copy, keep_if(ranks, n, is_above, copy), k);
      above = count(ranks, n, is_above);
    }
    const int64_t equals = std::max<int64_t>(k - above, 0);
    for_each_best(ranks, n, bound, above, equals, keep);
  }
  if constexpr (kHasKeys) {
    sort_keys(keys, kept, other);
    std::transform(keys, keys + k, places, place_of);
  } else {
    std::stable_sort(
        keys, keys + kept, [ranks](int64_t a, int64_t b) { return ranks[a] > ranks[b]; });
    std::copy_n(keys, k, places);
  }
}

} // namespace moe_cpu
} // namespace CPU_CAPABILITY
} // namespace at::native
