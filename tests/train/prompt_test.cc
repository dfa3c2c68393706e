// Tests the tokens before a prompt and the ends of a text that a directory's files give, as in
// transformers. tests/interop/make_generation_fixture.py wrote testdata/generation.json.
#include "train/generate/prompt.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "model/transformer.h"
#include "tests/testing/subprocess.h"
#include "tests/train/huggingface_fixture.h"
#include "tests/train/tokenizer_fixture.h"
#include "train/generate/generate.h"
#include "train/huggingface/pretrained.h"
#include "train/tokenizer/prompt_template.h"

namespace burst {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using testing::HasSubstr;
using Tokens = std::vector<int32_t>;

class Prompts : public testing::Test {
 protected:
  // Makes the directory of a case, without weights.
  std::string Make(const Json& one) const {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    const std::string tokenizer = one["tokenizer"];
    const std::string source = TokenizerFixture(tokenizer);
    if (tokenizer == "tiny") {
      Json json = Json::parse(Content(source + "/tokenizer.json"));
      json["post_processor"] = one["processor"];
      Set("tokenizer.json", json);
    } else {
      fs::copy(source + "/tokenizer.model", folder_);
    }
    for (const auto& [name, content] : one["files"].items()) Set(name, content);
    return folder_;
  }
  void Set(const std::string& name, const Json& content) const {
    SetContent(folder_ + "/" + name, content.dump());
  }
  absl::StatusOr<PromptRules> Rules() const {
    const auto tokenizer = Tokenizer::Load(folder_);
    EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
    return ReadPromptRules(folder_, *tokenizer, /*with_begin=*/true);
  }

  const std::string folder_ = FreshTestFolder() + "/model";
  const Json fixture_ = Json::parse(Content("tests/train/testdata/generation.json"));
};

bool BeginsTwice(const Tokens& tokens, const Tokens& begin) {
  const size_t n = begin.size();
  return n > 0 && tokens.size() >= 2 * n && std::equal(begin.begin(), begin.end(), &tokens[n]);
}

TEST_F(Prompts, TokensAndTextsAreThoseOfTransformers) {
  const FakeDirectory fake(fixture_["model"]);
  std::unique_ptr<Transformer> model;
  int compared = 0;
  for (const auto& [name, one] : fixture_["cases"].items()) {
    SCOPED_TRACE(name);
    Make(one);
    if (model == nullptr) {
      fake.Write(folder_);
      const auto found = FindPretrained(folder_);
      ASSERT_TRUE(found.ok()) << found.status();
      model = *Transformer::Create(found->model, DType::kFloat64, std::nullopt);
      ASSERT_EQ(LoadPretrained(*found, &model->parameters()), absl::OkStatus());
    }
    const auto tokenizer = Tokenizer::Load(folder_);
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    for (const Json& row : one["prompts"]) {
      SCOPED_TRACE(row["text"]);
      const Tokens expected = row["tokens"];
      if (row.contains("ends")) {  // one in each of two files
        Set("generation_config.json", {{"eos_token_id", {row["ends"][0]}}});
        Set("config.json", {{"eos_token_id", row["ends"][1]}});
      }
      const auto rules = ReadPromptRules(folder_, *tokenizer, /*with_begin=*/true);
      ASSERT_TRUE(rules.ok()) << rules.status();
      const auto tokens = EncodePrompt(*tokenizer, row["text"].get<std::string>(), *rules);
      ASSERT_TRUE(tokens.ok()) << tokens.status();
      if (expected.empty()) {  // transformers would begin without a token
        EXPECT_EQ(*tokens, Tokens{tokenizer->end_of_text()});
        continue;
      }
      if (BeginsTwice(expected, rules->begin)) {  // a prompt that has BOS gets no second one
        EXPECT_EQ(*tokens, Tokens(expected.begin() + rules->begin.size(), expected.end()));
        continue;
      }
      EXPECT_EQ(*tokens, expected);
      for (const char* key : {"generated", "ended"}) {
        GenerationOptions options;
        options.sampling.temperature = 0;
        options.tokens = 24;
        options.context = 128;
        if (key == std::string("ended")) options.ends = rules->ends;
        std::string text;
        const auto emit = [&](absl::string_view more) {
          text.append(more.data(), more.size());
          return true;
        };
        ASSERT_EQ(Generate(*model, *tokenizer, *tokens, options, emit), absl::OkStatus());
        Tokens generated = row[key];
        Tokens ends = options.ends;
        ends.push_back(tokenizer->end_of_text());
        if (std::count(ends.begin(), ends.end(), generated.back()) > 0) generated.pop_back();
        EXPECT_EQ(text, tokenizer->Decode(generated)) << key;
        ++compared;
      }
    }
  }
  EXPECT_GT(compared, 130);
}

TEST_F(Prompts, EndsAreThoseOfEveryFile) {
  const Json& cases = fixture_["cases"];
  Make(cases["bpe"]);
  EXPECT_EQ(Rules()->ends, Tokens{401});  // eos_token
  Set("config.json", {{"eos_token_id", 7}});
  Set("generation_config.json", {{"eos_token_id", {8, 9}}});
  Set("tokenizer_config.json", {{"eos_token", {{"content", "<tool_call>"}}}});
  EXPECT_EQ(Rules()->ends, (Tokens{8, 9, 7, 402}));
  Set("config.json", {{"eos_token_id", nullptr}});
  Set("generation_config.json", {{"do_sample", true}});
  Set("tokenizer_config.json", {{"eos_token", "no token of it"}});
  EXPECT_EQ(Rules()->ends, Tokens());
  const struct {
    const char* file;
    Json content;
    std::vector<std::string> says;
  } bad[] = {
      {"config.json",
       {{"eos_token_id", "</s>"}},
       {"config.json: eos_token_id must be", "\"</s>\""}},
      {"generation_config.json", {{"eos_token_id", {1, -1}}}, {"generation_config.json", "[1,-1]"}},
      {"generation_config.json",
       Json::array(),
       {"generation_config.json: it must be a JSON object"}},
      {"tokenizer_config.json", {{"eos_token", 3}}, {"tokenizer_config.json: eos_token", "3"}},
      {"tokenizer_config.json", {{"legacy", 1}}, {"legacy must be true or false; got 1"}},
  };
  for (const auto& c : bad) {
    Make(cases["llama"]);
    Set(c.file, c.content);
    const auto rules = Rules();
    EXPECT_EQ(rules.status().code(), absl::StatusCode::kInvalidArgument);
    for (const std::string& part : c.says) {
      EXPECT_THAT(std::string(rules.status().message()), HasSubstr(part));
    }
  }
}

// A tokenizer.model alone begins texts as SentencePiece's users do. If there is a tokenizer.json,
// it decides.
TEST_F(Prompts, WhatBeginsTheTextsOfATokenizerModel) {
  Make(fixture_["cases"]["llama"]);
  EXPECT_EQ(Rules()->begin, Tokens());
  fs::remove(folder_ + "/tokenizer_config.json");
  EXPECT_EQ(Rules()->begin, Tokens{1});
  Set("tokenizer.json", {{"post_processor", fixture_["cases"]["bpe_two"]["processor"]}});
  EXPECT_EQ(Rules()->begin, (Tokens{400, 403}));
}

TEST_F(Prompts, ARunsOwnDocumentsSayWhatSurroundsThem) {
  Make(fixture_["cases"]["llama"]);
  Tokenizer tokenizer = *Tokenizer::Load(folder_);
  const std::string checkpoint = folder_ + "/checkpoint.safetensors";
  EXPECT_EQ(RulesOfCheckpoint(checkpoint, tokenizer, true)->begin, Tokens());
  tokenizer.set_marks({/*begins=*/true, /*separator=*/5});
  const auto again = Tokenizer::FromJson(tokenizer.ToJson());
  ASSERT_TRUE(again.ok()) << again.status();
  const auto rules = RulesOfCheckpoint(checkpoint, *again, true);
  EXPECT_EQ(rules->begin, Tokens{1});
  EXPECT_EQ(rules->ends, Tokens{5});
  EXPECT_EQ(RulesOfCheckpoint(checkpoint, *again, false)->begin, Tokens());
}

TEST(TemplateBeginning, FormsOfPostProcessor) {
  const auto of = [](const std::string& processor) {
    return TemplateBeginning("{\"post_processor\": " + processor + "}");
  };
  EXPECT_EQ(*TemplateBeginning("{}"), Tokens());
  EXPECT_EQ(*of(R"({"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 7]})"),
            Tokens{7});
  for (const auto& [processor, says] :
       {std::pair(R"({"type": "Unheard"})", "the type Unheard is not supported"),
        std::pair(R"({"type": "TemplateProcessing"})", "no list 'single'"),
        std::pair(R"({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x"}}]})",
                  "the token x has no ids"),
        std::pair(R"({"type": "TemplateProcessing", "single": [3]})", "neither a token nor a text"),
        std::pair(R"({"type": "TemplateProcessing", "single": []})", "'single' has no text"),
        std::pair(
            R"({"type": "Sequence", "processors": [{"type": "BertProcessing", "cls": ["x", 1]},
                                                         {"type": "BertProcessing", "cls": ["y", 2]}]})",
            "two parts that put tokens before a text"),
        std::pair(R"({"type": "BertProcessing", "cls": ["x", -1]})", "has no id"),
        std::pair("7", "is not supported")}) {
    EXPECT_THAT(std::string(of(processor).status().message()), HasSubstr(says)) << processor;
  }
}

}  // namespace
}  // namespace burst
