// The number of threads changes no bit of a run on the CPU, also if the run is resumed with another
// number.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/testing/subprocess.h"
#include "tests/train/trainer_run.h"
#include "train/report/run_folder.h"

namespace burst {
namespace {

namespace fs = std::filesystem;

// A run's losses and gradient norms, and the bytes of its checkpoint's tensors. They follow a
// header that begins with its own length.
struct Outcome {
  std::vector<double> numbers;
  std::string tensors;
};

class ThreadsTest : public TrainerRunTest, public testing::WithParamInterface<const char*> {
 protected:
  ThreadsTest() : TrainerRunTest(/*sentences=*/400) {}

  // Threads share a KV head. There are several chunks of queries, and GEMMs and elementwise loops
  // are split.
  TrainConfig Options(const std::string& out, int64_t threads, int64_t steps) const {
    TrainConfig options = SmallTraining(folder_, out, DeviceType::kCpu);
    options.model = absl::StrCat(R"({"family": ")", GetParam(),
                                 R"(", "layers": 2, "width": 96, "heads": 3, "kv_heads": 1,)",
                                 R"( "ffn": 256, "dropout": 0.1})");
    options.seqlen = 700;
    options.batch = 1;
    options.accumulate = 2;
    options.steps = steps;
    options.schedule = LrShape::kConstant;
    options.warmup = 1;
    options.threads = threads;
    return options;
  }

  static Outcome Train(const TrainConfig& options) {
    Launch launch;
    const auto config = ResolveConfig(options, launch);
    EXPECT_EQ(config.status(), absl::OkStatus());
    EXPECT_EQ(RunTraining(*config, [](TrainingSetup*) { return absl::OkStatus(); }),
              absl::OkStatus());
    Outcome outcome;
    for (const StepMetrics& row : Recorded(options)) {
      outcome.numbers.insert(outcome.numbers.end(), {row.loss, row.grad_norm});
    }
    outcome.tensors = ReadAll(CheckpointPath(options.out));
    uint64_t header = 0;
    std::memcpy(&header, outcome.tensors.data(), sizeof(header));
    outcome.tensors.erase(0, sizeof(header) + header);
    return outcome;
  }
};

TEST_P(ThreadsTest, SameBitsForAnyNumber) {
  const Outcome one = Train(Options("one", 1, 4));
  ASSERT_EQ(one.numbers.size(), 8u);
  ASSERT_GT(one.tensors.size(), 1u << 20);
  for (const int64_t threads : {2, 3, 5, 8}) {
    const Outcome other = Train(Options(absl::StrCat("threads", threads), threads, 4));
    EXPECT_EQ(other.numbers, one.numbers) << threads << " threads";
    EXPECT_TRUE(other.tensors == one.tensors) << threads << " threads";
  }
}

TEST_P(ThreadsTest, SameBitsAfterAResumeWithAnother) {
  const Outcome one = Train(Options("one", 1, 4));
  Train(Options("resumed", 3, 2));
  TrainConfig options = Options("resumed", 2, 4);
  options.resume = true;
  const Outcome resumed = Train(options);
  EXPECT_EQ(resumed.numbers, one.numbers);
  EXPECT_TRUE(resumed.tensors == one.tensors);
}

INSTANTIATE_TEST_SUITE_P(Families, ThreadsTest, testing::Values("llama", "gpt2"));

}  // namespace
}  // namespace burst
