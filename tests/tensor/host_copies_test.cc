#include "burst/tensor/host_copies.h"

#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <vector>

#include "burst/device/memory.h"
#include "tests/testing/test_device.h"

namespace burst {
namespace {

std::vector<float> Numbers(int64_t n, float first) {
  std::vector<float> numbers(n);
  std::iota(numbers.begin(), numbers.end(), first);
  return numbers;
}

Tensor Make(int64_t n, float first) {
  return Tensor::FromVector(Numbers(n, first), {n}, kTestDevice);
}

TEST(HostCopies, GivesBackWhatWasStored) {
  HostCopies copies(kTestDevice);
  const auto stored = copies.Store(Make(1000, 3));
  stored->Release();
  stored->Fetch();
  stored->Fetch();
  EXPECT_EQ(stored->Take().ToVector<float>(), Numbers(1000, 3));
  // This skips the steps between, and stores a tensor without elements.
  EXPECT_EQ(copies.Store(Make(10, 1))->Take().ToVector<float>(), Numbers(10, 1));
  const auto released = copies.Store(Make(10, 2));
  released->Release();
  EXPECT_EQ(released->Take().ToVector<float>(), Numbers(10, 2));
  const auto empty = copies.Store(Make(0, 0));
  empty->Release();
  EXPECT_EQ(empty->Take().numel(), 0);
}

// Between Release and Fetch, the device's memory belongs to another tensor. The tensor's own
// content may change as soon as it is released.
TEST(HostCopies, FreesTheDevicesMemory) {
  constexpr int64_t kCount = 1 << 20;
  HostCopies copies(kTestDevice);
  const int64_t before = GetMemoryStats(kTestDevice).bytes_in_use;
  const auto stored = copies.Store(Make(kCount, 0));
  EXPECT_GE(GetMemoryStats(kTestDevice).bytes_in_use - before, 4 * kCount);
  stored->Release();
  EXPECT_LT(GetMemoryStats(kTestDevice).bytes_in_use - before, 4 * kCount);
  {
    const Tensor other = Tensor::Empty({kCount}, DType::kFloat32, kTestDevice);
    other.Fill(-1);
  }
  stored->Fetch();
  EXPECT_EQ(stored->Take().ToVector<float>(), Numbers(kCount, 0));
}

// Tensors are stored in order and fetched in reverse, as layers do. Buffers are used many times,
// and other work uses the same memory.
TEST(HostCopies, ManyInOrderAndBack) {
  constexpr int64_t kCount = 1 << 18;
  constexpr int kLayers = 12;
  HostCopies copies(kTestDevice);
  copies.Reserve(kLayers, 4 * kCount);
  EXPECT_EQ(copies.host_bytes(), kLayers * 4 * kCount);
  for (int step = 0; step < 3; ++step) {
    std::vector<std::unique_ptr<HostCopies::Stored>> stored;
    for (int layer = 0; layer < kLayers; ++layer) {
      const Tensor x = Make(kCount, static_cast<float>(layer + step));
      x.Scale(2);  // queued work, whose result is stored
      stored.push_back(copies.Store(x));
      if (layer > 0) stored[layer - 1]->Release();
    }
    stored.back()->Release();
    for (int layer = kLayers - 1; layer >= 0; --layer) {
      if (layer > 0) stored[layer - 1]->Fetch();
      const Tensor x = stored[layer]->Take();
      stored[layer].reset();
      x.Scale(0.5);
      EXPECT_EQ(x.ToVector<float>(), Numbers(kCount, static_cast<float>(layer + step)));
    }
  }
  EXPECT_EQ(copies.host_bytes(), kLayers * 4 * kCount);
}

// A failed pass leaves tensors at any stage.
TEST(HostCopies, MayBeDroppedAtAnyTime) {
  HostCopies copies(kTestDevice);
  for (int stage = 0; stage < 4; ++stage) {
    const auto stored = copies.Store(Make(100, 1));
    if (stage > 0) stored->Release();
    if (stage > 1) stored->Fetch();
    if (stage > 2) (void)stored->Take();
  }
  EXPECT_EQ(copies.host_bytes(), 400);
}

}  // namespace
}  // namespace burst
