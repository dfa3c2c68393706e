// Runs programs under limits of addresses, from one with which they just start to one that is
// enough. Each ends with 0, or with 1 and a sentence on stderr. None ends with a signal or a failed
// check.
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/subprocess.h"

namespace burst {
namespace {

using Arguments = std::vector<std::string>;

constexpr int64_t kMiB = 1024;  // in the unit of ulimit -v
constexpr int64_t kEnough = 6 << 20;

class Memory : public testing::Test {
 protected:
  void SetUp() override {
    if (kAddressSanitizer || kThreadSanitizer) {
      GTEST_SKIP() << "sanitizers take addresses by the terabyte";
    }
    std::ofstream text(Path("text.txt"));
    for (int i = 0; i < 200000; ++i) text << "line " << i * 7919 % 100003 << " of a text\n";
  }

  // Runs the program with `kib` KiB of addresses.
  Result RunUnder(int64_t kib, const Arguments& command) const {
    Arguments limited = {
        "/bin/bash", "-c",
        absl::StrCat("ulimit -v ", kib, R"(; exec timeout -s KILL 120 "$0" "$@")")};
    limited.insert(limited.end(), command.begin(), command.end());
    return Subprocess(limited, {folder_}).Wait();
  }

  // Expects exit code 0, or 1 and a sentence.
  static void ExpectSentence(const Result& result) {
    EXPECT_EQ(result.signal, 0) << result.err;
    EXPECT_TRUE(result.exit_code == 0 || result.exit_code == 1) << result.exit_code << result.err;
    if (result.exit_code == 0) return;
    EXPECT_FALSE(absl::StrContains(result.err, "check failed")) << result.err;
    EXPECT_FALSE(absl::StrContains(result.err, "terminate called")) << result.err;
    bool says = false;
    for (absl::string_view line : absl::StrSplit(result.err, '\n')) {
      says = says || absl::StartsWith(line, "error: ");
    }
    EXPECT_TRUE(says) << result.err;
  }

  // Runs the command under many limits, the last of which is enough.
  void Sweep(const Arguments& command, int64_t first, int64_t last, int steps) {
    int failed = 0, succeeded = 0;
    for (int step = 0; step <= steps; ++step) {
      for (const char* made : {"run", "shards"}) std::filesystem::remove_all(Path(made));
      const int64_t kib = step == steps ? kEnough : first + (last - first) * step / steps;
      SCOPED_TRACE(absl::StrCat(kib, " KiB: ", command[0], " ", command[1]));
      const Result result = RunUnder(kib, command);
      ExpectSentence(result);
      ++(result.exit_code == 0 ? succeeded : failed);
    }
    EXPECT_GT(failed, 0);
    EXPECT_GT(succeeded, 0);
  }

  std::string Path(const std::string& name) const { return folder_ + "/" + name; }

  const std::string folder_ = FreshTestFolder();
};

Arguments Train(const Arguments& more) {
  Arguments command = {ProgramPath("train/train"), "--data=text.txt", "--device=cpu", "--steps=2",
                       "--eval_every=0",           "--sample=0",      "--patience=60"};
  command.insert(command.end(), more.begin(), more.end());
  return command;
}

constexpr char kModel[] =
    R"({"family": "llama", "layers": 2, "width": 128, "heads": 4, "context": 512})";

TEST_F(Memory, OfATraining) {
  for (const char* ranks : {"--ranks=1", "--ranks=2"}) {
    Sweep(Train({absl::StrCat("--model=", kModel), "--seqlen=512", "--batch=16", ranks,
                 "--threads=3", "--noplan", "--out=run"}),
          60 * kMiB, 900 * kMiB, 10);
  }
}

TEST_F(Memory, OfAGeneration) {
  const Arguments train = Train({absl::StrCat("--model=", kModel), "--seqlen=512", "--batch=1",
                                 "--threads=2", "--out=model"});
  ASSERT_EQ(RunUnder(kEnough, train).exit_code, 0);
  for (const char* ranks : {"--ranks=1", "--ranks=2"}) {
    Sweep({ProgramPath("train/tools/generate"), "--device=cpu", "--checkpoint=model", "--tokens=4",
           absl::StrCat("--prompt=", std::string(4000, 'a')), ranks},
          14 * kMiB, 40 * kMiB, 10);
  }
}

TEST_F(Memory, OfATokenization) {
  for (const char* threads : {"--threads=1", "--threads=3"}) {
    Sweep({ProgramPath("train/tools/tokenize"), "--data=text.txt",
           absl::StrCat("--tokenizer=", ProgramPath("tests/train/tokenizers/tiny")), threads,
           "--out=shards"},
          24 * kMiB, 120 * kMiB, 10);
  }
}

TEST_F(Memory, OfABenchmark) {
  Sweep({ProgramPath("benchmarks/scaling/scaling"), "--device=cpu", "--seqlens=2048", "--ranks=2",
         "--heads=4", "--head_dim=64", "--out=run"},
        24 * kMiB, 120 * kMiB, 10);
}

// Sizes that no machine has are refused before memory is allocated. A parameter takes 16 bytes in
// float32, and 2 more for its value in bfloat16.
TEST_F(Memory, OfAModelThatIsTooLarge) {
  double needed[2] = {};
  for (const bool is_bf16 : {false, true}) {
    const Result result = RunUnder(
        kEnough, Train({R"(--model={"family": "gpt2", "layers": 8, "width": 65536, "heads": 512})",
                        is_bf16 ? "--precision=bf16" : "--precision=fp32", "--out=run"}));
    ExpectSentence(result);
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_TRUE(absl::StrContains(result.err, "error: --model: ")) << result.err;
    EXPECT_TRUE(absl::StrContains(result.err, "GiB for values, gradients and moments"))
        << result.err;
    const std::string before = " need ";
    const size_t at = result.err.find(before);
    ASSERT_NE(at, std::string::npos) << result.err;
    needed[is_bf16] = std::stod(result.err.substr(at + before.size()));
  }
  EXPECT_NEAR(needed[true] / needed[false], 18.0 / 16, 1e-3);
}

TEST_F(Memory, OfABatchThatIsTooLarge) {
  const Arguments train =
      Train({"--model=nanogpt_cpu", "--seqlen=6000", "--batch=200", "--out=run"});
  Arguments unchecked = train;
  unchecked.push_back("--noplan");
  for (const bool is_checked : {false, true}) {
    const Result result = RunUnder(3 << 20, is_checked ? train : unchecked);
    ExpectSentence(result);
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_TRUE(absl::StrContains(result.err, is_checked ? "error: --batch: 200 sequences of 6,000"
                                                         : "error: out of memory: "))
        << result.err;
  }
}

// A shard of 3 KB whose header says that the vocabulary has 2^31 - 1 tokens.
TEST_F(Memory, OfAVocabularyThatNoTokenNeeds) {
  constexpr int kTokens = 1000;
  std::vector<int32_t> header(256);
  header[0] = 20240520, header[1] = 1, header[2] = kTokens, header[3] = 2147483647, header[4] = 0;
  std::ofstream shard(Path("few.bin"), std::ios::binary);
  shard.write(reinterpret_cast<const char*>(header.data()), 4 * header.size());
  for (int i = 0; i < kTokens; ++i) {
    const uint16_t token = i % 50;
    shard.write(reinterpret_cast<const char*>(&token), sizeof(token));
  }
  shard.close();
  const Result result = RunUnder(
      kEnough, Train({"--model=llama_tiny", "--data=few.bin", "--seqlen=64", "--out=run"}));
  ExpectSentence(result);
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_TRUE(absl::StrContains(result.err, "error: --data: ")) << result.err;
  EXPECT_TRUE(absl::StrContains(result.err, "2147483647 tokens")) << result.err;
}

}  // namespace
}  // namespace burst
