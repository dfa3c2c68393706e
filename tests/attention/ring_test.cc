// Tests the ring without attention. Blocks hold their owner's rank, and gradients are random
// numbers. Rings are flat and double, and gradients are sent as float32 and as bfloat16.
#include "burst/attention/ring/ring.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "burst/attention/ring/schedule.h"
#include "burst/base/status.h"
#include "burst/comm/thread/thread_communicator.h"
#include "burst/tensor/tensor.h"
#include "tests/attention/sequence_problem.h"
#include "tests/testing/test_device.h"

namespace burst {
namespace {

constexpr int64_t kWidth = 3;

// Returns what rank `host` adds to the gradient of rank `source`'s block.
Tensor Part(int source, int host, int64_t length) {
  return RandomNormal({1, length, kWidth}, DType::kFloat32, /*seed=*/source, /*stream=*/host, 1.0);
}

struct Case {
  int ranks, per_node;
  Layout layout;
  Mask mask;
  DType in_transit;
};

// Makes two runs of one rank, so that buffers are used again, and returns the gradient of its own
// block.
absl::Status RunRank(const Case& c, int64_t seqlen, Communicator& comm, Tensor* result,
                     RingTraffic* traffic) {
  std::unique_ptr<Communicator> between_nodes;
  if (c.per_node > 0) {
    BURST_ASSIGN_OR_RETURN(between_nodes, comm.Split(/*color=*/0, comm.rank()));
  }
  BURST_ASSIGN_OR_RETURN(
      const RingSchedule schedule,
      RingSchedule::Create(*TokenShard::Create(comm.rank(), c.ranks, c.layout, seqlen), c.mask,
                           c.per_node));
  Ring ring(&comm, between_nodes.get());
  const int64_t length = schedule.query_route().lengths[comm.rank()];
  const Tensor block = Tensor::Empty({1, length, 1}, DType::kFloat32, kTestDevice);
  block.Fill(comm.rank());
  for (int run = 0; run < 2; ++run) {
    *traffic = RingTraffic();
    const Tensor gradient = Tensor::Zeros({1, length, kWidth}, DType::kFloat32, kTestDevice);
    Ring::BlockGradients gradients;
    gradients.own = {{gradient, 1}};
    gradients.in_transit = c.in_transit;
    BURST_RETURN_IF_ERROR(ring.Run(
        schedule.query_route(), {{block, 1}}, &gradients,
        [&](int source, Ring::Part part, const Ring::Tensors& visiting, const Ring::Sums& sums) {
          for (float owner : visiting[0].ToVector<float>()) EXPECT_EQ(owner, source);
          // This rank's own block is computed in two calls, half of it in each.
          EXPECT_EQ(part == Ring::Part::kWhole, source != comm.rank());
          const Tensor term = Part(source, comm.rank(), schedule.query_route().lengths[source]);
          if (source == comm.rank()) term.Scale(0.5);
          const Tensor& sum = sums.tensors[0];
          if (sums.first) {
            EXPECT_NE(source, comm.rank());
            sum.CopyFrom(term.To(kTestDevice));
          } else {
            sum.Add(term.To(kTestDevice));
          }
        },
        traffic));
    if (!gradients.last.empty()) gradient.Add(gradients.last[0]);
    *result = gradient.To(DeviceType::kCpu);
  }
  return absl::OkStatus();
}

// Whoever owns the gradient assigns it in the first call only where nothing is added to it before.
TEST(Ring, OwnGradientsReturnEarlyFromOtherNodes) {
  const auto always = [](int, int) { return true; };
  for (int ranks : {1, 2, 3, 4, 8}) {
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_FALSE(OwnGradientReturnsEarly(
          MakeRingRoute(rank, ranks, std::vector<int64_t>(ranks, 5), always)));
    }
  }
  for (const auto& [ranks, per_node] : {std::pair(4, 2), std::pair(6, 3), std::pair(6, 2)}) {
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_TRUE(OwnGradientReturnsEarly(
          MakeRingRoute(rank, per_node, std::vector<int64_t>(ranks, 5), always)));
    }
  }
}

TEST(Ring, GradientsAreSumsAndCountTheirBytes) {
  const int64_t seqlen = 50;
  for (const auto& [ranks, per_node] :
       {std::pair(2, 0), std::pair(3, 0), std::pair(4, 0), std::pair(5, 0), std::pair(8, 0),
        std::pair(4, 2), std::pair(6, 3), std::pair(6, 2), std::pair(4, 1)}) {
    for (const int64_t window : {0, 9}) {
      const Mask mask = window == 0 ? Mask::Full() : Mask::SlidingWindow(window);
      for (Layout layout : kLayouts) {
        for (DType in_transit : {DType::kFloat32, DType::kBFloat16}) {
          SCOPED_TRACE(testing::Message()
                       << ranks << " ranks, " << per_node << " a node, window " << window << " "
                       << Name(layout) << " " << Name(in_transit));
          const Case c = {ranks, per_node, layout, mask, in_transit};
          std::vector<Tensor> results(ranks);
          std::vector<RingTraffic> traffic(ranks);
          const absl::Status status = RunTestRanks(ranks, [&](Communicator& comm) {
            return RunRank(c, seqlen, comm, &results[comm.rank()], &traffic[comm.rank()]);
          });
          ASSERT_TRUE(status.ok()) << status;

          PerLink<int64_t> gradient_bytes;
          for (int rank = 0; rank < ranks; ++rank) {
            const RingSchedule schedule = *RingSchedule::Create(
                *TokenShard::Create(rank, ranks, layout, seqlen), mask, per_node);
            for (Link link : kLinks) gradient_bytes[link] += traffic[rank].gradients[link].bytes;
            const int64_t length = schedule.query_route().lengths[rank];
            std::vector<double> expected(length * kWidth);
            double magnitude = 0;  // bounds every partial sum
            std::vector<double> absolute(expected.size());
            for (int host = 0; host < ranks; ++host) {
              if (host != rank && schedule.for_keys_of(host).none()) continue;
              const std::vector<float> part = Part(rank, host, length).ToVector<float>();
              for (size_t i = 0; i < part.size(); ++i) {
                expected[i] += part[i];
                absolute[i] += std::fabs(part[i]);
                magnitude = std::max(magnitude, absolute[i]);
              }
            }
            // A partial sum is rounded once for every addition and, to bfloat16, at every transfer.
            // The number of transfers is at most the number of ranks.
            const double unit = in_transit == DType::kFloat32 ? 0x1p-24 : 0x1p-9 + 0x1p-24;
            const std::vector<float> actual = results[rank].ToVector<float>();
            for (size_t i = 0; i < expected.size(); ++i) {
              EXPECT_NEAR(actual[i], expected[i], ranks * unit * magnitude);
            }
          }
          const RingSchedule schedule =
              *RingSchedule::Create(*TokenShard::Create(0, ranks, layout, seqlen), mask, per_node);
          for (Link link : kLinks) {
            EXPECT_EQ(gradient_bytes[link],
                      schedule.query_route().gradient_tokens[link] * kWidth * SizeOf(in_transit));
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace burst
