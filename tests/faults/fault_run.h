// Functions that the fault tests share. They run //train disturbed and undisturbed, and compare
// both runs to the bit.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "tests/testing/subprocess.h"

namespace burst {

using Arguments = std::vector<std::string>;

inline Arguments Plus(Arguments all, const Arguments& more) {
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

// Returns the time in milliseconds.
inline int64_t NowMs() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
}

inline void SleepMs(int64_t ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

class FaultTest : public testing::Test {
 protected:
  static constexpr int64_t kEndsWithinMs = 60000;  // every process ends within this time

  void SetUp() override {
    folder_ = FreshTestFolder();
    std::ofstream text(Path("text.txt"), std::ios::binary);
    for (int i = 0; i < 400; ++i) {
      text << "line " << i * 7919 % 1000 << " of a text\n" << (i % 10 == 9 ? "\n" : "");
    }
  }

  std::string Path(const std::string& name) const { return folder_ + "/" + name; }

  Arguments Command(const Arguments& more) const {
    return Plus(
        {ProgramPath("train/train"), "--data=text.txt", "--seqlen=32", "--batch=2", "--sample=0",
         "--eval_batches=4", "--steps=24", "--eval_every=8", "--checkpoint_every=4", "--warmup=2",
         R"(--model={"family":"llama","layers":2,"width":32,"heads":2,"kv_heads":1,"ffn":64})"},
        more);
  }

  Result Run(const Arguments& more) const { return Subprocess(Command(more), {folder_}).Wait(); }

  // Returns the result of a process, which must end soon.
  static Result EndOf(Subprocess& process) {
    const int64_t end = NowMs() + kEndsWithinMs;
    while (!process.Ended() && NowMs() < end) SleepMs(2);
    const bool ended = process.Ended();
    if (!ended) process.Signal(SIGKILL);
    Result result = process.Wait();
    EXPECT_TRUE(ended) << "hangs\n" << result.out << result.err;
    return result;
  }

  static bool Says(const Result& result, const std::string& text) {
    return absl::StrContains(result.out, text) || absl::StrContains(result.err, text);
  }

  // Returns the rows of a run's metrics without the times.
  std::vector<nlohmann::json> Rows(const std::string& run) const {
    std::vector<nlohmann::json> rows;
    std::istringstream lines(ReadAll(Path(run) + "/metrics.jsonl"));
    for (std::string line; std::getline(lines, line);) {
      nlohmann::json row = nlohmann::json::parse(line, nullptr, false);
      if (!row.is_object()) continue;
      for (const char* key : {"tokens_per_second", "step_ms", "exposed_ms"}) row.erase(key);
      rows.push_back(std::move(row));
    }
    return rows;
  }

  // Returns when the run has `rows` rows, or the process has ended.
  void AwaitRows(const std::string& run, size_t rows, Subprocess& process) const {
    while (Rows(run).size() < rows && !process.Ended()) SleepMs(1);
  }

  // Returns whether `step` is the run's last step and has been evaluated.
  bool HasEvaluated(const std::string& run, size_t step) const {
    const auto rows = Rows(run);
    return rows.size() == step && rows.back().contains("val_loss");
  }

  // Makes the undisturbed run in the folder "straight".
  void MakeStraight(const Arguments& more) const {
    const Result result = Run(Plus(more, {"--out=straight"}));
    ASSERT_EQ(result.exit_code, 0) << result.err;
  }

  // Continues the run, or begins it if it left no checkpoint, and compares it.
  void ExpectContinues(const std::string& run, const Arguments& more) const {
    Arguments arguments = Plus(more, {"--out=" + run});
    if (HasCheckpoint(run)) arguments.push_back("--resume");
    const Result result = Run(arguments);
    EXPECT_EQ(result.exit_code, 0) << "signal " << result.signal << "\n"
                                   << result.out << result.err;
    EXPECT_TRUE(Weights(run) == Weights("straight")) << run << ": weights or optimizer differ";
    const auto rows = Rows(run), expected = Rows("straight");
    ASSERT_EQ(rows.size(), expected.size());
    for (size_t i = 0; i < rows.size(); ++i) EXPECT_EQ(rows[i], expected[i]) << run;
  }

  bool HasCheckpoint(const std::string& run) const {
    return std::filesystem::exists(Path(run) + "/checkpoint.safetensors");
  }

  // Returns a safetensors file's header, or null for other files.
  static nlohmann::json Header(const std::string& file) {
    uint64_t header = 0;
    if (file.size() < sizeof(header)) return nullptr;
    std::memcpy(&header, file.data(), sizeof(header));
    if (file.size() < sizeof(header) + header) return nullptr;
    return nlohmann::json::parse(file.substr(sizeof(header), header), nullptr,
                                 /*exceptions=*/false);
  }

  // Returns the newest checkpoint's step; 0 without a checkpoint.
  int64_t SavedStep(const std::string& run) const {
    if (!HasCheckpoint(run)) return 0;
    const auto json = Header(ReadAll(Path(run) + "/checkpoint.safetensors"));
    int64_t step = 0;
    const bool is_number = json.is_object() &&
                           absl::SimpleAtoi(json["__metadata__"]["step"].get<std::string>(), &step);
    EXPECT_TRUE(is_number) << run << ": the checkpoint is damaged";
    return step;
  }

  // Returns the bytes after the header of the checkpoint, or of each file of its set: weights and
  // optimizer.
  std::string Weights(const std::string& run) const {
    const std::string file = ReadAll(Path(run) + "/checkpoint.safetensors");
    const auto header = Header(file);
    if (!header.is_object()) return file;
    if (!header["__metadata__"].contains("set")) return file.substr(DataBegin(file));
    const auto set = nlohmann::json::parse(header["__metadata__"]["set"].get<std::string>());
    std::string all;
    for (const auto& part : set["files"]) {
      const std::string content = ReadAll(Path(run) + "/" + set["folder"].get<std::string>() + "/" +
                                          part["name"].get<std::string>());
      EXPECT_TRUE(Header(content).is_object()) << part;
      all += content.substr(DataBegin(content));
    }
    return all;
  }

  static size_t DataBegin(const std::string& file) {
    uint64_t header = 0;
    std::memcpy(&header, file.data(), sizeof(header));
    return sizeof(header) + header;
  }

  std::string folder_;
};

}  // namespace burst
