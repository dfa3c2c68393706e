// Deals packed documents to ranks (the layout "balanced"), and measures the time. Compares with the
// other layouts: the busiest rank's work divided by the mean, and the sent K and V tokens divided
// by the sequence length. The lengths of documents are log-normal (median 512, deviation 1.5), at
// most the third argument. Arguments: tokens, ranks, longest document.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "burst/attention/ring/schedule.h"
#include "burst/sequence/balance.h"

namespace burst {
namespace {

DocumentStarts LongTailed(int64_t seqlen, int64_t longest) {
  std::mt19937 random(1);
  DocumentStarts documents(1);
  for (int64_t at = 0; at < seqlen;) {
    documents[0].push_back(static_cast<int32_t>(at));
    const double a = (random() + 1.0) / 4294967297.0, b = random() / 4294967296.0;
    const double normal = std::sqrt(-2 * std::log(a)) * std::cos(2 * M_PI * b);
    at += std::clamp<int64_t>(static_cast<int64_t>(512 * std::exp(1.5 * normal)), 1, longest);
  }
  return documents;
}

void Report(benchmark::State& state, const char* name,
            const std::vector<std::vector<int32_t>>& positions, const Mask& mask) {
  const auto ranks = static_cast<int>(positions.size());
  double sum = 0, most = 0, sent = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    const RingSchedule schedule =
        *RingSchedule::Create(*TokenShard::Create(rank, ranks, positions), mask);
    double pairs = 0;
    for (int source = 0; source < ranks; ++source) {
      pairs += static_cast<double>(schedule.for_keys_of(source).pairs());
    }
    sum += pairs;
    most = std::max(most, pairs);
    sent = static_cast<double>(schedule.kv_route().block_tokens.total());
  }
  const std::string of = name;
  state.counters[of + " busiest"] = most * ranks / sum;
  state.counters[of + " sent"] = sent / static_cast<double>(state.range(0));
}

void Balance(benchmark::State& state) {
  const int64_t seqlen = state.range(0);
  const auto ranks = static_cast<int>(state.range(1));
  const DocumentStarts documents = LongTailed(seqlen, state.range(2));
  const Mask mask = Mask::Causal().WithDocuments(documents);
  std::vector<std::vector<int32_t>> positions;
  for (auto _ : state) {
    positions = BalancedPositions(mask, seqlen, ranks);
    benchmark::DoNotOptimize(positions.data());
  }
  Report(state, "balanced", positions, mask);
  for (const Layout layout : {Layout::kZigzag, Layout::kStriped, Layout::kContiguous}) {
    for (int rank = 0; rank < ranks; ++rank) {
      positions[rank] = LocalPositions(layout, seqlen, rank, ranks);
    }
    Report(state, Name(layout), positions, mask);
  }
  state.counters["documents"] = static_cast<double>(documents[0].size());
}

BENCHMARK(Balance)
    ->Unit(benchmark::kMillisecond)
    ->Args({32768, 4, 8192})
    ->Args({32768, 4, 32768})
    ->Args({131072, 4, 32768})
    ->Args({131072, 4, 131072})
    ->Args({262144, 8, 65536})
    ->Args({1048576, 8, 262144})
    ->Args({1048576, 8, 1048576})
    ->Args({1048576, 64, 262144});

}  // namespace
}  // namespace burst
