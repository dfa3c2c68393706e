// Functions that the tests of //train and //train:generate as programs share. They make a run
// folder and run commands there.
#pragma once

#include <gtest/gtest.h>

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
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/testing/subprocess.h"

namespace burst {

inline constexpr char kTinyModel[] =
    R"({"family":"llama","layers":2,"width":16,"heads":2,"kv_heads":1,"ffn":32})";

// Returns a checkpoint's header and its data.
std::pair<nlohmann::json, std::string> SplitCheckpoint(const std::string& content) {
  uint64_t length = 0;
  std::memcpy(&length, content.data(), sizeof(length));
  return {nlohmann::json::parse(content.substr(8, length)), content.substr(8 + length)};
}

class TrainCli : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = FreshTestFolder();
    std::string text;
    for (int i = 0; i < 400; ++i) {
      absl::StrAppend(&text, "line ", i * 7919 % 1000, " of a text\n", i % 10 == 9 ? "\n" : "");
    }
    Write("text.txt", text);
  }

  std::string Path(const std::string& name) const { return folder_ + "/" + name; }

  void Write(const std::string& name, const std::string& content) const {
    std::ofstream(Path(name), std::ios::binary) << content;
  }

  static std::vector<std::string> TrainCommand(const std::vector<std::string>& arguments) {
    std::vector<std::string> command = {ProgramPath("train/train"),
                                        "--data=text.txt",
                                        "--seqlen=32",
                                        "--batch=2",
                                        "--eval_batches=2",
                                        "--sample=0",
                                        absl::StrCat("--model=", kTinyModel)};
    command.insert(command.end(), arguments.begin(), arguments.end());
    return command;
  }

  Result Train(const std::vector<std::string>& arguments) const {
    return Subprocess(TrainCommand(arguments), {folder_}).Wait();
  }

  Result Generate(std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), ProgramPath("train/tools/generate"));
    return Subprocess(arguments, {folder_}).Wait();
  }

  std::vector<nlohmann::json> Metrics(const std::string& run) const {
    std::vector<nlohmann::json> rows;
    std::istringstream lines(ReadAll(Path(run) + "/metrics.jsonl"));
    for (std::string line; std::getline(lines, line);) {
      nlohmann::json row = nlohmann::json::parse(line, nullptr, false);
      if (row.is_object()) rows.push_back(std::move(row));
    }
    return rows;
  }

  std::string Checkpoint(const std::string& run) const {
    return ReadAll(Path(run) + "/checkpoint.safetensors");
  }

  // Returns the names in a run's folder with this begin and end, sorted.
  std::vector<std::string> Names(const std::string& run, const std::string& begin,
                                 const std::string& end) const {
    std::vector<std::string> names;
    std::error_code error;
    for (std::filesystem::directory_iterator entry(Path(run), error), last; !error && entry != last;
         entry.increment(error)) {
      const std::string name = entry->path().filename().string();
      if (absl::StartsWith(name, begin) && absl::EndsWith(name, end)) names.push_back(name);
    }
    std::sort(names.begin(), names.end());
    return names;
  }
  std::vector<std::string> Temporaries(const std::string& run) const {
    return Names(run, "", ".tmp");
  }

  // Compares weights and optimizer, but not options.
  void ExpectSameWeights(const std::string& a, const std::string& b) const {
    EXPECT_TRUE(Weights(a) == Weights(b));
  }

  // Returns the bytes after the header of a checkpoint, or of each file of its set.
  std::string Weights(const std::string& run) const {
    const auto [header, data] = SplitCheckpoint(Checkpoint(run));
    if (!header["__metadata__"].contains("set")) return data;
    const auto set = nlohmann::json::parse(header["__metadata__"]["set"].get<std::string>());
    std::string all;
    for (const auto& file : set["files"]) {
      all += SplitCheckpoint(ReadAll(Path(run) + "/" + set["folder"].get<std::string>() + "/" +
                                     file["name"].get<std::string>()))
                 .second;
    }
    return all;
  }

  // Expects two runs to be equal, apart from the times in their metrics.
  void ExpectSameRun(const std::string& a, const std::string& b) const {
    EXPECT_TRUE(Checkpoint(a) == Checkpoint(b)) << "options, weights or optimizer differ";
    ExpectSameWeights(a, b);
    std::vector<nlohmann::json> rows_a = Metrics(a), rows_b = Metrics(b);
    ASSERT_EQ(rows_a.size(), rows_b.size());
    for (size_t i = 0; i < rows_a.size(); ++i) {
      for (const char* key : {"tokens_per_second", "step_ms", "pipeline_bubble", "exposed_ms"}) {
        rows_a[i].erase(key), rows_b[i].erase(key);
      }
      EXPECT_EQ(rows_a[i], rows_b[i]);
    }
  }

  static void WaitUntil(const std::function<bool()>& condition) {
    for (int i = 0; i < 30000 && !condition(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    ASSERT_TRUE(condition());
  }

  std::string folder_;
};

inline void ExpectSuccess(const Result& result) {
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  EXPECT_EQ(result.err, "");
}

inline void ExpectError(const Result& result, int exit_code,
                        const std::vector<std::string>& parts) {
  EXPECT_EQ(result.exit_code, exit_code) << "signal " << result.signal << "\n" << result.err;
  EXPECT_TRUE(absl::StartsWith(result.err, "error: ")) << result.err;
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  for (const std::string& part : parts) {
    EXPECT_TRUE(absl::StrContains(result.err, part)) << part << " is missing in " << result.err;
  }
}

}  // namespace burst
