#include "tests/comm/communicator_reduction_checks.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "burst/base/philox.h"
#include "burst/base/status.h"

namespace burst {
namespace {

// Returns element i of a rank's input. Elements have both signs and very different magnitudes, so
// that the order of summation shows in the last bits.
template <typename T>
T Input(int rank, int64_t i) {
  const PhiloxCounter random = Philox(4, rank, i);
  return static_cast<T>(std::ldexp(UniformFromBits(random[0]) - 0.5, random[1] % 20));
}

// FNV-1a over the elements, four bytes at a time.
uint64_t Digest(const Tensor& tensor, uint64_t digest = 0xcbf29ce484222325) {
  const Tensor on_host = tensor.To(DeviceType::kCpu);
  const auto* words = static_cast<const uint32_t*>(on_host.raw_data());
  const int64_t n = tensor.size_bytes() / sizeof(uint32_t);
  for (int64_t i = 0; i < n; ++i) digest = (digest ^ words[i]) * 0x100000001b3;
  return digest;
}

absl::Status CheckEqualOnAllRanks(Communicator& comm, const Tensor& tensor) {
  const double mine = Digest(tensor) >> 12;
  BURST_ASSIGN_OR_RETURN(const std::vector<double> all, comm.AllGather(mine));
  EXPECT_EQ(all, std::vector<double>(comm.world_size(), mine));
  return absl::OkStatus();
}

}  // namespace

template <typename T>
Tensor SumInputs(int rank, int64_t n, DeviceType device) {
  const Tensor tensor = Tensor::Empty({n}, DTypeOf<T>::value);
  for (int64_t i = 0; i < n; ++i) tensor.data<T>()[i] = Input<T>(rank, i);
  return tensor.To(device);
}

template Tensor SumInputs<float>(int, int64_t, DeviceType);
template Tensor SumInputs<double>(int, int64_t, DeviceType);

template <typename T>
void CheckSum(const Tensor& sum, int ranks, bool fixed_order, int64_t stride) {
  const int64_t n = sum.numel();
  const Tensor on_host = sum.To(DeviceType::kCpu);
  const T* y = on_host.data<T>();
  const long double unit = std::numeric_limits<T>::epsilon() / 2;
  int64_t wrong = 0, not_in_order = 0;
  for (int s = 0; s < ranks; ++s) {
    for (int64_t i = n * s / ranks; i < n * (s + 1) / ranks; i += stride) {
      long double exact = 0, magnitude = 0;
      T in_order = Input<T>(s, i);
      for (int r = 0; r < ranks; ++r) {
        exact += Input<T>(r, i);
        magnitude += std::abs(Input<T>(r, i));
        if (r > 0) in_order += Input<T>((s + r) % ranks, i);
      }
      const long double u = (ranks - 1) * unit;
      wrong += !(std::abs(y[i] - exact) <= u / (1 - u) * magnitude);
      not_in_order += !(y[i] == in_order);
    }
  }
  EXPECT_EQ(wrong, 0) << "of " << n;
  EXPECT_TRUE(!fixed_order || not_in_order == 0) << not_in_order << " of " << n;
}

template void CheckSum<float>(const Tensor&, int, bool, int64_t);
template void CheckSum<double>(const Tensor&, int, bool, int64_t);

absl::Status CheckAllReduce(Communicator& comm, const CheckOptions& options) {
  const int ranks = comm.world_size();
  for (int64_t n : {0, 1, 2, 3, ranks - 1, ranks, ranks + 1, 1000, 54321}) {
    for (bool generic : {false, true}) {  // the implementation's function, and the base class's
      const bool fixed_order = generic || options.fixed_order;
      const auto reduce = [&](const Tensor& tensor) {
        return generic ? comm.Communicator::AllReduceSum(tensor) : comm.AllReduceSum(tensor);
      };
      SCOPED_TRACE(testing::Message() << n << " elements, generic " << generic);
      const Tensor floats = SumInputs<float>(comm.rank(), n, options.device);
      BURST_RETURN_IF_ERROR(reduce(floats));
      CheckSum<float>(floats, ranks, fixed_order);
      const Tensor doubles = SumInputs<double>(comm.rank(), n, options.device).View({1, n, 1});
      BURST_RETURN_IF_ERROR(reduce(doubles));
      CheckSum<double>(doubles, ranks, fixed_order);
      BURST_RETURN_IF_ERROR(CheckEqualOnAllRanks(comm, floats));

      const Tensor again = SumInputs<float>(comm.rank(), n, options.device);
      BURST_RETURN_IF_ERROR(reduce(again));
      EXPECT_EQ(Digest(again), Digest(floats)) << "of another time";
      if (options.device == DeviceType::kCpu) continue;  // the CPU does not compute in bfloat16
      const Tensor ranks_sum = Tensor::Zeros({n}, DType::kBFloat16, options.device);
      ranks_sum.Fill(comm.rank() + 1);
      BURST_RETURN_IF_ERROR(reduce(ranks_sum));
      EXPECT_EQ(ranks_sum.ToVector<float>(), std::vector<float>(n, ranks * (ranks + 1) / 2));
    }
  }
  return absl::OkStatus();
}

// Segments have more than one piece, and the last piece is short.
absl::Status CheckAllReduceInPieces(Communicator& comm, const CheckOptions& options) {
  const int64_t n = comm.world_size() * (int64_t{1} << 19) + 12'345;
  const Tensor generic = SumInputs<float>(comm.rank(), n, options.device), own = generic.Clone();
  comm.ResetStats();
  BURST_RETURN_IF_ERROR(comm.Communicator::AllReduceSum(generic));
  const CommStats counted = comm.stats();
  comm.ResetStats();
  BURST_RETURN_IF_ERROR(comm.AllReduceSum(own));
  EXPECT_EQ(comm.stats().bytes_sent, counted.bytes_sent);
  EXPECT_EQ(comm.stats().messages_sent, counted.messages_sent);
  CheckSum<float>(generic, comm.world_size(), /*fixed_order=*/true, /*stride=*/37);
  CheckSum<float>(own, comm.world_size(), options.fixed_order, /*stride=*/37);
  EXPECT_TRUE(!options.fixed_order || Digest(own) == Digest(generic));
  return CheckEqualOnAllRanks(comm, own);
}

absl::StatusOr<uint64_t> AllReduceDigest(Communicator& comm) {
  uint64_t digest = 0;
  for (int64_t n : {1, 5, 1001, 77'777}) {
    const Tensor floats = SumInputs<float>(comm.rank(), n, DeviceType::kCpu);
    const Tensor doubles = SumInputs<double>(comm.rank(), n, DeviceType::kCpu);
    for (const Tensor& tensor : {floats, doubles}) {
      BURST_RETURN_IF_ERROR(comm.AllReduceSum(tensor));
      digest = Digest(tensor, digest);
    }
  }
  return digest;
}

}  // namespace burst
