// Moves one tile through TMA, wgmma and back, in every operand form of the kernels, and compares
// with a plain matmul.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "burst/kernels/gpu/sm90/tensor_map.h"
#include "burst/kernels/gpu/sm90/tile.cuh"

namespace burst {
namespace sm90 {
namespace {

// Converts elements from their bits, as CUDA does.
template <class Element>
uint16_t BitsOf(float value);
template <>
uint16_t BitsOf<BFloat16>(float value) {
  return __bfloat16_as_ushort(__float2bfloat16(value));
}
template <>
uint16_t BitsOf<Float16>(float value) {
  return __half_as_ushort(__float2half(value));
}
template <class Element>
__host__ __device__ float FloatOf(uint16_t bits) {
  return std::is_same_v<Element, Float16> ? __half2float(__ushort_as_half(bits))
                                          : __bfloat162float(__ushort_as_bfloat16(bits));
}

enum class Form { kSharedShared, kRegisterShared };

struct Maps {
  CUtensorMap a, b;
};

// Computes d[64, N] = A B. In memory, a is [64, K] when K-major, [K, 64] when MN-major; b is [N, K]
// when K-major, [K, N] when MN-major.
template <class Element, Form kForm, Major kMajorA, Major kMajorB, int kN, int kK>
__global__ void MatmulKernel(const __grid_constant__ Maps maps, float* d) {
  using ATile = Tile<kMajorA == Major::kK ? 64 : kK, kMajorA == Major::kK ? kK : 64>;
  using BTile =
      Tile<kMajorB == Major::kK ? kN : kK, kMajorB == Major::kK ? kK : (kN + 63) / 64 * 64>;
  extern __shared__ __align__(1024) unsigned char bytes[];
  auto& a = *reinterpret_cast<ATile*>(bytes);
  auto& b = *reinterpret_cast<BTile*>(bytes + sizeof(ATile));
  __shared__ Barrier full;
  if (threadIdx.x == 0) {
    InitBarrier(&full, 1);
    FenceBarrierInit();
    ArriveExpectBytes(&full, ATile::kBytes + BTile::kBytes);
    LoadTile(a, maps.a, &full, 0, 0, 0);
    LoadTile(b, maps.b, &full, 0, 0, 0);
  }
  __syncthreads();
  Wait(&full, 0);
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x / 32 * 16 + lane / 4;
  float accumulators[kN / 2] = {};
  if constexpr (kForm == Form::kSharedShared) {
    WgmmaFence();
    MatmulSharedShared<Element, kN, kK, kMajorA, kMajorB>(accumulators, a.At(0), ATile::kBlockBytes,
                                                          b.At(0), BTile::kBlockBytes, false);
  } else {
    // Reads A's columns back through the swizzle, in the layout of accumulators.
    float values[kK / 2];
    for (int j = 0; j < kK / 8; ++j) {
      for (int i = 0; i < 4; ++i) {
        const int r = row + i / 2 * 8, column = j * 8 + lane % 4 * 2 + i % 2;
        const int chunk = column % 64 / 8;
        values[4 * j + i] =
            FloatOf<Element>(a.At(r, column / 64)[(chunk ^ (r % 8)) * 8 + column % 8]);
      }
    }
    uint32_t operand[kK / 4];
    PackOperand<Element>(values, operand);
    PinRegisters(operand);
    WgmmaFence();
    MatmulRegisterShared<Element, kN, kK, kMajorB>(accumulators, operand, b.At(0),
                                                   BTile::kBlockBytes, false);
  }
  WgmmaCommit();
  WgmmaWait<0>();
  PinRegisters(accumulators);
  for (int j = 0; j < kN / 8; ++j) {
    for (int i = 0; i < 4; ++i) {
      d[(row + i / 2 * 8) * kN + j * 8 + lane % 4 * 2 + i % 2] = accumulators[4 * j + i];
    }
  }
}

template <class T>
T* ToDevice(const std::vector<T>& host) {
  void* device = nullptr;
  EXPECT_EQ(cudaMalloc(&device, host.size() * sizeof(T)), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice),
            cudaSuccess);
  return static_cast<T*>(device);
}

template <class Element, Form kForm, Major kMajorA, Major kMajorB, int kN, int kK>
void CheckMatmulOf() {
  // The elements are small integers, so every sum is exact, and one wrong element shows.
  std::mt19937 random(kN * 1000 + kK);
  std::uniform_int_distribution<int> digit(-4, 4);
  std::vector<uint16_t> a(64 * kK), b(kN * kK);
  for (uint16_t& x : a) x = BitsOf<Element>(static_cast<float>(digit(random)));
  for (uint16_t& x : b) x = BitsOf<Element>(static_cast<float>(digit(random)));
  uint16_t* a_device = ToDevice(a);
  uint16_t* b_device = ToDevice(b);
  float* d_device = ToDevice(std::vector<float>(64 * kN, 1e30f));

  constexpr int kARows = kMajorA == Major::kK ? 64 : kK, kAColumns = 64 * kK / kARows;
  constexpr int kBRows = kMajorB == Major::kK ? kN : kK, kBColumns = kN * kK / kBRows;
  const auto map = [](uint16_t* data, int rows, int columns) {
    return MakeTensorMap({data, 0, columns, 0}, DTypeOf<Element>::value, {1, rows, 1, columns},
                         rows);
  };
  const Maps maps = {map(a_device, kARows, kAColumns), map(b_device, kBRows, kBColumns)};
  const auto kernel = MatmulKernel<Element, kForm, kMajorA, kMajorB, kN, kK>;
  constexpr int kPaddedN = (kN + 63) / 64 * 64, kPaddedK = (kK + 63) / 64 * 64;
  constexpr int kBytes = (64 + kPaddedN) * kPaddedK * 2 + 2048;
  ASSERT_EQ(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
            cudaSuccess);
  kernel<<<1, kWarpgroupSize, kBytes>>>(maps, d_device);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  std::vector<float> d(64 * kN);
  ASSERT_EQ(cudaMemcpy(d.data(), d_device, d.size() * sizeof(float), cudaMemcpyDeviceToHost),
            cudaSuccess);
  for (int i = 0; i < 64; ++i) {
    for (int j = 0; j < kN; ++j) {
      float expected = 0;
      for (int k = 0; k < kK; ++k) {
        expected += FloatOf<Element>(kMajorA == Major::kK ? a[i * kK + k] : a[k * 64 + i]) *
                    FloatOf<Element>(kMajorB == Major::kK ? b[j * kK + k] : b[k * kN + j]);
      }
      ASSERT_EQ(d[i * kN + j], expected) << "row " << i << " column " << j;
    }
  }
  cudaFree(a_device);
  cudaFree(b_device);
  cudaFree(d_device);
}

template <Form kForm, Major kMajorA, Major kMajorB, int kN, int kK>
void CheckMatmul() {
  CheckMatmulOf<BFloat16, kForm, kMajorA, kMajorB, kN, kK>();
  CheckMatmulOf<Float16, kForm, kMajorA, kMajorB, kN, kK>();
}

constexpr Form kSS = Form::kSharedShared, kRS = Form::kRegisterShared;
constexpr Major kK = Major::kK, kMN = Major::kMN;

TEST(WgmmaTest, KMajorOperands) {  // S = Q K^T, dP^T = V dO^T
  CheckMatmul<kSS, kK, kK, 64, 64>();
  CheckMatmul<kSS, kK, kK, 64, 128>();
  CheckMatmul<kSS, kK, kK, 80, 128>();
  CheckMatmul<kSS, kK, kK, 80, 256>();
  CheckMatmul<kSS, kK, kK, 112, 96>();
  CheckMatmul<kSS, kK, kK, 112, 192>();
  CheckMatmul<kSS, kK, kK, 128, 64>();
  CheckMatmul<kSS, kK, kK, 128, 128>();
  CheckMatmul<kSS, kK, kK, 176, 128>();
  CheckMatmul<kSS, kK, kK, 192, 64>();
}

TEST(WgmmaTest, RegisterOperandAndMnMajorB) {  // O += P V, dV += P^T dO
  CheckMatmul<kRS, kK, kMN, 64, 128>();
  CheckMatmul<kRS, kK, kMN, 128, 64>();
  CheckMatmul<kRS, kK, kMN, 128, 128>();
  CheckMatmul<kRS, kK, kMN, 96, 112>();
  CheckMatmul<kRS, kK, kMN, 192, 112>();
  CheckMatmul<kRS, kK, kMN, 256, 80>();
}

TEST(WgmmaTest, MnMajorB) {  // dQ = dS K
  CheckMatmul<kSS, kK, kMN, 64, 128>();
}

TEST(WgmmaTest, MnMajorA) {  // dQ^T = K^T dS^T
  CheckMatmul<kSS, kMN, kK, 64, 128>();
  CheckMatmul<kSS, kMN, kK, 80, 128>();
  CheckMatmul<kSS, kMN, kMN, 128, 128>();
}

}  // namespace
}  // namespace sm90
}  // namespace burst
