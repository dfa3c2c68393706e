// Renders chats with //train:chats into a test's folder.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "tests/testing/subprocess.h"
#include "tests/train/tokenizer_fixture.h"

namespace burst {

inline constexpr char kTemplate[] =
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}";
inline constexpr char kChat[] =
    R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})";

// The folder has `model`, whose tokenizer has the added tokens of testdata/chats.json.
class RenderedChatsTest : public testing::Test {
 protected:
  using Json = nlohmann::json;
  using Strings = std::vector<std::string>;

  void SetUp() override {
    fixture_ = Json::parse(ReadAll("tests/train/testdata/chats.json"));
    Json tokenizer = Json::parse(ReadAll(TokenizerFixture("tiny/tokenizer.json")));
    for (const Json& token : fixture_["added_tokens"]) tokenizer["added_tokens"].push_back(token);
    std::filesystem::create_directories(folder_ + "/model");
    Write("model/tokenizer.json", tokenizer.dump());
    Write("model/tokenizer_config.json", R"({"bos_token": "<bos>", "eos_token": "<eos>"})");
  }

  void Write(const std::string& name, const std::string& content) const {
    std::ofstream(folder_ + "/" + name, std::ios::binary) << content;
  }

  // Renders lines by the template in the model's folder.
  Result Render(const std::string& lines, Strings more = {}) const {
    Write("chats.jsonl", lines);
    Strings command = {"/usr/bin/python3", ProgramPath("train/tools/chats.py"),
                       "--data=chats.jsonl", "--template=model", "--out=rendered.jsonl"};
    command.insert(command.end(), more.begin(), more.end());
    return Subprocess(command, {folder_}).Wait();
  }

  // Expects one sentence with this part, and no half of a result.
  void ExpectOneError(const Result& result, const std::string& part) const {
    EXPECT_EQ(result.exit_code, 1) << result.err;
    EXPECT_TRUE(absl::StartsWith(result.err, "error: --")) << result.err;
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
    EXPECT_TRUE(absl::StrContains(result.err, part)) << part << " is missing in " << result.err;
    ExpectNoPart();
  }
  void ExpectNoPart() const {
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      const std::string name = entry.path().filename();
      EXPECT_FALSE(absl::StartsWith(name, "rendered.jsonl.")) << name;
    }
  }

  // Returns the texts that count in each line of the result.
  std::vector<Strings> Counted() const {
    std::istringstream rendered(ReadAll(folder_ + "/rendered.jsonl"));
    std::vector<Strings> lines;
    for (std::string line; std::getline(rendered, line);) {
      const Json row = Json::parse(line);
      const std::string text = row["text"];
      Strings& texts = lines.emplace_back();
      for (const Json& range : row["counted"]) {
        texts.push_back(text.substr(range[0], range[1].get<int>() - range[0].get<int>()));
      }
    }
    return lines;
  }
  // Returns the texts of the result.
  Strings Texts() const {
    std::istringstream rendered(ReadAll(folder_ + "/rendered.jsonl"));
    Strings texts;
    for (std::string line; std::getline(rendered, line);) {
      texts.push_back(Json::parse(line)["text"]);
    }
    return texts;
  }

  const std::string folder_ = FreshTestFolder();
  Json fixture_;
};

}  // namespace burst
