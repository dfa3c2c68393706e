// Tests evaluations against transformers. tests/interop/make_evaluation_fixture.py wrote
// testdata/evaluation.json.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "burst/comm/thread/thread_communicator.h"
#include "tests/testing/subprocess.h"
#include "tests/train/huggingface_fixture.h"
#include "tests/train/tokenizer_fixture.h"
#include "train/evaluate/choices.h"
#include "train/evaluate/needle.h"
#include "train/evaluate/perplexity.h"

namespace burst {
namespace {

using Json = nlohmann::json;
using testing::HasSubstr;

class EvaluateTest : public testing::Test {
 protected:
  void SetUp() override {
    const Json generation = Json::parse(Content("tests/train/testdata/generation.json"));
    FakeDirectory(generation["model"]).Write(folder_);
    SetContent(folder_ + "/tokenizer.json", Content(TokenizerFixture("tiny/tokenizer.json")));
    options_.checkpoint = folder_;
    const auto source = ModelSource::Find(options_);
    ASSERT_TRUE(source.ok()) << source.status();
    source_ = *source;
    place_.device = DeviceType::kCpu;
    place_.dtype = DType::kFloat64;
    tokenizer_ = Tokenizer::Load(folder_).value();
  }

  // Evaluates on ranks that share the sequences, and returns rank 0's result.
  using Task = std::function<absl::StatusOr<Evaluation>(Scorer*)>;
  absl::StatusOr<Evaluation> Run(int ranks, const Task& task) const {
    absl::StatusOr<Evaluation> result = absl::UnknownError("rank 0 did not run");
    const absl::Status status = RunRanks(ranks, [&](Communicator& comm) -> absl::Status {
      auto scorer = Scorer::Create(options_, source_, place_, &comm);
      if (!scorer.ok()) return scorer.status();
      absl::StatusOr<Evaluation> found = task(scorer->get());
      const absl::Status own = found.status();
      if (comm.rank() == 0) result = std::move(found);
      return own;
    });
    if (result.ok() && !status.ok()) return status;
    return result;
  }

  TokenSpan Load(const std::string& name, const std::string& content) const {
    const std::string path = folder_ + "/" + name;
    SetContent(path, content);
    const auto data = LoadTrainingData(path, path, std::nullopt, folder_ + "/cache", &*tokenizer_);
    EXPECT_TRUE(data.ok()) << data.status();
    return data->train;
  }

  const std::string folder_ = FreshTestFolder() + "/model";
  const Json fixture_ = Json::parse(Content("tests/train/testdata/evaluation.json"));
  ModelOptions options_;
  ModelSource source_;
  Place place_;
  std::optional<Tokenizer> tokenizer_;
};

// This side computes in double precision; transformers has RoPE's angles, norms and softmax in
// float32, whose rounding is 6e-8 each time.
constexpr double kRelative = 1e-6;

void ExpectNear(const Json& values, const Json& expected) {
  ASSERT_EQ(values.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_NEAR(values[i].get<double>(), expected[i].get<double>(),
                kRelative * std::abs(expected[i].get<double>()));
  }
}

TEST_F(EvaluateTest, ChoicesAreThoseOfTransformers) {
  std::string lines;
  int64_t right = 0, right_by_length = 0;
  for (const Json& question : fixture_["questions"]) {
    absl::StrAppend(&lines, question.dump(), "\n\n");
    const std::vector<double> losses = question["losses"];
    std::vector<double> by_length;
    for (size_t i = 0; i < losses.size(); ++i) {
      std::string text = question["choices"][i];
      if (text == " a rank é") text.pop_back();  // one character of two bytes
      by_length.push_back(losses[i] / static_cast<double>(text.size()));
    }
    const auto least = [&](const std::vector<double>& v) {
      return std::min_element(v.begin(), v.end()) - v.begin() == question["answer"].get<int>();
    };
    right += least(losses) ? 1 : 0;
    right_by_length += least(by_length) ? 1 : 0;
  }
  const auto questions = ParseQuestions(lines);
  ASSERT_TRUE(questions.ok()) << questions.status();
  for (const int ranks : {1, 2, 3}) {
    const auto evaluation = Run(ranks, [&](Scorer* scorer) {
      return EvaluateChoices(scorer, *questions, *tokenizer_, PromptRules());
    });
    ASSERT_TRUE(evaluation.ok()) << evaluation.status();
    const Json json = Json::parse(evaluation->json);
    for (size_t i = 0; i < questions->size(); ++i) {
      ExpectNear(json["by_question"][i]["losses"], fixture_["questions"][i]["losses"]);
    }
    const auto count = static_cast<double>(questions->size());
    EXPECT_EQ(json["accuracy"], static_cast<double>(right) / count);
    EXPECT_EQ(json["accuracy_by_length"], static_cast<double>(right_by_length) / count);
  }
}

TEST_F(EvaluateTest, LastWordsAreThoseOfTransformers) {
  std::string lines;
  double loss = 0;
  for (const Json& word : fixture_["words"]) {
    absl::StrAppend(&lines, Json{{"text", word["text"]}}.dump(), "\n");
    loss += word["loss"].get<double>() / static_cast<double>(fixture_["words"].size());
  }
  const auto questions = ParseQuestions(lines);
  ASSERT_TRUE(questions.ok()) << questions.status();
  const auto evaluation = Run(1, [&](Scorer* scorer) {
    return EvaluateChoices(scorer, *questions, *tokenizer_, PromptRules());
  });
  ASSERT_TRUE(evaluation.ok()) << evaluation.status();
  const Json json = Json::parse(evaluation->json);
  ExpectNear(Json::array({json["perplexity"]}), Json::array({std::exp(loss)}));
  EXPECT_EQ(json["accuracy"], 0);  // of random weights
}

// The tokens that transformers generates greedily are the likeliest, and no other is.
TEST_F(EvaluateTest, GreedyTokensAreTheLikeliest) {
  std::vector<int32_t> tokens = fixture_["greedy"]["tokens"];
  const int64_t prompt = fixture_["greedy"]["prompt"];
  const auto likeliest = [&] {
    std::vector<bool> found;
    EXPECT_TRUE(Run(2, [&](Scorer* scorer) -> absl::StatusOr<Evaluation> {
                  const auto scores = scorer->Score(BatchOf({tokens, tokens}, prompt));
                  if (!scores.ok()) return scores.status();
                  std::vector<bool> own;
                  for (const auto& score : *scores) own.push_back(score.likeliest);
                  static std::mutex mutex;
                  const std::lock_guard<std::mutex> lock(mutex);
                  EXPECT_TRUE(found.empty() || found == own);  // on both ranks
                  found = own;
                  return Evaluation();
                }).ok());
    return found;
  };
  const size_t length = tokens.size() - 1;
  std::vector<bool> expected(2 * length);
  for (size_t i = prompt - 1; i < length; ++i) expected[i] = expected[length + i] = true;
  EXPECT_EQ(likeliest(), expected);
  tokens.back() += 1;
  expected[length - 1] = expected.back() = false;
  EXPECT_EQ(likeliest(), expected);
}

TEST_F(EvaluateTest, PerplexitiesByPositionAreThoseOfTransformers) {
  const std::string text = fixture_["text"];
  PerplexityOptions options{fixture_["seqlen"], /*sequences=*/1};
  options.last = fixture_["last"];
  ASSERT_TRUE(CheckPerplexity(options).ok());
  // Documents: two are too short, and one comes after the number of sequences.
  std::string lines;
  for (const std::string& document : {std::string("too short"), text, std::string("short"), text}) {
    lines += Json{{"text", document}}.dump() + "\n";
  }
  const TokenSpan stream = Load("text.txt", text), documents = Load("lines.jsonl", lines);
  for (const int ranks : {1, 3}) {
    const auto evaluation =
        Run(ranks, [&](Scorer* scorer) { return EvaluatePerplexity(scorer, stream, options); });
    ASSERT_TRUE(evaluation.ok()) << evaluation.status();
    const Json json = Json::parse(evaluation->json);
    EXPECT_EQ(json["ranges"], (Json{{1, 128}, {129, 256}}));
    ExpectNear(json["by_range"], fixture_["by_range"]);
    ExpectNear(json["by_range_of_last"], fixture_["by_range_of_last"]);
    ExpectNear(Json::array({json["loss"]}), Json::array({fixture_["loss"]}));
    EXPECT_THAT(evaluation->svg, HasSubstr("the last 64"));
  }
  options.documents = true;
  options.last = 0;
  for (const int64_t most : {0, 1}) {
    options.sequences = most;
    const auto evaluation =
        Run(2, [&](Scorer* scorer) { return EvaluatePerplexity(scorer, documents, options); });
    ASSERT_TRUE(evaluation.ok()) << evaluation.status();
    EXPECT_EQ(Json::parse(evaluation->json)["sequences"], most == 0 ? 2 : 1);
  }
  // Tokens of a document that do not count in the loss do not count here.
  const Json half = {{"text", text}, {"counted", Json::array({{0, text.size() / 8}})}};
  const TokenSpan marked = Load("marked.jsonl", half.dump() + "\n");
  std::vector<double> losses;
  for (const bool from_documents : {false, true}) {
    options.documents = from_documents;
    const auto evaluation =
        Run(1, [&](Scorer* scorer) { return EvaluatePerplexity(scorer, marked, options); });
    ASSERT_TRUE(evaluation.ok()) << evaluation.status();
    losses.push_back(Json::parse(evaluation->json)["loss"]);
  }
  EXPECT_DOUBLE_EQ(losses[0], losses[1]);
  EXPECT_GT(std::abs(losses[0] - fixture_["loss"].get<double>()), 1e-3);
  const Json nothing = {{"text", text}, {"counted", Json::array({{text.size() - 1, text.size()}})}};
  const TokenSpan untaught = Load("untaught.jsonl", nothing.dump() + "\n");
  const auto empty =
      Run(1, [&](Scorer* scorer) { return EvaluatePerplexity(scorer, untaught, options); });
  EXPECT_THAT(std::string(empty.status().message()),
              HasSubstr("--data: must have a token that counts in the loss"));

  options.seqlen = 5000;
  const auto none =
      Run(1, [&](Scorer* scorer) { return EvaluatePerplexity(scorer, documents, options); });
  EXPECT_THAT(std::string(none.status().message()), HasSubstr("--seqlen: must be less than the"));
  for (const auto& [last, seqlen] : {std::pair{3, 64}, {128, 64}, {48, 64}}) {
    options.last = last;
    options.seqlen = seqlen;
    EXPECT_THAT(std::string(CheckPerplexity(options).message()), HasSubstr("--last: "));
  }
}

TEST_F(EvaluateTest, AHaystackHidesItsNeedle) {
  std::string text;
  for (int i = 0; i < 200; ++i) absl::StrAppend(&text, "Sentence ", i, " is hay. ");
  const TokenSpan span = Load("hay.txt", text);
  PromptRules rules;
  rules.begin = {400};
  for (const int64_t depth : {0, 30, 100}) {
    const auto made = MakeHaystack(span, *tokenizer_, rules, 500, depth, /*seed=*/1, /*trial=*/2);
    ASSERT_TRUE(made.ok()) << made.status();
    EXPECT_EQ(made->tokens.size(), 500u);
    EXPECT_EQ(made->tokens[0], 400);
    const std::string whole = tokenizer_->Decode(made->tokens);
    const std::string asked =
        tokenizer_->Decode(absl::MakeSpan(made->tokens).subspan(0, made->answer));
    const size_t needle = whole.find("The special number of ");
    ASSERT_NE(needle, std::string::npos);
    const std::string fact = whole.substr(needle, whole.find(".\n", needle) - needle);
    // The text ends with the question and its answer, which is the needle's number.
    EXPECT_EQ(whole.substr(whole.size() - fact.size()), fact);
    const std::string question = fact.substr(0, fact.rfind(' '));
    EXPECT_EQ(asked.substr(asked.size() - question.size()), question);
    // The needle comes after a sentence, near its depth.
    EXPECT_TRUE(depth == 0 || whole.substr(needle - 2, 2) == ". ");
    const double place = static_cast<double>(needle) / static_cast<double>(whole.size());
    EXPECT_NEAR(place, static_cast<double>(depth) / 100, 0.12);
    const auto other = MakeHaystack(span, *tokenizer_, rules, 500, depth, 1, /*trial=*/3);
    EXPECT_NE(other->tokens, made->tokens);
  }
  for (const auto& [length, option] : {std::pair{10, "--lengths"}, {1'000'000, "--data"}}) {
    const auto bad = MakeHaystack(span, *tokenizer_, rules, length, 50, 1, 2);
    EXPECT_THAT(std::string(bad.status().message()), HasSubstr(option));
  }

  // The loss is the mean over the answer's tokens.
  NeedleOptions options{{150, 300}, {0, 100}, /*trials=*/1, /*seed=*/7};
  const auto evaluation = Run(
      2, [&](Scorer* scorer) { return EvaluateNeedle(scorer, span, *tokenizer_, rules, options); });
  ASSERT_TRUE(evaluation.ok()) << evaluation.status();
  const Json json = Json::parse(evaluation->json);
  EXPECT_EQ(json["found"], (Json{{0, 0}, {0, 0}}));
  EXPECT_THAT(evaluation->svg, HasSubstr("0 %</text>"));
  const auto last = MakeHaystack(span, *tokenizer_, rules, 300, 100, 7, /*trial=*/3);
  const auto alone = Run(1, [&](Scorer* scorer) -> absl::StatusOr<Evaluation> {
    const auto scores = scorer->Score(BatchOf({last->tokens}));
    double loss = 0;
    for (int64_t i = last->answer; i < 300; ++i) loss += (*scores)[i - 1].loss;
    return Evaluation{"", Json(loss / static_cast<double>(300 - last->answer)).dump(), ""};
  });
  ExpectNear(Json::array({json["loss"][1][1]}), Json::array({Json::parse(alone->json)}));
}

TEST_F(EvaluateTest, QuestionsAreChecked) {
  const struct {
    const char *lines, *message;
  } cases[] = {{"", "must have a line"},
               {"{\"text\": \"a b\"}\n{", "line 2: "},
               {"[]", "line 1: must be {"},
               {R"({"context": "a", "choices": ["b"], "answer": 0})", "line 1: must be {"},
               {R"({"context": "a", "choices": ["b", 1], "answer": 0})", "line 1: must be {"},
               {R"({"context": "a", "choices": ["b", "c"], "answer": 2})", "answer must be from 0"},
               {R"({"context": "a", "choices": ["b", "c"], "answer": 18446744073709551615})",
                "got 18446744073709551615"},
               {R"({"context": "a", "choices": ["b", "c"], "answer": -1})", "got -1"},
               {"{\"text\": \"one\"}", "two words"},
               {"{\"text\": \"a b\"}\n"
                R"({"context": "a", "choices": ["b", "c"], "answer": 1})",
                "line 2: must have choices"}};
  for (const auto& c : cases) {
    EXPECT_THAT(std::string(ParseQuestions(c.lines).status().message()), HasSubstr(c.message))
        << c.lines;
  }
  const auto empty = ParseQuestions(R"({"context": "a", "choices": ["", "c"], "answer": 1})");
  const auto evaluation = Run(2, [&](Scorer* scorer) {
    return EvaluateChoices(scorer, *empty, *tokenizer_, PromptRules());
  });
  EXPECT_THAT(std::string(evaluation.status().message()), HasSubstr("question 1: the choice ''"));
}

}  // namespace
}  // namespace burst
