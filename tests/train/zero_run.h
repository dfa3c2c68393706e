// Runs the trainings of the tests of --zero.
#pragma once

#include "tests/testing/test_device.h"
#include "tests/train/trainer_run.h"

namespace burst {

inline constexpr char kLlama[] =
    R"({"family":"llama","layers":3,"width":32,"heads":4,"kv_heads":2,"ffn":48,"dropout":0.1})";
inline constexpr char kTiedGpt2[] =
    R"({"family":"gpt2","layers":2,"width":32,"heads":4,"ffn":64,"tied_embeddings":true})";

class ZeroRunTest : public TrainerRunTest {
 protected:
  ZeroRunTest() : TrainerRunTest(/*sentences=*/300) {}

  TrainConfig Options() const {
    TrainConfig options = SmallTraining(folder_, "run", kTestDevice);
    options.precision = Precision::kFp32;
    options.model = kLlama;
    options.seqlen = 40;
    options.batch = 6;
    options.lr = 4e-3;
    options.steps = 20;
    options.warmup = 2;
    options.threads = 1;
    options.ranks = -1;
    return options;
  }
};

}  // namespace burst
